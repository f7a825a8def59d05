"""What a soak showed, as a document and for people: every gate, the trend of idle memory, and some of its turns."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.advice.records import Advice
from pytest_vram.readings import Measured
from pytest_vram.report.advice_lines import advice_lines
from pytest_vram.sessions import table
from pytest_vram.sessions.soak import End
from pytest_vram.sessions.soak_gates import SoakVerdict
from pytest_vram.sessions.soak_journal import REPORT, EndLine, LossLine, SegmentLine, SessionLine, SoakJournal
from pytest_vram.sessions.soak_lines import duration, first_line
from pytest_vram.sessions.soak_series import CallShare, Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.text import encoded, printable
from pytest_vram.units import MIB

FORMAT = "pytest-vram/soak/1"
TEXT = "report.txt"
#: Segments and losses that a report lists; their number is told in any case.
MOST = 20
MOST_SERVERS = 6
#: Why a segment began, in words.
_WHY = {"start": "the first", "resumed": "the soak was taken up", "died": "the one before was lost"}
#: Outcome of a gate → its sign, and what that means.
_LEGEND = {
    "passed": ("ok", "held"),
    "failed": ("FAIL", "did not hold"),
    "inconclusive": ("?", "open"),
    "not judged": ("-", "nothing was asked for, or the server does not tell it"),
}


class SoakDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``vram soak --json`` prints, and what a test's record has of its soak.

    :ivar reason: why it ended, one of :data:`pytest_vram.sessions.soak.REASONS`, with ``ended`` in words.
    :ivar amount: what was asked for. :ivar seconds: that it ran, over all processes that took part, of which there were
        ``processes``. :ivar folder: of its journal. :ivar peak: device label → largest of all turns.
    :ivar segments: servers that served, the first and the last of ``segment_count``; ``losses`` likewise.
    :ivar turns: some of ``turn_count``: the first, the last, those with the highest peaks, and the first ten
        that have no answer.
    :ivar kinds: kind of defect → turns. :ivar notes: what a reader must know besides.
    :ivar advice: what would keep the peak within the limit, best first, where it was over; ``no_advice`` says why there
        is none. In a test that is in the test's record.
    """

    name: str
    verdict: SoakVerdict
    reason: str
    ended: str
    amount: str
    turn_count: int
    seconds: float
    folder: str
    fingerprint: dict[str, Any]
    peak: dict[str, Measured]
    peak_turn: dict[str, int]
    host_peak: Measured | None
    segment_count: int
    segments: list[SegmentLine]
    loss_count: int
    losses: list[LossLine]
    processes: int
    kinds: dict[str, int]
    repeated: int
    turns: list[Turn]
    notes: list[str] = []
    advice: list[Advice] = []
    no_advice: str | None = None
    format: str = FORMAT


class _Ended(msgspec.Struct, frozen=True):
    """What of a report says which end it is of."""

    ended: str


def document(
    journal: SoakJournal, series: Series, verdict: SoakVerdict, end: End, *, amount: str, notes: list[str] | None = None
) -> SoakDocument:
    """The document of a soak that has ended, or was stopped."""
    contents = journal.contents
    return SoakDocument(
        name=journal.manifest.name,
        verdict=verdict,
        reason=end.reason,
        ended=end.text,
        amount=amount,
        turn_count=series.turns,
        seconds=series.spent,
        folder=str(journal.folder),
        fingerprint=journal.manifest.fingerprint,
        peak=dict(series.peak),
        peak_turn=dict(series.peak_turn),
        host_peak=series.host_peak,
        segment_count=len(contents.segments),
        segments=_ends(contents.segments),
        loss_count=len(contents.losses),
        losses=_ends(contents.losses),
        processes=len(contents.sessions),
        kinds=dict(series.kinds.most_common(MOST)),
        repeated=series.repeated,
        turns=series.table(),
        notes=[*_dropped(contents.sessions), *(notes or [])],
    )


def _dropped(sessions: list[SessionLine]) -> list[str]:
    """What was found without its end in the journal, over all processes."""
    sizes = [line.dropped for line in sessions if line.dropped]
    if not sizes:
        return []
    said = f"a line of {sizes[0]:,} bytes without its end was"
    if len(sizes) > 1:
        said = f"{len(sizes)} lines of {sum(sizes):,} bytes together, without their ends, were"
    return [f"{said} dropped from the journal when the soak was taken up: that is what a kill leaves, and no turn"]


def _ends(lines: list[Any]) -> list[Any]:
    return lines if len(lines) <= MOST else [*lines[: MOST // 2], *lines[-MOST // 2 :]]


def lines(found: SoakDocument, width: int = 80) -> list[str]:
    """The document for people."""
    verdict = found.verdict
    said = [*_wrapped(f"soak {found.name}: {verdict.outcome.upper()}: {verdict.text}", width), ""]
    said += _wrapped(f"  ended      {found.ended}", width, 13)
    parts = [f"{_turns(found.turn_count)} of {found.amount}", f"{duration(found.seconds)} of soaking"]
    if found.segment_count:
        parts.append(f"{found.segment_count} server{'s' if found.segment_count > 1 else ''}")
    unwarmed = sum(loss.warm_up for loss in found.losses)
    if unwarmed:
        parts.append(f"{unwarmed} start{'s' if unwarmed > 1 else ''} that did not get past the warm-up")
    if found.processes > 1:
        parts.append(f"taken up {found.processes - 1} time{'s' if found.processes > 2 else ''}")
    said += _wrapped(f"  ran        {', '.join(parts)}", width, 13)
    said += _wrapped(f"  soaked     {_soaked(found.fingerprint)}", width, 13)
    said += _wrapped(f"  journal    {found.folder}", width, 13)
    if found.segment_count > 1:
        served = [f"from turn {one.first} ({_WHY.get(one.why, one.why)})" for one in found.segments[:MOST_SERVERS]]
        served += ["…"] if found.segment_count > MOST_SERVERS else []
        said += _wrapped(f"  servers    {', '.join(served)}", width, 13)
    said += ["", "gates"]
    for gate in verdict.gates:
        said += _wrapped(f"  {_LEGEND[gate.outcome][0]:4} {gate.name:12} {gate.text}", width, 20)
    legend = [
        f"{sign} {word}" for outcome, (sign, word) in _LEGEND.items() if outcome in {g.outcome for g in verdict.gates}
    ]
    said += _wrapped(f"  ({', '.join(legend)})", width, 3)
    advice = advice_lines(found.advice, found.no_advice, width=width, where=REPORT)
    said += ["", *advice] if advice else []
    for label, idle in verdict.idle.items():
        said += ["", f"idle memory of {label}: {idle.kind}"]
        if idle.slope is not None and idle.low is not None and idle.high is not None:
            said.append(
                f"  slope      {idle.slope / MIB:+.3f} MiB a turn, 95 % between {idle.low / MIB:+.3f} and"
                f" {idle.high / MIB:+.3f}"
            )
        for name, words in idle.layers.items():
            said += _wrapped(f"  layer      {name}: {words}", width, 13)
        for word in idle.alike:
            said += _wrapped(f"  looks like {word}", width, 13)
        for word in idle.settles:
            said += _wrapped(f"  settled by {word}", width, 13)
    for heading, shares in (("turns", verdict.by_turn), ("context fill", verdict.by_fill)):
        if any(share.judged for share in shares):
            said += ["", f"tool calls by {heading}", *map(_share, shares)]
    if found.kinds:
        kinds = ", ".join(f"{kind} {count}" for kind, count in found.kinds.items())
        said += _wrapped(f"  defects    {kinds}", width, 13)
    if found.repeated:
        said += _wrapped(f"  repeated   {found.repeated:,} calls that were identical to one before", width, 13)
    said += ["", "turns: the first, the last, the highest peaks, and the first without an answer"]
    said += table.lines(found.turns, width=width)
    if found.loss_count > len(found.losses):
        said += _wrapped(f"servers lost {found.loss_count:,} times; the first and the last {len(found.losses)}:", width)
    for index, loss in enumerate(found.losses):
        # The end of a server's log is told once: those of the others are in the JSON.
        said += _wrapped(f"{loss.place}: {first_line(loss.error) if index else loss.error}", width, 2)
    for note in found.notes:
        said += _wrapped(note, width, 2)
    return [*said, "", *_wrapped(verdict.proves, width)] if verdict.outcome == "passed" else said


def _soaked(fingerprint: Mapping[str, Any]) -> str:
    """What the manifest says of the deployment, in a few words."""
    backend = fingerprint.get("backend")
    table = backend if isinstance(backend, Mapping) else {}
    parts = [str(table[key]) for key in ("engine", "model") if table.get(key)]
    parts += [f"build {fingerprint['build']}"] if fingerprint.get("build") else []
    parts += [f"on {fingerprint['device']}"] if fingerprint.get("device") else []
    conversations = fingerprint.get("conversations")
    if isinstance(conversations, Sequence) and not isinstance(conversations, str):
        names = [str(one).rpartition(" ")[0] or str(one) for one in conversations]
        parts.append(f"conversations {', '.join(names)}")
    return "; ".join(parts) or "not told"


def _turns(count: int) -> str:
    return f"{count:,} turn{'s' if count != 1 else ''}"


def one_line(found: SoakDocument) -> str:
    """For the summary of a run."""
    return f"{_turns(found.turn_count)} of {found.amount}: {found.verdict.outcome}"


def told(folder: Path, end: EndLine) -> bool:
    """Whether the report in a folder is that of this end."""
    try:
        text = msgspec.json.decode((folder / REPORT).read_bytes(), type=_Ended).ended
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return text == end.text


def save(found: SoakDocument, folder: Path) -> str | None:
    """Write both forms beside the journal; what kept them from being written, where something did."""
    texts = {
        REPORT: msgspec.json.format(encoded(found), indent=1) + b"\n",
        TEXT: ("\n".join(lines(found)) + "\n").encode("utf-8", "backslashreplace"),
    }
    for name, data in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return f"the report could not be written: {folder / name}: {error.strerror}"
    return None


def _share(share: CallShare) -> str:
    if not share.judged:
        return f"  {share.name:22} none judged"
    return f"  {share.name:22} {share.right} of {share.judged} right ({share.right / share.judged:.1%})"


def _wrapped(text: str, width: int, indent: int = 2) -> list[str]:
    found: list[str] = []
    for part in text.splitlines() or [""]:
        found += textwrap.wrap(
            printable(part),
            width,
            initial_indent="" if not found else " " * indent,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
    return found

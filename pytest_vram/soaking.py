"""A soak on a backend of a run: where its journal lies, what it is held against, and who asks its turns."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_vram.bootlog.boot import Failure
from pytest_vram.checks.idle_layers import CAP_WORDS
from pytest_vram.errors import BadInput, VramError
from pytest_vram.readings import Reading
from pytest_vram.report import soaks
from pytest_vram.report.soaks import SoakDocument
from pytest_vram.run import Run
from pytest_vram.sessions import Conversation, Gauge, KeeperGauge, NoGauge, Session
from pytest_vram.sessions import soak_journal as journals
from pytest_vram.sessions.soak import FINAL, Began, End, Soak
from pytest_vram.sessions.soak_gates import LEAST_TURNS, Gates
from pytest_vram.sessions.soak_journal import SoakJournal, TurnLine
from pytest_vram.sessions.soak_lines import StructuredLog
from pytest_vram.sessions.soak_lock import FolderLock
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Amount, BackendSpec, as_table
from pytest_vram.toolcalls import fingerprints
from pytest_vram.units import MIB, with_mib

if TYPE_CHECKING:
    from pytest_vram.backends.pool import RunningBackend

#: Kinds of failure in a server's log that are the memory's.
_MEMORY = frozenset({"out_of_memory", "host_oom_killed"})
#: Keys of a spec that say where it is, or how long it is waited for, and not what runs.
_PLACES = ("origin", "base", "boot_timeout", "request_timeout", "floors", "binary", "api_key")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80
#: A report, and the backend that was soaked last → the report with advice.
Advise = Callable[["SoakDocument", "RunningBackend"], "SoakDocument"]


class SoakResult:
    """What became of a test's soak, as its ``vram_soak`` fixture holds it.

    :ivar document: everything that its report has. :ivar folder: of its journal, log and report.
    """

    def __init__(self, document: SoakDocument) -> None:
        self.document = document
        self.verdict = document.verdict
        self.folder = Path(document.folder)

    @property
    def turns(self) -> int:
        """Turns that are committed."""
        return self.document.turn_count

    def __repr__(self) -> str:
        return f"<soak {self.document.name}: {soaks.one_line(self.document)}>"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A soak that is to be run.

    :ivar folder: of its journal. :ivar conversations: that a cycle runs, in their order.
    """

    name: str
    folder: Path
    amount: Amount
    spec: BackendSpec
    conversations: tuple[Conversation, ...]
    gates: Gates


class SessionTalker:
    """Asks the turns of conversations on a backend of the pool, one session for each server."""

    def __init__(self, run: Run, spec: BackendSpec, conversations: Sequence[Conversation]) -> None:
        self.backend: RunningBackend | None = None
        self._run, self._spec, self._conversations = run, spec, tuple(conversations)
        self._session: Session | None = None

    def begin(self, number: int, segment: int) -> Began:
        """Have the server run, warm it up with the longest prompt, and put the conversation where it stood."""
        backend = self.backend = self._run.pool.acquire(self._spec)
        self._session = Session(
            backend, self._conversations, gauge=self._gauge(), spec=self._spec, start=number, segment=segment
        )
        self._session.warm_up()
        self._forget()
        return Began(
            engine=backend.engine,
            model=backend.model,
            pid=backend.pid,
            build=build_of(backend),
            context=self._session.context_size,
        )

    def take(self) -> Turn:
        """Take the next turn; nothing of it is kept here."""
        assert self._session is not None
        turn = self._session.take()
        self._forget()
        return turn

    def fate(self) -> bool:
        """Whether the log of the server that was lost says that it ran out of memory."""
        if self.backend is None:
            return False
        failure: Failure | None = self.backend.read_boot().failure
        return failure is not None and failure.kind in _MEMORY

    def _forget(self) -> None:
        """Drop what a short session would keep: a soak has 100,000 turns."""
        if self._session is not None:
            self._session.turns.clear()
            self._session.warm_ups.clear()
        if self.backend is not None:
            self.backend.take_requests()
            self.backend.client.requests.clear()

    def _gauge(self) -> Gauge:
        if not self._run.measurable:
            return NoGauge(self._run.why_unmeasurable())
        return KeeperGauge(self._run.call, self._window)

    def _window(self) -> int | None:
        return self._run.attempt.window if self._run.attempt is not None else None


def build_of(backend: RunningBackend) -> str | None:
    """What the server's log calls its build."""
    facts = backend.boot.facts
    named = [str(facts[name]) for name in ("version", "build") if facts.get(name) is not None]
    return " ".join(named) or None


# ---------------------------------------------------------------- what is soaked


def fingerprint(run: Run, wanted: Wanted) -> dict[str, Any]:
    """What must be the same for a soak to go on, but for the engine's build, which only a running server tells."""
    table = {name: value for name, value in as_table(wanted.spec).items() if name not in _PLACES}
    return {
        "backend": table,
        "model": fingerprints.of_model(wanted.spec),
        "conversations": [f"{one.name} {one.digest}" for one in wanted.conversations],
        "device": run.settings.device_text,
        "devices": {device.label: device.name for device in run.measurable},
        "gates": msgspec.to_builtins(wanted.gates),
        "pytest_vram": importlib.metadata.version("pytest-vram"),
    }


def caps_of(spec: BackendSpec) -> dict[str, int]:
    """Bytes up to which known caches of the engine may grow: llama-server's prompt cache (``cache-ram``, in MiB)."""
    if spec.engine != "llama-server":
        return {}
    from pytest_vram.backends import binary, flags
    from pytest_vram.backends.asked import whole

    try:
        known = flags.help_of(binary.locate(spec))
    except VramError:
        return {}
    flag = known.find("cache-ram")
    if flag is None or flag.removed:
        return {}
    given = next((spec.options[name] for name in (*flag.names, "cache-ram") if name in spec.options), 8192)
    size = whole(given)
    return {"prompt-cache": size * MIB} if size is not None and size > 0 else {}


def context_of(spec: BackendSpec) -> int | None:
    """Tokens of context that the spec asks for, for each slot; ``None``: it leaves them to the engine."""
    from pytest_vram.backends.asked import whole

    size = next(
        (whole(spec.options[name]) for name in ("ctx-size", "c", "max-model-len") if name in spec.options), None
    )
    slots = next((whole(spec.options[name]) for name in ("parallel", "np") if name in spec.options), None)
    if size is None or size <= 0:
        return None
    return size // slots if slots is not None and slots > 1 and spec.engine == "llama-server" else size


def capacity_of(run: Run) -> dict[str, int]:
    """Device label → bytes of it, where that is known and a figure above it cannot be true."""
    return {
        device.label: device.capacity.bytes
        for device in run.measurable
        if isinstance(device.capacity, Reading) and not device.oversubscribes
    }


def folder_name(name: str) -> str:
    """A name for a folder, from a node id or a backend's name: readable, and different for different ones."""
    plain = _UNSAFE.sub("-", name).strip("-.")[-_LONGEST_NAME:] or "soak"
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def newest(base: Path) -> tuple[Path, Path]:
    """The soak in ``base`` to go on with, and the one to begin where that has ended: ``base/1``, ``base/2`` …"""
    try:
        numbers = sorted(int(entry.name) for entry in base.iterdir() if entry.name.isascii() and entry.name.isdigit())
    except FileNotFoundError:
        numbers = []
    except OSError as error:
        raise BadInput(f"the folder of soaks cannot be read: {base}: {error.strerror}") from None
    last = numbers[-1] if numbers else 1
    return base / str(last), base / str(last + 1 if numbers else 1)


def to_go_on(base: Path) -> Path:
    """The folder of the newest soak in ``base`` that has not ended, else that of a new one.

    One that was killed between its end and its report goes on, which asks nothing: what it found is still to be told,
    and a new soak in its place would draw its outcome twice.

    :raises BadInput: its journal is damaged.
    """
    last, following = newest(base)
    if not journals.exists(last):
        return last
    end = journals.read(last).end
    if end is None or end.reason not in ("amount", *FINAL) or not soaks.told(last, end):
        return last
    return following


# ---------------------------------------------------------------- running it


def run_soak(
    run: Run, wanted: Wanted, told: Callable[[str], None], advise: Advise = lambda found, backend: found
) -> tuple[SoakDocument, End]:
    """Soak within the window that is open, and save the report beside the journal.

    :param advise: adds to the report what would let a soak that failed pass.
    :raises BadInput: the folder has a soak of something else, or is in use. :raises VramError: no server starts.
    """
    known = fingerprint(run, wanted)
    _refuse_early(wanted.folder, known)
    # Before there is a server: a second one beside that of a soak that runs would be in its figures, or take its room.
    lock = FolderLock(wanted.folder)
    try:
        return _run_locked(run, wanted, known, lock, told, advise)
    finally:
        lock.release()


def _run_locked(
    run: Run, wanted: Wanted, known: Mapping[str, Any], lock: FolderLock, told: Callable[[str], None], advise: Advise
) -> tuple[SoakDocument, End]:
    told(f"soak of {wanted.name}: {wanted.amount.text} in {wanted.folder}")
    if wanted.amount.turns is not None and wanted.amount.turns < LEAST_TURNS:
        told(
            f"fewer than {LEAST_TURNS} turns decide nothing about idle memory and throughput: this soak can fail, and"
            " it cannot pass"
        )
    talker = SessionTalker(run, wanted.spec, wanted.conversations)
    backend = run.pool.acquire(wanted.spec)
    talker.backend = backend
    period = sum(len(one.turns) for one in wanted.conversations)
    series = Series(period=period, limit=wanted.gates.limit, context=wanted.gates.context)
    series.engine = wanted.spec.log or wanted.spec.engine

    def fold(line: TurnLine) -> None:
        series.add(line.turn, line.spent)

    journal = SoakJournal.open(
        wanted.folder, {**known, "build": build_of(backend)}, name=wanted.name, told=fold, lock=lock
    )
    log = StructuredLog(wanted.folder)
    try:
        soak = Soak(journal, talker, series, wanted.gates, wanted.amount, told=told, log=log)
        if journal.contents.turns:
            told(f"{journal.contents.turns:,} turns are committed; {soak.going_on}")
        end = soak.run()
        notes = [f"{log.lost} lines of the structured log could not be written"] if log.lost else []
        notes += [
            f"{CAP_WORDS.get(name, name)} may fill {with_mib(size)} of memory here: so much growth is no leak"
            for name, size in wanted.gates.caps.items()
        ]
        found = soaks.document(journal, series, soak.verdict(end), end, amount=wanted.amount.text, notes=notes)
        found = advise(found, talker.backend)
        trouble = soaks.save(found, wanted.folder)
        if trouble is not None:
            found = msgspec.structs.replace(found, notes=[*found.notes, trouble])
        return found, end
    finally:
        log.close()
        journal.close()


def _refuse_early(folder: Path, known: Mapping[str, Any]) -> None:
    """Refuse what cannot go on before a server is started for it."""
    if not journals.exists(folder):
        journals.refuse_lost(folder, journals.Contents())
        return
    before = {name: value for name, value in journals.read_manifest(folder).fingerprint.items() if name != "build"}
    differing = journals.differences(before, msgspec.json.decode(msgspec.json.encode(known)))
    if differing:
        raise BadInput(journals.refusal(folder, differing))
    journals.refuse_lost(folder, journals.read(folder))

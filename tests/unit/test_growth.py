"""Growth while serving: what a probe's steps add up to, what is a line of the ledger, and how it is judged."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from pytest_vram.backends import growth as data
from pytest_vram.backends import lengths, probing
from pytest_vram.backends.growth import Growth, Outcome, Step, growth_of
from pytest_vram.backends.probing import Probe
from pytest_vram.backends.record import RequestRecord
from pytest_vram.bootlog import serving
from pytest_vram.bootlog.boot import Failure
from pytest_vram.checks import judge_growth, judge_served
from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.report.growth_lines import growth_lines
from pytest_vram.units import MIB

if TYPE_CHECKING:
    from pytest_vram.backends.pool import RunningBackend


def read(mib: float, label: str = "gpu0", source: str = "nvml-process") -> Reading:
    return Reading(bytes=round(mib * MIB), source=source, scope="backend", device=label, exact=True)


def step(
    name: str,
    before: float,
    after: float,
    *,
    label: str = "gpu0",
    source: str = "nvml-process",
    cache: float = 0,
    outcome: Outcome = "served",
) -> Step:
    rest = {label: read(after, label, source)}
    start: dict[str, Measured] = {label: read(before, label, source)}
    return Step(
        name=name,
        outcome=outcome,
        before=start,
        base=start,
        peak={label: read(max(before, after) + 5, label, source)},
        after=dict(rest),
        growth=data.risen(rest, start),
        prompt_cache=round(cache * MIB) or None,
    )


def printed(label: str, **sizes: float) -> list[Entry]:
    return [
        Entry(bucket=bucket, device=label, bytes=round(size * MIB), source="engine-log", detail="CPU")
        for bucket, size in sizes.items()
    ]  # type: ignore[arg-type]


def rows(found: Growth) -> list[tuple[str, str, float]]:
    return [(entry.bucket, entry.detail.removeprefix(f"{data.DETAIL}: "), entry.bytes / MIB) for entry in found.entries]


def test_what_stays_on_a_card_is_other_by_step() -> None:
    """Growth of a card stands in the ledger under the step that brought it, and memory used again counts once."""
    steps = [
        step("full ubatch", 100, 112),
        step("2 in flight", 104, 110),
        step("image", 110, 115),
        step("idle", 115, 115),
    ]
    found = growth_of(steps, {"gpu0": read(100)}, printed("gpu0", weights=80, kv=10, compute=20))
    assert rows(found) == [("other", "full ubatch", 12), ("other", "image", 3)]
    assert found.growth["gpu0"] == read(15)
    assert found.touched == {}, "what a card counts at boot is not counted again"
    assert found.peak["gpu0"] == read(120)


def test_buffers_of_the_boot_that_are_written_later_are_no_growth_of_the_ledger() -> None:
    """Where memory counts once it is written, compute buffers and what was missing at boot are told apart."""
    steps = [step("full ubatch", 100, 112, source="rpc-anon"), step("image", 112, 118, source="rpc-anon")]
    found = growth_of(steps, {"gpu0": read(100, source="rpc-anon")}, printed("gpu0", weights=80, compute=15))
    assert found.touched == {"gpu0": 15 * MIB}
    assert rows(found) == [("other", "image", 3)]
    short = growth_of(steps, {"gpu0": read(100, source="rpc-anon")}, printed("gpu0", weights=80, kv=37, compute=15))
    assert short.touched == {"gpu0": 18 * MIB}, "32 MiB of what was printed were not there at boot"
    assert rows(short) == []


def test_the_prompt_cache_is_kv_on_the_host_as_far_as_the_engine_says() -> None:
    """The engine's own figure goes to `kv`, never more than what stayed, and the rest to `other`."""
    mapped = Entry(
        bucket="weights", device="host", bytes=900 * MIB, source="engine-log", detail="CPU_Mapped model buffer"
    )
    steps = [
        step("near-full context", 50, 60, label="host", source="host-anon", cache=6),
        step("2 in flight", 60, 75, label="host", source="host-anon", cache=30),
    ]
    found = growth_of(steps, {"host": read(50, "host", "host-anon")}, [mapped, *printed("host", compute=2)])
    assert rows(found) == [
        ("kv", "near-full context (prompt cache and checkpoints)", 6),
        ("other", "near-full context", 2),
        ("kv", "2 in flight (prompt cache and checkpoints)", 15),
    ]
    assert found.touched == {"host": 2 * MIB}, "a mapped file is no memory that was missing"


def test_requests_before_the_probe_have_a_line_of_their_own() -> None:
    """What came between the boot and the probe is not charged to the probe's first step."""
    found = growth_of([step("short prompts", 107, 109)], {"gpu0": read(100)}, [])
    assert rows(found) == [("other", data.EARLIER, 7), ("other", "short prompts", 2)]


def test_an_unread_figure_stays_unread() -> None:
    """A device that could not be read has no line and no growth, but the reason."""
    gone = Unmeasurable(reason="the driver hangs", device="gpu0")
    one = Step(name="idle", outcome="served", before={"gpu0": gone}, after={"gpu0": gone}, peak={"gpu0": gone})
    found = growth_of([one], {"gpu0": read(100)}, [])
    assert found.entries == ()
    assert isinstance(found.growth["gpu0"], Unmeasurable)
    finding = judge_growth(found)
    assert finding is not None
    assert (finding.verdict, "the driver hangs" in finding.text) == ("inconclusive", True)
    assert "the driver hangs" in "\n".join(growth_lines(found))


@pytest.mark.parametrize(
    ("limit", "verdict"), [(None, None), (15, None), (14, "inconclusive"), (4, "inconclusive"), (2, "failed")]
)
def test_a_limit_on_growth_leaves_out_what_may_be_the_boots_own(limit: int | None, verdict: str | None) -> None:
    """15 MiB stayed, of which 12 may be compute buffers: over 15 nothing, below 3 all, between them undecided."""
    steps = [step("full ubatch", 100, 115, source="rpc-anon")]
    found = growth_of(steps, {"gpu0": read(100, source="rpc-anon")}, printed("gpu0", weights=80, compute=12))
    finding = judge_growth(found, None if limit is None else limit * MIB, limit_from="the test")
    assert (finding.verdict if finding else None) == verdict
    if finding is not None:
        assert "at ready" in finding.text
        assert finding.limit_from == "the test"


def test_growth_that_nobody_measured_is_inconclusive() -> None:
    """No figure is never a pass, with or without a limit."""
    for found in (Growth(), Growth(unmeasured="nothing is measured in this run")):
        for limit in (None, 1 << 40):
            finding = judge_growth(found, limit)
            assert finding is not None
            assert finding.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [("served", None), ("shortened", None), ("skipped", None), ("no_time", "inconclusive"), ("refused", "error"), ("timed_out", "error"), ("died", "error"), ("out_of_memory", "failed")],
)  # fmt: skip
def test_a_step_that_was_not_served_is_never_a_silent_pass(outcome: Outcome, verdict: str | None) -> None:
    """Out of memory is the deployment's failure; other trouble is an error; what was not sent is undecided."""
    failure = Failure(
        kind="out_of_memory",
        certainty="certain",
        text="ggml: out of memory",
        bucket="compute",
        device="gpu0",
        bytes=64 * MIB,
    )
    one = Step(
        name="image", outcome=outcome, reason="HTTP 500", failure=failure if outcome == "out_of_memory" else None
    )
    finding = judge_served(Growth(steps=(Step(name="full ubatch", outcome="served"), one)))
    assert (finding.verdict if finding else None) == verdict
    if verdict in ("error", "failed"):
        assert finding is not None
        assert "'image'" in finding.text
        assert "HTTP 500" in finding.text
    if verdict == "failed":
        assert finding is not None
        assert "64.00 MiB could not be allocated on gpu0 for compute" in " ".join(finding.text.split())


def test_lines_say_what_stayed_and_where_it_belongs() -> None:
    """Peaks and growth of each step, what the growth is, and what was not sent in full."""
    steps = [
        msgspec.structs.replace(
            step("near-full context", 100, 112), outcome="shortened", reason="no time", tokens=[900]
        ),
        msgspec.structs.replace(step("image", 112, 112), outcome="skipped", reason=""),
    ]
    text = "\n".join(growth_lines(growth_of(steps, {"gpu0": read(100)}, [])))
    for part in (
        "near-full context, 900 tokens        117.0       +12.0",
        "since the boot",
        "12.00 MiB are neither",
        "shortened: no time",
    ):
        assert part in text
    assert "image" not in text


# ---------------------------------------------------------------- the parts of a probe

LOG = """
0.07.905 I srv   prompt_save:  - saving prompt with length 631, total state size = 13.873 MiB (draft: 0.000 MiB)
0.07.905 I srv        update:  - cache state: 1 prompts, 13.873 MiB (limits: 8192.000 MiB, 2048 tokens, 372613 est)
0.10.001 I slot create_check: id  1 | task 22 | created context checkpoint 1 of 32 (pos_min = 0, pos_max = 8, n_tokens = 9, size = 1.000 MiB)
0.10.002 I slot create_check: id  0 | task 23 | created context checkpoint 1 of 32 (pos_min = 0, pos_max = 8, n_tokens = 9, size = 4.000 MiB)
0.10.002 I slot create_check: id  0 | task 23 | created context checkpoint 2 of 32 (pos_min = 0, pos_max = 9, n_tokens = 9, size = 2.000 MiB)
0.10.003 I slot operator(): id  0 | task 24 | erased invalidated context checkpoint (pos_min = 0, pos_max = 8, n_tokens = 9, n_swa = 512, pos_next = 0, size = 2.000 MiB)
0.11.905 I srv        update:  - cache state: 3 prompts, 20.500 MiB (limits: 8192.000 MiB, 2048 tokens, 372613 est)
"""


def test_the_last_line_about_the_prompt_cache_counts(tmp_path: Path) -> None:
    """Prompts by the last state, checkpoints by what was made and not erased; other text says nothing."""
    found = serving.caches(LOG)
    assert found == serving.Caches(prompts=round(20.5 * MIB), checkpoints=5 * MIB)
    assert serving.caches("cache state: x prompts, 1.2.3 MiB\ncreated context checkpoint\n") == serving.Caches()
    later = LOG + "0.12 I slot operator(): id  1 | task 30 | new prompt, n_ctx_slot = 1024, n_keep = 0\n"
    assert serving.caches(later).checkpoints == 4 * MIB
    log = tmp_path / "a.log"
    assert serving.caches_of(log) == serving.caches_of(None) == serving.Caches()
    log.write_text("x" * serving.MOST + LOG)
    assert serving.caches_of(log) == found


@pytest.mark.parametrize(("word", "template"), [(1, 0), (1, 31), (5, 12)])
def test_lengths_follow_from_two_counts(word: int, template: int) -> None:
    """Two counts give the cost of a word and of the template, and prompts of at most so many tokens."""
    found = lengths.measured(lambda words: template + word * words)
    assert (found.word, found.template) == (word, template)
    assert found.tokens_of(found.words_for(1000)) <= 1000 < found.tokens_of(found.words_for(1000) + 1)
    assert lengths.text(2, "10") == "10 hello hello"


def test_counts_that_no_length_explains_are_refused() -> None:
    """A prompt that was cut is no measure."""
    with pytest.raises(ValueError, match="were they cut"):
        lengths.measured(lambda words: min(words, 40))


class Planned(Probe):
    """A probe that only plans: a server that evaluates 1,000 tokens a second, of which 700 are counted on."""

    def __init__(self, left: float, timeout: float) -> None:
        self._rate = 1000.0
        self._seconds = left
        self._backend = cast("RunningBackend", SimpleNamespace(target=SimpleNamespace(timeout=timeout)))
        self.sent: list[tuple[int, int]] = []

    def _left(self) -> float:
        return self._seconds

    def _ubatch(self) -> int:
        return 512

    def _prompt(self, tokens: int, count: int = 1) -> Step:
        self.sent.append((tokens, count))
        return Step(name="", outcome="served")


@pytest.mark.parametrize(
    ("left", "timeout", "count", "tokens"),
    [
        (100, 300, 1, 28_000),  # 40 s of 100
        (100, 50, 1, 14_000),  # 20 s of the 50 that a request may take
        (100, 300, 4, 7_000),
        (1000, 3000, 1, 30_000),  # as many as are wanted
        (0, 300, 1, 512),  # what was evaluated already
    ],
)
def test_a_prompt_takes_two_fifths_of_the_time_at_most(left: float, timeout: float, count: int, tokens: int) -> None:
    """A slower machine than a moment ago has time left for it; what is sent shorter is said."""
    probe = Planned(left, timeout)
    step = probe._limited(30_000, count)
    assert probe.sent == [(tokens, count)]
    assert (step.outcome, step.wanted) == (("served", None) if tokens == 30_000 else ("shortened", 30_000))


def test_requests_at_once_are_counted_by_their_times() -> None:
    """Only requests that overlap are at once; one that begins when another ends is not."""

    def record(t: float, latency: float) -> RequestRecord:
        return RequestRecord(id="a", backend="b", path="/", result="ok", t=int(t * 1e9), latency=latency)

    assert probing.at_most_at_once([record(0, 1), record(1, 1), record(2, 1)]) == 1
    assert probing.at_most_at_once([record(0, 3), record(1, 1), record(1.5, 1)]) == 3
    assert probing.at_most_at_once([]) == 0


def test_the_image_is_a_png() -> None:
    """Signature, header, pixels and checksums are those of the format."""
    image = probing.png(5, 3)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(image):
        (size,) = struct.unpack(">I", image[at : at + 4])
        kind, body = image[at + 4 : at + 8], image[at + 8 : at + 8 + size]
        assert struct.unpack(">I", image[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (5, 3)
    assert len(zlib.decompress(chunks[b"IDAT"])) == 3 * (1 + 5 * 3)
    assert probing.data_uri(image).startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize("rounds", [5, "12", [0], [True], [10**6]])
def test_rounds_that_cannot_be_sent(rounds: Any) -> None:
    """How many requests to send at once is a list of counters; anything else is told in a sentence."""
    with pytest.raises(BadInput, match=r"probe\(at_once="):
        probing._check(rounds, 60.0, 2.0)

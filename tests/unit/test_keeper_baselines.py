"""What a test's rise is counted from, and how figures of windows and boots are merged."""

from __future__ import annotations

import msgspec
import pytest

from pytest_vram.keeper.baselines import Baseline
from pytest_vram.keeper.figures import doubted, joined, larger_of, with_boot
from pytest_vram.readings import Measured, Reading, Unmeasurable, rise

MIB = 1 << 20


def figure(low: int, high: int | None = None, *, note: str | None = None, exact: bool = True) -> Reading:
    return Reading(bytes=low, at_most=high, source="s", scope="run", device="gpu0", exact=exact, note=note)


def held(size: int) -> dict[str, Measured]:
    return {"gpu0": figure(size)}


def base(baseline: Baseline) -> int:
    found = baseline.held["gpu0"]
    assert isinstance(found, Reading)
    return found.bytes


def test_whoever_starts_a_backend() -> None:
    """The baseline is the same for the test that starts a backend as for one that finds it running."""
    first = Baseline(held(10))
    first.use("a#1", held(344), {"a#1"})
    second = Baseline(held(354), {"a#1": held(344)})
    second.use("a#1", held(344), {"a#1"})
    assert base(first) == base(second) == 354


def test_what_a_backend_grew_by_before_its_use() -> None:
    """A backend counts with what it holds at its first use, whether it grew or shrank since the window opened."""
    for size in (100, 400):
        baseline = Baseline(held(354), {"a#1": held(344)})
        baseline.use("a#1", held(size), {"a#1"})
        assert base(baseline) == 10 + size


def test_several_backends() -> None:
    """Each backend of a test raises the baseline by its own part."""
    baseline = Baseline({})
    baseline.use("a#1", held(100), {"a#1"})
    baseline.use("b#1", held(50), {"a#1", "b#1"})
    assert base(baseline) == 150


def test_a_backend_that_ended() -> None:
    """What ended is no part of the baseline any more: neither an idle backend nor the generation before a restart."""
    baseline = Baseline(held(310), {"idle#1": held(300)})
    baseline.use("a#1", held(100), {"a#1"})
    assert base(baseline) == 110
    baseline.use("a#2", held(120), {"a#2"})
    assert base(baseline) == 130


def test_a_rise_before_the_baseline_moved() -> None:
    """How far the test was above its baseline before a backend raised that is not forgotten; the largest counts."""
    baseline = Baseline(held(10))
    baseline.moves(held(510))
    baseline.use("a#1", held(344), {"a#1"})
    baseline.moves(held(600))
    found = baseline.risen["gpu0"]
    assert isinstance(found, Reading)
    assert found.bytes == 500
    baseline.moves({"gpu1": figure(7)})
    assert "gpu1" not in baseline.risen


def test_a_baseline_that_could_not_be_read() -> None:
    """One part that could not be measured leaves no baseline, and a rise over it is none."""
    baseline = Baseline(held(10))
    baseline.use("a#1", {"gpu0": Unmeasurable(reason="no driver")}, {"a#1"})
    assert isinstance(baseline.held["gpu0"], Unmeasurable)
    assert isinstance(rise(figure(500), baseline.held["gpu0"]), Unmeasurable)
    known = rise(Unmeasurable(reason="gone", at_least=500), figure(200))
    assert isinstance(known, Unmeasurable)
    assert known.at_least == 300


@pytest.mark.parametrize(
    ("peak", "base", "low", "high"),
    [
        (figure(500), figure(200), 300, 300),
        (figure(500, 700), figure(200), 300, 500),
        (figure(500, 700), figure(200, 250), 250, 500),
        (figure(100, 150), figure(200), 0, 0),
        (figure(100, 350), figure(200), 0, 150),
    ],
)
def test_a_rise_is_an_interval(peak: Reading, base: Reading, low: int, high: int) -> None:
    """The true rise lies between the ends, and is never negative."""
    found = rise(peak, base)
    assert isinstance(found, Reading)
    assert (found.bytes, found.upper) == (low, high)


# ---------------------------------------------------------------- merging


def test_no_sentence_twice() -> None:
    """However figures are merged, a note says each thing once."""
    boot = figure(344, note="boot of tiny#1; not exact", exact=False)
    once = with_boot(figure(100, exact=False, note="not exact"), boot, "tiny#1")[1]
    twice = larger_of(with_boot(once, boot, "tiny#1")[1], once)
    assert isinstance(twice, Reading)
    assert sorted((twice.note or "").split("; ")) == ["boot of tiny#1", "not exact"]
    (again,) = doubted({"gpu0": twice}, ["not exact", "stale"]).values()
    assert isinstance(again, Reading)
    assert (again.note or "").split("; ").count("not exact") == 1
    assert joined(None, "", None) is None


@pytest.mark.parametrize(
    ("run", "boot", "decided"),
    [
        (figure(100), figure(200), True),
        (figure(200), figure(200), False),
        (figure(100, 300), figure(200), False),
        (figure(100), figure(50, 200), True),
        (figure(300), figure(50, 200), False),
    ],
)
def test_when_a_boot_decides(run: Reading, boot: Reading, decided: bool) -> None:
    """A boot decides where its upper end is the higher one: what may be over the limit is then of the boot."""
    found, peak = with_boot(run, boot, "tiny#1")
    assert isinstance(peak, Reading)
    assert (found, peak.bytes, peak.upper) == (decided, max(run.bytes, boot.bytes), max(run.upper, boot.upper))
    assert ("boot of tiny#1" in (peak.note or "")) == decided
    # Sampled figures take over each other's reasons, but not whose peak it is.
    blurred = [msgspec.structs.replace(one, exact=False, note="not exact") for one in (run, boot)]
    peak = with_boot(blurred[0], blurred[1], "tiny#1")[1]
    assert isinstance(peak, Reading)
    assert (peak.note or "").split("; ") == (["boot of tiny#1", "not exact"] if decided else ["not exact"])
    larger = with_boot(peak, msgspec.structs.replace(blurred[1], bytes=1000, at_most=None), "tiny#2")[1]
    assert isinstance(larger, Reading)
    assert (larger.note or "").split("; ") == ["boot of tiny#2", "not exact"]


def test_a_boot_has_the_scope_of_what_it_is_merged_with() -> None:
    """Merged into the test's own part of the run, a boot's peak is of that part."""
    own = Reading(bytes=1, source="s", scope="own", device="gpu0", exact=True)
    found = with_boot(own, figure(200), "tiny#1")[1]
    assert isinstance(found, Reading)
    assert found.scope == "own"
    decided, alone = with_boot(None, msgspec.structs.replace(own, scope="backend"), "tiny#1")
    assert isinstance(alone, Reading)
    assert (decided, alone.scope, alone.note) == (True, "run", "boot of tiny#1")

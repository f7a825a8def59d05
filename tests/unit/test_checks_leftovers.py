"""How far what earlier tests left behind excuses a test."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.checks import judge_peak
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.leftovers import Left, left_in, unsettled
from pytest_vram.checks.wording import residue
from pytest_vram.keeper.messages import Closed, Residue
from pytest_vram.readings import Reading
from pytest_vram.spec import Limits

MIB, GIB = 1 << 20, 1 << 30


def reading(size: int, high: int | None = None, *, source: str = "nvml-process", label: str = "gpu0") -> Reading:
    return Reading(bytes=size, at_most=high, source=source, scope="run", device=label, exact=False)


def judged(figure: Reading, residues: list[Residue], limit: int, **more: Any) -> Finding | None:
    closed = Closed(
        t0=0,
        t1=1,
        run={"gpu0": figure},
        device={"gpu0": figure},
        phases={"load": {"gpu0": figure}},
        residues=residues,
    )
    return judge_peak(closed, check="x", limits=Limits(text="x", each=limit), limit_from="@max_vram", **more)


def test_what_was_gone_at_the_peak_excuses_nothing() -> None:
    """2 GiB were left, the test got rid of them and took 2 GiB itself: it fails, and no other test is accused."""
    gone = Residue(test="test_a", device="gpu0", bytes=2 * GIB)
    found = judged(reading(2 * GIB), [gone], GIB)
    assert found is not None
    assert found.verdict == "failed"
    assert "only because" not in found.text
    assert "2,048 MiB of it gone when the peak was reached" in " ".join(found.text.split())


def test_what_was_half_gone_excuses_its_half() -> None:
    """Of 2 GiB one was still there: a peak of 2 GiB is within a limit of 1 GiB without it, and over half of one."""
    half = Residue(test="test_a", device="gpu0", bytes=2 * GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    found = judged(reading(2 * GIB), [half], GIB)
    assert found is not None
    assert found.verdict == "error"
    assert "only because test_a left 1,024 MiB behind" in " ".join(found.text.split())
    found = judged(reading(2 * GIB), [half], GIB // 2)
    assert found is not None
    assert found.verdict == "failed"


def test_a_context_of_the_driver_excuses_nothing() -> None:
    """It is there whichever test uses the card first: the verdict is the one of the test alone."""
    context = Residue(test="test_a", device="gpu0", bytes=600 * MIB, first_use=True, context=600 * MIB)
    found = judged(reading(1500 * MIB), [context], GIB)
    assert found is not None
    assert found.verdict == "failed"
    assert "the driver's context" not in found.text.splitlines()[0]
    for more in ({"phase": "load"}, {"scope": "device"}):
        found = judged(reading(1500 * MIB), [context], GIB, **more)
        assert found is not None
        assert found.verdict == "failed"


def test_what_cannot_be_told_is_said_to_be_so() -> None:
    """Where the leftover was taken away at about the time of the peak, the limit is broken and nobody is accused."""
    vague = Residue(test="test_a", device="gpu0", bytes=2 * GIB, at_peak_most=2 * GIB)
    found = judged(reading(2 * GIB), [vague], GIB)
    assert found is not None
    assert found.verdict == "error"
    title = " ".join(found.text.split())
    assert "only because" not in title
    assert "whether this test would be over it without that cannot be told" in title
    assert "between 0.00 MiB and 2,048 MiB" in title


@pytest.mark.parametrize("more", [{"phase": "load"}, {"scope": "device"}])
def test_a_peak_whose_moment_is_not_kept(more: dict[str, str]) -> None:
    """It has what was held all along; what was there only at first may be in it."""
    stayed = Residue(test="test_a", device="gpu0", bytes=2 * GIB, lasted=2 * GIB)
    found = judged(reading(2 * GIB), [stayed], GIB, **more)
    assert found is not None
    assert found.verdict == "error"
    assert "only because test_a left" in " ".join(found.text.split())
    went = Residue(test="test_a", device="gpu0", bytes=2 * GIB)
    found = judged(reading(2 * GIB), [went], GIB, **more)
    assert found is not None
    assert "cannot be told" in " ".join(found.text.split())


def test_a_peak_that_only_torch_knows() -> None:
    """Its moment is not known, so that what was left may be in it or not: the limit is broken, nobody is accused."""
    left = Residue(test="test_a", device="gpu0", bytes=2 * GIB, lasted=2 * GIB, at_peak=2 * GIB, at_peak_most=2 * GIB)
    other = Residue(test="test_a", device="gpu1", bytes=GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    before = Closed(t0=0, t1=1, run={"gpu0": reading(GIB), "gpu1": reading(GIB, label="gpu1")}, residues=[left, other])
    raised = msgspec.structs.replace(before, run={**before.run, "gpu0": reading(3 * GIB)})
    assert [(one.at_peak, one.at_peak_most) for one in unsettled(raised, before).residues] == [
        (0, 2 * GIB),
        (GIB, GIB),
    ]
    found = judged(reading(3 * GIB), unsettled(raised, before).residues, 2 * GIB)
    assert found is not None
    assert (found.verdict, "cannot be told" in " ".join(found.text.split())) == ("error", True)


def test_a_peak_of_the_windows_own_processes() -> None:
    """It has nothing of what lies below other workers, and of the rest what was held all along, and maybe more."""
    here = Residue(test="test_a", device="gpu0", bytes=2 * GIB, lasted=GIB, at_peak=2 * GIB, at_peak_most=2 * GIB)
    there = Residue(test="test_b", device="gpu0", bytes=5 * GIB, lasted=5 * GIB, at_peak=5 * GIB, own=False)
    closed = Closed(t0=0, t1=1, run={"gpu0": reading(9 * GIB)}, residues=[here, there])
    for scope in ("own", "run"):
        left = left_in(closed, "gpu0", reading(3 * GIB), scope=scope, over="total", phase=None)
        assert left == (GIB, 2 * GIB, ("test_a",))


def test_a_figure_that_missed_something_excuses_nobody_for_sure() -> None:
    """Where nobody looked for a while, more may have been held than is known."""
    left = Residue(test="test_a", device="gpu0", bytes=GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    figure = msgspec.structs.replace(reading(2 * GIB), missed="for 1,500 ms nobody looked")
    found = judged(figure, [left], GIB)
    assert found is not None
    assert (found.verdict, "only because" in found.text) == ("error", False)


def test_an_interval_is_excused_only_where_both_ends_are() -> None:
    """1.5 GiB of its own at most, over a limit of 1 GiB: that the leftover alone broke it is not known."""
    left = Residue(test="test_a", device="gpu0", bytes=GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    found = judged(reading(2 * GIB, int(2.5 * GIB)), [left], GIB)
    assert found is not None
    assert (found.verdict, "only because" in found.text) == ("error", False)


def test_only_who_left_something_worth_a_word_is_named() -> None:
    """20 KiB by which a process grew in a later test make nobody a culprit."""
    many = [
        Residue(test=name, device="gpu0", bytes=size, lasted=size, at_peak=size, at_peak_most=size)
        for name, size in (("test_child", 302 * MIB), ("test_quiet", 20 << 10))
    ]
    found = judged(reading(302 * MIB + (20 << 10)), many, 200 * MIB)
    assert found is not None
    assert "test_quiet" not in found.text
    assert "test_child left 302" in " ".join(found.text.split())


@given(
    st.integers(0, 1 << 33),
    st.integers(0, 1 << 33),
    st.integers(0, 1 << 33),
    st.integers(0, 1 << 33),
    st.integers(1, 1 << 33),
)
def test_nobody_is_accused_or_excused_by_a_guess(own: int, spread: int, least: int, unsure: int, limit: int) -> None:
    """Whatever part of the leftover was there: who fails is over in each case, who is excused is over in none."""
    left = Residue(test="test_a", device="gpu0", bytes=least + unsure, at_peak=least, at_peak_most=least + unsure)
    figure = reading(own + least + unsure, own + least + unsure + spread)
    found = judged(figure, [left], limit)
    alone = [top - part for top in (figure.bytes, figure.upper) for part in (least, least + unsure)]
    if found is None or found.verdict == "inconclusive":
        assert figure.bytes <= limit
    elif found.verdict == "failed":
        assert all(size > limit for size in alone)
    elif "only because" in " ".join(found.text.split()):
        assert all(size <= limit for size in alone)
    else:
        assert any(size > limit for size in alone)
        assert any(size <= limit for size in alone)


def test_the_words_for_a_residue() -> None:
    """Holders, the driver's context and what went away are said in one line."""
    one = Residue(
        test="test_a",
        device="gpu0",
        bytes=3 * GIB,
        pids=[(7, "python serve.py")],
        first_use=True,
        context=1280 * MIB,
        at_peak_most=GIB,
    )
    assert residue(one, became=True) == (
        "3,072 MiB of gpu0 by test_a, still held by python serve.py (PID 7), the driver's context included, which stays"
        " until the process ends, 768.0 MiB of it gone when the peak was reached"
    )


def test_what_was_held_before_is_said() -> None:
    """What nobody knows the origin of, being from before the first window, is not taken for the test's own in words."""
    closed = Closed(t0=0, t1=1, run={"gpu0": reading(GIB)}, baseline={"gpu0": reading(302 * MIB)})
    found = judge_peak(closed, check="x", limits=Limits(text="x", each=GIB // 2), limit_from="@max_vram")
    assert found is not None
    assert "held before     302.0 MiB, when this test began" in found.text
    assert "held before" not in judged(reading(GIB), [], GIB // 2).text  # type: ignore[union-attr]


@pytest.mark.parametrize("scope", ["run", "own"])
def test_a_boot_has_nothing_of_what_was_left(scope: str) -> None:
    """A peak that a backend reached while it started is its own, whatever lay beside it."""
    left = Residue(test="test_a", device="gpu0", bytes=GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    closed = Closed(t0=0, t1=1, run={"gpu0": reading(2 * GIB)}, residues=[left], boots={scope: ["gpu0"]})
    assert left_in(closed, "gpu0", reading(2 * GIB), scope=scope, over="total", phase=None) == Left()
    assert left_in(closed, "sum", reading(2 * GIB), scope=scope, over="total", phase=None) == Left()


def test_a_phase_of_a_boot_has_nothing_of_what_was_left() -> None:
    """Its figures are of the backend alone."""
    left = Residue(test="test_a", device="gpu0", bytes=GIB, lasted=GIB, at_peak=GIB, at_peak_most=GIB)
    boot = msgspec.structs.replace(reading(2 * GIB), scope="backend")
    closed = Closed(t0=0, t1=1, run={"gpu0": reading(3 * GIB)}, residues=[left], phases={"weights": {"gpu0": boot}})
    assert left_in(closed, "gpu0", boot, scope="run", over="total", phase="weights") == Left()

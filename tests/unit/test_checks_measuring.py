"""Strangers, residues, spill, lost devices and the reserve: what a figure alone would hide or get wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.checks import judge_host, judge_lost, judge_peak, judge_reserve, judge_spill, judge_strangers
from pytest_vram.keeper.messages import Closed, DeviceInfo, Residue, Stranger
from pytest_vram.readings import Measured, Reading, Unmeasurable, larger
from pytest_vram.spec import Limits

MIB, GIB = 1 << 20, 1 << 30


def reading(size: int, high: int | None = None, *, source: str = "nvml-process", scope: str = "run") -> Reading:
    return Reading(bytes=size, at_most=high, source=source, scope=scope, device="gpu0", exact=False)


def window(figure: Measured, **more: object) -> Closed:
    return Closed(t0=0, t1=1, run={"gpu0": figure}, **more)  # type: ignore[arg-type]


def left(
    size: int, test: str = "test_a", *, device: str = "gpu0", pids: list[tuple[int, str]] | None = None
) -> Residue:
    """What a test left behind and nobody took away."""
    return Residue(test=test, device=device, bytes=size, pids=pids or [], lasted=size, at_peak=size, at_peak_most=size)


def card(capacity: Measured | None = None, *, usable: Measured | None = None, limit_from: str = "card") -> DeviceInfo:
    size = capacity or Reading(bytes=8 * GIB, source="nvml-device", scope="device", device="gpu0", exact=True)
    return DeviceInfo(
        label="gpu0",
        kind="nvml",
        name="NVIDIA L40S",
        capacity=size,
        source="NVML",
        limit_from=limit_from,
        usable=usable,
    )


def peak(closed: Closed, limit: int, **more: object):  # type: ignore[no-untyped-def]
    return judge_peak(closed, check="max_vram", limits=Limits(text="x", each=limit), limit_from="@max_vram", **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what earlier tests left behind


def test_the_third_test_is_the_victim_of_the_first_two() -> None:
    """Two tests left 42 GiB on a 44 GiB card; the third, which needs 2, is an error that names them, and no failure."""
    residues = [
        left(21 * GIB, "test_load_cosmos", pids=[(12, "pytest")]),
        left(21 * GIB, "test_load_hunyuan", pids=[(12, "pytest")]),
    ]
    found = peak(window(reading(44 * GIB), residues=residues), 40 * GIB)
    assert found is not None
    assert found.verdict == "error"
    title = found.text.splitlines()[0]
    assert "test_load_cosmos, test_load_hunyuan left 43,008 MiB behind" in title
    assert "and not this one" in title
    assert "pytest (PID 12)" in " ".join(found.text.split())
    assert "2,048 MiB" in found.text


def test_a_test_that_fails_for_itself_fails_whatever_was_left() -> None:
    """Where the limit would break without the residue as well, the test fails, and the residue stands beside it."""
    residues = [left(GIB)]
    found = peak(window(reading(6 * GIB), residues=residues), 4 * GIB)
    assert found is not None
    assert found.verdict == "failed"
    assert "1,024 MiB of gpu0 by test_a" in " ".join(found.text.split())


@given(own=st.integers(0, 1 << 34), others=st.integers(0, 1 << 34), limit=st.integers(1, 1 << 34))
def test_the_verdict_on_a_victim_follows_its_own_memory(own: int, others: int, limit: int) -> None:
    """Failed exactly where the test's own part is over the limit, an error exactly where only the sum is."""
    found = peak(window(reading(own + others), residues=[left(others)]), limit)
    expected = None if own + others <= limit else "failed" if own > limit else "error"
    assert (found and found.verdict) == expected


def test_residue_of_another_device_excuses_nothing() -> None:
    """What was left on gpu1 is no excuse on gpu0."""
    found = peak(window(reading(6 * GIB), residues=[left(5 * GIB, device="gpu1")]), 4 * GIB)
    assert found is not None
    assert found.verdict == "failed"


def test_the_rise_over_the_baseline_is_the_tests_own() -> None:
    """Residue is in the baseline already, and is not taken off a rise a second time."""
    closed = window(reading(6 * GIB), baseline={"gpu0": reading(GIB)}, residues=[left(GIB)])
    found = peak(closed, 4 * GIB, over="baseline")
    assert found is not None
    assert found.verdict == "failed"


# ---------------------------------------------------------------- strangers, lost devices, spill


def test_a_growing_daemon_is_an_error_that_says_how_to_count_it() -> None:
    """PID, name, growth and `attach` stand in the message."""
    one = Stranger(
        pid=812,
        name="ollama",
        device="gpu0",
        held=5 * GIB,
        grew=4 * GIB,
        talked_to=True,
        decisive=True,
        why="a test talked to it",
    )
    found = judge_strangers(window(reading(MIB), strangers=[one]))
    assert found is not None
    assert found.verdict == "error"
    text = " ".join(found.text.split())
    for part in ("PID 812", "ollama", "grew by 4,096 MiB", 'engine = "attach"', "a test talked to it"):
        assert part in text


def test_a_desktop_that_grows_is_a_row_and_no_verdict() -> None:
    """A stranger that decides nothing stands beside a failure, and by itself says nothing."""
    one = Stranger(pid=7, name="Xorg", device="gpu0", held=200 * MIB, grew=MIB)
    closed = window(reading(2 * GIB), strangers=[one])
    assert judge_strangers(closed) is None
    found = peak(closed, GIB)
    assert found is not None
    assert "Xorg (PID 7) held 200.0 MiB of gpu0" in " ".join(found.text.split())


def test_a_lost_device_is_an_error() -> None:
    """ "GPU is lost" ends in an error with the driver's sentence, beside a peak that is not known."""
    closed = window(Unmeasurable(reason="GPU is lost"), lost=["gpu0: GPU is lost"])
    (found,) = judge_lost(closed)
    assert found.verdict == "error"
    assert "GPU is lost" in found.text


def test_spill_fails_where_the_devices_own_figure_passes() -> None:
    """An 8 GiB card with 13.6 GiB reserved: the device reads 8, the limit of 8 GiB holds, and the test fails."""
    spilled = reading(int(5.641 * GIB), source="torch-reserved", scope="process")
    closed = window(reading(8 * GIB), spill={"gpu0": spilled})
    assert peak(closed, 8 * GIB) is None
    (found,) = judge_spill(closed, [card()])
    assert found.verdict == "failed"
    assert "several times slower" in " ".join(found.text.split())
    assert "torch-reserved" in found.text


def test_no_spill_is_no_finding() -> None:
    """Neither 0 bytes nor a figure that could not be read fails a test."""
    assert judge_spill(window(reading(1), spill={"gpu0": reading(0)}), [card()]) == []
    assert judge_spill(window(reading(1), spill={"gpu0": Unmeasurable(reason="unread")}), [card()]) == []


# ---------------------------------------------------------------- reserve


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (7 * GIB, None, []),
        (7 * GIB + 1, None, ["failed"]),
        (6 * GIB, 7 * GIB + 1, ["inconclusive"]),
        (7 * GIB + 1, 8 * GIB, ["failed"]),
    ],
)
def test_peak_and_reserve_must_fit_the_card(low: int, high: int | None, expected: list[str]) -> None:
    """To the byte: 7 GiB and a reserve of 1 GiB fit 8 GiB, one byte more does not."""
    found = judge_reserve(window(reading(low, high)), GIB, [card()])
    assert [finding.verdict for finding in found] == expected


def test_what_the_driver_keeps_is_not_usable() -> None:
    """Usable is the capacity less what the driver keeps for itself, and the message says where the size came from."""
    usable = Reading(bytes=7 * GIB, source="nvml-device", scope="device", device="gpu0", exact=True)
    device = card(usable=usable, limit_from="MIG slice")
    whole = {"gpu0": reading(7 * GIB, source="nvml-device", scope="device")}
    (found,) = judge_reserve(window(reading(6 * GIB + 1), device=whole), GIB, [device], limit_from="--vram-reserve")
    assert found.verdict == "failed"
    text = " ".join(found.text.split())
    assert "7,168 MiB of gpu0 = NVIDIA L40S, from MIG slice (nvml-device)" in text
    assert "everyone included" in text


def test_an_unknown_size_decides_nothing() -> None:
    """A capacity that could not be read is neither 0 nor enough."""
    (found,) = judge_reserve(window(reading(GIB)), GIB, [card(Unmeasurable(reason="Insufficient Permissions"))])
    assert found.verdict == "inconclusive"
    assert "Insufficient Permissions" in found.text


def test_an_unmeasured_peak_decides_nothing() -> None:
    """Nor does a peak that could not be read."""
    (found,) = judge_reserve(window(Unmeasurable(reason="no figure")), GIB, [card()])
    assert found.verdict == "inconclusive"


# ---------------------------------------------------------------- lower ends


def test_what_is_known_breaks_a_limit() -> None:
    """A read that failed takes nothing from what was seen over the limit; within it nothing is decided."""
    blip = Unmeasurable(reason="Unknown Error", source="nvml-process", scope="run", device="gpu0", at_least=1024 * MIB)
    found = peak(window(blip), 500 * MIB)
    assert found is not None
    assert found.verdict == "failed"
    assert "is at least 1,024 MiB, at least 524.0 MiB over the limit" in found.text
    assert "Unknown Error" in found.text
    found = peak(window(blip), 1024 * MIB)
    assert found is not None
    assert found.verdict == "inconclusive"
    summed = judge_peak(
        Closed(t0=0, t1=1, run={"gpu0": blip, "gpu1": reading(900 * MIB)}),
        check="vram_budget",
        limits=Limits(text="sum=1GiB", total=GIB),
        limit_from="--vram-budget",
    )
    assert summed is not None
    assert summed.verdict == "failed"


def test_what_is_known_breaks_a_limit_on_the_rise() -> None:
    """The lower end of a rise is what was held at least less what was there at most."""
    blip = Unmeasurable(reason="Unknown Error", at_least=1024 * MIB)
    base = {"gpu0": reading(500 * MIB, 600 * MIB)}
    for limit, verdict in ((423, "failed"), (424, "inconclusive")):
        found = peak(window(blip, baseline=base), limit * MIB, over="baseline")
        assert found is not None
        assert found.verdict == verdict


def test_what_is_known_breaks_host_limit_and_reserve() -> None:
    """The same holds for host memory, and for the room that must stay free."""
    blip = Unmeasurable(reason="gone", source="host-hwm", scope="backend", device="host", at_least=7 * GIB)
    for limit, verdict in ((7 * GIB - 1, "failed"), (7 * GIB, "inconclusive")):
        found = judge_host(Closed(t0=0, t1=1, host=blip), limit, limit_from="@max_host_memory")
        assert found is not None
        assert found.verdict == verdict
        assert "gone" in found.text
    for reserve, verdict in ((GIB + 1, "failed"), (GIB, "inconclusive")):
        (found,) = judge_reserve(window(blip), reserve, [card()])
        assert found.verdict == verdict
        assert "gone" in found.text


def test_a_figure_that_missed_something_is_within_no_limit() -> None:
    """While nobody looked anything may have been held: within the limit is undecided, over it stays over it."""
    gap = "for 1,500 ms nobody looked: the keeper was stopped or starved, or the driver hung"
    seen = Reading(bytes=GIB, source="nvml-process", scope="run", device="gpu0", exact=False, missed=gap)
    found = peak(window(seen), 3 * GIB)
    assert found is not None
    assert found.verdict == "inconclusive"
    words = " ".join(found.text.split())
    assert f"is at least 1,024 MiB, which is within the limit 3GiB (3,072 MiB), but undecided: {gap}" in words
    found = peak(window(seen), GIB - 1)
    assert found is not None
    assert found.verdict == "failed"
    assert "at least 1,024 MiB" in found.text
    (found,) = judge_reserve(window(seen), GIB, [card()])
    assert found.verdict == "inconclusive"
    assert gap in found.text.replace("\n", " ")
    found = judge_host(Closed(t0=0, t1=1, host=seen), 3 * GIB, limit_from="@max_host_memory")
    assert found is not None
    assert found.verdict == "inconclusive"
    assert (
        judge_peak(
            Closed(t0=0, t1=1, run={"gpu0": seen, "gpu1": reading(0)}),
            check="vram_budget",
            limits=Limits(text="sum=3GiB", total=3 * GIB),
            limit_from="--vram-budget",
        )
        is not None
    )


def test_figures_put_together_keep_what_they_missed() -> None:
    """The larger of two figures has missed what either has; the larger of one and none is at least the one."""
    gap = Reading(bytes=GIB, source="x", scope="run", device="gpu0", exact=False, missed="a gap")
    for pair in ((gap, reading(2 * GIB)), (reading(2 * GIB), gap)):
        found = larger(pair)
        assert isinstance(found, Reading)
        assert (found.bytes, found.missed) == (2 * GIB, "a gap")
    hole = Unmeasurable(reason="a hole", at_least=GIB)
    holes: list[tuple[Measured, Measured]] = [(hole, reading(2 * GIB)), (reading(2 * GIB), hole)]
    for two in holes:
        found = larger(two)
        assert isinstance(found, Unmeasurable)
        assert (found.reason, found.at_least) == ("a hole", 2 * GIB)
    assert larger([Unmeasurable(reason="?"), Unmeasurable(reason="!")]) == Unmeasurable(reason="?")

"""Idle memory of one source over many turns: what is called a leak, and what only looks like one."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pytest_vram.checks import IdleVerdict, judge_idle
from pytest_vram.errors import BadInput
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.sessions.soak_series import Column

MIB = 1 << 20
GIB = 1 << 30


def series(turns: int, curve: Callable[[int], float], spread: float = 4.0, seed: int = 7) -> list[int]:
    """Bytes per turn: 3000 MiB, a curve in MiB, and noise."""
    source = random.Random(seed)
    return [round((3000 + curve(turn) + source.gauss(0, spread)) * MIB) for turn in range(turns)]


def rising(turns: int, rate: float = 1.0, spread: float = 4.0) -> list[int]:
    """A straight rise, MiB a turn."""
    return series(turns, lambda turn: rate * turn, spread)


def flat(turns: int, spread: float = 4.0) -> list[int]:
    """Noise only."""
    return rising(turns, 0.0, spread)


def reading(size: int, source: str = "nvml-process", **more: Any) -> Reading:
    """One reading of a process on a card."""
    return Reading(bytes=size, source=source, scope="process", device="gpu0", exact=False, **more)


def test_a_leak_carries_its_slope_with_an_interval_and_what_is_left() -> None:
    """MiB a turn, per 1000 tokens, and hours until the limit at both ends of the interval."""
    readings = rising(120)
    found = judge_idle(
        readings, limit=4000 * MIB, seconds=[30.0 * turn for turn in range(120)], tokens=[500 * t for t in range(120)]
    )
    assert found.kind == "leak"
    assert found.slope is not None
    assert found.low is not None
    assert found.high is not None
    assert 0.9 * MIB < found.low < found.slope < found.high < 1.1 * MIB
    assert found.per_1000_tokens == pytest.approx(2 * found.slope, rel=0.02)
    assert found.hours_left is not None
    soonest, latest = found.hours_left
    left = (4000 * MIB - max(readings[-5:])) / found.high * 30 / 3600
    assert soonest == pytest.approx(left)
    assert latest is not None
    assert soonest < latest < 9
    assert found.cause == "unknown"
    assert (found.turns, found.warm_up) == (96, 24)
    assert "MiB per 1000 tokens" in found.text
    assert "more hours" in found.text


def test_a_flat_series_says_which_leak_it_excludes() -> None:
    """Flat is not "no leak": the text has the smallest slope that is excluded."""
    found = judge_idle(flat(120))
    assert found.kind == "flat"
    assert "a leak of 0.33 MiB a turn or more is excluded" in found.text


@pytest.mark.parametrize(("rate", "turns"), [(0.3, 120), (0.1, 300)])
def test_what_creeps_below_the_floor_is_flat_and_told(rate: float, turns: int) -> None:
    """A rise without noise that adds up to less than the floor is no leak, and not "does not grow" either."""
    found = judge_idle([round((3000 + rate * turn) * MIB) for turn in range(turns)])
    assert found.kind == "flat"
    assert "does not grow" not in found.text
    assert f"grows by {rate:.2f} MiB" in found.text
    assert "less than the floor of 32.00 MiB" in found.text
    assert f"1000 turns of it would be {1000 * rate:.1f} MiB" in found.text
    stepped = judge_idle([(3000 + 20 * (turn > 60)) * MIB for turn in range(120)])
    assert stepped.kind == "flat"
    assert "grew by about" in stepped.text


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_a_leak_that_begins_late_is_open_and_its_beginning_told(spread: float) -> None:
    """Level for 80 turns and then 8 MiB a turn, or 2 MiB from turn 90 on: the text does not say that it went down."""
    found = judge_idle(series(120, lambda turn: 8.0 * max(0, turn - 80), spread))
    assert found.kind == "inconclusive"
    since = re.search(r"so unevenly that this may be chance\. Nearly all of it came after turn (\d+)\.", found.text)
    assert since is not None
    assert 70 <= int(since[1]) <= 90
    found = judge_idle(series(120, lambda turn: 2.0 * max(0, turn - 90), spread))
    assert found.kind == "inconclusive"
    assert "above what it was before turn 89" in found.text


def test_figures_in_another_unit_are_invalid() -> None:
    """A leak of 1 MiB a turn that is written in MiB is none in bytes: the unit is asked for instead of a pass."""
    readings = [3000 + turn for turn in range(120)]
    found = judge_idle(readings)
    assert found.kind == "invalid"
    assert "the highest is 3,119" in found.text
    assert judge_idle(readings, floor=64, wander=0).kind == "leak"
    assert judge_idle({"torch-allocated": readings, "process": rising(120)}).kind == "leak"
    for layer in ("process", "device", "host"):
        named = judge_idle({layer: readings, "torch-allocated": flat(120)})
        assert named.kind == "invalid"
        assert f"All readings of `{layer}` are below 1 MiB" in named.text


def test_nothing_all_night_is_no_pass() -> None:
    """Plain zeros are a counter that could not be read; a reading that says 0 is one, as of a card that is not used."""
    zeros = [0] * 120
    for found in (judge_idle(zeros), judge_idle({"process": zeros, "device": rising(120, 4)})):
        assert found.kind == "invalid"
        assert "are 0: nothing that serves a model holds no memory" in found.text
    assert judge_idle([reading(0)] * 120).kind == "flat"
    assert judge_idle({"torch-allocated": zeros, "process": flat(120)}).kind == "flat"
    column = Column(0)
    for size in zeros:
        column.add(reading(size))
    assert judge_idle({"process": column.figures()}).kind == "flat"


@pytest.mark.parametrize("cycle", [True, False])
@pytest.mark.parametrize(("period", "turns"), [(3, 120), (6, 300), (7, 120), (15, 120)])
def test_a_leak_of_some_turns_alone_is_never_flat(period: int, turns: int, cycle: bool) -> None:
    """20 MiB a cycle at one phase, which is no cycle's level: open, with the turns that rise."""
    readings = series(turns, lambda turn: 20.0 * (turn // period) if turn % period == 0 else 0.0, 2.0)
    found = judge_idle(readings, cycle=period if cycle else None)
    assert found.kind == "inconclusive"
    assert "rise" in found.text
    if cycle:
        assert f"at one turn of each cycle of {period} (turns" in found.text
        assert "again and again" in found.text


@pytest.mark.parametrize(("count", "said"), [(1, "The last turn stands"), (2, "The last 2 turns stand")])
def test_turns_at_the_end_that_stand_above_all_others_are_told(count: int, said: str) -> None:
    """One or two are a spike or a jump; a spike that has been there before is none of them."""
    readings = flat(120 - count) + [5000 * MIB] * count
    found = judge_idle(readings)
    assert found.kind == "inconclusive"
    assert said in found.text
    readings[60] = 5000 * MIB
    assert judge_idle(readings).kind == "flat"


def test_levels_that_rise_with_each_restart_are_told() -> None:
    """No slope goes across a restart, but the text does not keep it back."""
    levels = [size + 500 * MIB * (turn // 30) for turn, size in enumerate(flat(120))]
    found = judge_idle(levels, segments=[30, 60, 90])
    assert found.kind == "flat"
    assert re.search(r"the last by 1,(49|50)\d(\.\d)? MiB above the first: look for what a restart leaves", found.text)


def test_what_is_not_used_is_said() -> None:
    """Indices that no turn has, and caps of unknown caches."""
    found = judge_idle(flat(120), events=[500, -1], segments=[120], caps={"prompt_cache": GIB})
    assert "`events` has 500, -1, which is the index of none of the 120 turns: not used." in found.text
    assert "`segments` has 120" in found.text
    assert "`prompt_cache` is none of the known caches (prompt-cache, " in found.text


def test_hours_left_of_a_flat_series_have_no_latest() -> None:
    """A slope that may be 0 has only a soonest."""
    found = judge_idle(flat(120, spread=20), limit=8 * GIB, seconds=[float(turn) for turn in range(120)])
    assert found.hours_left is None or found.hours_left[1] is None


@pytest.mark.parametrize("turns", [0, 1, 2, 9, 59])
def test_few_turns_decide_nothing(turns: int) -> None:
    """Below 60 turns every series is inconclusive, however steep, and a longer run settles it."""
    found = judge_idle(rising(turns, 50))
    assert found.kind == "inconclusive"
    assert "a verdict needs 60" in found.text or turns == 0
    assert found.settles == ["a longer run"]


def test_sixty_turns_may_decide() -> None:
    """The minimum is a bound that is met, and one that can be moved."""
    assert judge_idle(rising(60, 4)).kind == "leak"
    assert judge_idle(rising(60, 4), minimum=61).kind == "inconclusive"


def test_a_drop_below_the_start_is_fine() -> None:
    """Memory that falls, at once or bit by bit, is no leak and no step."""
    assert judge_idle(rising(120, -1)).kind == "flat"
    assert judge_idle(series(120, lambda turn: -700.0 * (turn >= 60))).kind == "flat"


def test_a_baseline_of_a_server_that_was_not_up_is_no_leak() -> None:
    """The first three readings are nearly nothing, and all others 32053 MiB."""
    assert judge_idle([0, 0, 3 * MIB] + [32053 * MIB] * 117).kind == "flat"


@pytest.mark.parametrize("at", [25, 60, 110, 117])
def test_one_jump_is_a_step_wherever_it_is(at: int) -> None:
    """From the first judged turns to the last three."""
    found = judge_idle(series(120, lambda turn: 100.0 * (turn >= at)))
    assert found.kind == "step", found.text
    assert [abs(turn - at) <= 1 and 85 * MIB < size < 115 * MIB for turn, size in found.steps] == [True]


def test_a_leak_under_a_step_is_a_leak() -> None:
    """A jump does not excuse what rises without it, and is told beside it."""
    found = judge_idle(series(120, lambda turn: 200.0 * (turn >= 70) + 1.5 * turn))
    assert found.kind == "leak"
    assert found.slope == pytest.approx(1.5 * MIB, rel=0.25)
    assert len(found.steps) == 1


def test_a_jump_that_goes_away_again_is_nothing() -> None:
    """Up at turn 40, back at turn 80."""
    assert judge_idle(series(120, lambda turn: 150.0 * (40 <= turn < 80))).kind == "flat"


def test_jumps_again_and_again_are_open() -> None:
    """Two jumps and nothing between them: neither one step nor a slope."""
    found = judge_idle(series(120, lambda turn: 300.0 * sum(turn >= at for at in (45, 101))))
    assert found.kind == "inconclusive"
    assert "grows in jumps" in found.text
    assert [turn for turn, _ in found.steps] == [45, 101]


def test_an_event_explains_a_step() -> None:
    """The same jump, at a turn that summarised."""
    readings = series(120, lambda turn: 100.0 * (turn >= 70))
    assert judge_idle(readings).kind == "step"
    found = judge_idle(readings, events=[70])
    assert found.kind == "flat"
    assert "Explained by events" in found.text
    assert judge_idle(readings, events=[30]).kind == "step"


def test_small_steps_at_events_are_explained_but_not_without_end() -> None:
    """Three steps of 20 MiB at events are no leak; growth at each of five is left open."""
    few, many = (40, 60, 90), (30, 50, 70, 90, 110)
    readings = series(120, lambda turn: 20.0 * sum(turn >= at for at in few))
    assert judge_idle(readings).kind == "leak"
    assert judge_idle(readings, events=few).kind == "flat"
    readings = series(120, lambda turn: 20.0 * sum(turn >= at for at in many))
    found = judge_idle(readings, events=many)
    assert found.kind == "inconclusive"
    assert "5 events" in found.text


@pytest.mark.parametrize("events", [range(0, 120, 5), range(0, 120, 15), range(120)])
def test_events_do_not_hide_a_leak(events: range) -> None:
    """A straight rise stays a leak however many turns are marked."""
    assert judge_idle(rising(120, 1.0, 3.0), events=events).kind == "leak"


@pytest.mark.parametrize("cycle", [15, None])
@pytest.mark.parametrize(("rate", "kind"), [(0.0, "flat"), (1.0, "leak")])
def test_a_cycle_neither_hides_a_leak_nor_makes_one(cycle: int | None, rate: float, kind: str) -> None:
    """A ramp of 120 MiB over 15 turns, its floor level or rising; the cycle given or found."""
    readings = series(120, lambda turn: 120.0 * (turn % 15) / 14 + rate * turn, spread=8)
    assert judge_idle(readings, cycle=cycle).kind == kind


def test_a_cycle_needs_three_of_it() -> None:
    """Phases that were seen twice cannot be taken out; the text says how long a run must be."""
    found = judge_idle(rising(120), cycle=40)
    assert found.kind == "inconclusive"
    assert found.settles == ["a run of at least 150 turns: three cycles after the warm-up"]


def test_a_curve_that_levels_is_warming() -> None:
    """500 MiB towards a level, with a time constant of a fifth of the run."""
    assert judge_idle(series(120, lambda turn: 500 * (1 - math.exp(-turn / 24)))).kind == "warming"


def test_a_leak_that_follows_on_a_warm_up_is_not_called_warming() -> None:
    """The second half is slower than the first but keeps rising."""
    found = judge_idle(series(300, lambda turn: 500 * (1 - math.exp(-turn / 30)) + turn))
    assert found.kind in ("leak", "inconclusive")


@pytest.mark.parametrize(("rate", "kind"), [(0.0, "flat"), (1.0, "leak")])
def test_segments_are_pooled_and_no_slope_crosses_a_restart(rate: float, kind: str) -> None:
    """Four servers one after another, each 60 MiB above the one before."""
    readings = [
        size + 60 * MIB * number for number in range(4) for size in series(60, lambda turn: rate * turn, seed=number)
    ]
    found = judge_idle(readings, segments=[60, 120, 180])
    assert found.kind == kind
    assert "4 segments were pooled" in found.text


def test_each_restart_that_hides_a_leak_does_not() -> None:
    """A saw-tooth of restarts: without its segments flat, with them a leak."""
    readings = series(240, lambda turn: 1.5 * (turn % 60))
    assert judge_idle(readings, segments=[60, 120, 180]).kind == "leak"


def test_segments_too_short_are_left_out_and_said() -> None:
    """A server that was restarted at once says nothing."""
    found = judge_idle(rising(130), segments=[120, 125])
    assert found.kind == "leak"
    assert "2 of 3 segments" in found.text


def test_few_turns_that_could_not_be_read_are_left_out_and_said() -> None:
    """Two holes do not change the verdict."""
    readings: list[Measured | int] = [reading(size) for size in rising(120)]
    readings[40] = readings[80] = Unmeasurable(reason="the driver did not answer")
    found = judge_idle(readings)
    assert found.kind == "leak"
    assert "2 of 120 turns could not be read" in found.text


def test_none_is_a_turn_that_could_not_be_read() -> None:
    """It is left out as an unmeasurable reading is; many of them leave the verdict open."""
    readings: list[int | None] = [*rising(120)]
    readings[40] = readings[80] = None
    found = judge_idle(readings)
    assert found.kind == "leak"
    assert "2 of 120 turns could not be read" in found.text
    found = judge_idle([*flat(100), *[None] * 20])
    assert found.kind == "inconclusive"
    assert "20 of 120 readings could not be taken (no reason was given)" in found.text


def test_many_turns_that_could_not_be_read_leave_it_open() -> None:
    """A figure that could not be read is never 0 and never a pass."""
    readings: list[Measured | int] = [Unmeasurable(reason="N/A in a container"), *flat(9)] * 12
    readings += [Unmeasurable(reason="N/A in a container")] * 20
    found = judge_idle(readings)
    assert found.kind == "inconclusive"
    assert "32 of 140 readings could not be taken (N/A in a container)" in found.text
    assert judge_idle([Unmeasurable(reason="x")] * 100).kind == "inconclusive"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (True, "not a number of bytes"),
        (float("nan"), "no counter holds"),
        (float("inf"), "no counter holds"),
        (-4096, "negative"),
        (2**64, "beyond any memory"),
        (2**64 - 1, "beyond any memory"),
        pytest.param(10**400, "beyond any memory", id="10^400"),
        ("3GB", "not a number of bytes"),
        (1.5, "not a whole number"),
    ],
)
def test_figures_that_cannot_be_true_are_invalid(wrong: Any, said: str) -> None:
    """One such reading spoils the series, and the text says which."""
    readings: list[Any] = flat(120)
    readings[77] = wrong
    found = judge_idle(readings)
    assert found.kind == "invalid"
    assert said in found.text
    assert "turn 78" in found.text


def test_more_than_the_device_has_is_invalid_and_more_than_a_budget_is_not() -> None:
    """``capacity`` is physical, ``limit`` may be a budget that a leak passes."""
    readings = rising(120, 8)
    assert judge_idle(readings, capacity=3500 * MIB).kind == "invalid"
    found = judge_idle(readings, limit=3500 * MIB, seconds=[float(turn) for turn in range(120)])
    assert found.kind == "leak"
    assert found.hours_left == (0.0, 0.0)
    assert "Its limit is reached." in found.text
    quick = judge_idle(rising(120, 8), limit=4500 * MIB, seconds=[float(turn) for turn in range(120)])
    assert re.search(r"memory lasts for \d\.\d( to \d\.\d)? more minutes\.", quick.text)


def test_what_varies_too_much_is_open() -> None:
    """Noise of 900 MiB could hide a leak of megabytes a turn: that is no pass."""
    found = judge_idle(flat(120, spread=900))
    assert found.kind == "inconclusive"
    assert "would not be seen" in found.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"flor": 1}, "`flor` is not a threshold of judge_idle; there are: minimum, warm_up"),
        ({"minimum": True}, "write a whole number"),
        ({"minimum": 60.5}, "write a whole number"),
        ({"p_value": 2.0}, "write a share below 1"),
        ({"p_value": float("nan")}, "write a number"),
        ({"blocks": 2}, "needs 4 or more"),
        ({"minimum": 1}, "needs 8 turns or more"),
        ({"cycle": 1.5}, "The cycle of judge_idle is 1.5"),
        ({"events": 5}, "`events` of judge_idle is 5; write a list"),
        ({"caps": [1]}, "`caps` of judge_idle is [1]; write bytes by the names"),
        ({"caps": {"prompt-cache": None}}, "`prompt-cache` of judge_idle is None"),
        ({"tokens": ["a"] * 70}, "`tokens` of judge_idle has 'a'; write a number"),
        ({"seconds": [None] * 70}, "`seconds` of judge_idle has None; write a number"),
        ({"cycle": 0}, "The cycle of judge_idle is 0"),
        ({"limit": -1}, "`limit` of judge_idle is -1"),
        ({"caps": {"prompt-cache": "8GiB"}}, "`prompt-cache` of judge_idle"),
        ({"seconds": [1.0]}, "the lengths differ"),
        ({"tokens": [1]}, "the lengths differ"),
        ({"segments": [0] * 60 + [1] * 60}, "`segments` of judge_idle has an index twice"),
        ({"events": [True]}, "`events` of judge_idle has True; write the indices"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(given: dict[str, Any], said: str) -> None:
    """Unknown thresholds, values out of range and lists of other lengths."""
    with pytest.raises(BadInput, match=re.escape(said)):
        judge_idle(flat(70), **given)


@pytest.mark.parametrize("given", [{"process": None}, {5: [1]}, "abc", None])
def test_what_is_no_list_of_figures_is_said(given: Any) -> None:
    """Sources by name, or one list."""
    with pytest.raises(BadInput, match="of judge_idle is|by the names of layers"):
        judge_idle(given)


def test_thresholds_are_used() -> None:
    """A floor above the growth, and one below it."""
    assert judge_idle(rising(120, 0.25, 1.0)).kind == "flat"
    assert judge_idle(rising(120, 0.25, 1.0), floor=4 * MIB, wander=0).kind == "leak"


def test_a_hundred_thousand_turns_are_judged_in_seconds() -> None:
    """Processor time, with a cycle, restarts and events; a straight leak of 1 KiB a turn is found in it."""
    count = 100_000
    readings = [3 * GIB + 1024 * turn for turn in range(count)]
    begun = time.process_time()
    assert judge_idle(readings).kind == "leak"
    found = judge_idle(readings, cycle=300, events=range(0, count, 7), segments=[*range(20_000, 90_000, 700)])
    assert found.kind == "leak"
    assert time.process_time() - begun < 20


def test_a_verdict_goes_through_json() -> None:
    """Journals and reports keep it whole."""
    found = judge_idle(rising(120), limit=8 * GIB, seconds=[float(turn) for turn in range(120)])
    assert msgspec.json.decode(msgspec.json.encode(found), type=IdleVerdict) == found


@pytest.mark.parametrize("cycle", [15, None])
def test_a_cycle_much_larger_than_the_noise_is_taken_out(cycle: int | None) -> None:
    """600 MiB within each 15 turns, and 1 MiB a turn under it, or a jump beside it."""

    def saw(turn: int) -> float:
        return 600.0 * (turn % 15) / 14

    assert judge_idle(series(120, saw, spread=8), cycle=cycle).kind == "flat"
    assert judge_idle(series(120, lambda turn: saw(turn) + turn, spread=8), cycle=cycle).kind == "leak"
    assert judge_idle(series(120, lambda turn: saw(turn) + 150 * (turn > 60), spread=8), cycle=cycle).kind == "step"


def test_a_rise_that_slows_down_and_goes_on_is_open() -> None:
    """5 MiB a turn, then 1.5: it eases once, but not further."""
    found = judge_idle(series(120, lambda turn: 5.0 * min(turn, 72) + 1.5 * max(0, turn - 72)))
    assert found.kind == "inconclusive"
    assert "still grows" in found.text


def test_a_drop_in_the_middle_of_a_leak_leaves_it_open() -> None:
    """1 MiB a turn on either side of 80 MiB that were let go."""
    found = judge_idle(series(120, lambda turn: turn - 80.0 * (turn > 60)))
    assert found.kind == "inconclusive"
    assert "dropped by" in found.text


def test_two_spikes_at_the_end_are_no_step() -> None:
    """The last turn but two and the last one are 200 MiB higher."""
    assert judge_idle(series(120, lambda turn: 200.0 * (turn in (117, 119)))).kind == "flat"


def test_a_rise_over_twenty_turns_is_no_step() -> None:
    """Two levels with a slope between them have no turn at which it happened."""
    found = judge_idle(series(120, lambda turn: 10.0 * min(max(turn - 55, 0), 30)))
    assert found.kind != "step"
    assert found.steps == []

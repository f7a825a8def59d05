"""Samples that are coarse, and memory that rises without steps: ranges that hold, and never a wrong answer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import Boot, read
from pytest_vram.readings import Reading
from pytest_vram.report.boot_lines import phase_lines
from tests.unit.test_bootlog_peaks import LINES, MIB, answer, csv, log

#: When a buffer of each kind is filled: from, to.
FILLED = {"weights": (0.6, 5.9), "kv": (6.05, 7.55), "compute": (7.65, 8.9)}


def printed(sizes: dict[str, int]) -> tuple[tuple[float, str], ...]:
    """The lines of a boot that printed so many MiB."""
    written = {"4064.00": sizes["weights"], "1032.00": sizes["kv"], " 516.00": sizes["compute"]}
    found = []
    for at, line in LINES:
        old = next((old for old in written if old in line), None)
        found.append((at, line if old is None else line.replace(old, f"{written[old]}.00")))
    return tuple(found)


def filled(at: float, sizes: dict[str, int], *, touched: float = 1.0, base: int = 310, context: int = 0) -> int:
    """MiB held by a device whose memory is there as it is written to."""
    held = float(base) + (context if at >= 0.3 else 0)
    for name, (begin, end) in FILLED.items():
        share = min(1.0, max(0.0, (at - begin) / (end - begin)))
        held += sizes[name] * share * (touched if name == "compute" else 1.0)
    return int(held)


SIZES = {"weights": 4000, "kv": 1000, "compute": 500}


def test_weights_that_were_still_loading_at_the_last_sample() -> None:
    """What stood when the weights were loaded is a range where nobody looked then, and the printed weights decide."""

    def held(at: float) -> int:
        return 310 if at < 0 else 1000 if at < 5 else 6000

    boot = read(log("epoch", lines=printed(SIZES)), samples=csv(held, interval=5.1, end=60))
    peak = answer(boot)
    assert peak.part == "weights"
    assert "rose by 690.0 MiB to 5,690 MiB until the weights were loaded" in peak.text
    assert "of it were not sampled)" in peak.text
    assert "4,000 MiB of weights and 1,000 MiB of cache were printed" in peak.text
    assert "its peak of at least 6,000 MiB, sampled every 5.1 s, fell into phase kv" in peak.text
    assert "peaks are the largest samples: at least so much was held" in "\n".join(phase_lines(boot))


def test_weights_that_were_not_printed_either() -> None:
    """Where neither samples nor the log tell what the weights took, nobody knows which part is larger."""
    lines = [line for line in printed(SIZES) if "model buffer" not in line[1]]
    boot = read(
        log("epoch", lines=lines),
        samples=csv(lambda at: 310 if at < 0 else 1000 if at < 5 else 6000, interval=5.1, end=60),
    )
    assert answer(boot).part == "unknown"


@pytest.mark.parametrize("weights", [900, 4500])
def test_samples_that_contradict_the_log(weights: int) -> None:
    """Samples in which the weights never were say so, and answer only what holds by the log as well."""
    sizes = {**SIZES, "weights": weights}
    boot = read(log("epoch", lines=printed(sizes)), samples=csv(lambda at: 310 + (4000 if at > 6.5 else 0)))
    assert answer(boot).part == ("later" if weights == 900 else "unknown")
    assert f"though {weights:,}" in answer(boot).text


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), interval=st.floats(0.1, 8.0))
def test_however_coarse_no_answer_is_wrong(seed: int, interval: float) -> None:
    """Weights or later: by whatever interval, clock and pace of the load, the answer is the true one or unknown."""
    rng = Random(seed)
    sizes = {"weights": rng.randrange(200, 6000), "kv": rng.randrange(50, 5000), "compute": rng.randrange(50, 1500)}
    context = rng.choice((0, 180))
    more = sizes["kv"] + sizes["compute"] - sizes["weights"]
    assume(abs(more) > 2 * context + 150)
    at_once = rng.random() < 0.5

    def held(at: float) -> int:
        if at_once:
            return 310 + context * (at >= 0.3) + sum(size for name, size in sizes.items() if at >= FILLED[name][0])
        return filled(at, sizes, context=context)

    for clock in ("epoch", "start", None):
        boot = read(log(clock, lines=printed(sizes)), samples=csv(held, interval=interval, end=40))
        assert answer(boot).part in ("unknown", "later" if more > 0 else "weights"), (clock, answer(boot).text)


def by_truth(boot: Boot, held: list[tuple[float, int]], late: float) -> dict[str, int]:
    """Phase → the largest sample in it, by the clock that the log does not tell."""
    found: dict[str, int] = {}
    for span in boot.phases:
        assert span.start is not None
        end = float("inf") if span.end is None else span.end
        inside = [size for at, size in held if span.start <= at - late < end]
        if inside:
            found[span.name] = max(inside)
    return found


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), interval=st.sampled_from([0.05, 0.1, 0.25]))
def test_bounds_of_a_rise_without_steps(seed: int, interval: float) -> None:
    """Memory that is there as it is written to, compute buffers in part: every range of a phase holds its true peak."""
    rng = Random(seed)
    sizes = {"weights": rng.randrange(200, 6000), "kv": rng.randrange(200, 5000), "compute": rng.randrange(50, 1500)}
    touched, context, late = rng.random(), rng.choice((0, 0, 180)), rng.random()
    seen: list[tuple[float, int]] = []

    def held(at: float) -> int:
        seen.append((at, filled(at - late, sizes, touched=touched, context=context)))
        return seen[-1][1]

    boot = read(log("start", lines=printed(sizes)), samples=csv(held, interval=interval))
    true = by_truth(boot, seen, late)
    for span in boot.phases:
        figure = span.peak.get("gpu0")
        if isinstance(figure, Reading) and span.name in true:
            assert figure.bytes <= (true[span.name] + 1) * MIB, (span.name, figure, true)
            # samples on one level may differ by 2 MiB
            assert (true[span.name] - 2) * MIB <= figure.upper, (span.name, figure, true)
    if context == 0 and interval < 0.1:
        assert isinstance(boot.phases[1].peak["gpu0"], Reading), boot.warnings


def test_compute_that_is_not_touched_without_any_clock() -> None:
    """Steps of weights and cache are found though that of the compute buffers is missing; what follows is not known."""

    def held(at: float) -> int:
        return 310 + 4000 * (at >= 0.9) + 1000 * (at >= 6.05) + 150 * (at >= 7.65)

    boot = read(log(lines=printed(SIZES)), samples=csv(held))
    _, weights, kv, reserve, *_ = (span.peak.get("gpu0") for span in boot.phases)
    for figure, size in ((weights, 4310), (kv, 5310)):
        assert isinstance(figure, Reading)
        assert figure.bytes == size * MIB
    assert not isinstance(reserve, Reading)
    assert answer(boot).part == "weights"


def test_steps_of_another_part_are_none() -> None:
    """Two buffers of one size: a boot of which only a part was sampled is not taken for another part of it."""
    sizes = {"weights": 1000, "kv": 500, "compute": 500}

    def held(at: float) -> int:
        return 310 + (1500 if at >= 6.05 else 0) + (500 if at >= 7.65 else 0)

    boot = read(log(lines=printed(sizes)), samples=csv(held))
    weights = boot.phases[1].peak.get("gpu0")
    assert not isinstance(weights, Reading)


def test_memory_that_swings_for_hours() -> None:
    """A server's memory that goes up and down is looked at by its heights, and not plateau by plateau."""
    held = [300] * 2 + [4395] * 3 + [5427] * 3 + [5943 + 4 * (place % 4 < 2) for place in range(20_000)]
    boot = read(log(), samples="memory.used [MiB]\n" + "".join(f"{size}\n" for size in held))
    figure = boot.phases[1].peak["gpu0"]
    assert isinstance(figure, Reading)
    assert figure.bytes == 4395 * MIB


def test_samples_that_fall_while_the_log_loads() -> None:
    """Memory that goes away while a boot goes well is another boot's, or its times are wrong: nothing is answered."""
    boot = read(log("epoch"), samples=csv(lambda at: 8600 if 0.2 < at < 2 else 310))
    assert answer(boot).part == "unknown"
    assert "contradict each other" in answer(boot).text

"""A boot log beside samples: the peak of each phase, by clocks, across time zones, by steps alone, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.boot import Peak
from pytest_vram.cli import main
from pytest_vram.readings import Reading, Unmeasurable

MIB = 1 << 20
AT = 1796077470.0  # 2026-11-30 22:24:30 UTC
#: Seconds since the start, and what is printed then.
LINES = (
    (0.1, "build: 6100 (abcdef0) with cc 13 for x86_64-linux-gnu"),
    (0.5, "load_tensors: loading model tensors, this can take a while... (mmap = true)"),
    (5.5, "load_tensors:        CUDA0 model buffer size =    4064.00 MiB"),
    (6.0, "llama_context: constructing llama_context"),
    (6.1, "llama_kv_cache:      CUDA0 KV buffer size =    1032.00 MiB"),
    (7.6, "sched_reserve: reserving ..."),
    (7.7, "sched_reserve:      CUDA0 compute buffer size =     516.00 MiB"),
    (9.0, "main: model loaded"),
    (9.1, "main: server is listening on http://127.0.0.1:8080 - starting the main loop"),
)
#: When memory is taken: a driver's context, weights, cache, compute, and a request.
TAKEN = ((0.3, 180), (0.9, 4064), (6.05, 1032), (7.65, 516), (11.0, 40))
PEAKS = {"weights": 4554, "kv": 5586, "reserve": 6102, "ready": 6142}


def log(clock: str | None = None, *, hours: int = 0, lines: Sequence[tuple[float, str]] = LINES) -> str:
    """The log with its own clock (``start``), the time of day (``epoch``), or none."""
    text = ""
    for at, line in lines:
        if clock == "start":
            whole, micros = divmod(round(at * 1e6), 10**6)
            text += f"{whole // 60}.{whole % 60:02d}.{micros // 1000:03d}.{micros % 1000:03d} I {line}\n"
        elif clock == "epoch":
            when = datetime.fromtimestamp(AT + at + hours * 3600, UTC)
            text += f"{when:%Y-%m-%dT%H:%M:%S.%f}Z {line}\n"
        else:
            text += f"{line}\n"
    return text


def level(at: float, taken: Sequence[tuple[float, int]] = TAKEN, base: int = 310) -> int:
    return base + sum(size for when, size in taken if at >= when)


def csv(
    held: Callable[[float], int | str] = level, *, interval: float = 0.25, end: float = 16.0, times: bool = True
) -> str:
    """Samples from four seconds before the start on."""
    rows = [("timestamp, " if times else "") + "index, memory.used [MiB]"]
    for place in range(round((end + 4) / interval)):
        at = place * interval - 4 + 0.013
        when = datetime.fromtimestamp(AT + at, UTC)
        stamp = f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}, " if times else ""
        value = held(at)
        rows.append(f"{stamp}0, {value}" + (" MiB" if isinstance(value, int) else ""))
    return "\n".join(rows) + "\n"


def in_mib(boot: Boot) -> dict[str, int | None]:
    """Phase → the peak of its samples in MiB, ``None`` where it could not be known."""
    found: dict[str, int | None] = {}
    for span in boot.phases:
        figure = span.peak.get("gpu0")
        found[span.name] = figure.bytes // MIB if isinstance(figure, Reading) else None
    return found


def answer(boot: Boot) -> Peak:
    (peak,) = boot.peaks
    return peak


@pytest.mark.parametrize("clock", ["epoch", "start", None])
def test_peaks_of_the_phases(clock: str | None) -> None:
    """With a common clock, with a clock of the log's own, and with none, each phase has its peak and its source."""
    boot = read(log(clock), samples=csv())
    found = in_mib(boot)
    assert {name: found[name] for name in PEAKS} == PEAKS
    ready = boot.phases[-1].peak["gpu0"]
    assert isinstance(ready, Reading)
    assert (ready.source, ready.scope, ready.device, ready.exact) == ("nvidia-smi", "device", "gpu0", False)
    assert ready.interval_ms == pytest.approx(250, abs=1)
    peak = answer(boot)
    assert (peak.part, peak.phase, peak.figure) == ("weights", "ready", ready)
    assert "310.0 MiB were held before the boot" in peak.text
    assert "until the weights were loaded, and by 1,588 MiB after that" in peak.text


def test_samples_without_times() -> None:
    """Samples of which only the order is known are placed by the steps, and have no interval."""
    boot = read(log("epoch"), samples=csv(times=False))
    found = in_mib(boot)
    assert {name: found[name] for name in PEAKS} == PEAKS
    ready = boot.phases[-1].peak["gpu0"]
    assert isinstance(ready, Reading)
    assert ready.interval_ms is None


@pytest.mark.parametrize("hours", [-9, -2, 1, 5])
def test_another_time_zone(hours: int) -> None:
    """The only shift of whole or half hours at which memory rises as printed is taken, and said."""
    boot = read(log("epoch", hours=hours), samples=csv())
    found = in_mib(boot)
    assert {name: found[name] for name in PEAKS} == PEAKS
    assert any("another time zone" in warning for warning in boot.warnings)


def _twice(at: float) -> int:
    """A server that boots again an hour later."""
    return level(at % 3600 if at > 3500 else at if at < 60 else -1.0)


@pytest.mark.parametrize(
    ("text", "samples", "words"),
    [
        (log("epoch", hours=24 * 3), csv(), "do not meet, in any time zone"),
        (log("epoch"), csv(lambda at: 310 + int(at) % 3), "do not rise by what the log says"),
        (log("epoch", hours=-3), csv(_twice, end=3640, interval=1.0), "several would fit"),
        (log(), csv(_twice, end=3640, interval=1.0), "show several boots that fit"),
        (log(), csv(lambda at: 310 + 5612 * (at > 1)), "no steps of the samples are those"),
        (log("start"), csv(lambda at: level(at / 4), end=60), "at other distances in time"),
        (
            "main: server is listening on http://127.0.0.1:8080\nllama_server: ready\n",
            csv(),
            "prints no buffers in an order",
        ),
    ],
)
def test_what_does_not_fit_is_not_placed(text: str, samples: str, words: str) -> None:
    """No phase gets a peak where log and samples cannot be brought together; why is said, once as a warning."""
    boot = read(text, samples=samples)
    assert all(not span.peak for span in boot.phases)
    assert [warning for warning in boot.warnings if words in warning]
    for peak in boot.peaks:
        assert peak.phase is None
        assert words in peak.text


def test_holes_are_no_zeros() -> None:
    """A phase of which some samples have no figure says so, and one of which all have none has no peak."""

    def held(at: float) -> int | str:
        return "[N/A]" if 6.0 <= at < 7.6 or 9.5 < at < 10.0 else level(at)

    boot = read(log("epoch"), samples=csv(held))
    kv, ready = boot.phases[2].peak["gpu0"], boot.phases[-1].peak["gpu0"]
    assert isinstance(kv, Unmeasurable)
    assert "have no figure" in kv.reason
    assert isinstance(ready, Reading)
    assert ready.bytes == 6142 * MIB
    assert "have no figure" in (ready.missed or "")


def test_phase_shorter_than_the_interval() -> None:
    """A phase into which no sample fell has no peak, and not that of its neighbour."""
    boot = read(log("epoch"), samples=csv(interval=3.0))
    kv = boot.phases[2].peak["gpu0"]
    assert isinstance(kv, Unmeasurable)
    assert "no sample fell into it" in kv.reason


def test_cache_that_is_larger_than_the_weights() -> None:
    """Where more came after the weights than with them, it is the cache and what runs."""
    lines = [(at, line.replace("4064.00", " 564.00")) for at, line in LINES]
    taken = [(at, 564 if size == 4064 else size) for at, size in TAKEN]
    for clock in ("epoch", "start", None):
        boot = read(log(clock, lines=lines), samples=csv(lambda at: level(at, taken)))
        assert answer(boot).part == "later", clock


def test_peak_while_weights_are_loaded() -> None:
    """A peak of the load itself, which goes away again, is one of the weights."""
    taken = [*TAKEN, (2.0, 3000), (4.0, -3000)]
    peak = answer(read(log("epoch"), samples=csv(lambda at: level(at, taken))))
    assert (peak.part, peak.phase) == ("weights", "weights")
    assert peak.figure is not None
    assert "while the weights were loaded" in peak.text


@pytest.mark.parametrize(("refused", "part"), [("KV", "later"), ("model", "weights")])
def test_refused_allocation_decides(refused: str, part: str) -> None:
    """What memory ran out for is the answer, with samples or without; memory that goes with the process is no phase."""
    until = 4 if refused == "KV" else 2
    reason = "failed to allocate buffer for kv cache" if refused == "KV" else ""
    lines = [
        *LINES[:until],
        (
            6.2,
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        ),
        (6.3, f"llama_init_from_model: failed to initialize the context: {reason}")
        if reason
        else (6.3, "alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296"),
    ]
    taken = [*TAKEN[: 2 if refused == "KV" else 1], (7.0, -(180 + 4064 * (refused == "KV"))), (12.0, 7000)]
    for samples in (None, csv(lambda at: level(at, taken))):
        boot = read(log("epoch", lines=lines), samples=samples)
        peak = answer(boot)
        assert peak.part == part
        assert "memory ran out for" in peak.text
        if samples is not None:
            assert max(size or 0 for size in in_mib(boot).values()) == level(6.5, taken)


def test_answer_without_samples() -> None:
    """What was printed answers where nothing was sampled."""
    peak = answer(read(log()))
    assert (peak.part, peak.phase, peak.figure) == ("weights", None, None)
    assert "4,064 MiB of weights and 1,548 MiB of cache and runtime were printed" in peak.text
    assert (
        read("main: model loaded\nmain: server is listening on http://127.0.0.1:8080\nllama_server: ready\n").peaks
        == ()
    )


def test_one_card_of_several() -> None:
    """Of several cards, that which rose by what was printed is the log's; of two that did none is."""

    def rows(others: Callable[[float], int]) -> str:
        lines = csv().splitlines()
        found = [lines[0]]
        for place, line in enumerate(lines[1:]):
            stamp = line.split(",")[0]
            found += [f"{stamp}, 0, {others(place * 0.25 - 4)} MiB", line.replace(", 0, ", ", 1, ")]
        return "\n".join(found) + "\n"

    for clock in ("epoch", None):
        found = in_mib(read(log(clock), samples=rows(lambda at: 2000 + (int(at) % 2) * 300)))
        assert {name: found[name] for name in PEAKS} == PEAKS
        boot = read(log(clock), samples=rows(level))
        assert set(in_mib(boot).values()) == {None}
        assert any("cannot be told" in warning or "not known" in warning for warning in boot.warnings)


def test_card_of_another_size() -> None:
    """Samples of a card that is not of the size that the log names are of another card."""
    line = "common_memory_breakdown_print: |   - CUDA0 (RTX 3050)   | 8191 = 1000 + (5612 =  4064 +    1032 +     516) + 100 |"
    text = (
        log()
        + "common_memory_breakdown_print: | memory breakdown [MiB] | total   free    self   model   context   compute    unaccounted |\n"
    )
    boot = read(text + line + "\n", samples=csv())
    assert boot.facts["total_bytes"] == {"gpu0": 8191 * MIB}
    assert any(in_mib(boot).values())
    other = (
        csv()
        .replace("memory.used [MiB]", "memory.used [MiB], memory.total [MiB]")
        .replace(" MiB\n", " MiB, 24576 MiB\n")
    )
    boot = read(text + line + "\n", samples=other)
    assert not any(in_mib(boot).values())
    assert any("no device of the samples has that size" in warning for warning in boot.warnings)


def test_journal_beside_a_log(tmp_path: Path) -> None:
    """A run's journal knows the log by its name, and gives the figures that the keeper wrote down."""
    second = 10**9
    figure = {"kind": "reading", "source": "rpc-hwm", "scope": "backend", "device": "gpu0", "exact": True}
    lines: list[dict[str, object]] = [{"t": 0, "kind": "run", "wall": AT}]
    for generation in (1, 2):
        lines.append({"t": 1, "kind": "backend", "state": "starting", "name": "a", "generation": generation})
        lines[-1]["log"] = f"a.{generation}.log"
    for place, (name, peak) in enumerate([("start", 5), ("weights", 70), ("kv", 100), ("reserve", 120)]):
        before = {"name": name, "start": place * second, "end": (place + 1) * second}
        before["peak"] = {"gpu0": {**figure, "bytes": peak * MIB}}
        lines.append({"t": 1, "kind": "phase", "backend": "a", "generation": 2, "name": "-", "before": before})
    for begin, most in ((3, 120), (5, 130)):
        block = {"t0": begin * second, "t": (begin + 1) * second, "max": most * MIB, "device": "gpu0"}
        lines.append({"kind": "sample", **block})
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines))
    own = tmp_path / "a.2.log"
    own.write_text(log("start"))
    boot = read(own, samples=journal)
    assert in_mib(boot) == {"start": 5, "weights": 70, "kv": 100, "reserve": 120, "ready": 130}
    assert (answer(boot).part, answer(boot).phase) == ("weights", "ready")
    other = tmp_path / "other.log"
    other.write_text(log("start"))
    assert any("the journal is of 2 boots" in warning for warning in read(other, samples=journal).warnings)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``vram boot LOG --samples CSV`` shows a column of peaks and the answer; a file without samples is bad use."""
    (tmp_path / "server.log").write_text(log("start"))
    (tmp_path / "gpu.csv").write_text(csv())
    arguments = ["boot", str(tmp_path / "server.log"), "--samples"]
    assert main([*arguments, str(tmp_path / "gpu.csv")]) == 0
    told = capsys.readouterr().out
    assert "peak gpu0" in told
    assert "5,586 MiB" in told
    assert "weights, or cache and runtime?" in told
    assert main([*arguments, str(tmp_path / "server.log")]) == 2
    assert main([*arguments, str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), interval=st.sampled_from([0.1, 0.25, 1.0, 3.0]))
def test_with_exact_clocks_a_peak_is_the_largest_sample(seed: int, interval: float) -> None:
    """Whatever the memory does, each phase's peak is the maximum of the samples in it, and there is no other."""
    rng = Random(seed)
    noise = {}

    def held(at: float) -> int | str:
        noise[at] = level(at) + rng.randrange(0, 400)
        return noise[at]

    boot = read(log("epoch"), samples=csv(held, interval=interval))
    for span in boot.phases:
        assert span.start is not None
        end = float("inf") if span.end is None else span.end
        # a stamp has milliseconds
        inside = [value for at, value in noise.items() if span.start <= round(AT + at, 3) + 1e-6 < end]
        figure = span.peak["gpu0"]
        assert (figure.bytes if isinstance(figure, Reading) else None) == (max(inside) * MIB if inside else None)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_steps_with_noise_are_found_or_not_told(seed: int) -> None:
    """Boots of any size and pace, with another program's noise: a peak that is given is the true one."""
    rng = Random(seed)
    weights, kv, compute = (rng.randrange(low, high) for low, high in ((200, 9000), (20, 4000), (20, 2000)))
    lines = [
        (
            at,
            line.replace("4064.00", f"{weights}.00").replace("1032.00", f"{kv}.00").replace(" 516.00", f"{compute}.00"),
        )
        for at, line in LINES
    ]
    sizes = dict(zip((4064, 1032, 516, 40), (weights, kv, compute, 0), strict=True))
    taken = [(at, sizes.get(size, size)) for at, size in TAKEN]
    base, noise = rng.randrange(0, 3000), rng.choice((0, 0, 1, 40))
    true = {name: level(at, taken, base) for name, at in (("weights", 5.9), ("kv", 7.5), ("reserve", 8.9))}
    for clock in ("start", None):
        boot = read(
            log(clock, lines=lines), samples=csv(lambda at: level(at, taken, base) + (rng.randrange(noise + 1)))
        )
        found = in_mib(boot)
        for name, value in true.items():
            got = found[name]
            assert got is None or abs(got - value) <= max(noise, 2), (name, got, value)
        if noise == 0 and min(kv, compute) > 100 and (weights + kv + compute) < 4000:
            assert all(found[name] is not None for name in true)


def test_one_card_of_two_without_times() -> None:
    """Where the samples of one card run into each other, so that it has no times, the other card's still count."""
    rows = ["timestamp, index, memory.used [MiB], memory.total [MiB]"]
    for second, used in enumerate([300, 300, 300, 1300, 1300, 1300, 1300, 1300]):
        rows.append(f"2026/06/08 10:00:0{second}.000, 0, 500 MiB, 24576 MiB")
        rows.append(f"2026/06/08 10:00:0{second}.100, 1, {used} MiB, 24576 MiB")
    rows += [f"2026/06/08 10:00:0{second}.000, 0, {6000 + second} MiB, 24576 MiB" for second in range(1, 6)]
    log = (
        "2026-06-08T10:00:02.000Z load_tensors: loading model tensors, this can take a while... (mmap = false)\n"
        "2026-06-08T10:00:03.500Z load_tensors:        CUDA0 model buffer size =  1000.00 MiB\n"
        "2026-06-08T10:00:06.000Z llama_context: constructing llama_context\n"
        "2026-06-08T10:00:07.000Z main: server is listening on http://127.0.0.1:8080\n"
    )
    boot = read(log, engine="llama-server", samples="\n".join(rows) + "\n")
    (weights,) = [span for span in boot.phases if span.name == "weights"]
    assert {label: figure.bytes for label, figure in weights.peak.items()} == {"gpu0": 1300 * MIB}

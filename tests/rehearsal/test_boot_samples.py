"""A real boot on the software GPU beside samples that were taken meanwhile, as nvidia-smi would print them."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_vram.backends import binary, smoke
from pytest_vram.bootlog import Boot, read
from pytest_vram.readings import Reading
from pytest_vram.testing import Shape, software_gpu, weights_as_buffers, write_llama
from pytest_vram.units import MIB

pytestmark = pytest.mark.engine
READY = "listening on http"


def boot_with_samples(folder: Path) -> tuple[str, list[tuple[float, int]]]:
    """Boot a small model on the software GPU: the log, and (time, bytes held by the device) every few milliseconds."""
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    write_llama(folder / "m.gguf", Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    lines: list[str] = []
    with software_gpu() as (gpu,):
        argv = [str(executable), "-m", str(folder / "m.gguf"), "--rpc", gpu.endpoint, "-ngl", "99", "-c", "16384"]
        argv += ["--port", str(smoke.free_port()), "-lv", "4", "--parallel", "1", "-fit", "off"]
        for name, value in weights_as_buffers(executable).items():
            argv += [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
        found: list[tuple[float, int]] = []
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.004):
                found.append((time.time(), gpu.used() + gpu.idle_bytes))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            while len(found) < 20:
                over.wait(0.01)
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
                stop = threading.Timer(60, server.kill)
                stop.start()
                try:
                    assert server.stdout is not None
                    for line in server.stdout:  # with the time of day before it, as `docker logs -t` has it
                        lines.append(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z {line}")
                        if READY in line:
                            break
                    most = len(found) + 20
                    while len(found) < most:
                        over.wait(0.01)
                finally:
                    stop.cancel()
                    server.kill()
        finally:
            over.set()
            sampler.join()
    return "".join(lines), found


def as_csv(found: list[tuple[float, int]]) -> str:
    rows = ["timestamp, index, memory.used [MiB]"]
    for at, used in found:
        when = datetime.fromtimestamp(at, UTC)
        rows.append(f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}, 0, {used // MIB} MiB")
    return "\n".join(rows) + "\n"


def in_phases(found: list[tuple[float, int]], boot: Boot, zero: float = 0.0) -> dict[str, int]:
    """Phase → the most that the series itself has in it, in whole MiB; the log's clock began at ``zero``."""
    most: dict[str, int] = {}
    for span in boot.phases:
        assert span.start is not None
        end = float("inf") if span.end is None else span.end
        # the samples' clock has milliseconds
        inside = [used // MIB * MIB for at, used in found if span.start <= int(at * 1000) / 1000 - zero < end]
        if inside:
            most[span.name] = max(inside)
    return most


def began(log: str) -> float:
    """When the log's own clock was zero, by the line that came through the pipe with the least delay."""
    found = re.findall(r"(?m)^(\S+)Z (\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ", log)
    return min(
        datetime.fromisoformat(stamp + "+00:00").timestamp() - (int(m) * 60 + int(s) + int(ms) / 1e3 + int(us) / 1e6)
        for stamp, m, s, ms, us in found
    )


def test_real_boot_beside_samples(tmp_path: Path) -> None:
    """By the time of day each phase's peak is the largest sample in it; by the log's own clock it is within its range.

    This device holds what was written to: weights and cache rise without a step between, and of the compute buffers a
    warm-up touches a part only, so that the last level of what was printed is never reached.
    """
    log, found = boot_with_samples(tmp_path)
    boot: Boot = read(log, samples=as_csv(found))
    assert boot.clock == "epoch"
    (label,) = [name for name in boot.devices if name != "host"]
    true = in_phases(found, boot)
    assert {"weights", "kv", "ready"} <= set(true)
    for span in boot.phases:
        figure = span.peak[label]
        assert (figure.bytes if isinstance(figure, Reading) else None) == true.get(span.name), span.name
    holds(boot, found, label)
    own = "".join(line.split(" ", 1)[1] for line in log.splitlines(keepends=True))
    timed: Boot = read(own, samples=as_csv(found))
    assert timed.clock == "start"
    true = in_phases(found, timed, began(log))
    for span in timed.phases:
        bounds = span.peak[label]
        if isinstance(bounds, Reading):
            assert bounds.bytes <= true[span.name] <= bounds.upper, (span.name, true)
    assert {"weights", "kv", "ready"} <= {span.name for span in timed.phases if isinstance(span.peak[label], Reading)}
    holds(timed, found, label)


def holds(boot: Boot, found: list[tuple[float, int]], label: str) -> None:
    """The peak of the boot is what was printed, the weights alone are held in their phase, and the cache is the answer."""
    assert boot.ready
    printed = {bucket: row.get(label, 0) for bucket, row in boot.buckets.items()}
    (answer,) = [peak for peak in boot.peaks if peak.device == label]
    assert isinstance(answer.figure, Reading), answer.text
    held = answer.figure.bytes - found[0][1]
    whole = sum(printed.values())
    assert whole - printed["compute"] - 8 * MIB <= held <= whole + max(8 * MIB, 0.05 * whole)
    weights = next(span.peak[label] for span in boot.phases if span.name == "weights")
    assert isinstance(weights, Reading)
    # What a device over a socket was sent arrives later than the log says: never more than the weights, then.
    assert 0 < weights.bytes - found[0][1] <= printed["weights"] + 8 * MIB
    assert answer.phase not in ("start", "weights")
    # The weights are loaded, and the cache after them: what is larger is the answer.
    assert printed["kv"] > printed["weights"]
    assert answer.part == "later", answer.text

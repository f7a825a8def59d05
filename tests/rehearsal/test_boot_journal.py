"""The journal of a run of ours, read as samples beside the log of its own server."""

from __future__ import annotations

import json
from pathlib import Path

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.backends import binary
from pytest_vram.bootlog import read
from pytest_vram.readings import Reading
from pytest_vram.testing import Shape, software_gpu, weights_as_buffers, write_llama
from pytest_vram.units import MIB
from tests.conftest import Inner

pytestmark = pytest.mark.engine

TESTS = """
def test_small(vram_client):
    assert vram_client.complete("a b c", max_tokens=4).tokens_out
"""


def test_journal_of_a_real_run(pytester: pytest.Pytester, inner: Inner) -> None:
    """Phases of the run's own boot have the keeper's peaks: no less than was printed until then, and never falling."""
    model: Path = pytester.path / "tiny.gguf"
    write_llama(model, Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    with software_gpu() as (gpu,):
        options = {"ctx-size": 16384, "n-gpu-layers": 99, "parallel": 1, "fit": "off", "rpc": gpu.endpoint}
        options |= weights_as_buffers(executable)
        lines = ["default = 'small'", "[backend.small]", "engine = 'llama-server'", f"model = {json.dumps(str(model))}"]
        lines += ["[backend.small.options]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
        (pytester.path / "vram.toml").write_text("\n".join(lines) + "\n")
        pytester.makepyfile(TESTS)
        inner("--vram-device=rpc").assert_outcomes(passed=1)
    (journal,) = pytester.path.glob(".vram/runs/*/journal.jsonl")
    log = next(path for path in journal.parent.rglob("*.log") if "small" in path.name)
    boot = read(log, samples=journal)
    assert boot.ready
    figures = {span.name: span.peak.get("gpu0") for span in boot.phases}
    peaks = {name: figure.bytes for name, figure in figures.items() if isinstance(figure, Reading) and figure.exact}
    assert {"start", "weights", "kv", "reserve"} <= set(peaks)
    assert peaks["start"] <= peaks["weights"] <= peaks["kv"] <= peaks["reserve"]
    printed = {bucket: row.get("gpu0", 0) for bucket, row in boot.buckets.items()}
    # what is sent over a socket may arrive after the log says so, and this device holds what was written to
    assert 0 < peaks["weights"] <= printed["weights"] + 8 * MIB
    sure = printed["weights"] + printed["kv"]
    assert sure - 8 * MIB <= peaks["reserve"] <= sure + printed["compute"] + 8 * MIB
    (answer,) = (peak for peak in boot.peaks if peak.device == "gpu0")
    assert isinstance(answer.figure, Reading)
    assert answer.part == "later", answer.text
    # the kernel's high-water mark is exact; a block of samples of the time after the boot is not
    assert ("at least" in answer.text) == (not answer.figure.exact)

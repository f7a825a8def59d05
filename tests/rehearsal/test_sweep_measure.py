"""Growth while serving and measured sweeps, with real engines: what was predicted, printed and measured agree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.checks import judge_growth, judge_served
from pytest_vram.report import schemas
from pytest_vram.spec import BackendSpec
from pytest_vram.testing import Shape, recipes, software_gpu, write_llama
from pytest_vram.units import MIB
from tests.rehearsal.conftest import Rehearsal
from tests.rehearsal.test_sizing_kv_weights import image_encoder

pytestmark = pytest.mark.engine

Start = Callable[..., Rehearsal]
Spec = Callable[..., BackendSpec]
COMMAND = [sys.executable, "-c", "import sys; from pytest_vram.cli import main; sys.exit(main())", "sweep", "--measure"]
#: Digits of what the engine prints: 0.005 MiB for each line.
PRINTED = round(0.05 * MIB)


def measured(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `vram sweep --measure --json` in a process of its own: exit code, document, standard error."""
    done = subprocess.run([*COMMAND, *arguments, "--json"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    if "points" in found:
        jsonschema.Draft202012Validator(schemas()["sweep.json"]).validate(found)
    return done.returncode, found, done.stderr


def test_every_step_of_a_probe_is_served_and_counted(rehearse: Start, spec: Spec, tmp_path: Path) -> None:
    """On a software GPU: prompts of exact length, two requests at once, an image; the prompt cache is the host's `kv`."""
    model = recipes.gemma("gemma3").write(tmp_path / "gemma3.gguf")
    images = image_encoder(tmp_path / "images.gguf", width=256, hidden=1024, heads=4, side=32)
    options = {"ctx-size": 2048, "parallel": 2, "mmproj": str(images), "n-gpu-layers": 99}
    with software_gpu() as gpus:
        run = rehearse(spec(str(model), options=options), kind="rpc", rpc=[gpu.endpoint for gpu in gpus])
        backend = run.pool.acquire(run.pool.spec())
        booted = backend.boot.buckets
        growth = backend.probe(seconds=60, settle=1)
        steps = {step.name: step for step in growth.steps}
        assert [(step.name, step.outcome) for step in growth.steps if step.outcome != "served"] == []
        assert list(steps) == ["short prompts", "full ubatch", "near-full context", "2 in flight", "image", "idle"]
        assert 512 < steps["full ubatch"].tokens[0] <= 512 + 16
        assert 1024 - 40 <= steps["near-full context"].tokens[0] <= 1024 - 32
        assert steps["2 in flight"].in_flight == steps["2 in flight"].requests == 2
        assert steps["image"].tokens[0] > 40
        for label in ("gpu0", "host"):
            assert growth.peak[label].bytes >= growth.idle[label].bytes - MIB  # type: ignore[union-attr]
        assert steps["image"].transient["gpu0"].bytes > MIB, "the encoder computes on the device"  # type: ignore[union-attr]
        cache = sum(entry.bytes for entry in growth.entries if entry.bucket == "kv" and entry.device == "host")
        assert cache == pytest.approx(steps["idle"].prompt_cache, rel=0.2)
        assert {entry.device for entry in growth.entries if entry.bucket == "kv"} == {"host"}
        assert judge_served(growth) is None
        assert judge_growth(growth) is None
        assert backend.explained.buckets()["kv"]["host"] >= cache
        assert backend.ledger.buckets()["kv"] == booted["kv"], "of the boot's peak it is no part"
        assert "serving: near-full context" in run.peaks().phases
        backend.restart()
        assert backend.growth is None, "what grew is gone with the server"


def test_a_server_that_dies_in_a_step_is_the_steps_outcome(rehearse: Start, spec: Spec, tmp_path: Path) -> None:
    """The step says so, those after it are not sent, and what was measured before it stays."""
    write_llama(tmp_path / "tiny.gguf", Shape(layers=6, embedding=512, context=8192))
    run = rehearse(spec("tiny.gguf", options={"ctx-size": 8192, "parallel": 1, "threads": 1}))
    backend = run.pool.acquire(run.pool.spec())

    def end_it() -> None:
        log, deadline = backend.log, time.monotonic() + 60
        while (
            log is not None and log.read_text(errors="replace").count("new prompt,") < 4 and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        os.kill(backend.pid, signal.SIGKILL)

    threading.Thread(target=end_it, daemon=True).start()
    growth = backend.probe(seconds=60)
    outcomes = {step.name: step.outcome for step in growth.steps}
    assert outcomes["full ubatch"] == "served"
    assert outcomes["near-full context"] == "died"
    assert growth.failed is not None
    assert "SIGKILL" in growth.failed.reason
    assert growth.failed.after == {}
    finding = judge_served(growth)
    assert finding is not None
    assert finding.verdict == "error"


def test_the_cache_of_a_sliding_window_stays_flat(tmp_path: Path) -> None:
    """A tiny iSWA model on a software GPU: predicted is what is printed, and of 6 layers only one grows."""
    model = recipes.gemma(layers=6, window=256, context=16384).write(tmp_path / "tiny.gguf")
    words = ("--over", "context", "--values", "1024,4096", "-ngl", "99", "-np", "1", "-b", "256", "-ub", "256")
    with software_gpu():
        code, found, said = measured(tmp_path, str(model), *words, "--device", "rpc", "--seconds", "30")
    assert code == 0, said
    assert [point["measured"]["facts"]["context"] for point in found["points"]] == [1024, 4096]
    for point in found["points"]:
        shown = point["measured"]
        for bucket in ("weights", "kv", "compute"):
            assert point["buckets"][bucket]["gpu0"] == pytest.approx(shown["printed"][bucket]["gpu0"], abs=PRINTED)
        needed = shown["printed"]["weights"]["gpu0"] + shown["printed"]["kv"]["gpu0"]
        assert shown["at_ready"]["gpu0"]["bytes"] >= needed - MIB, "weights and cache are there at boot"
        assert needed < shown["peak"]["gpu0"]["bytes"] < shown["printed_total"]["gpu0"] + 16 * MIB
        assert "error" not in shown
    small, large = (point["measured"]["printed"]["kv"]["gpu0"] for point in found["points"])
    row = 2 * 2 * 64 * 2
    assert large - small == pytest.approx((4096 - 1024) * row, abs=PRINTED), "one layer is full, five have windows"


def test_two_requests_at_once_do_not_double_it(tmp_path: Path) -> None:
    """Slots are paid for at boot: a second request in flight adds next to nothing, whichever way they share."""
    write_llama(tmp_path / "tiny.gguf", Shape(layers=4, context=4096))
    (tmp_path / "vram.toml").write_text(
        '[backend.tiny]\nengine = "llama-server"\nmodel = "tiny.gguf"\noptions = { cache-ram = 0, threads = 1 }\n'
    )
    words = ("--backend", "tiny", "--over", "parallel", "--values", "1,2", "-c", "1024", "--device", "cpu")
    code, found, said = measured(tmp_path, *words, "--seconds", "30")
    assert code == 0, said
    assert [(point["value"], point["measured"]["way"]) for point in found["points"]] == [
        ("1", "context each"),
        ("2", "context each"),
        ("2", "context in all"),
    ]
    one, each, shared = (point["measured"] for point in found["points"])
    assert each["printed"]["kv"]["host"] == 2 * one["printed"]["kv"]["host"]
    assert shared["printed"]["kv"]["host"] == one["printed"]["kv"]["host"]
    for several in (each, shared):
        assert several["peak"]["host"]["bytes"] < 1.5 * one["peak"]["host"]["bytes"]
        flights = {step["name"]: step for step in several["growth"]["steps"]}
        assert flights["2 in flight"]["in_flight"] == 2
        first, second = (flights[f"{count} in flight"]["peak"]["host"]["bytes"] for count in (1, 2))
        assert second - first < 0.1 * first


def test_a_value_that_does_not_boot_is_a_row(tmp_path: Path) -> None:
    """A software GPU that is too small for one value: a row with what its log says; where all are so, exit code 1."""
    write_llama(tmp_path / "tiny.gguf", Shape(layers=8, context=65536))
    words = ("tiny.gguf", "--over", "context", "-ngl", "99", "-np", "1", "--fit", "off", "--vram-device", "rpc:0")
    with software_gpu(memory="150MiB"):
        code, found, said = measured(tmp_path, *words, "--values", "512,65536", "--seconds", "10")
        assert code == 0, said
        good, bad = found["points"]
        assert good["measured"]["peak"]["gpu0"]["bytes"] > 0
        assert "boot_peak" not in bad["measured"]
        assert bad["measured"]["error"]
        # Some builds crash on the failed allocation before they write why.
        failure = bad["measured"].get("failure")
        assert (failure is not None and failure["kind"] == "out_of_memory") or "SIG" in bad["measured"]["error"]
        code, found, said = measured(tmp_path, *words, "--values", "65536", "--seconds", "10")
        assert code == 1, said

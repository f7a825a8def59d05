"""Plans held against the engine itself: its dry run for large shapes, a real boot for small ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary
from pytest_vram.cli import main
from pytest_vram.cli.asked import as_mapping
from pytest_vram.sizing import planning
from pytest_vram.testing import recipes, software_gpu, weights_as_buffers
from pytest_vram.testing.real_shapes import real
from pytest_vram.testing.software import SoftwareGpu
from pytest_vram.units import MIB

pytestmark = pytest.mark.engine

PRINTED = round(0.01 * MIB)
Start = Callable[..., Any]


@pytest.fixture
def gpu() -> Iterator[SoftwareGpu]:
    """A software GPU."""
    with software_gpu() as gpus:
        yield gpus[0]


@pytest.mark.parametrize(
    ("name", "budget"),
    [("Llama-3-70B", "4GB"), ("Gemma3-27B", "6GB"), ("DeepSeek-V3", "8GB"), ("Qwen3-30B-A3B", "8GB")],
)
def test_every_plan_of_a_large_shape_fits_by_the_dry_run(
    gpu: SoftwareGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, budget: str
) -> None:
    """The engine's own figures of every returned plan are within the budget, and agree with the prediction."""
    model = real(name, tokenizer="bytes").write(tmp_path / "model.gguf")
    code = main(
        [
            "plan",
            str(model),
            "--budget",
            budget,
            "--minimum-context",
            "4096",
            "--rpc",
            gpu.endpoint,
            "--exact",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    plans = found["searches"][0]["plans"]
    assert code == 0
    assert plans
    assert [plan["confirmed"] for plan in plans] == [True] * len(plans)


def test_exact_shows_the_rules_beside_the_engine(
    gpu: SoftwareGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and KV cache agree to the printed digit, and the buckets are the engine's."""
    model = real("Qwen3-30B-A3B", tokenizer="bytes").write(tmp_path / "model.gguf")
    words = ["-c", "8192", "-ngl", "99", "-ncmoe", "10", "-np", "1", "--rpc", gpu.endpoint, "--no-mmap"]
    assert main(["estimate", str(model), *words, "--exact", "--json", "--budget", "24GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    compared = {(one["group"], one["device"]): one for one in found["exact"]["compared"]}
    for key in (("weights", "gpu0"), ("weights", "host"), ("kv", "gpu0")):
        assert compared[key]["agree"], compared[key]
    assert compared["compute", "gpu0"]["error"] < 0.15
    assert {one["source"] for one in found["entries"] if one["device"] == "gpu0"} == {"dry-run"}


def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of the host never stand for those of a device that the engine did not find."""
    model = recipes.llama().write(tmp_path / "model.gguf")
    assert main(["estimate", str(model), "--exact", "--rpc", "127.0.0.1:9"]) == 3
    assert "found none of the devices RPC0" in capsys.readouterr().err


def test_plans_of_a_small_model_boot_as_predicted(
    gpu: SoftwareGpu, tmp_path: Path, rehearse: Start, spec: Start
) -> None:
    """Each plan, really booted, prints buffers that are within the budget and those of the prediction."""
    from pytest_vram.testing import write_qwen3moe

    write_qwen3moe(tmp_path / "moe.gguf")
    executable = next(place.path for place in binary.places() if place.usable and place.path is not None)
    loading = weights_as_buffers(executable)
    budget = 16 * 10**6
    plans = planning.plan(
        tmp_path / "moe.gguf",
        "16MB",
        minimum_context=512,
        rpc=gpu.endpoint,
        **{name.replace("-", "_"): value for name, value in loading.items()},
    )
    assert plans
    assert all(plan.experts_on_cpu for plan in plans)
    for plan in plans:
        mapping = {name: value for name, value in as_mapping(plan.options).items() if name not in ("device", "model")}
        run = rehearse(spec("moe.gguf", options={**loading, **mapping, "cache-ram": 0}), kind="rpc", rpc=[gpu.endpoint])
        backend = run.pool.acquire(run.pool.spec())
        printed = backend.ledger.explained()["gpu0"]
        backend.stop()
        assert printed <= budget
        assert printed == pytest.approx(plan.estimate.total()["gpu0"], abs=4 * PRINTED)


def test_a_dry_run_promises_no_more_than_a_boot_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a boot takes beside the figures of a dry run, which allocates nothing, is in the answer: mapped weights that
    the CPU may keep a second time."""
    model = recipes.llama(embedding=1024, types=recipes.Types(matrices="q4_k")).write(tmp_path / "model.gguf")
    upper: dict[str, int] = {}
    lower: dict[str, int] = {}
    for name, words in (("rules", []), ("exact", ["--exact"]), ("read", ["--exact", "--no-mmap"])):
        main(["estimate", str(model), *words, "--device", "none", "-c", "512", "--json"])
        found = json.loads(capsys.readouterr().out)
        upper[name] = found["total_at_most"]["host"]
        lower[name] = found["total"]["host"]
    assert abs(upper["exact"] - upper["rules"]) <= 2 * MIB
    assert upper["read"] < upper["exact"]
    assert lower["exact"] <= upper["read"] + MIB

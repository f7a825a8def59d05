"""Advice held against the engine itself: its dry run for large shapes, real boots that run out of memory for small ones.

``python ci/bench/advice.py`` does the same for many more.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from pytest_vram.cli import main
from pytest_vram.testing import software_gpu
from tests.conftest import Inner
from tests.rehearsal import advice_trials as trials
from tests.rehearsal.sizing_boots import Gpus, first_engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trials.Bench]:
    """An engine with two software GPUs."""
    with Gpus(2) as gpus:
        yield trials.Bench(first_engine(), tmp_path_factory.mktemp("models"), gpus)


@pytest.mark.parametrize("kind", list(trials.KINDS))
def test_what_is_advised_makes_it_fit(bench: trials.Bench, kind: str) -> None:
    """By the engine's own figures; what each followed change saves of weights and KV cache is what was predicted."""
    outcome = bench.tried(trials.draw(kind, random.Random(f"1 {kind} 3")), every=False)
    assert outcome.before > outcome.limit
    assert outcome.chosen, "nothing was said to be enough"
    assert outcome.fits, f"{outcome.chosen}: {outcome.after} of {outcome.limit} bytes"
    assert outcome.rows
    assert trials.over(outcome) == []


def test_a_boot_that_ran_out_of_memory_starts_as_advised() -> None:
    """The software GPU really refused it, and refuses nothing once the advice from that log is followed."""
    tried = (trials.booted(first_engine(), random.Random(f"0 boot {number}")) for number in range(6))
    found = next(one for one in tried if one is not None)
    assert "failed to allocate" in found.failure
    assert found.flags
    assert found.after is None


def test_a_backend_that_does_not_boot_says_what_to_change(pytester: pytest.Pytester, inner: Inner) -> None:
    """The report of the test that wanted it has the advice, by the model's own files."""
    from pytest_vram.testing import recipes

    recipes.llama(layers=6, embedding=512, kv_heads=4, head_size=64, tokenizer="bytes").write(pytester.path / "m.gguf")
    pytester.path.joinpath("vram.toml").write_text(
        'default = "a"\n[backend.a]\nengine = "llama-server"\nmodel = "m.gguf"\n[backend.a.options]\n'
        'ctx-size = 65536\nn-gpu-layers = 99\nparallel = 1\nno-mmap = true\nfit = "off"\n'
    )
    pytester.makepyfile("def test_it(vram_backend): pass")
    # An engine that crashes on a refused allocation may lose the line that says so.
    for _ in range(5):
        with software_gpu(memory="200MiB"):
            result = inner("--vram-device=rpc:0", "--vram-report=out.json")
        if "Out of memory" in result.stdout.str():
            break
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Out of memory*", "*- vram: advice -*", "first: *"])
    (test,) = json.loads((pytester.path / "out.json").read_text())["tests"]
    settings = [one["setting"] for one in test["advice"]]
    assert settings[:2] == ["cache-type-k, cache-type-v", "ctx-size"]
    assert {one["source"] for one in test["advice"] if one["effect"] == "saves"} == {"estimate"}
    # The same log, read by hand with the model beside it.
    log = max((pytester.path / ".vram" / "runs").glob("*/a.1.log"))
    assert main(["boot", str(log), "--model", str(pytester.path / "m.gguf"), "--json"]) == 1

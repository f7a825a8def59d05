"""What older builds choose for options that nobody gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Ledger
from pytest_vram.sizing import eras, estimating
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.testing import recipes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipes.llama(layers=4, context=32768).write(tmp_path_factory.mktemp("models") / "m.gguf")


def by(model: Path, build: int, **options: Any) -> Estimate:
    """The estimate under the rules of a build."""
    era, _ = eras.era_of(build)
    return estimating.estimate(model, era=era, **options)


def on(ledger: Ledger, bucket: str, device: str) -> int:
    return sum(one.bytes for one in ledger.entries if (one.bucket, one.device) == (bucket, device))


def said(estimate: Estimate) -> str:
    return " | ".join(note.text for note in estimate.notes)


def test_flash_attention_was_off_by_default(model: Path) -> None:
    """Before August 2025 the compute buffer is that of no flash attention, unless it is asked for."""
    old = by(model, 6000, ctx_size=8192, n_gpu_layers=99)
    assert old.settings["flash_attn"] == "off"
    assert on(old, "compute", "gpu0") == on(
        by(model, 6000, ctx_size=8192, n_gpu_layers=99, flash_attn="off"), "compute", "gpu0"
    )
    assert on(old, "compute", "gpu0") > on(
        by(model, 6000, ctx_size=8192, n_gpu_layers=99, flash_attn="on"), "compute", "gpu0"
    )
    assert "flash attention is off in b6000" in said(old)
    assert by(model, 6400, ctx_size=8192).settings["flash_attn"] == "auto"


def test_layers_stayed_on_the_host_by_default(model: Path) -> None:
    """Before August 2025 no layer goes to a device unless it is asked for, and the notes say no other."""
    old = by(model, 6000, ctx_size=1024)
    assert old.settings["layers_on_gpu"] == 0
    assert on(old, "kv", "gpu0") == 0
    assert "all layers are counted on the device" not in said(old)
    assert by(model, 6000, ctx_size=1024, n_gpu_layers="all").settings["layers_on_gpu"] == 4
    assert by(model, 6400, ctx_size=1024).settings["layers_on_gpu"] == 4


@pytest.mark.parametrize(("build", "slots", "unified"), [(6400, 1, False), (7100, 4, True), (10068, 4, True)])
def test_slots_by_default(build: int, slots: int, unified: bool, model: Path) -> None:
    """One slot before November 2025, four that share a cache since."""
    made = by(model, build, ctx_size=1024)
    assert (made.settings["parallel"], made.settings["kv_unified"]) == (slots, unified)
    assert ("4 slots that share one cache" in said(made)) == unified


def test_one_slot_was_four_for_a_while(model: Path) -> None:
    """In November and December 2025 --parallel 1 was not told from no --parallel, and that is said."""
    made = by(model, 7100, ctx_size=1024, parallel=1)
    assert made.settings["parallel"] == 4
    assert "makes one slot into four" in said(made)
    assert by(model, 7100, ctx_size=1024, parallel=2).settings["parallel"] == 2
    assert by(model, 7500, ctx_size=1024, parallel=1).settings["parallel"] == 1


def test_the_context_was_4096_by_default(model: Path) -> None:
    """Before December 2025 the default context is 4096 tokens and nothing lowers it; 0 asks for the trained one."""
    old = by(model, 7100)
    assert old.settings["ctx_size"] == 4096
    assert "--fit" not in said(old)
    assert by(model, 7100, ctx_size=0).settings["ctx_size"] == 32768
    assert "--fit" not in said(by(model, 7100, ctx_size=0, n_cpu_moe=1))
    assert by(model, 7500).settings["ctx_size"] == 32768


def test_there_was_no_prompt_cache(model: Path) -> None:
    """Before October 2025 no prompt cache grows in host memory."""
    assert "prompt cache" not in said(by(model, 6400, ctx_size=512))
    assert "prompt cache" in said(by(model, 6900, ctx_size=512))


def test_a_locked_file_was_mapped_too(tmp_path: Path) -> None:
    """--mlock of older builds leaves the file mapped, beside what the CPU reorders; today's reads it into memory."""
    types = recipes.Types(matrices="q4_k", output="q4_k")
    model = recipes.llama(types=types).write(tmp_path / "m.gguf")
    old, new = (by(model, build, device="none", ctx_size=512, mlock=True) for build in (10068, 10434))
    assert old.at_most()["host"] > new.at_most()["host"]
    assert old.settings["mmap"] is True
    assert new.settings["mmap"] is False


def test_options_that_came_later_are_named(model: Path) -> None:
    """An option that a build does not have yet is a warning with the time when it came."""
    text = said(by(model, 6000, ctx_size=512, cache_ram=0, n_cpu_moe=0))
    assert "b6000 has no --cache-ram, which came later (October 2025)" in text
    assert "b6000 has no --n-cpu-moe" in text
    assert "has no --" not in said(by(model, 10434, ctx_size=512, cache_ram=0, load_mode="none"))


def test_builds_beyond_what_is_known_say_so(model: Path) -> None:
    """A build that is newer than the newest that was read is noted; one older than what is followed is a lower bound."""
    _, notes = eras.era_of(99999)
    assert "newer than b10773" in notes[0].text
    _, notes = eras.era_of(3000)
    assert {note.kind for note in notes} >= {"unknown"}
    assert eras.era_of(10434)[1] == ()


def test_builds_near_a_change_say_so() -> None:
    """A build as old as a change of a default may have either."""
    assert any("flash attention and of the layers" in note.text for note in eras.era_of(6324)[1])
    assert any("how many slots" in note.text for note in eras.era_of(6930)[1])


def test_a_build_without_a_number_is_known_by_its_options(model: Path) -> None:
    """Packaged builds call themselves build 1: what their help lists tells their defaults."""
    for options, slots, context in ((("cache-ram", "kv-unified"), 1, 4096), (("fit", "cache-ram"), 4, 0)):
        era, _ = eras.era_of(1, options)
        assert (era.defaults.slots, era.defaults.context) == (slots, context)


def test_a_quantised_v_needs_flash_attention_that_is_asked_for(model: Path) -> None:
    """Where flash attention is off by default, a quantised V is refused as the engine refuses it."""
    with pytest.raises(BadInput, match="flash"):
        by(model, 6000, ctx_size=512, cache_type_v="q8_0")
    assert by(model, 6000, ctx_size=512, cache_type_v="q8_0", flash_attn="on")

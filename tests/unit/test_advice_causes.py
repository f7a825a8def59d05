"""Advice where memory is not what is short, where another setting than the usual ones is to blame, and in few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.advice import Advice, Saving, advise, of_boot, reason
from pytest_vram.advice.goal import missing
from pytest_vram.advice.records import first_sufficient
from pytest_vram.bootlog.boot import Failure
from pytest_vram.ledger import Entry
from pytest_vram.report.advice_lines import advice_lines, change, ranked_lines, saved
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import estimating, llama_cpp, llama_options, turns
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.options import Era, LlamaOptions
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import verdict
from pytest_vram.testing import recipes
from pytest_vram.units import MIB
from tests.unit.test_advice_logs import CACHE, GIB, boot, entry, failed, nothing, saving


def test_savings_of_a_maximum_do_not_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes save 84 and 0 MiB alone and 1,994 together: the second is neither dropped nor called useless.

    The figures are those of a mixture of 35 billion weights with a ubatch of 4,096: the buffer is as large as its
    largest peak, and with one of them gone the other is still there.
    """
    shape = estimating.load(recipes.llama().write(tmp_path / "model.gguf"))
    real = llama_cpp.predict

    def predict(model: ModelShape, options: LlamaOptions, era: Era, *, given: Given) -> Estimate:
        made = real(model, options, era, given=given)
        peaks = {(False, False): 3976, (True, False): 3892, (False, True): 3976, (True, True): 1982}
        size = peaks[options.flash_attn == "on", options.ubatch_size != 4096] * MIB
        compute = Entry(bucket="compute", device="gpu0", bytes=size, source="estimate")
        entries = (*(one for one in made.entries if one.device != "gpu0"), compute)
        return Estimate(**{**{name: getattr(made, name) for name in made.__struct_fields__}, "entries": entries})

    monkeypatch.setattr(llama_cpp, "predict", predict)
    options = {"device": "RPC0", "flash-attn": "off", "ubatch-size": 4096, "batch-size": 4096, "parallel": 1}
    advice = advise(shape, options, missing("gpu0", 1990 * MIB, bucket="compute"))
    flash, ubatch = (saving(advice)[name] for name in ("flash-attn", "ubatch-size"))
    assert (flash.saves_bytes, flash.saves_bytes_after) == (Saving(bytes=84 * MIB), Saving(bytes=84 * MIB))
    assert (ubatch.saves_bytes, ubatch.saves_bytes_after) == (Saving(bytes=0), Saving(bytes=1910 * MIB))
    assert (flash.enough, ubatch.enough, ubatch.enough_after) == (False, False, True)
    assert first_sufficient(advice) == (flash, ubatch)


def test_more_free_than_asked_for_is_no_shortage() -> None:
    """37 GiB free and 128 MiB refused: no smaller setting is about that."""
    asked = failed(None, 128, certainty="unknown", free=37 * GIB, total=45 * GIB)
    advice = of_boot(boot(failure=asked, engine="transformers", allocated_bytes=6 * GIB, reserved_bytes=6 * GIB))
    assert list(saving(advice)) == ["limits of the process"]
    assert {"batch_size", "max_new_tokens"} <= set(nothing(advice))


def test_a_step_of_training_has_settings_of_its_own() -> None:
    """Gradients are not served: no advice about prompts and answers."""
    log = boot(failure=failed("other", 2939, free=0), engine="transformers")
    found = saving(of_boot(log))
    assert {"per_device_train_batch_size", "gradient_checkpointing"} <= set(found)
    assert "max_new_tokens" not in found


def test_a_device_that_did_not_start_comes_before_every_setting() -> None:
    """Layers on the GPU by the log's words, and not one buffer of the model there."""
    facts = {**CACHE, "layers_offloaded": 81, "layers_on_device_real": 0}
    held = entry("weights", 47_600, "host"), entry("kv", 2560, "host")
    assert of_boot(boot(*held, failure=failed("compute", 1331), **facts))[0].setting == "driver"
    facts["layers_on_device_real"] = 81
    assert of_boot(boot(*held, failure=failed("compute", 1331), **facts))[0].setting != "driver"


def test_the_machines_memory_and_a_containers() -> None:
    """A limit is raised where there is one; a file that was read into buffers may be mapped."""
    whole = "the host's memory ran out, not that of a device; the process held 14,878 MiB"
    killed = Failure(kind="host_oom_killed", certainty="certain", text="Out of memory: Killed process 42", note=whole)
    found = saving(of_boot(boot(entry("weights", 28_000, "host", "CPU model buffer"), failure=killed, mmap=False)))
    assert {"mmap", "other programs"} <= set(found)
    assert (found["mmap"].after, found["mmap"].flag) == ("on", "without --no-mmap")
    assert "memory limit" not in found
    assert all(one.before for one in found.values())


def test_no_advice_says_why_where_memory_is_the_matter() -> None:
    """A mistyped option gets no word about memory; an allocation without a figure gets the reason."""
    lone = failed("compute", None, certainty="likely", device=None)
    assert "no figure of the device" in str(reason(boot(failure=lone)))
    assert reason(boot(failure=Failure(kind="bad_option", certainty="certain", text="--n-cpu-mo"))) is None
    assert reason(boot(failure=None)) is None


def changes(count: int) -> list[Advice]:
    """Changes of so many settings."""
    return [
        Advice(setting=f"s{n}", before="1", after="0", effect="saves", why="less", source="rule", flag=f"--s{n} 0")
        for n in range(count)
    ]


def test_a_long_list_is_cut() -> None:
    """Five changes are described, the others counted; what comes first is said where nothing is known to be enough."""
    told = ranked_lines(changes(8))
    assert told[1] == "  first: --s0 0 (no change here is known to be enough)"
    assert [line for line in told if line[2:3].isdigit() and ". " in line] == [
        f"  {n + 1}. s{n} 1 → 0, saves an unknown amount" for n in range(5)
    ]
    assert "  3 more with --json" in told
    assert not [line for line in ranked_lines(changes(5)) if "more with" in line]


@pytest.mark.parametrize(
    ("saving", "text"),
    [
        (Saving(bytes=2 * MIB), "2.00 MiB"),
        (Saving(bytes=MIB, at_most=2 * MIB), "1.00 MiB to 2.00 MiB"),
        (Saving(bytes=0, at_most=2 * MIB), "at most 2.00 MiB"),
    ],
)
def test_savings_in_words(saving: Saving, text: str) -> None:
    """A least that is not known is no figure."""
    assert saved(saving) == text


def test_one_reason_is_said_once() -> None:
    """Settings that do nothing for the same reason share a line."""
    useless = [
        Advice(setting=name, before="1", after="0", effect="nothing", why="because", source="rule") for name in "abc"
    ]
    assert ranked_lines([*changes(1), *useless])[-1] == "  a, b, c would save nothing here: because"
    assert ranked_lines(useless)[1] == "  no setting is known that would save anything here"
    assert ranked_lines([], "so") == ["what to change", "  so"]


def test_what_was_not_set_before_has_no_arrow() -> None:
    """And no device is no word in the line."""
    one = Advice(
        setting="limit", before="", after="higher", effect="saves", why="", source="rule", enough=True,
        saves_bytes=Saving(bytes=MIB),
    )  # fmt: skip
    assert change(one) == "limit: higher"
    assert advice_lines([one])[0] == "first: limit: higher (saves 1.00 MiB: enough alone)"


def test_every_layer_on_the_cpu_is_not_turned_first(tmp_path: Path) -> None:
    """Where nothing is enough, giving up the device saves most and is no advice while anything else saves something."""
    shape = estimating.load(
        recipes.llama(layers=8, embedding=512, heads=8, kv_heads=8, head_size=64).write(tmp_path / "model.gguf")
    )
    options = llama_options.options_of({"device": "CUDA0", "ctx_size": 8192, "parallel": 1, "flash_attn": "on"})
    limits = parse_budget("100MB")
    judged = verdict(llama_cpp.predict(shape, options), limits)
    assert judged.fits == "no"
    turn = turns.first(shape, options, judged, limits, llama_cpp.predict)
    assert turn is not None
    assert turn.enough or turn.setting != "n-gpu-layers"

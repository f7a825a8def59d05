"""Verdicts under a budget, and the setting that is turned first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import engine_options, eras, estimating, llama_cpp, llama_options, turns
from pytest_vram.sizing.options import Defaults, Era, LlamaOptions
from pytest_vram.sizing.prediction import Estimate, ModelFacts, Turn
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import verdict
from pytest_vram.units import MIB
from tests.unit import sizing_models

FACTS = ModelFacts(
    architecture="llama",
    parameters=1,
    active_parameters=1,
    non_expert_parameters=1,
    layers=1,
    experts=0,
    experts_used=0,
    trained_context=1,
    file_bytes=1,
)


def estimate(*entries: tuple[str, int, int | None], unknown: tuple[str, ...] = ()) -> Estimate:
    """An estimate of compute buffers on these devices."""
    made = tuple(
        Entry(bucket="compute", device=device, bytes=low, at_most=high, source="estimate")
        for device, low, high in entries
    )
    return Estimate(engine="llama-server", model=FACTS, entries=made, unknown=unknown)


@pytest.mark.parametrize(
    ("low", "high", "limit", "reserve", "fits", "spare"),
    [
        (100, None, "100B", 0, "yes", 0),
        (100, None, "99B", 0, "no", -1),
        (100, None, "110B", 10, "yes", 0),
        (100, None, "110B", 11, "no", -1),
        (100, 120, "120B", 0, "yes", 0),
        (100, 120, "119B", 0, "inconclusive", -1),
        (100, 120, "100B", 0, "inconclusive", -20),
        (100, 120, "99B", 0, "no", -21),
    ],
)
def test_boundaries(low: int, high: int | None, limit: str, reserve: int, fits: str, spare: int) -> None:
    """The upper end must fit, the lower end must not, and in between nothing is claimed."""
    judged = verdict(estimate(("gpu0", low, high)), parse_budget(limit), reserve=reserve)
    assert (judged.fits, judged.spare, judged.device) == (fits, spare, "gpu0")


def test_what_is_unknown_is_never_within() -> None:
    """A lower bound under the limit is inconclusive, one over it is over it."""
    made = estimate(("gpu0", 100, None), unknown=("kv",))
    assert verdict(made, parse_budget("1MB")).fits == "inconclusive"
    assert verdict(made, parse_budget("99B")).fits == "no"


def test_the_tightest_device_decides() -> None:
    """Each card has its limit; the host has none beside a card."""
    made = estimate(("gpu0", 100, None), ("gpu1", 200, None), ("host", 9999, None))
    assert verdict(made, parse_budget("150B")).device == "gpu1"
    assert verdict(made, parse_budget("gpu0=50B,gpu1=200B")).device == "gpu0"
    judged = verdict(made, parse_budget("sum=300B"))
    assert (judged.device, judged.fits, judged.predicted) == ("sum", "yes", 300)
    assert verdict(made, parse_budget("sum=299B")).fits == "no"


def test_the_host_stands_in_where_there_is_no_card() -> None:
    """Without any card the host is held against the limit."""
    judged = verdict(estimate(("host", 100, None)), parse_budget("99B"))
    assert (judged.device, judged.fits) == ("host", "no")


@pytest.mark.parametrize("text", ["gpu2=1GB", "gpu0=1GB,gpu2=1GB", "gpu2=1GB,sum=1GB"])
def test_a_limit_for_a_device_that_is_not_there_is_refused(text: str) -> None:
    """It would hold whatever happens; the sentence names the devices that there are."""
    made = estimate(("gpu0", 100, None), ("gpu1", 200, None), ("host", 300, None))
    with pytest.raises(BadInput, match="limits gpu2, .*: its devices are gpu0, gpu1, host"):
        verdict(made, parse_budget(text))
    with pytest.raises(BadInput, match="limits gpu0, .*: its devices are host"):
        verdict(estimate(("host", 100, None)), parse_budget("gpu0=1GB"))


@pytest.mark.parametrize(
    ("text", "device", "fits", "predicted", "spare"),
    [
        ("host=299B", "host", "no", 300, -1),
        ("host=300B", "host", "yes", 300, 0),
        ("gpu0=90B,host=1GB", "gpu0", "no", 100, -10),
        ("gpu0=1GB,host=310B", "host", "yes", 300, 10),
        ("gpu0=1GB,sum=299B", "sum", "no", 300, -1),
        ("gpu1=199B,sum=1GB", "gpu1", "no", 200, -1),
    ],
)
def test_every_limit_of_a_budget_is_judged(text: str, device: str, fits: str, predicted: int, spare: int) -> None:
    """The host's own limit beside cards, and a device's beside the sum: the tightest decides."""
    made = estimate(("gpu0", 100, None), ("gpu1", 200, None), ("host", 300, None))
    judged = verdict(made, parse_budget(text))
    assert (judged.device, judged.fits, judged.predicted, judged.spare) == (device, fits, predicted, spare)


def test_a_reserve_is_kept_on_cards() -> None:
    """Not on the host beside a card."""
    made = estimate(("gpu0", 100, None), ("host", 300, None))
    judged = verdict(made, parse_budget("gpu0=1GB,host=300B"), reserve=50)
    assert (judged.device, judged.fits, judged.reserve) == ("host", "yes", 0)
    assert verdict(made, parse_budget("gpu0=149B,host=1GB"), reserve=50).fits == "no"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelShape]:
    """Models by name, read once."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "f16": sizing_models.dense_8b(folder / "f16.gguf", sizing_models.F16),
        "q4": sizing_models.dense_8b(folder / "q4.gguf"),
        "moe": sizing_models.moe_30b(folder / "moe.gguf"),
    }
    read = {name: estimating.load(path) for name, path in made.items()}
    return lambda name: read[name]


def first(shape: ModelShape, limit: str, **options: object) -> Turn | None:
    """The setting to turn first under this budget."""
    given = llama_options.read({"device": "RPC0", **options})

    def predict(shape: ModelShape, options: LlamaOptions) -> Estimate:
        return llama_cpp.predict(shape, options, given=given)

    limits = parse_budget(limit)
    judged = verdict(predict(shape, given.options), limits)
    assert judged.fits != "yes"
    return turns.first(shape, given.options, judged, limits, predict)


@pytest.mark.parametrize(
    ("name", "limit", "options", "setting", "after"),
    [
        ("f16", "9GB", {"ctx_size": 8192}, "model", "q6_k"),
        ("f16", "6GB", {"ctx_size": 8192}, "model", "q4_k"),
        ("q4", "6GiB", {"ctx_size": 16384, "parallel": 1}, "cache-type-k, cache-type-v", "q8_0"),
        ("q4", "5.5GiB", {"ctx_size": 16384, "cache_type_k": "q8_0", "cache_type_v": "f16", "parallel": 1}, "cache-type-k, cache-type-v", "q8_0"),
        ("moe", "8GB", {"ctx_size": 4096, "cache_type_k": "q4_0", "cache_type_v": "q4_0"}, "n-cpu-moe", None),
        ("q4", "2GB", {"ctx_size": 256, "parallel": 1}, "n-gpu-layers", None),
        ("q4", "8GB", {"parallel": 1}, "ctx-size", None),
        ("q4", "8GB", {"ctx_size": 8192, "parallel": 1, "device": "none"}, "mmap", "off"),
        ("q4", "7.3GB", {"ctx_size": 32768, "parallel": 1, "device": "CUDA0"}, "ctx-size", None),
        ("moe", "8GB", {"ctx_size": 256, "parallel": 1, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}, "n-cpu-moe", None),
    ],
)  # fmt: skip
def test_the_first_change_that_is_enough(
    shapes: Callable[[str], ModelShape],
    name: str,
    limit: str,
    options: dict[str, object],
    setting: str,
    after: str | None,
) -> None:
    """Weights before KV type before context before experts before layers, and what it names does fit."""
    turn = first(shapes(name), limit, **options)
    assert turn is not None
    assert (turn.setting, turn.enough) == (setting, True)
    assert after is None or turn.after == after
    assert turn.saves > 0


def test_the_command_line_with_the_change_is_ready(shapes: Callable[[str], ModelShape]) -> None:
    """It means the changed settings and fits; another quantisation has none, because nobody has the file yet."""
    turn = first(shapes("moe"), "8GB", ctx_size=16384, parallel=1)
    assert turn is not None
    words, model = engine_options.pairs(turn.command[1:])
    assert not model
    assert words.pop("model") == shapes("moe").source
    made = llama_cpp.predict(shapes("moe"), llama_options.options_of(words))
    assert verdict(made, parse_budget("8GB")).fits == ("yes" if turn.enough else "no")
    changed = first(shapes("f16"), "9GB", ctx_size=8192)
    assert changed is not None
    assert (changed.setting, changed.command) == ("model", ())


def test_four_bits_of_cache_are_turned_last(shapes: Callable[[str], ModelShape]) -> None:
    """Only where no gentler change is enough alone."""
    options = {"ctx_size": 32768, "parallel": 1, "device": "CUDA0"}
    for size in (4, 5, 6, 7):
        turn = first(shapes("q4"), f"{size}GB", **options)
        assert turn is not None
        assert turn.enough
        assert "q4_0" not in turn.after


def test_what_saves_most_where_nothing_is_enough(shapes: Callable[[str], ModelShape]) -> None:
    """A budget below the compute buffers is out of reach of any single change, and the largest saving is named.

    Giving up the device saves most of all, and is named only where nothing else saves anything.
    """
    turn = first(shapes("q4"), "50MB", ctx_size=8192, parallel=1, device="CUDA0")
    assert turn is not None
    assert not turn.enough
    assert turn.setting == "ctx-size"
    only = first(
        shapes("q4"), "50MB", ctx_size=256, parallel=1, device="CUDA0", cache_type_k="q4_0", cache_type_v="q4_0"
    )
    assert only is not None
    assert only.setting == "n-gpu-layers"


def test_a_longer_context_than_named_does_not_fit(shapes: Callable[[str], ModelShape]) -> None:
    """The context that is named is the longest: one step more is over the limit."""
    turn = first(shapes("q4"), "8GB", parallel=1)
    assert turn is not None
    limits = parse_budget("8GB")
    for extra, fits in ((0, "yes"), (turns.STEP, "no")):
        options = llama_options.options_of({"device": "RPC0", "ctx_size": int(turn.after) + extra, "parallel": 1})
        assert verdict(llama_cpp.predict(shapes("q4"), options), limits).fits == fits


def test_requantised_matrices_have_the_types_own_size(shapes: Callable[[str], ModelShape]) -> None:
    """Norms stay as they are; a matrix that is small already stays too."""
    before = shapes("f16")
    after = turns.requantised(before, "q4_k")
    for old, new in zip(before.tensors, after.tensors, strict=True):
        if len(old.dims) > 1:
            assert new.bytes * 256 == old.elements * 144
        else:
            assert new == old
    assert turns.requantised(after, "q8_0").tensors == after.tensors


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1, 7), (5, 100)])
def test_searches_find_the_boundary(low: int, high: int) -> None:
    """Every boundary within the range is found, and none outside of it."""
    for edge in range(low, high + 1):
        assert turns.smallest(low, high, lambda n, edge=edge: n >= edge) == edge
        assert turns.largest(low, high, lambda n, edge=edge: n <= edge) == edge
    assert turns.smallest(low, high, lambda n: False) is None
    assert turns.largest(low, high, lambda n: False) is None
    assert turns.smallest(high + 1, low, lambda n: True) is None


def test_driver_context_is_a_range_from_reports() -> None:
    """Under CUDA the driver's own memory is a range with its source, elsewhere it is said to be missing."""
    entries, notes = llama_cpp.driver_context(llama_options.options_of({"device": "CUDA0,CUDA1"}))
    assert [(entry.device, entry.bytes, entry.at_most) for entry in entries] == [
        ("gpu0", 107 * MIB, 555 * MIB),
        ("gpu1", 107 * MIB, 555 * MIB),
    ]
    assert any("reported" in note.text for note in notes)
    entries, notes = llama_cpp.driver_context(llama_options.options_of({"device": "Vulkan0"}))
    assert entries == []
    assert any("not in the sum" in note.text for note in notes)
    assert llama_cpp.driver_context(llama_options.options_of({"device": "none"})) == ([], [])


def test_estimate_and_plan_stay_functions(tmp_path: Path) -> None:
    """No module of the package takes the place of a function once it is imported."""
    from pytest_vram import sizing

    path = sizing_models.dense_8b(tmp_path / "m.gguf")
    for _ in range(2):
        assert sizing.estimate(str(path), ctx_size=1024, device="RPC0").total()["gpu0"] > 0
        assert sizing.plan(path, "8GB", device="RPC0")


OF_B10068: dict[str, Any] = {
    "extra_blocks_skipped": False,
    "glm_indexer": False,
    "sinks_ignored": False,
    "quant_v_settles": False,
    "mamba2_flat": False,
}


@pytest.mark.parametrize(
    ("build", "options", "rules", "unsure"),
    [
        (10434, (), {"mamba2_flat": False}, 0),
        (10500, (), {}, 0),
        (10773, (), {"mamba2_flat": True}, 0),
        (10068, (), OF_B10068, 0),
        (10200, (), OF_B10068, 1),
        (9501, (), OF_B10068, 0),
        (9500, (), {**OF_B10068, "quant_copies_reserved": False}, 0),
        (9459, (), {**OF_B10068, "quant_copies_reserved": False, "outputs_per_slot": False}, 1),
        (None, (), {}, 0),
        (1, ("fit", "load-mode"), {}, 0),
        (1, ("fit",), OF_B10068, 1),
        (None, ("model",), {**OF_B10068, "mask_padded": True, "mla_latent_only": False, "mask_f16": False, "outputs_per_slot": False, "quant_copies_reserved": False}, 1),
    ],
)  # fmt: skip
def test_rules_follow_the_build(
    build: int | None, options: tuple[str, ...], rules: dict[str, Any], unsure: int
) -> None:
    """By number where there is one, else by the options that the binary has; what is not certain is said."""
    era, notes = eras.era_of(build, options)
    assert msgspec.structs.replace(era, build=None, defaults=Defaults()) == Era(**rules)
    assert len(notes) == unsure


@pytest.mark.parametrize("text", ["", "b", "12", "b999", "b10434x", "-1", "b99999999"])
def test_a_build_is_a_number(text: str) -> None:
    """Anything else is refused with what is accepted."""
    with pytest.raises(BadInput, match="such as b10434"):
        eras.read_build(text)

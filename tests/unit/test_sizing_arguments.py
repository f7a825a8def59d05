"""Arguments of `sizing.estimate` and `sizing.plan` as programs give them: a result, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram import sizing
from pytest_vram.errors import BadInput
from pytest_vram.sizing import planning
from pytest_vram.sizing.option_values import shown
from tests.unit import sizing_models

HUGE = 10**5000


def repr_of(value: object) -> str:
    """A name for a case, also of a number that cannot be written."""
    return "object" if type(value) is object else shown(value)[:30]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model."""
    return sizing_models.dense_8b(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.mark.parametrize("wrong", [None, True, 3, 1.5, b"m.gguf", ["m.gguf"], {}, object(), HUGE], ids=repr_of)
def test_what_names_no_model_is_refused(wrong: Any) -> None:
    """No name is made up from a value that is none."""
    with pytest.raises(BadInput, match="names no model"):
        sizing.estimate(wrong)


@pytest.mark.parametrize("wrong", [None, (), [], [None], [b"x"], b"x", 3, HUGE, {"m.gguf"}, {}, "", [""]], ids=repr_of)
def test_what_names_no_models_is_refused(wrong: Any) -> None:
    """Neither is an empty list a search."""
    with pytest.raises(BadInput, match="no model|no name"):
        sizing.plan(wrong, "8GB")


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"minimum_context": "4096"}, "minimum_context = '4096' cannot be used: write a number of tokens from 1 to"),
        ({"minimum_context": 4096.0}, "minimum_context = 4096.0"),
        ({"minimum_context": True}, "minimum_context = True"),
        ({"minimum_context": HUGE}, "minimum_context = a number that is too long"),
        ({"minimum_context": (1 << 31) - 1, "slots": 2}, "for each of 2 slots from 1 to 1073741568"),
        ({"slots": "1"}, "slots = '1' cannot be used: write a number from 1 to 256"),
        ({"slots": None}, "slots = None"),
        ({"slots": True}, "slots = True"),
        ({"slots": 1.0}, "slots = 1.0"),
        ({"slots": []}, r"slots = \[\]"),
        ({"prefer": []}, r"prefer = \[\]"),
        ({"host_memory": HUGE}, "is larger than any device"),
        ({"host_memory": 1.5}, "host_memory"),
        ({"host_memory": b"1GB"}, "host_memory"),
        ({"reserve": None}, "reserve"),
        ({"reserve": -HUGE}, "is negative"),
        ({"reserve": "8GB"}, "leaves nothing of the budget '8GB'"),
        ({"reserve": 8 * 10**9}, "leaves nothing of the budget '8GB'"),
        ({"engine": ["vllm"]}, "is not known"),
    ],
    ids=repr_of,
)
def test_a_wish_of_another_type_is_one_sentence(model: Path, wishes: dict[str, Any], says: str) -> None:
    """The wish, its value and what is accepted."""
    with pytest.raises(BadInput, match=says):
        sizing.plan(model, "8GB", **wishes)


@pytest.mark.parametrize("budget", [None, True, 4, 4.5, 10**9, b"8GB", "", ["8GB"], {"gpu0": 10**9}, HUGE], ids=repr_of)
def test_a_budget_of_another_type_is_one_sentence(model: Path, budget: Any) -> None:
    """A budget is a text."""
    with pytest.raises(BadInput, match="is not a size|is no budget"):
        sizing.plan(model, budget)


def test_slots_never_take_a_context_beyond_what_the_option_holds(model: Path) -> None:
    """The largest wish for many slots is a ctx-size that llama-server reads, and so is every plan's."""
    for slots in (1, 3, 256):
        most = planning.most_context(slots)
        assert most * slots < 1 << 31
        found = sizing.search(model, "400GB", slots=slots, minimum_context=most)
        for one in found.plans:
            assert one.options.ctx_size < 1 << 31
        if found.impossible is not None:
            command = found.impossible.cheapest.command
            assert int(command[command.index("--ctx-size") + 1]) < 1 << 31


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["ctx_size", "parallel", "device", "rpc", "tensor_split", "override_kv", "override_tensor",
                         "lora_scaled", "flash_attn", "n_gpu_layers", "threads", "kv_unified", "cache_type_k"]),
        ANYTHING,
        max_size=3,
    )
)  # fmt: skip
def test_any_value_of_an_option_is_a_result_or_one_sentence(model: Path, options: dict[str, Any]) -> None:
    """No type and no size of a value ends in another exception."""
    try:
        sizing.estimate(model, **options)
    except BadInput as error:
        assert str(error)


def test_a_number_of_thousands_of_digits_in_a_config_is_named_as_such(tmp_path: Path) -> None:
    """The message is about the file, and does not advise on Python's settings."""
    (tmp_path / "config.json").write_text(f'{{"hidden_size": 1{"0" * 5000}}}')
    with pytest.raises(BadInput, match="a number in it has thousands of digits") as caught:
        sizing.estimate(tmp_path, engine="vllm")
    assert "set_int" not in str(caught.value)

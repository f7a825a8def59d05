"""Models whose metadata was written by somebody who means harm."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_vram.errors import BadInput, BadModel
from pytest_vram.sizing import gguf, gguf_shape, llama_cpp, llama_options
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
from pytest_vram.testing.sparse import Typed

SEEDS = [
    make(tokenizer="none")
    for make in (
        recipes.llama,
        recipes.qwen3moe,
        recipes.deepseek2,
        recipes.mamba,
        attention_recipes.gemma4,
        attention_recipes.gpt_oss,
        hybrid_recipes.jamba,
        hybrid_recipes.qwen3next,
        hybrid_recipes.rwkv7,
    )
]
NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 64, 4096, 1 << 16, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
MORE = ("expert_group_count", "expert_group_used_count", "nextn_predict_layers", "expert_shared_count", "num_loops")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_numbers_end_in_figures_or_in_one_sentence(data: st.DataObject) -> None:
    """Whatever whole numbers a file states, an estimate of it ends soon, with figures that a machine could count."""
    recipe = data.draw(st.sampled_from(SEEDS), label="recipe")
    own = [
        key
        for key, value in recipe.metadata.items()
        if key.startswith(f"{recipe.architecture}.") and isinstance(value, int) and not isinstance(value, bool)
    ]
    metadata: dict[str, Any] = dict(recipe.metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*own, *(f"{recipe.architecture}.{name}" for name in MORE)]), label="key")
        metadata[key] = Typed(data.draw(NUMBERS), "u32")
    given = llama_options.read({"ctx-size": 512, "cache-type-k": "q8_0", "cache-type-v": "q8_0"})
    with tempfile.TemporaryDirectory() as folder:
        path = msgspec.structs.replace(recipe, metadata=metadata).write(Path(folder) / "m.gguf")
        try:
            made = llama_cpp.predict(gguf_shape.shape_of(gguf.read(path)), given.options, given=given)
        except (BadModel, BadInput) as error:
            assert "\n" not in str(error)
            return
    assert all(math.isfinite(entry.bytes) and 0 <= entry.bytes < 1 << 50 for entry in made.entries)

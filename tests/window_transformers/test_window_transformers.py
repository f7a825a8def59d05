"""The reference window over transformers' cache keeps every invariant on small random models; planted bugs are found.

These need torch and transformers: ``ci/test`` runs them in an environment of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing.estimating import load
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.windows import Window, WindowSpec
from pytest_vram.windows.transformers import TransformersWindow

pytest.importorskip("transformers", reason="ci/test runs these in an environment of their own")

LIMIT = 48
STEPS: list[int] = []


@cache
def model(layers: int, kind: str = "llama") -> Any:
    """A random model of that many layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    if kind == "window":
        made = MistralForCausalLM(MistralConfig(**sizes, sliding_window=16))
    else:
        made = LlamaForCausalLM(LlamaConfig(**sizes))
    return made.eval().requires_grad_(False)


def shape(folder: Path, layers: int) -> ModelShape:
    """The sizing view of that model."""
    path = folder / f"transformers-{layers}"
    if not path.exists():
        model(layers).save_pretrained(path)
    return load(path, engine="transformers")


class OnTransformers(WindowSpec):
    """A window over a ``DynamicCache`` of a random model."""

    layers: ClassVar[int] = 2
    shift: ClassVar[bool] = False
    max_examples = 64
    folder: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).folder = tmp_path_factory.getbasetemp()

    @classmethod
    @cache
    def _shape(cls) -> ModelShape:
        return shape(cls.folder, cls.layers)

    def make_window(self) -> Window:
        return TransformersWindow(model(self.layers), LIMIT, shift=self.shift, shape=self._shape())

    def test_window(self) -> None:
        """Every invariant holds after each step."""
        super().test_window()
        STEPS.append(type(self).steps_done)


class TestComputedAnew(OnTransformers):
    """What follows a gap is computed anew: equal to a fresh run."""


class TestShiftedOneLayer(OnTransformers):
    """In one layer a shifted cell is what a fresh run computes: the rotation of keys is right."""

    layers = 1
    shift = True


class TestShifted(OnTransformers):
    """The usual shift."""

    shift = True


def test_steps() -> None:
    """The conversations of this module had at least 5000 steps."""
    if len(STEPS) == 3:
        assert sum(STEPS) >= 5000


class _NotTurned(TransformersWindow):
    def _turned(self, keys: Any, by: Sequence[int]) -> Any:
        return keys if len(set(by)) == 1 and by[0] < 0 else super()._turned(keys, by)


class _View(TransformersWindow):
    def _crop(self, length: int) -> None:
        for block in self._cache.layers:
            block.keys, block.values = block.keys[..., :length, :], block.values[..., :length, :]


@pytest.mark.parametrize(
    ("window", "shift", "name"), [(_NotTurned, True, "positions"), (_View, False, "bytes")], ids=["turn", "view"]
)
def test_planted_bugs_are_found(window: type[TransformersWindow], shift: bool, name: str, tmp_path: Path) -> None:
    """Keys that keep their old rotation, and views that keep memory, are found within 200 conversations."""
    known = shape(tmp_path, 1)

    class Planted(WindowSpec):
        max_examples = 200
        shrink = False

        def make_window(self) -> Window:
            return window(model(1), LIMIT, shift=shift, shape=known)

    with pytest.raises(AssertionError, match=f'invariant "{name}" is broken'):
        Planted().test_window()


def test_a_cache_that_forgets_by_itself_is_not_shifted() -> None:
    """A model with sliding windows is refused with shift, in a sentence that names the way on."""
    with pytest.raises(BadInput, match="blocks that do not keep every token.*shift=False"):
        TransformersWindow(model(2, "window"), LIMIT, shift=True)

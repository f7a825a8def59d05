"""The reference window over llama.cpp keeps every invariant on tiny random models, and a bug planted in it is found.

These need llama-cpp-python, which is built from source: ``ci/test`` runs them in an environment of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pytest_vram.errors import BadInput, EngineRefused
from pytest_vram.testing import Shape, write_llama
from pytest_vram.windows import Piece, Window, WindowSpec
from pytest_vram.windows.llama_cpp import LlamaCppWindow

pytest.importorskip("llama_cpp", reason="ci/test runs these in an environment of their own")

LIMIT = 48
STEPS: list[int] = []


def model(folder: Path, layers: int) -> Path:
    """A random model of that many layers."""
    path = folder / f"{layers}-layers.gguf"
    if not path.exists():
        write_llama(path, Shape(layers=layers, embedding=64, heads=2, kv_heads=1, feed_forward=64, context=512))
    return path


class OnLlamaCpp(WindowSpec):
    """A window over a context of a random model; scores of a cache in f16 differ a little by the shape of batches."""

    layers: ClassVar[int] = 2
    shift: ClassVar[bool] = False
    max_examples = 60
    tolerance = 2e-2

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).folder = tmp_path_factory.getbasetemp()

    folder: ClassVar[Path]

    def make_window(self) -> Window:
        return LlamaCppWindow(model(self.folder, self.layers), LIMIT, shift=self.shift, n_threads=1, n_threads_batch=1)

    def test_window(self) -> None:
        """Every invariant holds after each step."""
        super().test_window()
        STEPS.append(type(self).steps_done)


class TestComputedAnew(OnLlamaCpp):
    """What follows a gap is computed anew: equal to a fresh run."""


class TestShiftedOneLayer(OnLlamaCpp):
    """In one layer a shifted cell is what a fresh run computes: the rotation of keys is right."""

    layers = 1
    shift = True


class TestShifted(OnLlamaCpp):
    """The usual shift."""

    shift = True


def test_steps() -> None:
    """The conversations of this module had at least 5000 steps."""
    if len(STEPS) == 3:
        assert sum(STEPS) >= 5000


class _NotMoved(LlamaCppWindow):
    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        self._llama.llama_memory_seq_rm(self._memory(self._context), 0, start, stop)
        self._scores = None


class _NotTrimmed(LlamaCppWindow):
    def _take_out(self, gone: Sequence[int]) -> None:
        tokens = list(self._tokens)
        super()._take_out(gone)
        self.stale = tokens if gone else None

    def tokens(self) -> list[int]:
        return getattr(self, "stale", None) or super().tokens()


@pytest.mark.parametrize("window", [_NotMoved, _NotTrimmed])
def test_planted_bugs_are_found(window: type[LlamaCppWindow], tmp_path: Path) -> None:
    """Cells that are not moved (which llama.cpp may refuse by itself) and a stale token list are found."""
    path = model(tmp_path, 1)

    class Planted(WindowSpec):
        max_examples = 200
        shrink = False

        def make_window(self) -> Window:
            return window(path, LIMIT, shift=True, n_threads=1, n_threads_batch=1)

    with pytest.raises((AssertionError, EngineRefused), match='invariant "(positions|tokens|limit)"|cannot decode'):
        Planted().test_window()


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """The rows in the cache's state take exactly what the sizing formula gives for the tokens held."""
    window = LlamaCppWindow(model(tmp_path, 2), LIMIT, n_threads=1)
    window.append(Piece(0, "system", tuple(range(10))))
    assert window.bytes() == window.expected_bytes() == 10 * 2 * 2 * 64 * 2
    window.close()


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    """A file that is no model, and an option that does not exist, end in a sentence."""
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(EngineRefused, match=r"cannot load .*no\.gguf"):
        LlamaCppWindow(tmp_path / "no.gguf", LIMIT)
    with pytest.raises(BadInput, match="there is no n_threats"):
        LlamaCppWindow(model(tmp_path, 1), LIMIT, n_threats=1)

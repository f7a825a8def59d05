"""A reference window over a ``DynamicCache`` of transformers; needs the packages torch and transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pytest_vram.errors import BadInput
from pytest_vram.sizing import transformers_cache
from pytest_vram.windows.cached import CachedWindow
from pytest_vram.windows.protocol import Cell

if TYPE_CHECKING:
    from pytest_vram.sizing.shape import ModelShape

# Keys of two positions count as the same when they differ by less than this share of their length: products of other
# shapes round differently, positions that are one apart differ by far more.
_ALIKE = 2e-2


class TransformersWindow(CachedWindow):
    """Pieces in a ``DynamicCache``, one sequence, oldest out after the pinned prefix.

    ``DynamicCache`` knows no positions: a key carries its own, because it was rotated by it. So there are two ways to
    close a gap. With ``shift=False`` what follows the gap is computed anew: slower, and equal to a fresh run. With
    ``shift=True`` the cells that follow are kept and their keys are rotated back by the length of the gap: fast, but
    what they hold was computed while the tokens that left were still there. A shift is refused for models whose keys
    cannot be rotated so, which is tried on the model itself, and for caches whose blocks forget by themselves (sliding
    windows, recurrent states); these are computed anew as a whole.

    :param model: a causal language model of transformers. :param limit: tokens. :param shift: see above.
    :param shape: the model's shape from :func:`pytest_vram.sizing.estimating.load`, for ``expected_bytes``.
    :raises BadInput: a shift that this model or cache does not allow.
    """

    def __init__(self, model: Any, limit: int, *, shift: bool = False, shape: ModelShape | None = None) -> None:
        super().__init__(limit)
        self._model = model
        self._shape = shape
        self._shift = shift
        # The argument was renamed in the course of transformers 5.
        named = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        self._cache = self._empty()
        self._scores: Any = None
        if shift:
            self._check_shift()

    def cells(self) -> list[Cell] | None:
        """Read off the first block: its values tell the token, its keys the position they are rotated to.

        A block's values depend on the tokens before only from the second block on. Where keys cannot be rotated by this
        class, positions are their places.
        """
        keys, values = self._block(self._cache, 0)
        if keys is None:
            return []
        count = keys.shape[-2]
        places = list(range(count))
        own_keys, own_values = self._own(self._tokens[:count]) if count <= len(self._tokens) else (None, None)
        turns = self._angles() is not None
        found = []
        # The usual case, in one go: every cell shows its listed token at its place.
        if (
            own_keys is not None
            and _alike(own_values, values).all()
            and (not turns or _alike(self._turned(own_keys, places), keys).all())
        ):
            return [Cell(place, token) for place, token in enumerate(self._tokens[:count])]
        for place in places:
            token = self._recognised(values[..., place : place + 1, :])
            position = place
            if token is not None and turns:
                position = self._position(keys[..., place : place + 1, :], token)
            found.append(Cell(position, -1 if token is None else token))
        return sorted(found, key=lambda cell: cell.position)

    def bytes(self) -> int:
        """Bytes of the storages behind the cache's tensors: a view of a larger tensor keeps all of it."""
        storages: dict[int, int] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def expected_bytes(self) -> int | None:
        if self._shape is None:
            return None
        size = self._model.dtype.itemsize
        return sum(transformers_cache.dynamic_layer(layer, 1, len(self._tokens), size) for layer in self._shape.layers)

    def logits(self) -> list[float] | None:
        if not self._tokens:
            return None
        if self._scores is None:
            # Eviction has changed what the last token sees: it is computed once more in its place.
            self._crop(len(self._tokens) - 1)
            self._compute(self._tokens[-1:], len(self._tokens) - 1)
        return [float(score) for score in self._scores]

    def fresh_logits(self) -> list[float] | None:
        if self._shift and self._model.config.get_text_config().num_hidden_layers > 1:
            return None
        scores = self._forward(self._empty(), self._tokens, 0)
        return [float(score) for score in scores]

    def close(self) -> None:
        self._cache = self._scores = None

    def _extend(self, tokens: Sequence[int]) -> None:
        self._compute(tokens, len(self._tokens))

    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        import torch

        if not self._shift:
            self._crop(start)
            if behind:
                self._compute(behind, start)
            else:
                self._scores = None
            return
        for block in self._cache.layers:
            moved = self._turned(block.keys[..., stop:, :], [start - stop] * len(behind))
            block.keys = torch.cat([block.keys[..., :start, :], moved], dim=-2)
            block.values = torch.cat([block.values[..., :start, :], block.values[..., stop:, :]], dim=-2)
        self._scores = None

    def _crop(self, length: int) -> None:
        """Keep the first ``length`` cells: copied, because a slice would keep the whole tensor in memory."""
        if not self._plain():
            self._cache = self._empty()
            if length:
                self._forward(self._cache, self._tokens[:length], 0)
            return
        for block in self._cache.layers:
            if block.keys is None or not block.keys.numel():
                continue
            block.keys = block.keys[..., :length, :].clone()
            block.values = block.values[..., :length, :].clone()

    def _compute(self, tokens: Sequence[int], start: int) -> None:
        self._scores = self._forward(self._cache, tokens, start)

    def _forward(self, cache: Any, tokens: Sequence[int], start: int) -> Any:
        import torch

        places = torch.arange(start, start + len(tokens))
        return self._call(cache, torch.tensor([list(tokens)]), places[None]).logits[0, -1].float()

    def _call(self, cache: Any, tokens: Any, places: Any) -> Any:
        import torch

        device = self._model.device
        with torch.inference_mode():
            return self._model(
                input_ids=tokens.to(device),
                position_ids=places.to(device),
                use_cache=True,
                **{self._cache_argument: cache},
            )

    def _empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _plain(self) -> bool:
        """Whether every block of the cache keeps every token."""
        from transformers.cache_utils import DynamicLayer

        return all(type(block) is DynamicLayer for block in self._cache.layers)

    def _tensors(self) -> list[Any]:
        found: list[Any] = []
        for block in self._cache.layers:
            found.extend(one for one in (block.keys, block.values) if one is not None)
        return found

    @staticmethod
    def _block(cache: Any, place: int) -> tuple[Any, Any]:
        block = cache.layers[place] if cache.layers else None
        if block is None or getattr(block, "keys", None) is None or not block.keys.numel():
            return None, None
        return block.keys, block.values

    def _angles(self) -> Any:
        """Turns per position of each pair of a key's elements; ``None``: the model has no such table."""
        return getattr(getattr(self._model.get_decoder(), "rotary_emb", None), "inv_freq", None)

    def _turned(self, keys: Any, by: Sequence[int]) -> Any:
        """Keys rotated by so many positions each, halves of a head as pairs (the layout of Llama and its kin)."""
        import torch

        angles = torch.tensor(by, device=keys.device).float()[:, None] * self._angles().to(keys.device).float()
        wide = 2 * angles.shape[-1]
        cosine, sine = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
        first = keys[..., :wide].float()
        half = torch.cat([-first[..., wide // 2 :], first[..., : wide // 2]], dim=-1)
        return torch.cat([(first * cosine + half * sine).to(keys.dtype), keys[..., wide:]], dim=-1)

    def _check_shift(self) -> None:
        why = None
        if not self._plain():
            why = "its cache has blocks that do not keep every token"
        elif self._angles() is None:
            why = "it has no table of rotations that is known here"
        else:
            near, far = self._empty(), self._empty()
            token, away = [0], min(self.limit, 37)
            self._forward(near, token, 0)
            self._forward(far, token, away)
            for place in range(len(near.layers)):
                turned = self._turned(self._block(near, place)[0], [away])
                if not _alike(turned, self._block(far, place)[0]).all():
                    why = "its keys are not rotated by their positions as is known here"
                    break
        if why is not None:
            name = type(self._model).__name__
            raise BadInput(f"{name} cannot be shifted in its cache: {why}. Use TransformersWindow(…, shift=False).")

    def _own(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Keys (at position 0) and values of these tokens in the first block, each as alone in a cache."""
        import torch

        known = _KNOWN.setdefault(self._model, {})
        new = sorted(set(tokens) - known.keys())
        if new:
            cache = self._empty()
            self._call(cache, torch.tensor(new)[:, None], torch.zeros(len(new), 1, dtype=torch.long))
            keys, values = self._block(cache, 0)
            for row, token in enumerate(new):
                known[token] = (keys[row : row + 1], values[row : row + 1])
        pairs = [known[token] for token in tokens]
        return torch.cat([key for key, _ in pairs], dim=-2), torch.cat([value for _, value in pairs], dim=-2)

    def _recognised(self, value: Any) -> int | None:
        tokens = sorted(set(self._tokens))
        if not tokens:
            return None
        alike = _alike(self._own(tokens)[1], value)
        return tokens[int(alike.int().argmax())] if alike.any() else None

    def _position(self, key: Any, token: int) -> int:
        """The position that makes the token's own key this one; -1: none up to twice the limit."""
        own = self._own([token])[0]
        alike = _alike(self._turned(own.expand(-1, -1, 2 * self.limit, -1), list(range(2 * self.limit))), key)
        return int(alike.int().argmax()) if alike.any() else -1


# Model → token → its key and value in the first block.
_KNOWN: WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = WeakKeyDictionary()


def _alike(one: Any, other: Any) -> Any:
    """Which cells are the same: one truth value for each, over all heads."""
    difference = (one.float() - other.float()).square().sum(dim=(0, 1, 3))
    return difference <= _ALIKE**2 * one.float().square().sum(dim=(0, 1, 3))

"""A reference window over llama.cpp's KV cache, through the memory calls of llama-cpp-python."""

from __future__ import annotations

import builtins
import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_vram import sizing
from pytest_vram.errors import BadInput, EngineRefused
from pytest_vram.windows.cached import CachedWindow
from pytest_vram.windows.protocol import Cell, checked_limit

_F16 = 2
_FLASH_ATTENTION_ON = 1


class LlamaCppWindow(CachedWindow):
    """Pieces in one sequence of a llama.cpp context, oldest out after the pinned prefix.

    With ``shift=True`` (llama.cpp's own context shift) cells are removed with ``llama_memory_seq_rm`` and those behind
    the gap moved with ``llama_memory_seq_add``, which rotates their keys at the next decode: fast, but what they hold
    was computed while the tokens that left were still there. With ``shift=False`` what follows is computed anew.
    Caches that cannot lose a part, such as recurrent ones, are computed anew as a whole.

    What the cache holds is read from the state of the sequence (``llama_state_seq_get_data``): positions as they are,
    tokens by their value rows of the first layer, which depend on the token alone.

    :param model: a GGUF file. :param limit: tokens; also the context that is asked for. :param shift: see above.
    :param options: of the context, by the names of ``llama_context_params``, such as ``n_threads=2``; whole numbers and
        truth values. :raises BadInput: the package is missing, or the model's memory cannot shift.
    :raises EngineRefused: llama.cpp cannot load the model or make the context.
    """

    def __init__(self, model: str | Path, limit: int, *, shift: bool = True, **options: int) -> None:
        super().__init__(checked_limit(limit, type(self).__name__))
        self._shift = shift
        self._options = options
        self._model_path = Path(model)
        self._llama = _package()
        self._model: Any = None
        self._context: Any = None
        self._aside: Any = None
        self._values: dict[int, builtins.bytes] = {}
        self._scores: list[float] | None = None
        self._row_bytes: int | None = None
        self._model = self._load()
        try:
            vocabulary = self._llama.llama_model_get_vocab(self._model)
            self._vocabulary = int(self._llama.llama_vocab_n_tokens(vocabulary))
            self._layers = int(self._llama.llama_model_n_layer(self._model))
            self._context = self._new_context()
            if shift and not self._llama.llama_memory_can_shift(self._memory(self._context)):
                raise BadInput(
                    f"{self._model_path.name} has a memory that llama.cpp cannot shift: use "
                    "LlamaCppWindow(…, shift=False)."
                )
        except BaseException:
            self.close()
            raise

    def cells(self) -> list[Cell] | None:
        state = self._state(self._context)
        missing = set(self._tokens) - self._values.keys()
        for token in sorted(missing):
            self._values[token] = self._value_of(token)
        found = []
        listed = self._tokens
        for place, (position, value) in enumerate(sorted(zip(state.positions, state.values, strict=True))):
            candidates = (*listed[place : place + 1], *sorted(self._values))
            token = next((one for one in candidates if _alike(self._values[one], value)), -1)
            found.append(Cell(position, token))
        return found

    def bytes(self) -> int | None:
        """Bytes of the K and V rows in the sequence's state, without what describes them."""
        return self._state(self._context).bytes

    def expected_bytes(self) -> int | None:
        """The sizing formula's cache, as the share of the cells that are held."""
        if self._row_bytes is None:
            cells = 256
            predicted = sizing.estimate(self._model_path, ctx_size=cells, parallel=1, flash_attn="on")
            size = sum(entry.bytes for entry in predicted.entries if entry.bucket == "kv")
            self._row_bytes = size // cells
        return self._row_bytes * len(self._tokens)

    def logits(self) -> list[float] | None:
        if not self._tokens:
            return None
        if self._scores is None:
            # Eviction has changed what the last token sees: it is computed once more in its place.
            last = len(self._tokens) - 1
            if not self._llama.llama_memory_seq_rm(self._memory(self._context), 0, last, -1):
                self._anew(self._tokens)
            else:
                self._decode(self._context, self._tokens[-1:], last)
        return self._scores

    def fresh_logits(self) -> list[float] | None:
        if self._shift and self._layers > 1:
            return None
        context = self._other()
        kept, self._scores = self._scores, None
        self._decode(context, self._tokens, 0)
        fresh, self._scores = self._scores, kept
        return fresh

    def close(self) -> None:
        for context in (self._context, self._aside):
            if context is not None:
                self._llama.llama_free(context)
        self._context = self._aside = None
        if self._model is not None:
            self._llama.llama_model_free(self._model)
        self._model = None

    def _extend(self, tokens: Sequence[int]) -> None:
        self._decode(self._context, tokens, len(self._tokens))

    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        memory = self._memory(self._context)
        if not self._llama.llama_memory_seq_rm(memory, 0, start, stop if self._shift else -1):
            self._anew([*self._tokens[:start], *behind])
        elif self._shift:
            self._llama.llama_memory_seq_add(memory, 0, stop, -1, start - stop)
            self._scores = None
        else:
            self._scores = None
            if behind:
                self._decode(self._context, behind, start)

    def _anew(self, tokens: Sequence[int]) -> None:
        self._llama.llama_memory_clear(self._memory(self._context), True)
        self._scores = None
        if tokens:
            self._decode(self._context, tokens, 0)

    def _decode(self, context: Any, tokens: Sequence[int], start: int) -> None:
        """Compute the cells of tokens at their positions; scores are those of the last."""
        llama = self._llama
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for place, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = start + place
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = 0
                batch.logits[place] = place == len(tokens) - 1
            code = llama.llama_decode(context, batch)
        finally:
            llama.llama_batch_free(batch)
        if code:
            raise EngineRefused(
                f"llama.cpp cannot decode {len(tokens)} tokens at position {start} (code {code}): make n_batch or the "
                "limit fit."
            )
        self._scores = list(llama.llama_get_logits_ith(context, -1)[: self._vocabulary])

    def _memory(self, context: Any) -> Any:
        return self._llama.llama_get_memory(context)

    def _load(self) -> Any:
        llama = self._llama
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = self._options.get("n_gpu_layers", 0)
        model = llama.llama_model_load_from_file(os.fsencode(self._model_path), parameters)
        if not model:
            raise EngineRefused(f"llama.cpp cannot load {self._model_path}: is it a GGUF file that this version knows?")
        return model

    def _new_context(self) -> Any:
        llama = self._llama
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self.limit
        parameters.n_seq_max = 1
        # Values lie in rows only with flash attention, and only rows can be told apart.
        parameters.flash_attn_type = _FLASH_ATTENTION_ON
        for name, value in self._options.items():
            if name == "n_gpu_layers":
                continue
            if not hasattr(parameters, name):
                raise BadInput(f"LlamaCppWindow: there is no {name} in this package's llama_context_params.")
            setattr(parameters, name, value)
        context = llama.llama_init_from_model(self._model, parameters)
        if not context:
            raise EngineRefused(f"llama.cpp cannot make a context of {self.limit} tokens for {self._model_path.name}.")
        return context

    def _other(self) -> Any:
        """An empty context beside the window's own."""
        if self._aside is None:
            self._aside = self._new_context()
        self._llama.llama_memory_clear(self._memory(self._aside), True)
        return self._aside

    def _value_of(self, token: int) -> builtins.bytes:
        context = self._other()
        kept = self._scores
        self._decode(context, [token], 0)
        self._scores = kept
        return self._state(context).values[0]

    def _state(self, context: Any) -> _State:
        llama = self._llama
        size = llama.llama_state_seq_get_size(context, 0)
        buffer = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data(context, buffer, size, 0)
        data = bytes(buffer)[:written]
        # Newer versions write a mark and a number before the cache's own state.
        state = _read(data, 8) or _read(data, 0)
        if state is None:
            raise EngineRefused(
                f"The state of a sequence of {self._model_path.name} is laid out in a way that is not known here, so "
                "the cells of its cache cannot be read: only plain caches in rows (flash attention on) can."
            )
        return state


class _State:
    """The cells of one sequence, as llama.cpp writes them (``llama_kv_cache::state_write``)."""

    def __init__(self, positions: list[int], values: list[bytes], size: int) -> None:
        self.positions, self.values, self.bytes = positions, values, size


def _read(data: bytes, offset: int) -> _State | None:
    """Positions, first-layer value rows and bytes of all rows; ``None``: laid out in a way that is not known here."""
    try:
        streams, count = struct.unpack_from("<II", data, offset)
        offset += 8
        if streams != 1:
            return None
        if not count:
            return _State([], [], 0) if offset == len(data) else None
        positions = []
        for _ in range(count):
            position, sequences, _ = struct.unpack_from("<iIi", data, offset)
            if sequences != 1:
                return None
            positions.append(position)
            offset += 12
        transposed, layers = struct.unpack_from("<II", data, offset)
        if transposed:
            return None
        offset += 8
        total, values = 0, b""
        for row in range(2 * layers):
            _, width = struct.unpack_from("<iQ", data, offset)
            offset += 12
            if row == layers:
                values = data[offset : offset + width * count]
            offset += width * count
            total += width * count
        if offset != len(data):
            return None
    except struct.error:
        return None
    width = len(values) // count
    return _State(positions, [values[place * width : (place + 1) * width] for place in range(count)], total)


def _alike(one: bytes, other: bytes) -> bool:
    """Whether two rows of f16 values are the same but for rounding."""
    if one == other:
        return True
    if len(one) != len(other) or len(one) % _F16:
        return False
    pairs = list(zip(*(struct.unpack(f"<{len(row) // _F16}e", row) for row in (one, other)), strict=True))
    apart = sum((left - right) ** 2 for left, right in pairs)
    return bool(apart <= 1e-4 * sum(left * left for left, _ in pairs))


def _package() -> Any:
    try:
        import llama_cpp
    except ImportError:
        raise BadInput(
            "LlamaCppWindow needs llama-cpp-python, which is not installed: pip install pytest-vram[llama-cpp]"
        ) from None
    return llama_cpp

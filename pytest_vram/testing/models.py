"""Tiny random GGUF models that llama.cpp boots in tens of milliseconds; needs the packages ``gguf`` and ``numpy``.

Their shapes are exact: every buffer that the engine prints for them can be computed. The tokenizer is byte-level, one
token for each byte of a text, so token counts of prompts are known without asking. What they generate is small letters
and blanks at random, never an end-of-text token: an answer is valid text and exactly as long as it may be. The recipes
are described in ``fixtures/models``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pytest_vram.errors import BadInput

if TYPE_CHECKING:
    import numpy

Float = Literal["f32", "f16"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NORMAL, _CONTROL = 1, 3


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a model, in the words of GGUF metadata.

    :ivar feed_forward: hidden size of a dense layer, or of one expert.
    :ivar experts: experts in each layer; 0 makes a dense model. :ivar experts_used: of those, active per token.
    :ivar dtype: type of the matrices; norms, and the router of a mixture of experts, are ``f32`` as in real files.
    """

    layers: int = 2
    embedding: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    feed_forward: int = 512
    context: int = 4096
    experts: int = 0
    experts_used: int = 0
    dtype: Float = "f16"

    @property
    def vocabulary(self) -> int:
        """256 bytes, one merged pair and the special tokens."""
        return 256 + 1 + len(SPECIAL)

    @property
    def kv_row(self) -> int:
        """Elements of K (and of V) that one token takes in one layer."""
        return self.kv_heads * self.head_size

    def kv_bytes(self, context: int, bytes_per_element: float = 2.0) -> int:
        """Bytes of the KV cache: 2 · layers · context · row · bytes per element (f16: 2, q8_0: 34/32)."""
        return round(2 * self.layers * context * self.kv_row * bytes_per_element)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the expert matrices of one layer: three matrices for each expert."""
        return 3 * self.experts * self.feed_forward * self.embedding * (2 if self.dtype == "f16" else 4)


def write_llama(path: Path, shape: Shape | None = None, *, seed: int = 0) -> Shape:
    """Write a dense model of architecture ``llama``; about 3 MB with the default shape.

    :raises BadInput: the packages that write it are missing.
    """
    used = shape or Shape()
    writer, numbers = _open(path, "llama", used, seed)
    writer.add_rope_dimension_count(used.head_size)
    for layer in range(used.layers):
        _attention(writer, numbers, used, layer)
        name = f"blk.{layer}.ffn_"
        writer.add_tensor(f"{name}gate.weight", numbers.matrix(used.feed_forward, used.embedding))
        writer.add_tensor(f"{name}up.weight", numbers.matrix(used.feed_forward, used.embedding))
        writer.add_tensor(f"{name}down.weight", numbers.matrix(used.embedding, used.feed_forward))
    _close(writer)
    return used


def write_qwen3moe(path: Path, shape: Shape | None = None, *, seed: int = 0) -> Shape:
    """Write a mixture of experts of architecture ``qwen3moe``: 4 layers of 8 experts, 25 MB, with the default shape.

    ``--n-cpu-moe N`` moves exactly ``N · shape.expert_bytes`` from the device to the host.

    :raises BadInput: the packages that write it are missing, or the shape has no experts.
    """
    used = shape or Shape(layers=4, experts=8, experts_used=2)
    if used.experts < 1 or not 1 <= used.experts_used <= used.experts:
        raise BadInput("a mixture of experts needs experts ≥ 1 and 1 ≤ experts_used ≤ experts in its shape")
    writer, numbers = _open(path, "qwen3moe", used, seed)
    writer.add_expert_count(used.experts)
    writer.add_expert_used_count(used.experts_used)
    writer.add_expert_feed_forward_length(used.feed_forward)
    for layer in range(used.layers):
        _attention(writer, numbers, used, layer)
        for which in ("q", "k"):
            writer.add_tensor(f"blk.{layer}.attn_{which}_norm.weight", numbers.ones(used.head_size))
        name = f"blk.{layer}.ffn_"
        wide, narrow = used.feed_forward, used.embedding
        writer.add_tensor(f"{name}gate_inp.weight", numbers.matrix(used.experts, narrow, exact=True))
        writer.add_tensor(f"{name}gate_exps.weight", numbers.matrix(used.experts, wide, narrow))
        writer.add_tensor(f"{name}up_exps.weight", numbers.matrix(used.experts, wide, narrow))
        writer.add_tensor(f"{name}down_exps.weight", numbers.matrix(used.experts, narrow, wide))
    _close(writer)
    return used


class _Numbers:
    """Small random matrices from one seed, cut from one pool: fast, and of no meaning anyway."""

    _POOL = 1_000_003  # prime, so that rows do not repeat

    def __init__(self, shape: Shape, seed: int) -> None:
        import numpy

        self._numpy = numpy
        values = numpy.random.default_rng(seed).standard_normal(self._POOL, dtype=numpy.float32) * 0.02
        self._exact = values
        self._pool = values.astype(numpy.float16 if shape.dtype == "f16" else numpy.float32)

    def matrix(self, *dimensions: int, exact: bool = False) -> numpy.ndarray[Any, Any]:
        """Rows first: the last dimension is the one that llama.cpp lists first."""
        return self._numpy.resize(self._exact if exact else self._pool, dimensions)

    def ones(self, length: int) -> numpy.ndarray[Any, Any]:
        return self._numpy.ones(length, dtype=self._numpy.float32)

    def ends(self, shape: Shape) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
        """Token embeddings and output matrix, made so that the next token is a small letter or a blank.

        Every embedding has a large first component, which survives the layers and the norm; in the output matrix it
        counts for the wanted tokens and against all others.
        """
        embeddings = self.matrix(shape.vocabulary, shape.embedding)
        output = self.matrix(shape.vocabulary, shape.embedding)
        embeddings[:, 0] = 4.0
        output[:, 0] = -1.0
        output[list(b" abcdefghijklmnopqrstuvwxyz"), 0] = 1.0
        return embeddings, output


def _open(path: Path, architecture: str, shape: Shape, seed: int) -> tuple[Any, _Numbers]:
    try:
        import gguf
    except ImportError as error:
        raise BadInput(
            f"writing a GGUF model needs the package {error.name!r}: pip install 'pytest-vram[gguf]'"
        ) from None
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny random {architecture}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    _tokenizer(writer)
    numbers = _Numbers(shape, seed)
    embeddings, output = numbers.ends(shape)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", numbers.ones(shape.embedding))
    writer.add_tensor("output.weight", output)
    return writer, numbers


def _attention(writer: Any, numbers: _Numbers, shape: Shape, layer: int) -> None:
    name, query = f"blk.{layer}.", shape.heads * shape.head_size
    writer.add_tensor(f"{name}attn_norm.weight", numbers.ones(shape.embedding))
    writer.add_tensor(f"{name}attn_q.weight", numbers.matrix(query, shape.embedding))
    writer.add_tensor(f"{name}attn_k.weight", numbers.matrix(shape.kv_row, shape.embedding))
    writer.add_tensor(f"{name}attn_v.weight", numbers.matrix(shape.kv_row, shape.embedding))
    writer.add_tensor(f"{name}attn_output.weight", numbers.matrix(shape.embedding, query))
    writer.add_tensor(f"{name}ffn_norm.weight", numbers.ones(shape.embedding))


def _tokenizer(writer: Any) -> None:
    # The reader insists on at least one merge, so one pair that texts hardly contain is merged: two NUL bytes.
    letters = byte_letters()
    tokens = [*letters, letters[0] * 2, *SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_NORMAL] * 257 + [_CONTROL] * len(SPECIAL))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_bos_token_id(tokens.index(SPECIAL[0]))
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def byte_letters() -> list[str]:
    """GPT-2's alphabet: a printable letter for each byte, those without one taken from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters: list[str] = []
    spare = 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

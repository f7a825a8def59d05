"""Whether a model can be: numbers within bounds, and keys and tensors that say the same.

A file whose keys and tensors contradict each other loads nowhere, so that figures for it would be promises about
nothing; and whatever a file says, no rule is to count up to it. Readers of both formats end with :func:`checked`.

What is refused for a GGUF file is what llama.cpp refuses: ``llama-model.cpp:load_hparams`` (experts, heads, rope),
``load_tensors`` with the ``create_tensor`` calls of ``src/models/*.cpp`` (a tensor for each block, their dimensions)
and ``llama-model-loader.cpp:done_getting_tensors`` (no tensor too many). For an architecture that is not known here,
only bounds are checked: its buckets are lower bounds anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from pytest_vram.errors import BadModel
from pytest_vram.sizing.gguf_architectures import ARCHITECTURES, PLAIN
from pytest_vram.sizing.shape import Layer, ModelShape, Note, Ssm, Tensor

MOST_WIDTH = 1 << 24  # elements of one dimension; the widest in use have some ten thousand
MOST_ROW = 1 << 31  # elements of one block's cache cell or state
MOST_LAYERS = 10_000
MOST_EXPERTS = 1024  # llama-hparams.h, LLAMA_MAX_EXPERTS
MOST_VOCABULARY = 1 << 31
_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]{1,9})\.(.+)")
_OF_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.")
_STACKED = re.compile(r"ffn_(?:up|down|gate|gate_up)_exps\.weight")
_NUMBERED = re.compile(
    r"(?:model\.|language_model\.|text_model\.|transformer\.|backbone\.|gpt_neox\.|decoder\.|llm\.|encoder\.)*"
    r"(?:layers|layer|h|blocks)\.([0-9]{1,9})\."
)
_ANY_NUMBER = re.compile(r"(?:^|\.)[0-9]+\.")
_SCANS = ("ssm", "mamba", "mamba2", "gated-delta")
_ROPE_IS_HEAD = ("llama", "deci", "falcon", "llama-embed")  # load_hparams: "invalid n_rot"


def checked(shape: ModelShape) -> ModelShape:
    """The same shape, with notes on what is suspicious.

    :raises BadModel: it is of no model: a number that no model has, or two parts of it that contradict each other.
    """
    _bounds(shape)
    notes: list[Note] = []
    if shape.format == "gguf":
        _experts(shape)
        if not shape.tensors:
            raise BadModel(
                f"{shape.source} holds no tensors: it is a header or a vocabulary only, which nothing can run; name a"
                " file with weights"
            )
        if shape.known:
            notes += _gguf_tensors(shape)
    elif shape.tensors and shape.format == "safetensors":
        _numbered_blocks(shape)
    return msgspec.structs.replace(shape, notes=(*shape.notes, *notes)) if notes else shape


def _refused(shape: ModelShape, trouble: str) -> BadModel:
    return BadModel(f"{shape.source} {trouble}: the file is damaged or of an unfinished conversion")


def _bounds(shape: ModelShape) -> None:
    """Numbers that every model has, and no model has larger."""
    if not shape.layers or len(shape.layers) + shape.extra_layers > MOST_LAYERS:
        raise _refused(shape, f"says it has {len(shape.layers)} blocks and {shape.extra_layers} for prediction")
    widths = {
        "embedding": shape.embedding,
        "experts": shape.experts,
        "experts used": shape.experts_used,
        "shared experts": shape.shared_experts,
        "feed-forward": shape.expert_feed_forward,
    }
    if shape.mla is not None:
        widths |= {f"latent attention's {name}": value for name, value in _fields(shape.mla)}
    if shape.ssm is not None:
        widths |= {f"state-space {name}": value for name, value in _fields(shape.ssm)}
    for name, value in widths.items():
        if value > MOST_WIDTH:
            raise _refused(shape, f"says that its {name} is {value}, more than any model has ({MOST_WIDTH})")
    if not shape.embedding:
        raise _refused(shape, "says that its width (embedding length) is 0")
    if shape.vocabulary > MOST_VOCABULARY:
        raise _refused(shape, f"says that its vocabulary has {shape.vocabulary} entries")
    for block, layer in enumerate((*shape.layers, *shape.extra_blocks)):
        _layer(shape, block, layer)


def _fields(part: msgspec.Struct) -> Iterator[tuple[str, int]]:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, int):
            yield name.replace("_", " "), value


def _layer(shape: ModelShape, block: int, layer: Layer) -> None:
    for name in ("heads", "kv_heads", "key_length", "value_length", "feed_forward", "experts", "indexer_row"):
        if getattr(layer, name) > MOST_WIDTH:
            what = name.replace("_", " ")
            raise _refused(shape, f"gives block {block} {what} of {getattr(layer, name)}, more than any model has")
    for name in ("k_row", "v_row", "state_r", "state_s", "indexer_v_row"):
        if getattr(layer, name) > MOST_ROW:
            raise _refused(shape, f"gives block {block} a cache of {getattr(layer, name)} elements for each token")
    if not shape.known:
        return
    if layer.heads and layer.kv_heads and layer.heads % layer.kv_heads:
        raise _refused(
            shape, f"gives block {block} {layer.heads} heads and {layer.kv_heads} K heads, which cannot share them"
        )
    if layer.heads and layer.kv_heads and not layer.key_length:
        raise _refused(shape, f"gives block {block} {layer.heads} heads of no width")


def _experts(shape: ModelShape) -> None:
    """``load_hparams``: the assertions on experts, for every architecture."""
    if shape.experts > MOST_EXPERTS:
        raise _refused(shape, f"says it has {shape.experts} experts; llama.cpp takes up to {MOST_EXPERTS}")
    if shape.architecture.startswith("hunyuan") and shape.experts <= 1:
        return
    if shape.experts_used > shape.experts:
        raise _refused(shape, f"says that {shape.experts_used} of its {shape.experts} experts are used for a token")
    if shape.experts and not shape.experts_used:
        raise _refused(shape, f"says that none of its {shape.experts} experts is used")


def _gguf_tensors(shape: ModelShape) -> list[Note]:
    """What the tensors of a known architecture say about its keys."""
    rules = ARCHITECTURES.get(shape.architecture, PLAIN)
    main, all_blocks = len(shape.layers), len(shape.layers) + shape.extra_layers
    decoder = shape.meta.get("decoder_block_count", 0)
    most = max(all_blocks, decoder if isinstance(decoder, int) else 0)
    found: dict[int, set[str]] = {}
    notes: list[Note] = []
    for tensor in shape.tensors:
        if not tensor.elements:
            raise _refused(shape, f"has a tensor {tensor.name!r} with a dimension of 0")
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            if _OF_BLOCK.match(tensor.name):
                raise _refused(shape, f"has a tensor {tensor.name!r}, which is of no block")
            continue
        block = int(match[1])
        if block >= most:
            raise _refused(shape, f"has a tensor {tensor.name!r} of block {block}, and {all_blocks} blocks by its keys")
        found.setdefault(block, set()).add(match[2])
        if block < main and not rules.draft and not tensor.name.startswith(("enc.", "dec.")):
            _in_block(shape, shape.layers[block], tensor, match[2], latent=rules.latent or rules.cache == "compressed")
            if match[2] == "ffn_down.weight":
                notes += _feed_forward(shape, tensor, notes)
    # A file may hold the prediction blocks alone ("mtp_only"), and helpers of another model use its tables.
    alone = shape.extra_layers > 0 and not any(block in found for block in range(main))
    if rules.draft or alone:
        return notes
    _table(shape)
    if rules.loops or rules.router or shape.architecture == "wavtokenizer-dec":
        return notes
    for block, layer in enumerate(shape.layers):
        # Pruned blocks without attention and feed-forward have no tensors (``deci.cpp``).
        pruned = shape.architecture == "deci" and not (layer.heads or layer.kv_heads or layer.feed_forward)
        if block not in found and not pruned:
            raise _refused(shape, f"has {main} blocks by its keys, and no tensor of block {block}")
    return notes


def _in_block(shape: ModelShape, layer: Layer, tensor: Tensor, name: str, *, latent: bool) -> None:
    """``create_tensor_qkv`` and the experts: dimensions that follow from the keys."""
    rows = tensor.dims[1] if len(tensor.dims) > 1 else 1
    if _STACKED.fullmatch(name) and tensor.dims[-1] != shape.experts:
        raise _refused(
            shape, f"has {shape.experts} experts by its keys, and {tensor.dims[-1]} by its tensor {tensor.name!r}"
        )
    if layer.state_s and shape.ssm is not None and shape.ssm.kind in _SCANS and shape.architecture != "plamo2":
        _scan(shape, shape.ssm, tensor, name)
    if latent or layer.recurrent:
        return
    wanted: tuple[int, ...] = ()
    if name == "attn_q.weight":
        queries = layer.heads * layer.key_length
        wanted = (queries, 2 * queries)  # some models have a gate in it
    elif name == "attn_k.weight":
        wanted = (layer.kv_heads * layer.key_length,)
    elif name == "attn_v.weight":
        wanted = (layer.kv_heads * layer.value_length,)
    if wanted and rows not in wanted:
        raise _refused(shape, f"has {rows} rows in its tensor {tensor.name!r}, and its keys ask for {wanted[0]}")


def _scan(shape: ModelShape, ssm: Ssm, tensor: Tensor, name: str) -> None:
    """Convolution and state of a block, as ``mamba.cpp``, ``mamba2.cpp``, ``qwen3next.cpp`` and others create them."""
    wanted: tuple[int, ...] = tensor.dims
    if name == "ssm_conv1d.weight":
        wanted = (ssm.conv, ssm.inner + 2 * ssm.groups * ssm.state)
    elif name == "ssm_a" and len(tensor.dims) > 1 and tensor.dims[0] > 1:
        wanted = (ssm.state, ssm.inner)
    if tensor.dims[: len(wanted)] != wanted:
        raise _refused(
            shape, f"has {tensor.dims} elements in its tensor {tensor.name!r}, and its keys ask for {wanted}"
        )


def _feed_forward(shape: ModelShape, tensor: Tensor, notes: list[Note]) -> list[Note]:
    stated = shape.meta.get("feed_forward_length")
    if notes or not isinstance(stated, int) or isinstance(stated, bool) or stated == tensor.dims[0]:
        return []
    text = (
        f"the file says its feed-forward is {stated} wide, and {tensor.name} has {tensor.dims[0]}: llama.cpp refuses"
        " most such files"
    )
    return [Note(kind="unknown", bucket="compute", text=text)]


def _table(shape: ModelShape) -> None:
    """The embedding table, which every model has, as wide as the model and as long as its vocabulary."""
    table = next((tensor for tensor in shape.tensors if tensor.name == "token_embd.weight"), None)
    if table is None:
        raise _refused(shape, "has no tensor 'token_embd.weight'")
    width, words = table.dims[0], table.dims[1] if len(table.dims) > 1 else 1
    if width != shape.embedding and shape.architecture != "wavtokenizer-dec":
        raise _refused(shape, f"is {shape.embedding} wide by its keys, and {width} by its tensor 'token_embd.weight'")
    if shape.vocabulary != words:
        raise _refused(shape, f"has a vocabulary of {shape.vocabulary}, and a table of {words} embeddings")
    rope = shape.meta.get("rope.dimension_count")
    head = next((layer.key_length for layer in shape.layers if layer.heads), 0)
    if shape.architecture in _ROPE_IS_HEAD and isinstance(rope, int) and head and rope != head:
        raise _refused(shape, f"rotates {rope} elements of a head by its keys, and its heads have {head}")


def _numbered_blocks(shape: ModelShape) -> None:
    """A folder's weights hold every block that its configuration promises."""
    found = {int(match[1]) for tensor in shape.tensors if (match := _NUMBERED.match(tensor.name))}
    held = max(found) + 1 if found else 0
    others = not found and any(_ANY_NUMBER.search(tensor.name) for tensor in shape.tensors)  # other names for blocks
    if held < len(shape.layers) and not others:
        raise BadModel(
            f"{shape.source}: config.json says {len(shape.layers)} blocks, and the weights hold {held}: they"
            " are of another model, or not all of them are here"
        )

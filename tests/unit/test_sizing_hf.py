"""Hugging Face folders as shapes: configurations with what they leave out, safetensors headers, quantised weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import BadModel
from pytest_vram.sizing import hf_quant, hf_shape, moe, safetensors
from pytest_vram.sizing.hf_config import LARGEST_FILE, read_config
from pytest_vram.sizing.shape import ModelShape

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
    },
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def folder_of(tmp_path: Path, config: object) -> Path:
    tmp_path.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def shape_of(tmp_path: Path, config: object) -> ModelShape:
    return hf_shape.read_shape(folder_of(tmp_path, config))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], **changes: Any) -> None:
    """A sparse safetensors file with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, dims) in tensors.items():
        elements = 1
        for size in dims:
            elements *= size
        size = elements * safetensors.BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [end, end + size]}
        end += size
    header.update(changes)
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def test_gemma3_takes_its_head_size_and_window_pattern_from_its_class(tmp_path: Path) -> None:
    """A nested config without ``head_dim`` has heads of 256 and five window blocks in six, never vision's blocks."""
    shape = shape_of(tmp_path, GEMMA3_12B)
    assert len(shape.layers) == 48
    assert {layer.key_length for layer in shape.layers} == {256}
    assert sum(layer.window == 1024 for layer in shape.layers) == 40
    assert [index for index, layer in enumerate(shape.layers) if not layer.window] == list(range(5, 48, 6))
    # At 8192 tokens, one slot, ubatch 512, f16: 512 MiB of full cells and 480 MiB of 1536 window cells.
    cells = [1536 if layer.window else 8192 for layer in shape.layers]
    kv = sum(count * (layer.k_row + layer.v_row) * 2 for count, layer in zip(cells, shape.layers, strict=True))
    assert kv == 992 << 20
    assert shape.swa_pattern == "40 of 48"


def test_every_default_that_stood_in_is_told(tmp_path: Path) -> None:
    """The 4B config leaves out heads, K and V heads, head size and window: all four are named as assumed."""
    sparse = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    shape = shape_of(tmp_path, {"model_type": "gemma3", "text_config": sparse, "architectures": ["Gemma3"]})
    assert (len(shape.layers), shape.heads, shape.kv_heads, shape.head_size) == (34, 8, 4, 256)
    assumed = " ".join(note.text for note in shape.notes if note.kind == "assumed")
    for key in ("num_attention_heads = 8", "num_key_value_heads = 4", "head_dim = 256", "sliding_window_pattern = 6"):
        assert key in assumed


def test_head_size_is_read_not_divided(tmp_path: Path) -> None:
    """Qwen3-4B has heads of 128 although its width over its heads is 80."""
    config = {**LLAMA_8B, "model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128}
    assert shape_of(tmp_path, config).head_size == 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 32768}, 0),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 28}, 0),
    ],
)
def test_qwen2_windows_begin_at_max_window_layers(tmp_path: Path, changes: dict[str, Any], windows: int) -> None:
    """Only blocks from ``max_window_layers`` on have a window, and only where it is switched on."""
    shape = shape_of(tmp_path, {**LLAMA_8B, "model_type": "qwen2", **changes})
    assert sum(layer.window > 0 for layer in shape.layers) == windows


def test_an_explicit_null_is_no_default(tmp_path: Path) -> None:
    """``sliding_window: null`` in a Mistral config means none, although the class's default is 4096."""
    assert shape_of(tmp_path, {**LLAMA_8B, "model_type": "mistral", "sliding_window": None}).window == 0
    without = shape_of(tmp_path / "b", {**LLAMA_8B, "model_type": "mistral"})
    assert without.window == 4096


def test_latent_attention_keeps_one_row_of_576(tmp_path: Path) -> None:
    """DeepSeek-V3 keeps 576 elements per token and block, once: not for V, not twice, not per head."""
    shape = shape_of(tmp_path, DEEPSEEK_V3)
    assert {(layer.k_row, layer.v_row) for layer in shape.layers} == {(576, 0)}
    assert shape.leading_dense == 3
    facts = moe.facts(shape)
    # 671 billion in all, 37 active, as published; the block for multi-token prediction is not among them.
    assert round(facts.parameters / 1e9) == 671
    assert 37 <= facts.active_parameters / 1e9 < 38


def test_the_indexer_of_sparse_attention_is_read(tmp_path: Path) -> None:
    """DeepSeek-V3.2 keeps an indexer row of 128 beside the latent."""
    shape = shape_of(tmp_path, {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    assert {(layer.k_row, layer.indexer_row) for layer in shape.layers} == {(576, 128)}


def test_hybrid_blocks_have_states_or_a_cache(tmp_path: Path) -> None:
    """Qwen3-Next keeps a cache in every fourth block and a state in the others."""
    config = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "torch_dtype": "bfloat16"}
    shape = shape_of(tmp_path, config)
    assert [index for index, layer in enumerate(shape.layers) if layer.k_row] == list(range(3, 48, 4))
    state = next(layer for layer in shape.layers if layer.recurrent)
    # 8192 channels of a convolution of 4, and 32 heads of 128 × 128.
    assert (state.state_r, state.state_s) == (3 * 8192, 32 * 128 * 128)


def test_shared_caches_are_counted_once(tmp_path: Path) -> None:
    """The last blocks of Gemma 3n use the cache of earlier ones and keep none."""
    shape = shape_of(tmp_path, {"model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"]})
    assert [layer.k_row > 0 for layer in shape.layers] == [True] * 20 + [False] * 15


def test_encoders_keep_no_cache(tmp_path: Path) -> None:
    """A reranker has attention and no KV cache, and is marked so."""
    config = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]}
    shape = shape_of(tmp_path, config)
    assert shape.encoder
    assert not shape.causal
    assert all(layer.k_row == layer.v_row == 0 and layer.heads for layer in shape.layers)


def test_an_unknown_model_type_is_said_to_be_unknown(tmp_path: Path) -> None:
    """Neither its cache nor its weights are passed off as known."""
    shape = shape_of(tmp_path, {**LLAMA_8B, "model_type": "brandnew", "architectures": ["BrandNewForCausalLM"]})
    assert not shape.known
    assert {note.bucket for note in shape.notes if note.kind == "unknown"} == {"kv", "weights"}
    assert "brandnew" in " ".join(note.text for note in shape.notes)


def test_the_model_type_is_found_by_the_class_name(tmp_path: Path) -> None:
    """A config without ``model_type`` is read by its architecture."""
    config = {key: value for key, value in QWEN3_30B.items() if key != "model_type"}
    assert read_config(folder_of(tmp_path, config)).model_type == "qwen3_moe"


HOSTILE: list[tuple[str, object, str]] = [
    ("not an object", "[1, 2]", "object"),
    ("not JSON", "{", "not valid JSON"),
    ("empty", "", "not valid JSON"),
    ("no model", {}, "names no model"),
    ("architecture of another kind", {"architectures": 7}, "architectures"),
    ("model type of another kind", {"model_type": 7}, "model_type"),
    ("no layers", {**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers"),
    ("negative layers", {**LLAMA_8B, "num_hidden_layers": -3}, "num_hidden_layers"),
    ("too many layers", {**LLAMA_8B, "num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("layers in words", {**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers"),
    ("half a layer", {**LLAMA_8B, "num_hidden_layers": 31.5}, "num_hidden_layers"),
    ("a truth as a number", {**LLAMA_8B, "num_hidden_layers": True}, "num_hidden_layers"),
    ("NaN", '{"model_type": "llama", "hidden_size": NaN}', "hidden_size"),
    ("infinite", '{"model_type": "llama", "vocab_size": Infinity}', "vocab_size"),
    ("huge number", '{"model_type": "llama", "hidden_size": 1' + "0" * 4000 + "}", "hidden_size"),
    ("number too long to read", '{"model_type": "llama", "hidden_size": 1' + "0" * 9000 + "}", "not valid JSON"),
    ("deep nesting", '{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    ("nested part of another kind", {"model_type": "gemma3", "text_config": [1]}, "text_config"),
    ("no heads", {**LLAMA_8B, "num_attention_heads": 0}, "num_attention_heads"),
    ("more heads than width", {**LLAMA_8B, "num_attention_heads": 9999}, "num_attention_heads"),
    ("short list of kinds", {**LLAMA_8B, "layer_types": ["full_attention"]}, "layer_types"),
    ("kinds that are no names", {**LLAMA_8B, "layer_types": [1] * 32}, "layer_types"),
    ("dtype unknown", {**LLAMA_8B, "torch_dtype": "float3"}, "dtype"),
    ("dtype of another kind", {**LLAMA_8B, "torch_dtype": 16}, "dtype"),
    ("shared blocks beyond all", {**LLAMA_8B, "num_kv_shared_layers": 40}, "num_kv_shared_layers"),
    ("no default for the width", {"model_type": "brandnew", "num_hidden_layers": 2}, "num_attention_heads"),
    ("quantisation of another kind", {**LLAMA_8B, "quantization_config": 4}, "quantization_config"),
    (
        "group of zero",
        {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 0}},
        "group_size",
    ),
    ("pattern of strangers", {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
]


@pytest.mark.parametrize(("name", "config", "key"), HOSTILE, ids=[row[0] for row in HOSTILE])
def test_bad_configurations_end_in_one_sentence(tmp_path: Path, name: str, config: object, key: str) -> None:
    """A configuration that cannot be used is refused by a sentence that names the file and the key."""
    with pytest.raises(BadModel) as caught:
        shape_of(tmp_path, config)
    message = str(caught.value)
    assert key in message
    assert "config.json" in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    """A ``config.json`` of 100 MB is refused by its size."""
    path = folder_of(tmp_path, "{}") / "config.json"
    with path.open("r+b") as file:
        file.truncate(100_000_000)
    with pytest.raises(BadModel, match=str(LARGEST_FILE)):
        hf_shape.read_shape(tmp_path)


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (None, "no config.json, so it is not"),
        ("adapter_config.json", "adapter"),
        ("model-q4.gguf", "GGUF"),
        ("params.json", "another format"),
    ],
)
def test_a_folder_without_configuration_is_told_what_it_is(tmp_path: Path, present: str | None, said: str) -> None:
    """Adapters, GGUF files and other formats are recognised, and the way on is given."""
    if present:
        (tmp_path / present).write_text("{}")
    with pytest.raises(BadModel, match=said):
        hf_shape.read_shape(tmp_path)


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(BadModel, match="nowhere does not exist"):
        hf_shape.read_shape(tmp_path / "nowhere")


# Weights in the folder.


def test_weights_are_exact_from_the_headers(tmp_path: Path) -> None:
    """Bytes, dimensions and types are those of the header, the fastest dimension first."""
    folder = folder_of(tmp_path, LLAMA_8B)
    write_safetensors(
        folder / "model.safetensors", {"model.layers.31.a": ("BF16", [4, 6]), "b.weight": ("F8_E4M3", [3])}
    )
    shape = hf_shape.read_shape(folder)
    assert shape.format == "safetensors"
    assert [(tensor.name, tensor.dims, tensor.type, tensor.bytes) for tensor in shape.tensors] == [
        ("model.layers.31.a", (6, 4), "bf16", 48),
        ("b.weight", (3,), "f8_e4m3", 3),
    ]
    assert shape.file_bytes == (folder / "model.safetensors").stat().st_size


def test_shards_are_followed_by_the_index(tmp_path: Path) -> None:
    """All shards of the index are read, and tensors that it does not name are left out."""
    folder = folder_of(tmp_path, LLAMA_8B)
    write_safetensors(
        folder / "model-00001-of-00002.safetensors", {"model.layers.31.a": ("F16", [2]), "spare": ("F16", [9])}
    )
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b": ("I4", [4])})
    placed = {"model.layers.31.a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"weight_map": placed}
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    shape = hf_shape.read_shape(folder)
    assert [(tensor.name, tensor.bytes) for tensor in shape.tensors] == [("model.layers.31.a", 4), ("b", 2)]
    assert len(shape.files) == 2


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "model-00003.safetensors"}, "model-00003.safetensors"),
        ({"a": "../secret.safetensors"}, "not a file of its folder"),
        ({"a": "/etc/passwd"}, "not a file of its folder"),
        ({"a": "..\\secret"}, "not a file of its folder"),
        ({"a": ""}, "not a file of its folder"),
        ({"a": 3}, "not a file name"),
        ({"missing": "model-00001.safetensors"}, "does not hold it"),
        ({}, "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_bad_indices_are_refused(tmp_path: Path, weight_map: object, said: str) -> None:
    """Missing shards are named; an index cannot point out of its folder nor to tensors that are not there."""
    folder = folder_of(tmp_path, LLAMA_8B)
    write_safetensors(folder / "model-00001.safetensors", {"a": ("F16", [2])})
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadModel, match=said):
        hf_shape.read_shape(folder)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    """Several safetensors files alone do not say what belongs to the model."""
    folder = folder_of(tmp_path, LLAMA_8B)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        write_safetensors(folder / name, {name: ("F16", [2])})
    with pytest.raises(BadModel, match=r"model\.safetensors\.index\.json"):
        hf_shape.read_shape(folder)


def header_bytes(header: object) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


BAD_HEADERS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "too few"),
    ("length only in part", b"\1\0\0", "too few"),
    ("length beyond the file", struct.pack("<Q", 1 << 60) + b"{}", "offset 0"),
    ("pointer of git", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    ("not JSON", header_bytes(b"\xff{"), "not JSON"),
    ("deep", header_bytes(b"[" * 200_000), "not JSON"),
    ("a list", header_bytes([]), "not an object"),
    ("entry of another kind", header_bytes({"a": 3}), "not an object"),
    ("no dtype", header_bytes({"a": {"shape": [1], "data_offsets": [0, 2]}}), "no dtype"),
    ("negative size", header_bytes({"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]}}), "list of sizes"),
    ("fraction", header_bytes({"a": {"dtype": "F16", "shape": [1.5], "data_offsets": [0, 2]}}), "list of sizes"),
    ("no offsets", header_bytes({"a": {"dtype": "F16", "shape": [1]}}), "data_offsets"),
    ("beyond the data", header_bytes({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}), "truncated"),
    ("backwards", header_bytes({"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 0]}}) + b"00", "truncated"),
    (
        "shape of another size",
        header_bytes({"a": {"dtype": "F16", "shape": [3], "data_offsets": [0, 2]}}) + b"00",
        "needs others",
    ),
    (
        "overlap",
        header_bytes({name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for name in "ab"}) + b"00",
        "overlap",
    ),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD_HEADERS, ids=[row[0] for row in BAD_HEADERS])
def test_bad_headers_end_in_one_sentence(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """A damaged or hostile file is refused by a sentence that names it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadModel, match=said) as caught:
        safetensors.read_header(path)
    assert str(path) in str(caught.value)


def test_a_type_from_the_future_is_unknown_but_its_bytes_are_not(tmp_path: Path) -> None:
    """The data's own length tells the bytes of a number format that is not known."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes({"a": {"dtype": "F2", "shape": [8], "data_offsets": [0, 2]}}) + b"00")
    (tensor,) = safetensors.read_header(path)
    assert (tensor.known, tensor.bytes, tensor.type) == (False, 2, "f2")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    """A folder with ``pytorch_model.bin`` only gets computed weights, and is told so."""
    folder = folder_of(tmp_path, LLAMA_8B)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 10)
    shape = hf_shape.read_shape(folder)
    assert shape.format == "config"
    assert shape.file_bytes == 10
    assert any("pytorch_model.bin" in note.text and note.kind == "assumed" for note in shape.notes)


# Weights from dimensions.


def test_weights_of_llama_from_its_dimensions(tmp_path: Path) -> None:
    """Llama-3-8B has 8,030,261,248 parameters of two bytes."""
    shape = shape_of(tmp_path, LLAMA_8B)
    assert sum(tensor.elements for tensor in shape.tensors) == 8_030_261_248
    assert sum(tensor.bytes for tensor in shape.tensors) == 2 * 8_030_261_248
    assert any(note.bucket == "weights" and note.kind == "assumed" for note in shape.notes)


def quant_of(tmp_path: Path, section: dict[str, Any]) -> hf_quant.Quant:
    found = hf_quant.read(read_config(folder_of(tmp_path, {**LLAMA_8B, "quantization_config": section})))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("section", "expected", "label"),
    [
        # Four bits, and for each of 32 groups of 128 and each output an f16 scale and a packed zero point.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 8388608 + 32 * 4096 * 2 + 32 * 4096 // 2, "awq int4 g128"),
        # The same with GPTQ's index of groups: one i32 per input.
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            8388608 + 32 * 4096 * 2 + 32 * 4096 // 2 + 4 * 4096,
            "gptq int4 g128",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 4096 * 4096 + 4 * 4096, "bnb-8bit int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 8388608 + 4 * 262144, "bnb nf4"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            8388608 + 262144 + 4 * 1024 + 1024,
            "bnb nf4",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 4096 * 4096 + 4 * 32 * 32, "fp8 128x128"),
        ({"quant_method": "mxfp4"}, 4096 * 4096 // 32 * 17, "mxfp4"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
            8388608 + 2 * 2 * 64 * 4096,
            "hqq int4 g64",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True},
                    }
                },
            },
            8388608 + 2 * 32 * 4096,
            "packed int4 g128",
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_quantised_matrix(tmp_path: Path, section: dict[str, Any], expected: int, label: str) -> None:
    """A matrix of 4096 × 4096 takes its packed weights and everything that comes with them."""
    quant = quant_of(tmp_path, section)
    assert quant.matrix(4096, 4096) == expected
    assert quant.label == label


def test_embeddings_in_eight_bits_beside_weights_in_four(tmp_path: Path) -> None:
    """A scheme that targets embeddings and output gives those one byte, the rest half of one and scales."""
    groups = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128, "symmetric": True}},
        "b": {"targets": ["Embedding", "re:.*lm_head"], "weights": {"num_bits": 8, "symmetric": True}},
    }
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    shape = shape_of(tmp_path, {**LLAMA_8B, "quantization_config": section})
    sizes = {tensor.name: tensor for tensor in shape.tensors}
    assert sizes["model.embed_tokens.weight"].bytes == 128256 * 4096
    assert sizes["lm_head.weight"].bytes == 128256 * 4096
    assert sizes["model.layers.0.self_attn.q_proj.weight"].bytes == 8388608 + 2 * 32 * 4096


def test_modules_that_are_not_converted_stay_whole(tmp_path: Path) -> None:
    """Names, parts of names and patterns keep a module in the model's own format."""
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["model.layers.0", "o_proj", "re:.*down_proj$", "re:(a+)+$"],
    }
    shape = shape_of(tmp_path, {**LLAMA_8B, "quantization_config": section})
    types = {tensor.name: tensor.type for tensor in shape.tensors}
    assert types["model.layers.0.self_attn.q_proj.weight"] == "bfloat16"
    assert types["model.layers.1.self_attn.q_proj.weight"] == "awq int4 g128"
    assert types["model.layers.1.self_attn.o_proj.weight"] == "bfloat16"
    assert types["model.layers.1.mlp.down_proj.weight"] == "bfloat16"
    assert types["lm_head.weight"] == "bfloat16"


def test_an_unknown_quantisation_bounds_the_weights(tmp_path: Path) -> None:
    """Its linear layers are not counted, and the weights are said to be unknown."""
    shape = shape_of(tmp_path, {**LLAMA_8B, "quantization_config": {"quant_method": "brandnew"}})
    assert any(note.kind == "unknown" and note.bucket == "weights" for note in shape.notes)
    assert not any(tensor.known for tensor in shape.tensors if tensor.name.endswith("q_proj.weight"))


# The view of mixtures, and the textbook.

"""Properties of Hugging Face folders: whatever is in the files, the answer is a shape or one sentence."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.errors import BadInput, BadModel
from pytest_vram.sizing import hf_shape, moe, safetensors, sglang, transformers_cache, vllm
from pytest_vram.sizing.hf_config import class_defaults

KEYS = [
    *sorted({key for row in class_defaults().classes.values() for key in row["defaults"]}),
    "text_config",
    "quantization_config",
    "torch_dtype",
    "architectures",
    "per_layer_config",
    "linear_attn_config",
    "layer_types",
    "num_kv_shared_layers",
    "global_head_dim",
]
odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(0, 64)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "mamba", "awq", "gptq", "compressed-tensors", "MEM*-"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["quant_method", "bits", "0", "weights", "config_groups"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def folder_with(config: bytes) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "config.json").write_bytes(config)
    return folder


def check(folder: Path) -> None:
    try:
        shape = hf_shape.read_shape(folder)
    except BadModel as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 600
        return
    assert shape.layers
    for layer in shape.layers:
        assert min(layer.k_row, layer.v_row, layer.state_r, layer.state_s, layer.window) >= 0
    assert all(tensor.bytes >= 0 for tensor in shape.tensors)
    facts = moe.facts(shape)
    assert 0 <= facts.non_expert_parameters <= facts.active_parameters or not shape.experts
    for predict in (vllm.predict, sglang.predict, transformers_cache.predict):
        try:
            estimate = predict(shape)
        except BadInput as error:
            assert "\n" not in str(error)
            continue
        assert all(entry.bytes >= 0 for entry in estimate.entries)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(class_defaults().classes)),
    st.dictionaries(st.sampled_from(KEYS), odd, max_size=3),
    st.integers(1, 12),
)
def test_any_value_under_any_key_is_read_or_refused(model: str, changes: dict[str, Any], layers: int) -> None:
    """Odd values under keys that matter never end in anything but a shape or one sentence."""
    config = {"model_type": model, "num_hidden_layers": layers, "architectures": ["X"], **changes}
    with folder_with(json.dumps(config).encode()) as name:
        check(Path(name))


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | odd.map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_as_a_configuration(content: bytes) -> None:
    """Random bytes and random JSON never end in anything but one sentence or a shape."""
    with folder_with(content) as name:
        check(Path(name))


entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*safetensors.BITS, "F2"]) | odd,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | odd,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | odd,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=64)
    | st.dictionaries(st.text(max_size=5), entry | odd, max_size=4).map(
        lambda header: struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode()
    ),
    st.binary(max_size=40),
)
def test_any_bytes_as_weights(header: bytes, data: bytes) -> None:
    """Any file is read, or refused by one sentence; what is read fits into the file."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        path.write_bytes(header + data)
        try:
            tensors = safetensors.read_header(path)
        except BadModel as error:
            assert "\n" not in str(error)
            return
        assert sum(tensor.bytes for tensor in tensors) <= len(header) + len(data)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(safetensors.BITS)), st.lists(st.integers(0, 7), max_size=3)), max_size=6)
)
def test_what_is_written_is_read(tensors: list[tuple[str, list[int]]]) -> None:
    """Bytes, types and dimensions of a well-formed file come back exactly."""
    header: dict[str, Any] = {}
    end = 0
    expected = []
    for index, (dtype, dims) in enumerate(tensors):
        # Whole bytes: four-bit types come in pairs, six-bit ones in fours.
        shape = [*dims, 4]
        size = 1
        for length in shape:
            size *= length
        size = size * safetensors.BITS[dtype] // 8
        header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        expected.append((f"t{index}", tuple(reversed(shape)), dtype.lower(), size))
        end += size
    raw = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
        found = safetensors.read_header(path)
    assert sorted((row.name, row.dims, row.type, row.bytes) for row in found) == sorted(expected)

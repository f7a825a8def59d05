"""vLLM, SGLang and transformers: bytes per token, blocks and tokens, held against what engines printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing import hf_shape, serving, sglang, transformers_cache, vllm
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import Layer, Mla, ModelShape, Tensor

GIB = 1 << 30


def model(layers: int, kv_heads: int, *, heads: int = 32, head: int = 128, window: int = 0) -> ModelShape:
    layer = Layer(
        heads=heads,
        kv_heads=kv_heads,
        key_length=head,
        value_length=head,
        k_row=kv_heads * head,
        v_row=kv_heads * head,
        window=window,
    )
    return ModelShape(source="m", format="config", architecture="x", context=131072, layers=(layer,) * layers)


def per_token(engine: Any, shape: ModelShape, cards: int = 1, kind: str = "auto", element: int | None = None) -> int:
    """Bytes of a token on one card, over all blocks."""
    size = serving.loaded_element(shape, "auto") if element is None else element
    if engine is vllm:
        return sum(vllm.token_bytes(shape, layer, cards, kind, size) for layer in shape.layers)
    size = sglang.cache_element(kind, size)
    return sum(sum(sglang.token_bytes(shape, layer, cards, size, kind)) for layer in shape.layers)


LLAMA_8B = model(32, 8)
QWEN3_235B = model(94, 4, heads=64)
QWEN3_CODER_30B = model(48, 4)


def read(tmp_path: Path, config: dict[str, Any]) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return hf_shape.read_shape(tmp_path)


def entry_of(estimate: Estimate, bucket: str, device: str = "gpu0") -> tuple[int, int | None]:
    (entry,) = [entry for entry in estimate.entries if entry.bucket == bucket and entry.device == device]
    return entry.bytes, entry.at_most


# Figures that engines printed.


def test_llama_8b_takes_128_kib_per_token_and_half_on_two_cards() -> None:
    """131072 bytes per token on one card, 65536 on each of two."""
    assert per_token(vllm, LLAMA_8B) == 131072
    assert per_token(vllm, LLAMA_8B, 2) == 65536


def test_blocks_of_a_boot_on_two_cards() -> None:
    """3852 blocks of 16 tokens are 61,632 tokens, 3.76 GiB, and 1.54 requests of 40,000 tokens."""
    here = vllm.pool(LLAMA_8B, vllm.Options(tensor_parallel_size=2))
    memory = 3852 * 16 * 65536
    assert round(memory / GIB, 2) == 3.76
    assert here.blocks(memory + here.block_bytes - 1) == 3852
    assert here.tokens(memory) == 61632
    assert round(here.concurrency(memory, 40000), 2) == 1.54
    # 15.77 GiB × 0.90 minus weights, peak activations and what is not torch's.
    left = vllm.available(int(15.77 * GIB), 0.90, int(7.51 * GIB), int((2.53 + 0.39) * GIB))
    assert abs(left - 3.76 * GIB) < 0.01 * GIB


@pytest.mark.parametrize(
    ("memory", "length", "blocks", "tokens", "concurrency"),
    [(3.81, 20000, 1952, 31232, 1.56), (2.89, 29000, 1478, 23648, 0.82)],
)
def test_blocks_of_two_boots_of_llama_8b(
    memory: float, length: int, blocks: int, tokens: int, concurrency: float
) -> None:
    """The printed cache (two decimals of GiB) holds the printed blocks within what the rounding hides."""
    here = vllm.pool(LLAMA_8B, vllm.Options())
    low, high = int((memory - 0.005) * GIB), int((memory + 0.005) * GIB)
    assert here.blocks(low) <= blocks <= here.blocks(high)
    exact = blocks * here.block_bytes
    assert here.tokens(exact) == tokens
    assert round(here.concurrency(exact, length), 2) == concurrency
    assert (here.needed(length) <= exact) is (concurrency >= 1)


def test_qwen3_235b_on_four_cards_takes_the_same_under_both_engines() -> None:
    """48,128 bytes per token and card: 178,880 tokens are 8.018 GiB, 367,404 are 16.468 in halves of 8.234."""
    assert per_token(vllm, QWEN3_235B, 4) == 48128
    assert per_token(sglang, QWEN3_235B, 4) == 48128
    here = vllm.pool(QWEN3_235B, vllm.Options(tensor_parallel_size=4))
    assert here.tokens(178_880 * 48128) == 178_880
    assert round(178_880 * 48128 / GIB, 3) == 8.018
    pool = sglang.pool(QWEN3_235B, sglang.Options(tp_size=4), QWEN3_235B.layers)
    assert round(367_404 * pool.k / GIB, 3) == 8.234
    assert round((pool.size(367_404)) / GIB, 2) == 16.47


def test_one_million_tokens_on_eight_cards_need_24_gib() -> None:
    """48 blocks with one K and V head left on each of eight cards."""
    here = vllm.pool(model(48, 8, heads=40), vllm.Options(tensor_parallel_size=8))
    assert here.needed(1_048_576) == 24 * GIB


def test_stages_need_what_their_blocks_need() -> None:
    """Of 24 GiB for 262,144 tokens a stage of 16 blocks needs 8, one of 32 needs 16; 3.18 GiB hold 34,736 tokens."""
    options = vllm.Options(pipeline_parallel_size=2, pp_layer_partition="16,32", max_model_len=262144)
    assert vllm.stages(48, options) == (16, 32)
    needs = [vllm.pool(QWEN3_CODER_30B, options, QWEN3_CODER_30B.layers[:n]).needed(262144) for n in (16, 32, 48)]
    assert needs == [8 * GIB, 16 * GIB, 24 * GIB]
    here = vllm.pool(QWEN3_CODER_30B, vllm.Options())
    assert here.longest(int(3.185 * GIB), 262144) >= 34736 >= here.longest(int(3.175 * GIB), 262144)


def test_the_check_before_anything_is_loaded() -> None:
    """With 3.22 of 4 GiB free vLLM refuses 0.9 of the card and would start with 0.80."""
    starts, largest = vllm.startup_check(4 * GIB, int(3.22 * GIB), 0.9)
    assert not starts
    assert int(largest * 100) / 100 == 0.8
    assert vllm.startup_check(4 * GIB, int(3.22 * GIB), 0.8)[0]


def test_a_card_that_is_too_full_is_a_warning() -> None:
    """With device_free the check before the start is in the notes; a free part without a whole is refused."""
    options = {"device_memory": 24 * GIB, "gpu_memory_utilization": 0.9, "max_model_len": 8192}
    said = " ".join(note.text for note in vllm.predict(LLAMA_8B, device_free=20 * GIB, **options).notes)
    assert "vllm will refuse to start: 20.00 GiB are free, less than 0.9 of the card's 24.00 GiB" in said
    assert "gpu_memory_utilization up to 0.83 would do" in said
    fine = vllm.predict(LLAMA_8B, device_free=23 * GIB, **options)
    assert "refuse to start" not in " ".join(note.text for note in fine.notes)
    assert "--device-free" not in fine.command
    with pytest.raises(BadInput, match="device_memory"):
        vllm.predict(LLAMA_8B, device_free=GIB, max_model_len=16)


def test_requests_at_once_are_told() -> None:
    """Where the cache is known, how many requests of full length have room is said, beside max_num_seqs."""
    made = vllm.predict(LLAMA_8B, kv_cache_memory_bytes=4 * GIB, max_model_len=8192, max_num_seqs=16)
    assert any(
        "4.00 requests of 8192 tokens have room at once on gpu0, of max_num_seqs 16" in n.text for n in made.notes
    )
    made = vllm.predict(LLAMA_8B, max_model_len=8192)
    assert not any("at once" in note.text for note in made.notes)


def test_more_than_the_trained_context_is_refused() -> None:
    """vLLM refuses a longer request than the model was trained for; allowed, it is counted, with a warning."""
    with pytest.raises(BadInput, match="131072 tokens: write at most 131072, or allow_long_max_model_len"):
        vllm.predict(LLAMA_8B, max_model_len=131073)
    made = vllm.predict(LLAMA_8B, max_model_len=262144, allow_long_max_model_len=True)
    assert made.settings["max_model_len"] == 262144
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in " ".join(note.text for note in made.notes)
    assert not any("allow" in word for word in made.command)
    assert vllm.predict(LLAMA_8B, max_model_len=131072).settings["max_model_len"] == 131072
    said = " ".join(note.text for note in sglang.predict(LLAMA_8B, context_length=262144).notes)
    assert "longer than the trained 131072" in said


@pytest.mark.parametrize(
    ("rope", "trained"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "longrope", "factor": 8.0}, 4096),
        ({"rope_type": "default"}, 4096),
        (None, 4096),
    ],
)
def test_rotary_scaling_stretches_the_trained_context(tmp_path: Path, rope: object, trained: int) -> None:
    """vLLM multiplies the configured length by the factor of linear, dynamic and yarn scaling, not by that of others."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    shape = read(tmp_path, config | {"vocab_size": 100, "torch_dtype": "bfloat16", "rope_scaling": rope})
    assert vllm.trained_length(shape) == trained


def test_a_table_of_requests_is_not_counted_in_silence() -> None:
    """max_running_requests costs a table that no figure here has."""
    made = sglang.predict(LLAMA_8B, context_length=1024, max_running_requests=2048)
    assert "other" in made.unknown


def test_attention_blocks_of_a_hybrid_hold_a_state(tmp_path: Path) -> None:
    """vLLM makes blocks of 544 tokens for Qwen3-Next, so that a page of attention holds a recurrent state."""
    shape = read(tmp_path, {"model_type": "qwen3_next", "architectures": ["Q"], "torch_dtype": "bfloat16"})
    here = vllm.pool(shape, vllm.Options())
    assert {group.spec.tokens for group in here.groups} == {544}
    # 12 blocks of attention and 36 of states: four groups of 12 layers share each page.
    assert [group.layers for group in here.groups] == [12, 12, 12, 12]
    assert here.block_bytes == 12 * 544 * 2048


# Rules.


@pytest.mark.parametrize(
    ("cards", "kv_heads", "expected"), [(1, 8, 8), (2, 8, 4), (8, 8, 1), (16, 8, 1), (4, 2, 1), (1, 1, 1)]
)
def test_each_card_holds_at_least_one_head(cards: int, kv_heads: int, expected: int) -> None:
    """K and V heads are divided over the cards, never below one."""
    shape = model(1, kv_heads, heads=16)
    assert per_token(vllm, shape, cards) == expected * 128 * 2 * 2
    assert per_token(sglang, shape, cards) == expected * 128 * 2 * 2


def latent(indexer: int = 0) -> ModelShape:
    layer = Layer(heads=128, kv_heads=128, key_length=192, value_length=128, k_row=576, indexer_row=indexer)
    mla = Mla(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128)
    return ModelShape(source="m", format="config", architecture="x", context=4096, layers=(layer,) * 61, mla=mla)


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_latent_attention_is_not_divided(cards: int) -> None:
    """Every card keeps all 576 elements of each token."""
    assert per_token(vllm, latent(), cards) == 61 * 576 * 2
    assert per_token(sglang, latent(), cards) == 61 * 576 * 2
    assert per_token(vllm, latent(), cards, "fp8_ds_mla") == 61 * 656
    assert per_token(sglang, latent(128), cards, "fp8_e4m3") == 61 * (656 + 132)
    assert per_token(vllm, latent(128), cards) == 61 * (576 * 2 + 132)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 2 * 128 * 2),
        ("fp8", 2 * 128),
        ("fp8_e5m2", 2 * 128),
        ("int8_per_token_head", 2 * 128 + 8),
        ("nvfp4", 2 * (64 + 8)),
    ],
)
def test_cache_types(dtype: str, expected: int) -> None:
    """Bytes per head and token of the cache types."""
    assert per_token(vllm, model(1, 1), 1, dtype) == expected


def windowed(full: int, windows: int) -> ModelShape:
    base = model(1, 8).layers[0]
    narrow = model(1, 8, window=1024).layers[0]
    return ModelShape(
        source="m", format="config", architecture="x", context=131072, layers=(base,) * full + (narrow,) * windows
    )


@pytest.mark.parametrize(
    ("full", "windows", "groups"),
    [
        (8, 40, [8] * 6),
        (12, 12, [12, 12]),
        # Not 1.5 times as many: the rarer kind is padded instead of both being split.
        (13, 12, [13, 12]),
        # Split as evenly as can be, and padded to the widest.
        (5, 29, [5, 5, 5, 5, 5, 5, 4]),
    ],
)
def test_window_blocks_are_grouped_with_full_ones(full: int, windows: int, groups: list[int]) -> None:
    """Groups have as many layers as the rarer kind, and one page serves a layer of each group."""
    here = vllm.pool(windowed(full, windows), vllm.Options())
    assert sorted((group.layers for group in here.groups), reverse=True) == groups
    assert here.block_bytes == max(groups) * 16 * 4096


def test_a_window_needs_its_reach_and_a_step() -> None:
    """One request of 131,072 tokens: all of them in full blocks, the window, one step and a block more in others."""
    here = vllm.pool(windowed(8, 40), vllm.Options())
    window_blocks = -(-(1023 + 2048) // 16) + 1
    assert here.needed(131072, 2048) == 8 * 16 * 4096 * (8192 + 5 * window_blocks)
    flat = vllm.pool(windowed(8, 40), vllm.Options(disable_hybrid_kv_cache_manager=True))
    assert flat.needed(131072) == 48 * 4096 * 131072


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(32, 2, (16, 16)), (61, 2, (31, 30)), (61, 4, (15, 15, 16, 15)), (94, 4, (23, 24, 24, 23)), (5, 1, (5,))],
)
def test_pipeline_stages(layers: int, count: int, expected: tuple[int, ...]) -> None:
    """Blocks that are left over go to the stages before the last."""
    assert vllm.stages(layers, vllm.Options(pipeline_parallel_size=count)) == expected
    assert sglang.stages(layers, count) == expected


def with_tensors(shape: ModelShape, *names: tuple[str, tuple[int, ...]]) -> ModelShape:
    import msgspec

    tensors = tuple(
        Tensor(name=name, dims=dims, type="bf16", bytes=2 * dims[0] * (dims[1] if len(dims) > 1 else 1))
        for name, dims in names
    )
    return msgspec.structs.replace(shape, tensors=tensors, format="safetensors")


@pytest.mark.parametrize(
    ("name", "dims", "cards", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), 4, 2048),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), 4, 4096),
        ("model.layers.0.input_layernorm.weight", (64,), 4, 128),
        ("model.layers.0.mlp.gate.weight", (64, 8), 4, 1024),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), 4, 2048),
        ("model.layers.0.self_attn.q_proj.bias", (64,), 4, 32),
        ("model.layers.0.self_attn.o_proj.bias", (64,), 4, 128),
        ("lm_head.weight", (64, 64), 4, 2048),
    ],
)
def test_what_of_a_tensor_is_on_each_card(name: str, dims: tuple[int, ...], cards: int, expected: int) -> None:
    """Matrices are divided, K and V no further than their heads; norms and routers are whole."""
    shape = with_tensors(model(2, 2, heads=4), (name, dims))
    estimate = vllm.predict(shape, tensor_parallel_size=cards, max_model_len=16)
    assert entry_of(estimate, "weights", f"gpu{cards - 1}") == (expected, None)


def test_stages_hold_their_own_blocks_and_a_tied_table_twice() -> None:
    """Embeddings are on the first stage, on the last too when they are the output; vision is on the first."""
    import msgspec

    shape = with_tensors(
        model(2, 2, heads=4),
        ("model.embed_tokens.weight", (10, 10)),
        ("model.layers.0.mlp.up_proj.weight", (10, 20)),
        ("model.layers.1.mlp.up_proj.weight", (10, 30)),
        ("visual.blocks.0.mlp.weight", (10, 40)),
    )
    tied = msgspec.structs.replace(shape, tied=True)
    estimate = vllm.predict(tied, pipeline_parallel_size=2, max_model_len=16)
    assert entry_of(estimate, "weights", "gpu0") == (200 + 400, None)
    assert entry_of(estimate, "weights", "gpu1") == (200 + 600, None)
    assert entry_of(estimate, "projector", "gpu0") == (800, None)


def test_stated_cache_is_exact_in_whole_blocks() -> None:
    """``kv_cache_memory_bytes`` is floored to blocks; ``num_gpu_blocks_override`` beats it."""
    estimate = vllm.predict(LLAMA_8B, kv_cache_memory_bytes=GIB + 1, max_model_len=4096)
    assert entry_of(estimate, "kv") == (GIB, None)
    estimate = vllm.predict(LLAMA_8B, kv_cache_memory_bytes=GIB, num_gpu_blocks_override=7, max_model_len=16)
    assert entry_of(estimate, "kv") == (7 * 16 * 131072, None)


def test_a_share_of_the_card_bounds_the_cache() -> None:
    """Without what profiling finds the cache is a range; with it, exact; too little is told with what would fit."""
    options = {"device_memory": 24 * GIB, "gpu_memory_utilization": 0.9, "max_model_len": 8192}
    size, at_most = entry_of(vllm.predict(LLAMA_8B, **options), "kv")
    assert size == 8192 * 131072
    assert at_most is not None
    assert at_most <= 0.9 * 24 * GIB < at_most + 16 * 131072
    exact = vllm.predict(LLAMA_8B, **options, activation_memory=2 * GIB)
    assert entry_of(exact, "kv")[1] is None
    small = vllm.predict(LLAMA_8B, device_memory=GIB, gpu_memory_utilization=0.5, max_model_len=8192)
    (warning,) = [note for note in small.notes if note.kind == "warning"]
    assert "max_model_len up to 4096 fits" in warning.text


def test_what_files_cannot_tell_is_unknown() -> None:
    """Activations, graphs and context are unknown buckets, never zero."""
    for estimate in (
        vllm.predict(LLAMA_8B, max_model_len=16),
        sglang.predict(LLAMA_8B, context_length=16),
        transformers_cache.predict(LLAMA_8B, max_length=16),
    ):
        assert {"compute", "context"} <= set(estimate.unknown)
        assert not estimate.exact
        assert not any(entry.bucket in ("compute", "context") for entry in estimate.entries)


def test_sglang_takes_its_share() -> None:
    """Weights and cache together take ``mem_fraction_static``; ``max_total_tokens`` makes the cache exact."""
    estimate = sglang.predict(LLAMA_8B, mem_fraction_static=0.5, device_memory=8 * GIB, context_length=4096)
    size, at_most = entry_of(estimate, "kv")
    assert size == 4097 * 131072
    assert at_most == 4 * GIB + 131072
    estimate = sglang.predict(
        LLAMA_8B, mem_fraction_static=0.5, device_memory=8 * GIB, max_total_tokens=1000, page_size=64
    )
    assert entry_of(estimate, "kv") == (1064 * 131072, None)


def test_sglang_gives_windows_fewer_tokens() -> None:
    """The window pool has 0.8 tokens for each of the full pool."""
    pool = sglang.pool(windowed(8, 40), sglang.Options(), windowed(8, 40).layers)
    assert pool.k + pool.v == (8 + 40 * 0.8) * 4096


def test_sglang_divides_between_states_and_cache(tmp_path: Path) -> None:
    """Without a number of states they get 0.9 bytes for each byte of cache."""
    shape = read(tmp_path, {"model_type": "qwen3_next", "architectures": ["Q"], "torch_dtype": "bfloat16"})
    import msgspec

    bare = msgspec.structs.replace(shape, tensors=())
    estimate = sglang.predict(bare, mem_fraction_static=0.5, device_memory=38 * GIB, context_length=4096)
    _, states = entry_of(estimate, "recurrent")
    _, cache = entry_of(estimate, "kv")
    assert states is not None
    assert cache is not None
    assert abs(states / cache - 0.9) < 0.01
    unknown = sglang.predict(bare, context_length=4096)
    assert "recurrent" in unknown.unknown


# Options.


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_option_names_are_the_engines_own(engine: str) -> None:
    """The names that an estimate understands are listed for each engine."""
    names = serving.engine_options(engine)
    wanted = {
        "vllm": {"tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "block_size"},
        "sglang": {"tp_size", "mem_fraction_static", "context_length"},
        "transformers": {"max_length", "cache_implementation", "batch_size"},
    }
    assert wanted[engine] <= set(names)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'"),
    ({"zzz": 2}, "known here are"),
    ({"max_model_len": -1}, "max_model_len"),
    ({"max_model_len": "many"}, "max_model_len"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
    ({"kv_cache_dtype": "q8_0"}, "kv_cache_dtype"),
    ({"block_size": 0}, "block_size"),
    ({"tensor_parallel_size": 3}, "cannot divide 32 attention heads"),
    ({"pipeline_parallel_size": 99}, "more than the model's 32 blocks"),
    ({"pipeline_parallel_size": 2, "pp_layer_partition": "16,17"}, "add up to 32"),
    ({"pipeline_parallel_size": 2, "pp_layer_partition": "a"}, "write 16,32"),
    ({"max_model_len": 5, "max-model-len": 6}, "given twice"),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS)
def test_bad_options_end_in_one_sentence(options: dict[str, Any], said: str) -> None:
    """Unknown names get a near one, values are refused with their option's name."""
    with pytest.raises(BadInput, match=said) as caught:
        vllm.predict(LLAMA_8B, **options)
    assert "\n" not in str(caught.value)


def test_options_may_come_from_a_command_line() -> None:
    """Text is converted and dashes are names."""
    estimate = vllm.predict(LLAMA_8B, **{"max-model-len": "4096", "tensor-parallel-size": "2", "enforce-eager": "true"})
    assert estimate.settings["max_model_len"] == 4096
    assert entry_of(estimate, "kv", "gpu1") == (4096 * 65536, None)
    assert estimate.command[:4] == ("vllm", "serve", "m", "--max-model-len")


# transformers.


@pytest.mark.parametrize(
    ("length", "dynamic", "static"), [(1, 1, 1), (15, 15, 15), (16, 15, 16), (17, 15, 16), (100, 15, 16)]
)
def test_windows_of_transformers_caches(length: int, dynamic: int, static: int) -> None:
    """A window of 16 keeps 15 tokens between steps in a dynamic cache, and 16 in a static one."""
    layer = Layer(kv_heads=2, key_length=8, value_length=8, k_row=16, v_row=16, window=16)
    assert transformers_cache.dynamic_layer(layer, 3, length, 2) == 3 * dynamic * 32 * 2
    assert transformers_cache.static_layer(layer, 3, length, 2) == 3 * static * 32 * 2


@pytest.mark.parametrize(
    ("length", "expected"), [(0, (0, 0)), (1, (1, 0)), (2, (1, 1)), (128, (1, 127)), (129, (129, 0)), (130, (129, 1))]
)
def test_tokens_of_a_quantised_cache(length: int, expected: tuple[int, int]) -> None:
    """The last tokens stay whole until there are 128 of them."""
    assert transformers_cache.quantized_tokens(length, 128) == expected


def test_a_quantised_cache_refuses_windows() -> None:
    """transformers refuses it, and the message says what serves instead."""
    with pytest.raises(BadInput, match="use dynamic or static"):
        transformers_cache.predict(model(2, 2, window=16), cache_implementation="quantized", max_length=32)


def test_an_offloaded_cache_is_on_the_host() -> None:
    """Its bytes are host memory."""
    estimate = transformers_cache.predict(LLAMA_8B, cache_implementation="offloaded", max_length=4096)
    assert entry_of(estimate, "kv", "host") == (4096 * 131072, None)


def test_encoders_have_no_cache_anywhere(tmp_path: Path) -> None:
    """A reranker's estimate has weights and no KV cache in any engine."""
    shape = read(tmp_path, {"model_type": "xlm-roberta", "architectures": ["X"], "torch_dtype": "float16"})
    for estimate in (vllm.predict(shape), sglang.predict(shape), transformers_cache.predict(shape)):
        assert not any(entry.bucket == "kv" for entry in estimate.entries)
        assert any(entry.bucket == "weights" for entry in estimate.entries)

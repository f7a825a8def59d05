"""Options of llama-server, as users write them: by keyword, in a spec file, or in a pasted command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.errors import BadInput
from pytest_vram.sizing import engine_options, llama_options
from pytest_vram.sizing.options import Device, Draft, LlamaOptions

PASTED = (
    "llama-server -m my.gguf -ngl 999 --n-cpu-moe 6 -c 4096 --cache-type-k q8_0 --cache-type-v q8_0 -fa on -t 8 --mlock"
)


def read(text: str) -> llama_options.Given:
    """A command line, read."""
    found, others = engine_options.pairs(shlex.split(text))
    assert others == []
    return llama_options.read(found)


def test_a_pasted_command_line_is_understood() -> None:
    """Short and long forms, switches and the program's name itself."""
    given = read(PASTED)
    assert given.model == "my.gguf"
    assert given.kept == ("--threads", "8")
    assert given.options == LlamaOptions(
        n_gpu_layers=999,
        n_cpu_moe=6,
        ctx_size=4096,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        flash_attn="on",
        mlock=True,
        mmap=False,
    )


@pytest.mark.parametrize(
    ("mapping", "field", "value"),
    [
        ({"n_gpu_layers": 12}, "n_gpu_layers", 12),
        ({"gpu-layers": "12"}, "n_gpu_layers", 12),
        ({"--n-gpu-layers": "all"}, "n_gpu_layers", None),
        ({"n_gpu_layers": "auto"}, "n_gpu_layers", None),
        ({"n_gpu_layers": -1}, "n_gpu_layers", None),
        ({"parallel": -1}, "parallel", None),
        ({"parallel": "3"}, "parallel", 3),
        ({"flash_attn": True}, "flash_attn", "on"),
        ({"flash_attn": "0"}, "flash_attn", "off"),
        ({"flash-attn": "auto"}, "flash_attn", "auto"),
        ({"kv_offload": False}, "kv_offload", False),
        ({"no-kv-offload": True}, "kv_offload", False),
        ({"no_kv_unified": False}, "kv_unified", True),
        ({"kv-unified": "on"}, "kv_unified", True),
        ({"no-mmap": True}, "mmap", False),
        ({"load_mode": "none"}, "mmap", False),
        ({"load_mode": "mmap+mlock"}, "mlock", True),
        ({"no_host": True}, "no_host", True),
        ({"no-repack": True}, "repack", False),
        ({"tensor_split": "3,1"}, "tensor_split", (3.0, 1.0)),
        ({"tensor_split": [3, 1]}, "tensor_split", (3.0, 1.0)),
        ({"override_tensor": "a=CPU,b=CUDA0"}, "override_tensor", (("a", "CPU"), ("b", "CUDA0"))),
        ({"override_tensor": [("a", "CPU")]}, "override_tensor", (("a", "CPU"),)),
        ({"n_cpu_ffn": 1}, "override_tensor", ((r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),)),
        ({"lora": "a.gguf,b.gguf"}, "lora", ("a.gguf", "b.gguf")),
        ({"lora_scaled": "a.gguf:0.5"}, "lora", ("a.gguf",)),
        ({"lora_scaled": "a.gguf:0.5,b.gguf:-1e1"}, "lora", ("a.gguf", "b.gguf")),
        ({"lora": Path("a.gguf")}, "lora", ("a.gguf",)),
        ({"mmproj": Path("p.gguf")}, "mmproj", "p.gguf"),
        ({"model_draft": Path("d.gguf")}, "draft", Draft(model="d.gguf")),
        ({"mmproj": "p.gguf", "no_mmproj": True}, "mmproj", None),
        ({"embeddings": True}, "batch_size", 512),
        ({"reranking": True}, "embeddings", True),
        ({"kv_unified_per_slot": 1000, "parallel": 2}, "ctx_size", 2000),
        ({"model_draft": "d.gguf"}, "draft", Draft(model="d.gguf")),
        ({"spec_type": "draft-mtp"}, "draft", Draft(kind="draft-mtp")),
        ({"spec_type": "ngram-simple"}, "draft", None),
        ({"device": "none"}, "devices", ()),
        ({"device": "Vulkan0"}, "devices", (Device(label="gpu0", kind="vulkan", name="Vulkan0"),)),
        ({"rpc": "127.0.0.1:1"}, "devices", (Device(label="gpu0", kind="rpc", name="RPC0", server="127.0.0.1:1"),)),
        ({"cache_ram": -1}, "cache_ram", -1),
        ({"ctx_size": None}, "ctx_size", 0),
    ],
)
def test_values_are_read(mapping: dict[str, Any], field: str, value: object) -> None:
    """Each spelling means what the engine makes of it."""
    assert getattr(llama_options.options_of(mapping), field) == value


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"ctx_size": -1}, "'ctx-size' = -1 ([backend.agent]) cannot be used: write a whole number from 0"),
        ({"ctx_size": "8k"}, "'ctx-size' = '8k'"),
        ({"ctx_size": True}, "'ctx-size' = True"),
        ({"ctx_size": 1 << 40}, "ctx-size"),
        ({"ubatch_size": 0}, "'ubatch-size' = 0"),
        ({"parallel": 0}, "'parallel' = 0 ([backend.agent]) cannot be used: write a number of slots from 1 to 256"),
        ({"cache_type_k": "q3_0"}, "one of f32, f16, bf16, q8_0"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "needs flash attention"),
        ({"ctxsize": 1}, "did you mean 'ctx-size'"),
        ({"ngl": 1}, "did you mean 'n-gpu-layers'"),
        ({"qqqqqq": 1}, "as in its --help"),
        ({"gpu_layers": 1, "n_gpu_layers": 1}, "the same as 'gpu_layers'"),
        ({"mlock": "perhaps"}, "is a switch"),
        ({"mlock": 1}, "is a switch"),
        ({"device": "none,CUDA0"}, "device"),
        ({"device": ""}, "device"),
        ({"override_tensor": "abc"}, "PATTERN=BUFFER"),
        ({"override_tensor": "a(=CPU"}, "regular expression"),
        ({"tensor_split": "x"}, "shares such as 3,1"),
        ({"tensor_split": "0,0"}, "shares such as 3,1"),
        ({"main_gpu": 3}, "main-gpu"),
        ({"ctx_size": 10**5000}, "a number that is too long to be written"),
        ({"ctx_size": 1 << 31}, "write a whole number from 0 to 2147483647"),
        ({"ctx_size": 4096.0}, "'ctx-size' = 4096.0"),
        ({"ctx_size": b"1"}, "'ctx_size' = b'1' ([backend.agent]) cannot be used: write text, a number"),
        ({"threads": {}}, "'threads' = {} ([backend.agent]) cannot be used: write text, a number"),
        ({"threads": [b"1"]}, "write text, a number"),
        ({"kv_unified_per_slot": 1 << 30, "parallel": 4}, "at most 536870911 tokens for each of 4 slots"),
        ({"device": "Nope"}, "'device' = 'Nope' ([backend.agent]) cannot be used: write device names such as CUDA0"),
        ({"device": "CUDA99999999"}, "device"),
        ({"device": "cpu"}, "device"),
        ({"device": 3}, "device"),
        ({"device": "CUDA0,cuda0"}, "each device once"),
        ({"rpc": "a"}, "'rpc' = 'a' ([backend.agent]) cannot be used: write servers as HOST:PORT"),
        ({"rpc": "a:1,b:9999999"}, "'rpc' = 'b:9999999'"),
        ({"rpc": ","}, "HOST:PORT"),
        ({"tensor_split": ",".join("1" * 16)}, "up to 15 shares"),
        ({"tensor_split": "1_0,1"}, "shares such as 3,1"),
        ({"override_kv": "x"}, "'override-kv' = 'x' ([backend.agent]) cannot be used: write KEY=TYPE:VALUE"),
        ({"override_kv": "a=int:1,b=number:2"}, "KEY=TYPE:VALUE"),
        ({"override_kv": "a=bool:yes"}, "KEY=TYPE:VALUE"),
        ({"override_kv": f"a=str:{'x' * 128}"}, "KEY=TYPE:VALUE"),
        ({"override_kv": "a=int:x\n"}, "KEY=TYPE:VALUE"),
        ({"lora_scaled": "a.gguf"}, "'lora-scaled' = 'a.gguf' ([backend.agent]) cannot be used: write PATH:SCALE"),
        ({"lora_scaled": "a.gguf:big"}, "'lora-scaled'"),
        ({"help": True}, "prints something and exits"),
        ({"list_devices": True}, "prints something and exits"),
        ({"spec_type": "draft-simple"}, "add model-draft"),
        ({"spec_type": "magic"}, "spec-type"),
        ({"hf_repo": "a/b"}, "have to be fetched"),
        ({"threads": True}, "threads"),
        ({"load_mode": "fast"}, "auto, none, mmap"),
        ({"n_gpu_layers": "most"}, "auto or all"),
        ({"flash_attn": "maybe"}, "on, off or auto"),
        ({"pooling": "max"}, "none, mean"),
        ({"lora": ""}, "lora"),
        ({"n_cpu_ffn": 1 << 20}, "n-cpu-ffn"),
    ],
)
def test_a_bad_value_is_one_sentence(mapping: dict[str, Any], says: str) -> None:
    """The message names option, value and what is accepted, and where it came from."""
    with pytest.raises(BadInput) as caught:
        llama_options.read(mapping, origin="[backend.agent]")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--foo 3", "no option '--foo'"),
        ("--ctx-sise 3", "did you mean 'ctx-size'"),
        ("-c", "'-c' has no value: write -c N"),
        ("--mlock=3", "takes no value"),
        ("-zz 3", "no option '-zz'"),
    ],
)
def test_a_bad_word_is_one_sentence(text: str, says: str) -> None:
    """Unknown options and missing values of a command line are named."""
    with pytest.raises(BadInput, match=says):
        engine_options.pairs(text.split())


def test_words_of_older_builds_are_read() -> None:
    """`-fa` alone was on; of several values of one option the last counts; added ones add up."""
    found, others = engine_options.pairs(
        ["-fa", "--ctx-size=100", "-c", "200", "-ot", "a=CPU", "-ot", "b=CPU", "x.gguf"]
    )
    assert found == {"flash-attn": True, "ctx-size": "200", "override-tensor": ["a=CPU", "b=CPU"]}
    assert others == ["x.gguf"]


def test_what_is_assumed_is_said() -> None:
    """A card that nobody named is a note, and so is an option that no rule follows."""
    notes = llama_options.read({"override_kv": "a=int:1"}).notes
    assert any(note.kind == "assumed" and "one CUDA card" in note.text for note in notes)
    assert any(note.kind == "unknown" and "override-kv a=int:1" in note.text for note in notes)
    assert not any("CUDA card" in note.text for note in llama_options.read({"device": "CUDA0"}).notes)


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer.ggml.add_bos_token=bool:false,tokenizer.ggml.add_eos_token=bool:false",
        "general.name=str:x y",
        "llama.rope.freq_base=float:1e6",
        "llama.attention.layer_norm_rms_epsilon=float:1e-5",
    ],
)
def test_metadata_without_a_say_in_memory_may_be_overridden(text: str) -> None:
    """The words' own and factors inside of operators change no size, so that nothing becomes unknown."""
    given = llama_options.read({"override_kv": text})
    assert not any(note.kind == "unknown" for note in given.notes)
    assert given.kept == ("--override-kv", text)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "qwen3moe.expert_used_count", "general.architecture", "a.rope.scaling.finetuned"]
)
def test_metadata_that_a_size_may_depend_on_makes_it_unknown(key: str) -> None:
    """What is overridden is not applied, so that no budget may be promised."""
    notes = llama_options.read({"override_kv": ["general.name=str:x", f"{key}=int:1"]}).notes
    assert [note.text.partition(":")[0] for note in notes if note.kind == "unknown"] == [f"override-kv {key}=int"]


def test_shares_for_devices_that_are_not_there_are_said() -> None:
    """The engine ignores them."""
    assert any("3 shares for 1 device" in note.text for note in llama_options.read({"tensor_split": "1,1,1"}).notes)
    notes = llama_options.read({"tensor_split": "1,1", "device": "CUDA0,CUDA1"}).notes
    assert not any("shares" in note.text for note in notes)


@pytest.mark.parametrize(
    "name", ["CUDA0", "cuda15", "ROCm0", "Vulkan0", "Metal", "MTL0", "SYCL1", "RPC0", "RPC[127.0.0.1:50052]",
             "MUSA0", "CANN0", "GPUOpenCL", "WebGPU", "OPENVINO0", "HTP0"],
)  # fmt: skip
def test_devices_of_every_kind_of_build_are_taken(name: str) -> None:
    """Names that builds of llama.cpp give to devices; of some no more is known than the name."""
    assert [device.name for device in llama_options.options_of({"device": name}).devices] == [name]


def test_rpc_servers_come_before_the_devices_that_they_are() -> None:
    """The engine reads its words in order, and knows no RPC0 before --rpc."""
    given = read("-m x.gguf --device RPC0 --rpc 127.0.0.1:1")
    words = llama_options.command(given.options, "x.gguf", given.kept)
    assert words.index("--rpc") < words.index("--device")


def test_every_option_has_one_name() -> None:
    """No spelling of the table belongs to two options."""
    table = msgspec.json.decode(engine_options._TABLE.read_bytes(), type=list[engine_options.EngineOption])
    spellings = [name for row in table for name in (row.name, *row.aliases, *row.negatives)]
    short = [name for row in table for name in (*row.short, *row.negative_short)]
    assert len(spellings) == len(set(spellings))
    assert len(short) == len(set(short))


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "ctx_size": st.integers(0, 1 << 20),
        "batch_size": st.integers(1, 4096),
        "ubatch_size": st.integers(1, 4096),
        "parallel": st.integers(1, 256),
        "kv_unified": st.booleans(),
        "flash_attn": st.sampled_from(["on", "auto"]),
        "cache_type_k": st.sampled_from(llama_options.CACHE_TYPES),
        "cache_type_v": st.sampled_from(llama_options.CACHE_TYPES),
        "swa_full": st.booleans(),
        "kv_offload": st.booleans(),
        "op_offload": st.booleans(),
        "n_gpu_layers": st.integers(0, 200),
        "n_cpu_moe": st.integers(0, 200),
        "cpu_moe": st.booleans(),
        "override_tensor": st.sampled_from(["a=CPU", ["a=CPU", "b.*=CPU"]]),
        "tensor_split": st.sampled_from(["3,1", "0.25,0.75"]),
        "device": st.sampled_from(["none", "CUDA0", "CUDA0,Vulkan1"]),
        "mmap": st.booleans(),
        "mlock": st.booleans(),
        "repack": st.booleans(),
        "embeddings": st.booleans(),
        "pooling": st.sampled_from(["mean", "cls"]),
        "mmproj": st.just("p.gguf"),
        "lora": st.just("a.gguf,b.gguf"),
        "model_draft": st.just("d.gguf"),
        "spec_draft_n_max": st.integers(0, 16),
        "cache_ram": st.integers(-1, 9999),
        "ctx_checkpoints": st.integers(0, 99),
        "threads": st.integers(1, 8),
        "jinja": st.booleans(),
    },
)


@given(SETTINGS)
def test_the_command_line_means_the_same_options(mapping: dict[str, Any]) -> None:
    """Reading the command line that is printed for some options gives those options back."""
    first = llama_options.read(mapping)
    words = llama_options.command(first.options, "m.gguf", first.kept)
    found, others = engine_options.pairs(words)
    again = llama_options.read(found)
    assert others == []
    assert again.options == first.options
    assert again.model == "m.gguf"
    assert again.kept == first.kept


@given(
    st.dictionaries(
        st.sampled_from(sorted(engine_options.known())),
        st.none() | st.text() | st.integers() | st.floats() | st.booleans() | st.lists(st.text(), max_size=3),
        max_size=4,
    )
)
def test_any_value_is_read_or_refused(mapping: dict[str, Any]) -> None:
    """Whatever is written for a known option, the answer is options or one sentence."""
    try:
        given = llama_options.read(mapping)
        llama_options.command(given.options, "m.gguf", given.kept)
    except BadInput as error:
        assert str(error)

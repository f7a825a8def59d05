"""What a deployment was asked for: options, arguments and variables, in the words of a boot log's facts.

Only settings that decide memory, placement or the context window are taken; names, ports and sampling are no part of
it. A value that leaves the choice to the engine (``auto``, 0 for a context) asks for nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from pytest_vram.backends.flags import Flag, Help
from pytest_vram.spec import OptionValue
from pytest_vram.units import MIB

Asked = dict[str, OptionValue]
#: What an option asks for: a fact and its value, or ``None`` for nothing.
Read = Callable[[object], OptionValue | None]

#: Multiples that vLLM takes after a number: decimal in small letters, binary in capitals.
_SCALES = {
    "": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30,
}  # fmt: skip
_SCALED = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgG]?)", re.ASCII)
_ON, _OFF = ("on", "1", "true", "enabled", "yes"), ("off", "0", "false", "disabled", "no")


def whole(value: object) -> int | None:
    """A whole number as such, as text or as a float; ``None`` for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value.strip(), re.ASCII):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _count(value: object) -> int | None:
    """A number above 0; zero and less leave the choice to the engine."""
    if isinstance(value, str) and (match := _SCALED.fullmatch(value.strip())):
        value = int(float(match[1]) * _SCALES[match[2]])
    number = whole(value)
    return number if number is not None and number > 0 else None


def _layers(value: object) -> OptionValue | None:
    if value in ("all", "max"):
        return "all"
    number = whole(value)
    return number if number is not None and number >= 0 else None


def _fraction(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except ValueError:
        return None
    return number if number > 0 else None


def _word(value: object) -> str | None:
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text.lower() not in ("auto", "none") else None


def _any_word(value: object) -> str | None:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return str(value).strip() or None if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _switch(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    return True if word in _ON else False if word in _OFF else None


def _wanted(value: object) -> bool | None:
    """A switch that asks for something only where it is on."""
    return True if _switch(value) is True else None


def _unwanted(value: object) -> bool | None:
    return False if _switch(value) is False else None


def _given(value: object) -> bool | None:
    """That a file was given, whichever."""
    return True if isinstance(value, str | list | tuple) and value else None


def _flash(value: object) -> str | None:
    found = _switch(value)
    return None if found is None else "enabled" if found else "disabled"


def _megabytes(value: object) -> int | None:
    number = whole(value)
    return number * MIB if number is not None and number >= 0 else None


def _not_negative(value: object) -> int | None:
    number = whole(value)
    return number if number is not None and number >= 0 else None


def _inverse(value: object) -> float | None:
    factor = _fraction(value)
    return None if factor is None else 1 / factor


_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}


def _dtype(value: object) -> str | None:
    word = _word(value)
    return None if word is None else _DTYPES.get(word, word)


#: llama.cpp's long option → fact, and what its value asks for.
LLAMA: dict[str, tuple[str, Read]] = {
    "ctx-size": ("context", _count),
    "parallel": ("slots", _count),
    "batch-size": ("batch", _count),
    "ubatch-size": ("ubatch", _count),
    "n-gpu-layers": ("layers_offloaded", _layers),
    "cache-type-k": ("cache_type_k", _any_word),
    "cache-type-v": ("cache_type_v", _any_word),
    "flash-attn": ("flash_attention", _flash),
    "mlock": ("mlock", _wanted),
    "mmap": ("mmap", _unwanted),
    "load-mode": ("load_mode", _word),
    "kv-unified": ("kv_unified", _switch),
    "kv-offload": ("kv_offload", _unwanted),
    "swa-full": ("swa_full", _wanted),
    "threads": ("threads", _count),
    "rope-scaling": ("rope_scaling", _word),
    "rope-scale": ("rope_freq_scale", _inverse),
    "rope-freq-base": ("rope_freq_base", _fraction),
    "rope-freq-scale": ("rope_freq_scale", _fraction),
    "yarn-orig-ctx": ("yarn_orig_ctx", _count),
    "cache-ram": ("prompt_cache_limit_bytes", _megabytes),
    "ctx-checkpoints": ("checkpoints", _not_negative),
    "cpu-moe": ("cpu_moe", _wanted),
    "n-cpu-moe": ("n_cpu_moe", _count),
    "override-tensor": ("override_tensor", _given),
    "tensor-split": ("tensor_split", _any_word),
    "split-mode": ("split_mode", _any_word),
    "main-gpu": ("main_gpu", _not_negative),
    "device": ("device", _any_word),
    "model-draft": ("draft", _given),
    "mmproj": ("projector", _given),
    "lora": ("lora", _given),
    "lora-scaled": ("lora", _given),
}
#: Names that builds had or have for one of those, and short ones; a binary's own ``--help`` comes before them.
_LLAMA_NAMES = {
    "gpu-layers": "n-gpu-layers", "ngl": "n-gpu-layers", "c": "ctx-size", "np": "parallel", "b": "batch-size",
    "ub": "ubatch-size", "fa": "flash-attn", "ctk": "cache-type-k", "ctv": "cache-type-v", "kvu": "kv-unified",
    "kvo": "kv-offload", "t": "threads", "cram": "cache-ram", "ctxcp": "ctx-checkpoints",
    "swa-checkpoints": "ctx-checkpoints", "cmoe": "cpu-moe", "ncmoe": "n-cpu-moe", "ot": "override-tensor",
    "ts": "tensor-split", "sm": "split-mode", "mg": "main-gpu", "dev": "device", "md": "model-draft",
    "spec-draft-model": "model-draft", "mm": "mmproj",
}  # fmt: skip
_LLAMA_NEGATIVES = {
    "no-mmap": "mmap", "no-kv-unified": "kv-unified", "no-kvu": "kv-unified", "no-kv-offload": "kv-offload",
    "nkvo": "kv-offload",
}  # fmt: skip
_KOBOLD: dict[str, tuple[str, Read]] = {"contextsize": ("context", _count), "gpulayers": ("layers_offloaded", _layers)}
_PARALLEL: dict[str, tuple[str, Read]] = {
    "tensor-parallel-size": ("tensor_parallel", _count),
    "pipeline-parallel-size": ("pipeline_parallel", _count),
    "data-parallel-size": ("data_parallel", _count),
    "kv-cache-dtype": ("cache_type", _word),
    "quantization": ("quantization", _word),
    "dtype": ("dtype", _dtype),
}
_VLLM: dict[str, tuple[str, Read]] = {
    **_PARALLEL,
    "max-model-len": ("context", _count),
    "max-num-seqs": ("slots", _count),
    "max-num-batched-tokens": ("batch_tokens", _count),
    "gpu-memory-utilization": ("memory_share", _fraction),
    "block-size": ("block_size", _count),
    "enforce-eager": ("eager", _wanted),
    "cpu-offload-gb": ("cpu_offload_gb", _fraction),
    "num-gpu-blocks-override": ("num_gpu_blocks_override", _count),
}
_SGLANG: dict[str, tuple[str, Read]] = {
    **_PARALLEL,
    "context-length": ("context", _count),
    "max-running-requests": ("slots", _count),
    "chunked-prefill-size": ("batch_tokens", _count),
    "mem-fraction-static": ("memory_share", _fraction),
    "page-size": ("block_size", _count),
    "disable-cuda-graph": ("graphs_off", _wanted),
    "cpu-offload-gb": ("cpu_offload_gb", _fraction),
}
_RANKS = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
    "tp-size": "tensor-parallel-size", "pp-size": "pipeline-parallel-size", "dp-size": "data-parallel-size",
    "q": "quantization",
}  # fmt: skip
#: Engine whose log is read → its options, its other names for them, and words by which its program is known.
_TABLES: dict[str, tuple[dict[str, tuple[str, Read]], dict[str, str], tuple[str, ...]]] = {
    "llama-server": (LLAMA, _LLAMA_NAMES, ("llama-server", "llama.cpp", "llama-cpp", "llama_cpp")),
    "ik_llama": (LLAMA, _LLAMA_NAMES, ("llama-server", "ik_llama")),
    "koboldcpp": (_KOBOLD, {}, ("koboldcpp",)),
    "vllm": (_VLLM, _RANKS, ("vllm",)),
    "sglang": (_SGLANG, _RANKS, ("sglang",)),
}
_SHELLS = ("sh", "bash", "dash", "zsh", "ash")
#: Variables of Ollama's server.
_OLLAMA: dict[str, tuple[tuple[str, ...], Read]] = {
    "OLLAMA_CONTEXT_LENGTH": (("context_per_slot",), _count),
    "OLLAMA_NUM_PARALLEL": (("slots",), _count),
    "OLLAMA_KV_CACHE_TYPE": (("cache_type_k", "cache_type_v"), _word),
    "OLLAMA_FLASH_ATTENTION": (("flash_attention",), _flash),
}
_VARIABLE = re.compile(r"\(env: (\w{1,60})\)", re.ASCII)


def of_llama(options: Mapping[str, object], known: Help | None = None, env: Mapping[str, str] = {}) -> Asked:
    """What llama.cpp options ask for.

    :param options: spelling without dashes → value, as in a spec or from :func:`of_command`.
    :param known: the binary's own help, by which another name of an option and its negative are understood.
    :param env: variables of the server; those that its help names count where the option itself is not given.
    """
    found: Asked = {}
    if known is not None:
        for flag in known.flags:
            match = _VARIABLE.search(flag.text)
            if match is not None and match[1] in env and flag.names:
                _take(found, LLAMA, _canonical(flag.names[-1], known), env[match[1]])
    for name, value in options.items():
        option, positive = _spelled(name, known)
        if not positive:
            switched = _switch(value)
            value = None if switched is None else not switched
        _take(found, LLAMA, option, value)
    if "mlock" in str(found.get("load_mode", "")):
        found["mlock"] = True
    return found


def _take(found: Asked, table: Mapping[str, tuple[str, Read]], option: str, value: object) -> None:
    if option not in table:
        return
    fact, read = table[option]
    result = read(value)
    if result is None:
        found.pop(fact, None)  # the later one counts, and it leaves the choice to the engine
    else:
        found[fact] = result


def _canonical(name: str, known: Help | None) -> str:
    return _spelled(name, known)[0]


def _spelled(name: str, known: Help | None) -> tuple[str, bool]:
    """The name that the table has for an option, and whether this spelling switches it on."""
    name = name.lstrip("-").replace("_", "-")
    flag = _flag(name, known)
    if flag is not None:
        positive = name not in flag.negatives and not (name in flag.short and _is_negative(name))
        for spelling in (*flag.names, *flag.short):
            option = _LLAMA_NAMES.get(spelling, spelling)
            if option in LLAMA:
                return option, positive
        return flag.name, positive
    if name in _LLAMA_NEGATIVES:
        return _LLAMA_NEGATIVES[name], False
    return _LLAMA_NAMES.get(name, name), True


def _is_negative(short: str) -> bool:
    return short.startswith("no-") or short in _LLAMA_NEGATIVES


def _flag(name: str, known: Help | None) -> Flag | None:
    if known is None:
        return None
    found = known.find(name)
    return found or next((flag for flag in known.flags if name in flag.short), None)


def of_command(
    argv: Sequence[str], engine: str | None, *, env: Mapping[str, str] = {}, known: Help | None = None
) -> Asked:
    """What a command line asks of the engine that it starts.

    Only words after the engine's own program or image count, as those before belong to a wrapper (``taskset``, a
    container's command); the script of a shell is read as a command line itself.

    :param engine: whose log the server writes; of others nothing is known.
    """
    found: Asked = {}
    if engine == "ollama":
        for variable, (facts, read) in _OLLAMA.items():
            wanted = read(env[variable]) if variable in env else None
            found |= {} if wanted is None else dict.fromkeys(facts, wanted)
        return found
    if engine not in _TABLES:
        return found
    table, names, programs = _TABLES[engine]
    options = _options(_after(_words(argv), programs))
    if table is LLAMA:
        return of_llama(options, known, env)
    for name, value in options.items():
        name = name.replace("_", "-")
        _take(found, table, names.get(name, name), value)
    return found


def program_of(argv: Sequence[str], engine: str | None) -> str | None:
    """The word of a command line that is the engine's program itself; ``None`` where a wrapper hides it."""
    if engine not in _TABLES:
        return None
    return next((word for word in _words(argv) if PurePath(word).name in _TABLES[engine][2]), None)


def _words(argv: Sequence[str]) -> list[str]:
    words = list(argv)
    if len(words) > 2 and PurePath(words[0]).name in _SHELLS:
        at = next((at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
        if at is not None and at + 1 < len(words):
            try:
                return shlex.split(words[at + 1])
            except ValueError:
                return []
    return words


def _after(words: list[str], programs: tuple[str, ...]) -> list[str]:
    """The arguments of the engine: what follows its program, its module or its image."""
    named = [at for at, word in enumerate(words) if PurePath(word).name in programs]
    holding = [at for at, word in enumerate(words) if word[:1] != "-" and any(name in word for name in programs)]
    at = next(iter([*named, *holding]), None)
    return [] if at is None else words[at + 1 :]


def _options(words: Sequence[str]) -> dict[str, object]:
    """Option, without dashes → its value; ``True`` for one without. The last of several counts."""
    found: dict[str, object] = {}
    name: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            found[name] = value if equals else True
            name = None if equals else name
        elif name is not None:
            found[name] = word
            name = None
    return found

"""How engines that run llama.cpp's code call its settings, for advice from a log."""

from __future__ import annotations

import msgspec


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """One setting in an engine's words. :ivar setting: its name. :ivar flag: how it is written; ``{}`` is the value."""

    setting: str
    flag: str


_LLAMA: dict[str, Word] = {
    "flash": Word(setting="flash-attn", flag="--flash-attn on"),
    "ubatch": Word(setting="ubatch-size", flag="--ubatch-size {}"),
    "parallel": Word(setting="parallel", flag="--parallel {}"),
    "model": Word(setting="model", flag="--model FILE (a {} file of the same model)"),
    "cache": Word(setting="cache-type-k, cache-type-v", flag="--cache-type-k {0} --cache-type-v {0}"),
    "context": Word(setting="ctx-size", flag="--ctx-size {}"),
    "pipeline": Word(setting="override-tensor", flag="--override-tensor '^$=CPU'"),
    "split": Word(setting="tensor-split", flag="--tensor-split {}"),
    "experts": Word(setting="n-cpu-moe", flag="--n-cpu-moe {}"),
    "layers": Word(setting="n-gpu-layers", flag="--n-gpu-layers {}"),
    "projector": Word(setting="mmproj-offload", flag="--no-mmproj-offload"),
    "draft": Word(setting="spec-type", flag="without --model-draft"),
    "mmap": Word(setting="mmap", flag="--no-mmap"),
    "mlock": Word(setting="mlock", flag="without --mlock"),
    "cache-ram": Word(setting="cache-ram", flag="--cache-ram 0"),
}
_IK: dict[str, Word] = {
    **{name: word for name, word in _LLAMA.items() if name not in ("cache-ram", "projector")},
    # Its own scheduler keeps the copies that it was built for.
    "pipeline": Word(setting="GGML_SCHED_MAX_COPIES", flag="built with -DGGML_SCHED_MAX_COPIES=1"),
    "flash": Word(setting="flash-attn", flag="-fa"),
    "attention": Word(setting="attention-max-batch", flag="-amb 512"),
}
_KOBOLD: dict[str, Word] = {
    "flash": Word(setting="flashattention", flag="--flashattention"),
    "ubatch": Word(setting="batchsize", flag="--batchsize {}"),
    "model": Word(setting="model", flag="--model FILE (a {} file of the same model)"),
    "cache": Word(setting="quantkv", flag="--flashattention --quantkv {}"),
    "context": Word(setting="contextsize", flag="--contextsize {}"),
    "split": Word(setting="tensor_split", flag="--tensor_split {}"),
    "experts": Word(setting="moecpu", flag="--moecpu {}"),
    "layers": Word(setting="gpulayers", flag="--gpulayers {}"),
    "mlock": Word(setting="usemlock", flag="without --usemlock"),
}
_OLLAMA: dict[str, Word] = {
    "flash": Word(setting="OLLAMA_FLASH_ATTENTION", flag="OLLAMA_FLASH_ATTENTION=1"),
    "ubatch": Word(setting="num_batch", flag="PARAMETER num_batch {}"),
    "parallel": Word(setting="OLLAMA_NUM_PARALLEL", flag="OLLAMA_NUM_PARALLEL={}"),
    "model": Word(setting="model", flag="FROM another tag of the model, such as one with {} in its name"),
    "cache": Word(setting="OLLAMA_KV_CACHE_TYPE", flag="OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE={}"),
    "context": Word(setting="num_ctx", flag="PARAMETER num_ctx {} (OLLAMA_CONTEXT_LENGTH for all models)"),
    "layers": Word(setting="num_gpu", flag="PARAMETER num_gpu {}"),
    "mmap": Word(setting="use_mmap", flag="PARAMETER use_mmap false"),
}
#: Values of koboldcpp's option for the types of a cache.
KOBOLD_TYPES = {"q8_0": "1", "q4_0": "2"}


def words(engine: str) -> dict[str, Word]:
    """The settings of an engine by what they do."""
    return {"ollama": _OLLAMA, "koboldcpp": _KOBOLD, "ik_llama": _IK}.get(engine, _LLAMA)

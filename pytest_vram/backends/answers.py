"""What running servers say of themselves: the endpoints of llama.cpp, vLLM, SGLang and Ollama, read alike.

Every answer is a server's, so any part of it may be missing or of another kind; what cannot be read is not said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_vram.backends.asked import whole
from pytest_vram.backends.base import Properties

#: Endpoints of the engines of which the program is not known beforehand.
PATHS = ("/v1/models", "/props", "/slots", "/get_server_info", "/api/ps")
#: SGLang's argument → fact.
_ARGUMENTS = {
    "tp_size": "tensor_parallel",
    "pp_size": "pipeline_parallel",
    "mem_fraction_static": "memory_share",
    "kv_cache_dtype": "cache_type",
}


def read(answers: Mapping[str, object]) -> Properties:
    """What these answers (path → decoded JSON) say.

    The total of llama.cpp's context is given only where one slot has all of it: with a unified cache every slot
    reports the whole, without one its share, and the answers do not say which.
    """
    found: dict[str, Any] = {}
    _props(answers.get("/props"), found)
    _slots(answers.get("/slots"), found)
    _models(answers.get("/v1/models"), found)
    _server_info(answers.get("/get_server_info"), found)
    _loaded(answers.get("/api/ps"), found)
    if found.get("slots") == 1 and "context" not in found and "context_per_slot" in found:
        found["context"] = found["context_per_slot"]
    return Properties(**{name: value for name, value in found.items() if value is not None})


def _props(props: object, found: dict[str, Any]) -> None:
    if not isinstance(props, dict):
        return
    settings = props.get("default_generation_settings")
    if isinstance(settings, dict):
        found["context_per_slot"] = whole(settings.get("n_ctx"))
        parameters = settings.get("params")
        adapters = parameters.get("lora") if isinstance(parameters, dict) else None
        if isinstance(adapters, list):
            found["adapters"] = len(adapters)
    found["slots"] = whole(props.get("total_slots"))
    if isinstance(props.get("model_path"), str):
        found["model"] = props["model_path"]
    modalities = props.get("modalities")
    if isinstance(modalities, dict) and isinstance(modalities.get("vision"), bool):
        found["projector"] = any(value is True for value in modalities.values())


def _slots(slots: object, found: dict[str, Any]) -> None:
    if not isinstance(slots, list) or not slots or not all(isinstance(slot, dict) for slot in slots):
        return
    if found.get("slots") is None:
        found["slots"] = len(slots)
    contexts = [whole(slot.get("n_ctx")) for slot in slots]
    if found.get("context_per_slot") is None:
        found["context_per_slot"] = contexts[0]
    found["slot_contexts"] = tuple(context for context in contexts if context is not None)
    if all(isinstance(slot.get("speculative"), bool) for slot in slots):
        found["draft"] = any(slot["speculative"] for slot in slots)


def _models(answer: object, found: dict[str, Any]) -> None:
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        return
    models = [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]
    found["models"] = tuple(model["id"] for model in models)
    # Adapters of a model are listed beside it, with the same length; several models have each their own.
    lengths = {length for model in models if (length := whole(model.get("max_model_len"))) is not None}
    if len(lengths) == 1:
        found["context"] = found["context_per_slot"] = lengths.pop()
    meta = models[0].get("meta") if len(models) == 1 else None
    if isinstance(meta, dict):
        found["context_trained"] = whole(meta.get("n_ctx_train"))
        found["parameters"] = whole(meta.get("n_params"))
        found["model_bytes"] = whole(meta.get("size"))


def _server_info(answer: object, found: dict[str, Any]) -> None:
    if not isinstance(answer, dict):
        return
    arguments = answer.get("server_args") if isinstance(answer.get("server_args"), dict) else answer
    assert isinstance(arguments, dict)
    shown = {
        fact: arguments[name] for name, fact in _ARGUMENTS.items() if type(arguments.get(name)) in (int, float, str)
    }
    if shown:
        found["settings"] = shown


def _loaded(answer: object, found: dict[str, Any]) -> None:
    """Ollama's models in memory; with several loaded it is not known which of them a request would reach."""
    listed = answer.get("models") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        return
    models = [model for model in listed if isinstance(model, dict)]
    found["loaded"] = tuple(str(model["name"]) for model in models if isinstance(model.get("name"), str))
    if len(models) == 1:
        found["context_per_slot"] = whole(models[0].get("context_length")) or found.get("context_per_slot")
        found["device_bytes"] = whole(models[0].get("size_vram"))
        found["held_bytes"] = whole(models[0].get("size"))

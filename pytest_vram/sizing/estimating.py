"""``estimate``: the predicted ledger of a model, named as a user names it, under an engine's settings."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BadInput, BadModel
from pytest_vram.sizing import stores
from pytest_vram.sizing.option_values import shown
from pytest_vram.sizing.options import CURRENT, Era
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape, Note

#: Engines that run Hugging Face folders → module with their rules.
_RULES = {"transformers": "transformers_cache", "vllm": "vllm", "sglang": "sglang"}
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
ENGINES = ("llama-server", *_RULES)


def estimate(model: str | Path, *, engine: str = "llama-server", era: Era = CURRENT, **options: Any) -> Estimate:
    """Predict what a deployment takes, bucket by bucket, from the model's files alone.

    :param model: a GGUF file, a folder with ``config.json``, or a name in the local Hugging Face or Ollama store.
    :param engine: whose rules hold: ``llama-server``, ``transformers``, ``vllm`` or ``sglang``.
    :param era: which of llama.cpp's rules that changed over time hold; today's by default.
    :param options: the engine's own long options with underscores, such as ``ctx_size=8192``.
    :raises BadModel: no such model, or one that cannot be read. :raises BadInput: an option that cannot be used.
    """
    check_engine(engine)
    return of_shape(load(model, engine=engine), engine=engine, era=era, options=options)


def load(model: str | Path, *, engine: str = "llama-server") -> ModelShape:
    """Find a model and read what decides its memory, in a form that ``engine`` can run.

    :raises BadModel: no such model, damaged files, or a format that the engine does not run.
    """
    if not isinstance(model, (str, Path)):
        raise BadModel(f"{shown(model)} names no model: write a path or a name as text, or a Path")
    found = stores.find(str(model))
    path = found.path
    if path.name == "config.json":
        raise BadModel(f"{path} is a file of a Hugging Face model: name its folder {path.parent}")
    if path.is_dir():
        if engine == "llama-server":
            path = _only_gguf(path)
        else:
            from pytest_vram.sizing import hf_shape

            return hf_shape.read_shape(path)
    if engine != "llama-server":
        raise BadModel(
            f"{path} is a GGUF file, which is sized for llama-server here: for {engine} give the Hugging Face folder"
            " with config.json"
        )
    from pytest_vram.sizing import gguf, gguf_shape

    return _with_company(gguf_shape.shape_of(gguf.read(path)), found)


def _with_company(shape: ModelShape, found: stores.Found) -> ModelShape:
    """The model with what its store keeps beside it: Ollama loads that too, llama-server only where it is told to."""
    if found.origin.startswith(stores.OLLAMA):
        return msgspec.structs.replace(
            shape, projectors=tuple(map(str, found.projectors)), adapters=tuple(map(str, found.adapters))
        )
    if not found.projectors:
        return shape
    text = (
        f"{found.projectors[0].name} lies beside the model and is not counted: with it, it sees or hears; give it with"
        " --mmproj"
    )
    return msgspec.structs.replace(shape, notes=(*shape.notes, Note(kind="rule", bucket="projector", text=text)))


def _only_gguf(folder: Path) -> Path:
    """The one GGUF model in a folder, the first part of a split one.

    :raises BadModel: none, or several.
    """
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.lower().startswith("mmproj"))
    firsts = [path for path in found if not _LATER_PART.search(path.name)]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = ", ".join(path.name for path in firsts[:5])
        raise BadModel(f"{folder} holds {len(firsts)} GGUF models ({names}…): name the file")
    if (folder / "config.json").exists():
        raise BadModel(
            f"{folder} is a Hugging Face folder, and llama-server runs GGUF files: convert it with llama.cpp's"
            " convert_hf_to_gguf.py, or size it for another engine with --engine transformers, vllm or sglang"
        )
    raise BadModel(f"{folder} holds no model: there is no GGUF file and no config.json in it")


def of_shape(shape: ModelShape, *, engine: str, options: dict[str, Any], era: Era = CURRENT) -> Estimate:
    """The same for a model that was read already."""
    if engine == "llama-server":
        from pytest_vram.sizing import llama_cpp, llama_options

        given = llama_options.read(options)
        return llama_cpp.predict(shape, given.options, era, given=given)
    check_engine(engine)
    made: Estimate = rules_of(engine).predict(shape, **options)
    return made


def rules_of(engine: str) -> Any:
    """The module with the rules of an engine that runs Hugging Face folders: ``predict`` and its ``Options``."""
    return importlib.import_module(f"pytest_vram.sizing.{_RULES[engine]}")


def check_engine(engine: str) -> None:
    """:raises BadInput: an engine whose rules are not known."""
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is not known: write one of {', '.join(ENGINES)}")

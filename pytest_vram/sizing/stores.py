"""Finds a model by name in the local stores of Hugging Face and Ollama; nothing is ever fetched.

Layouts are those of ``huggingface_hub`` (``models--org--name/refs``, ``snapshots``) and of Ollama (``manifests`` by
registry, namespace, model and tag; ``blobs`` by digest). What a store's files say is not trusted: a name or digest in
them cannot lead out of the store.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_vram.errors import BadModel
from pytest_vram.paths import expanded
from pytest_vram.sizing import gguf

#: How :attr:`Found.origin` begins for a model of Ollama's store.
OLLAMA = "Ollama's"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a name: no slash, no leading dot
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MANIFEST_BYTES = 1 << 20
_MOST_FILES = 10_000  # looked at in one folder
_MOST_NAMED = 8  # in a message


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a store or on the disk.

    :ivar path: the GGUF file or the folder with ``config.json``. :ivar origin: for people: what it was found as.
    :ivar projectors: multimodal projectors that belong to it. :ivar adapters: LoRA adapters that belong to it.
    """

    path: Path
    origin: str = ""
    projectors: tuple[Path, ...] = ()
    adapters: tuple[Path, ...] = ()


def locate(model: str) -> Path:
    """The GGUF file or Hugging Face folder that ``model`` names; see :func:`find`."""
    return find(model).path


def find(model: str) -> Found:
    """The model that a path or a name stands for.

    A file or folder wins. Else a name of the Hugging Face store, ``org/name``, with ``@revision`` and, where there are
    several GGUF files, ``:Q4_K_M`` or ``:file.gguf``; else one of Ollama's store, ``llama3.2:1b``, with or without its
    registry and namespace, or the digest of a blob, ``sha256-…``.

    :raises BadModel: nothing of that name (the message says where it was looked for), several files, or a store that
        is damaged.
    """
    if not model.strip():
        raise BadModel("the model has no name: write the path of a GGUF file, or a name of a local store")
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, or the home of no such user
        raise BadModel(f"{model!r} cannot be looked up: {error}") from None
    if there:
        return Found(path=path)
    if _is_path(model):
        raise BadModel(f"{path} does not exist{_nearby_files(path)}")
    try:
        return _in_hugging_face(model) or _in_ollama(model) or _missing(model)
    except OSError as error:
        raise BadModel(
            f"{model!r} was looked for in the local stores, and {error.filename} cannot be read: {error.strerror}"
        ) from None


def hugging_face_folder() -> Path:
    """Where ``huggingface_hub`` keeps its models: HF_HUB_CACHE, or ``hub`` in HF_HOME, or the default."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return expanded(os.environ[variable], variable)
    if os.environ.get("HF_HOME"):
        return expanded(os.environ["HF_HOME"], "HF_HOME") / "hub"
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "huggingface" / "hub"


def ollama_folders() -> list[Path]:
    """Where Ollama keeps its models: OLLAMA_MODELS, or the user's and the Linux service's default folders."""
    if os.environ.get("OLLAMA_MODELS"):
        return [expanded(os.environ["OLLAMA_MODELS"], "OLLAMA_MODELS")]
    return [expanded("~/.ollama/models", "the folder of Ollama's models"), Path("/usr/share/ollama/.ollama/models")]


def _is_path(model: str) -> bool:
    file = model.endswith((".gguf", ".safetensors", ".json")) and ":" not in model
    return file or "\\" in model or model.startswith((".", "~", os.sep))


def _missing(model: str) -> Found:
    folders = [str(hugging_face_folder()), *map(str, ollama_folders())]
    near = difflib.get_close_matches(model, [*_hugging_face_names(), *_ollama_names()], n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise BadModel(
        f"{model!r} is no file or folder, and no model of that name is in the local stores ({', '.join(folders)}){hint}"
    )


def _nearby_files(path: Path) -> str:
    names = [entry.name for entry in _entries(path.parent)]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; near it are {', '.join(near)}" if near else ": correct the path of the model"


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, in order; empty where it is none, or cannot be read."""
    try:
        return sorted(itertools.islice(folder.iterdir(), _MOST_FILES))
    except OSError:
        return []


def _names(paths: Iterable[str]) -> str:
    """A list for a message, cut short."""
    all_of_them = sorted(paths)
    more = f" and {len(all_of_them) - _MOST_NAMED} more" if len(all_of_them) > _MOST_NAMED else ""
    return ", ".join(all_of_them[:_MOST_NAMED]) + more


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _in_hugging_face(model: str) -> Found | None:
    name, _, choice = model.partition(":")
    name, _, revision = name.partition("@")
    parts = name.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) for part in parts):
        return None
    repository = hugging_face_folder() / f"models--{'--'.join(parts)}"
    if not repository.is_dir():
        return None
    return _from_snapshot(_snapshot(repository, name, revision), name, choice)


def _snapshot(repository: Path, name: str, revision: str) -> Path:
    """The folder of one revision: a branch or tag by its ``refs`` file, or a commit."""
    snapshots = repository / "snapshots"
    wanted = revision or "main"
    if not all(_PART.fullmatch(part) for part in wanted.split("/")):
        raise BadModel(f"{wanted!r} is not a revision of {name}: write a branch, a tag or a commit")
    commit = wanted
    reference = repository / "refs" / wanted
    if reference.is_file():
        try:
            with reference.open("rb") as stream:
                commit = stream.read(256).decode("utf-8", "replace").strip()
        except OSError as error:
            raise BadModel(f"{reference} cannot be read: {error.strerror}") from None
        if not _PART.fullmatch(commit):
            raise BadModel(f"{reference} is damaged: it should hold the name of a commit, and holds {commit[:40]!r}")
    if (snapshots / commit).is_dir():
        return snapshots / commit
    have = [entry for entry in _entries(snapshots) if entry.is_dir()]
    if not revision and len(have) == 1:
        return have[0]
    known = f": it has {_names(entry.name for entry in have)}" if have else ": its download was cut short?"
    raise BadModel(f"no snapshot {commit!r} of {name} is in {repository}{known}")


def _from_snapshot(folder: Path, name: str, choice: str) -> Found:
    """The model in a snapshot: one GGUF file, or the folder itself when it holds other weights."""
    files = {str(file.relative_to(folder)): file for file in _gguf_files(folder)}
    projectors = tuple(file for key, file in files.items() if "mmproj" in key.lower())
    models = {key: file for key, file in files.items() if file not in projectors and not _later_part(file)}
    if choice:
        return Found(path=_chosen(models, choice, name, folder), origin=f"{name}:{choice}", projectors=projectors)
    weights = any(entry.suffix in (".safetensors", ".bin", ".pt") for entry in _entries(folder))
    if (folder / "config.json").exists() and (weights or not models):
        return Found(path=folder, origin=name)
    if len(models) == 1:
        return Found(path=next(iter(models.values())), origin=name, projectors=projectors)
    if models:
        raise BadModel(f"{name} has several GGUF files: add the one you mean, {name}:FILE, of {_names(models)}")
    raise BadModel(f"{folder} ({name}) holds neither GGUF files nor a config.json: its download was cut short?")


def _gguf_files(folder: Path) -> Iterator[Path]:
    """GGUF files of a snapshot and of its folders, where repositories keep one folder for each quantisation."""
    for entry in _entries(folder):
        if entry.suffix == ".gguf":
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            yield from (inner for inner in _entries(entry) if inner.suffix == ".gguf")


def _later_part(file: Path) -> bool:
    split = gguf.SPLIT_NAME.fullmatch(file.name)
    return split is not None and int(split["part"]) != 1


def _chosen(models: dict[str, Path], choice: str, name: str, folder: Path) -> Path:
    """The file that ``:choice`` means: its name, or a word of its name."""
    exact = [file for key, file in models.items() if choice in (key, file.name, file.stem)]
    word = re.compile(rf"(?<![a-z0-9]){re.escape(choice.lower())}(?![a-z0-9_])")
    found = exact or [file for key, file in models.items() if word.search(key.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadModel(
            f"{choice!r} fits several files of {name}: {_names(str(one.relative_to(folder)) for one in found)}"
        )
    have = f"it has {_names(models)}" if models else "it has no GGUF file"
    raise BadModel(f"no GGUF file of {name} ({folder}) is called {choice!r}: {have}")


def _hugging_face_names() -> list[str]:
    return [
        entry.name.removeprefix("models--").replace("--", "/")
        for entry in _entries(hugging_face_folder())
        if entry.name.startswith("models--")
    ]


# --- Ollama ---------------------------------------------------------------------------------------------------------


class _Blob(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""
    digest: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    layers: tuple[_Blob, ...]


def _in_ollama(model: str) -> Found | None:
    digest = _DIGEST.fullmatch(model)
    for folder in ollama_folders():
        if digest:
            blob = folder / "blobs" / f"sha256-{digest[1]}"
            if blob.is_file():
                return Found(path=blob, origin=model)
            continue
        name = _ollama_name(model)
        if name is not None:
            manifest = folder.joinpath("manifests", *name)
            if manifest.is_file():
                return _from_manifest(manifest, folder / "blobs", model)
    return None


def _ollama_name(model: str) -> tuple[str, ...] | None:
    """Registry, namespace, model and tag of a name, with Ollama's defaults; ``None`` where it cannot be one."""
    path, _, tag = model.removeprefix("https://").removeprefix("http://").partition(":")
    parts = path.split("/")
    if len(parts) > 3:
        return None
    name = (*("registry.ollama.ai", "library")[: 3 - len(parts)], *parts, tag or "latest")
    return name if all(_PART.fullmatch(part) for part in name) else None


def _from_manifest(manifest: Path, blobs: Path, model: str) -> Found:
    try:
        with manifest.open("rb") as stream:
            raw = stream.read(_MANIFEST_BYTES + 1)
        layers = msgspec.json.decode(raw, type=_Manifest).layers
    except OSError as error:
        raise BadModel(f"{manifest} (Ollama's manifest of {model}) cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadModel(f"{manifest} is damaged, it is not a manifest of Ollama: {error}") from None
    kinds: dict[str, list[Path]] = {"model": [], "projector": [], "adapter": []}
    for layer in layers:
        kind = layer.media_type.partition(";")[0].removeprefix("application/vnd.ollama.image.")
        if kind == "tensor":
            raise BadModel(
                f"{model} is stored by Ollama as single tensors, not as a GGUF file, and cannot be sized: name a GGUF"
                " file, or a folder with config.json"
            )
        if kind in kinds:
            digest = _DIGEST.fullmatch(layer.digest)
            if digest is None:
                raise BadModel(f"{manifest} is damaged: {layer.digest[:80]!r} is not the digest of a blob")
            blob = blobs / f"sha256-{digest[1]}"
            if not blob.is_file():
                raise BadModel(f"{blob} ({kind} of Ollama's {model}) is missing: run `ollama pull {model}`")
            kinds[kind].append(blob)
    if len(kinds["model"]) != 1:
        raise BadModel(f"{manifest} (Ollama's manifest of {model}) names {len(kinds['model'])} models instead of one")
    return Found(
        path=kinds["model"][0],
        origin=f"{OLLAMA} {model}",
        projectors=tuple(kinds["projector"]),
        adapters=tuple(kinds["adapter"]),
    )


def _ollama_names() -> Iterator[str]:
    """Names of models as Ollama lists them: without its own registry and namespace."""
    for folder in ollama_folders():
        for registry in _entries(folder / "manifests"):
            for namespace in _entries(registry):
                for model in _entries(namespace):
                    prefix = f"{registry.name}/{namespace.name}/".removeprefix("registry.ollama.ai/")
                    yield from (f"{prefix.removeprefix('library/')}{model.name}:{tag.name}" for tag in _entries(model))

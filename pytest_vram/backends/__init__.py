"""What runs: engines by name, the pool that starts backends, and the client that talks to them.

Engines are registered as strings ``"module:Class"`` and resolved when they are used, so that a run with one engine
never imports another's packages. The built-in ones come first; other packages add theirs through the entry-point
group :data:`GROUP` and cannot replace a built-in name.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from pytest_vram.errors import BadSpec

if TYPE_CHECKING:
    from pytest_vram.backends.base import CAPABILITIES, Engine, PlanContext, Properties
    from pytest_vram.backends.client import AsyncVramClient, VramClient
    from pytest_vram.backends.pool import Pool, RunningBackend
    from pytest_vram.backends.record import RequestRecord
    from pytest_vram.backends.reply import Reply

__all__ = [
    "CAPABILITIES",
    "AsyncVramClient",
    "Engine",
    "PlanContext",
    "Pool",
    "Properties",
    "Reply",
    "RequestRecord",
    "RunningBackend",
    "VramClient",
    "engine",
    "engine_names",
]

#: Where each public name lives; imported on use, since most who import this package need a record or a name only.
_HOMES = {
    "CAPABILITIES": "base",
    "AsyncVramClient": "client",
    "Engine": "base",
    "PlanContext": "base",
    "Pool": "pool",
    "Properties": "base",
    "Reply": "reply",
    "RequestRecord": "record",
    "RunningBackend": "pool",
    "VramClient": "client",
}

GROUP = "pytest_vram.engines"

BUILT_IN: dict[str, str] = {
    "llama-server": "pytest_vram.backends.llama_server:LlamaServer",
    "command": "pytest_vram.backends.command:Command",
    "attach": "pytest_vram.backends.attach:Attach",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def _registered() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name not in BUILT_IN:
            found.setdefault(point.name, point)
    return found


def engine_names() -> list[str]:
    """Every engine that a spec may name: the built-in ones, then those of other packages."""
    return [*BUILT_IN, *sorted(_registered())]


def engine(name: str, *, origin: str = "") -> Engine:
    """The engine with this name, imported now.

    :param origin: where the name was written, for messages.
    :raises BadSpec: an unknown name, or an engine of another package that cannot be imported or is not an engine.
    """
    from pytest_vram.backends.base import Engine

    where = f" (from {origin})" if origin else ""
    target = BUILT_IN.get(name)
    provider = "pytest-vram"
    if target is None:
        point = _registered().get(name)
        if point is None:
            known = engine_names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BadSpec(f"engine {name!r} is unknown{where}: {hint}known are {', '.join(known)}")
        target = point.value
        provider = point.dist.name if point.dist is not None else target.partition(":")[0]
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name or str(error)
        raise BadSpec(
            f"engine {name!r}{where} of package {provider!r} cannot be imported: {missing!r} is missing;"
            f" install it into this environment (pip install {missing.partition('.')[0]})"
        ) from error
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise BadSpec(
            f"engine {name!r}{where} of package {provider!r} is not an engine:"
            f" {target} is not a subclass of pytest_vram.backends.base.Engine"
        )
    return found()

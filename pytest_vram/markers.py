"""The markers: their help lines, their signatures and the check of their arguments.

Decorators imported from :mod:`pytest_vram` and ``pytest.mark.*`` are the same objects, so a wrong argument is found
when the plugin reads the marker, and is an error of that test alone. The plugin imports this module at load, so it
imports the standard library only, and the rest when a marker is read.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

OVERS = ("total", "baseline")
SCOPES = ("run", "backend", "process", "device")


def _max_vram(limit: object, *, over: object = "total", scope: object = "run", phase: object = None) -> dict[str, Any]:
    _one_of("over", over, OVERS)
    _one_of("scope", scope, SCOPES)
    if phase is not None and (not isinstance(phase, str) or not phase):
        raise ValueError(f"phase={phase!r} is not the name of a phase, such as 'weights', 'warm-up' or one of your own")
    if over == "baseline" and scope in ("process", "device"):
        raise ValueError(f"over='baseline' has no baseline in scope {scope!r}: use scope 'run' or 'backend'")
    return {"limit": _size("limit", limit), "text": limit, "over": over, "scope": scope, "phase": phase}


def _max_host_memory(limit: object) -> dict[str, Any]:
    return {"limit": _size("limit", limit), "text": limit}


def _serial_only(reason: object = None) -> dict[str, Any]:
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"reason={reason!r} is not a string")
    return {"reason": reason}


def _vram_backend(name: object, **overrides: object) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r} is not the name of a backend in the config file")
    return {"name": name, "overrides": overrides}


def _requires_vram(size: object) -> dict[str, Any]:
    return {"size": _size("size", size), "text": size}


def _min_tokens_per_second(rate: object) -> dict[str, Any]:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
        raise ValueError(f"rate={rate!r} is not a number of tokens per second above 0")
    return {"rate": float(rate)}


class Marker:
    """A marker of the contract.

    :ivar signature: as shown to users. :ivar check: validates bound arguments and returns what they mean; ``None``
        for a marker that this version does not have yet.
    """

    __slots__ = ("check", "signature", "what")

    def __init__(self, signature: str, what: str, check: Callable[..., dict[str, Any]] | None) -> None:
        self.signature = signature
        self.what = what
        self.check = check


MARKERS: dict[str, Marker] = {
    "max_vram": Marker(
        'max_vram(limit, *, over="total", scope="run", phase=None)',
        'fail the test when its peak memory is over limit, such as "3GB"',
        _max_vram,
    ),
    "max_host_memory": Marker(
        "max_host_memory(limit)",
        "fail the test when the host memory of its backend peaks over limit",
        _max_host_memory,
    ),
    "serial_only": Marker(
        "serial_only(reason=None)",
        "give the test the device for itself, and its backend one request at a time",
        _serial_only,
    ),
    "vram_backend": Marker(
        "vram_backend(name, **overrides)",
        "run the test against the backend of this name in the config file",
        _vram_backend,
    ),
    "requires_vram": Marker(
        "requires_vram(size)",
        "skip the test where the device is smaller than size",
        _requires_vram,
    ),
    "min_tokens_per_second": Marker(
        "min_tokens_per_second(rate)",
        "fail the test when the median decode rate of its requests is below rate",
        _min_tokens_per_second,
    ),
    "toolcall_accuracy": Marker("toolcall_accuracy(target, ...)", "not built yet: an error of the test", None),
    "idle_rollback": Marker("idle_rollback(tolerance, settle)", "not built yet: an error of the test", None),
    "vram_soak": Marker("vram_soak(turns=None, hours=None)", "not built yet: an error of the test", None),
}

#: Fixtures whose use makes the plugin take part in a test.
FIXTURES = frozenset({"vram", "vram_backend", "vram_backends", "vram_client", "vram_async_client", "vram_estimate"})


def read(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Check the arguments of one marker and return what they mean, sizes in bytes.

    :raises BadMarker: naming marker, argument, value and what is accepted; also for a marker that is not built yet.
    """
    from pytest_vram.errors import BadMarker

    marker = MARKERS[name]
    if marker.check is None:
        raise BadMarker(f"@{name} is not built yet in this version of pytest-vram: remove the marker or upgrade")
    try:
        inspect.signature(marker.check).bind(*args, **kwargs)
    except TypeError as error:
        raise BadMarker(f"@{name}: {error}; write {marker.signature}") from None
    try:
        return marker.check(*args, **kwargs)
    except ValueError as error:
        raise BadMarker(f"@{name}: {error}; write {marker.signature}") from None


def _one_of(argument: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{argument}={value!r} is not one of {', '.join(accepted)}")


def _size(argument: str, value: object) -> int:
    from pytest_vram.units import parse_size

    try:
        return parse_size(value)
    except ValueError as error:  # BadSize is one
        raise ValueError(f"{argument}: {error}") from None

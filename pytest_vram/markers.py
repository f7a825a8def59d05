"""The markers: their help lines, their signatures and the check of their arguments.

Decorators imported from :mod:`pytest_vram` and ``pytest.mark.*`` are the same objects, so a wrong argument is found
when the plugin reads the marker, and is an error of that test alone. The plugin imports this module at load, so it
imports the standard library only, and the rest when a marker is read.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

OVERS = ("total", "baseline")
SCOPES = ("run", "backend", "process", "device")
#: Most retries of one case: what three rounds of feedback do not repair, a fourth does not either.
RETRIES = 3
#: Turns of a soak whose marker names no amount: the fewest on which a trend is judged.
SOAK_TURNS = 120
#: Seconds for which idle memory may be waited.
LONGEST_SETTLE = 600.0
_EXAMPLES = {"target": "0.94", "confidence": "0.95", "margin": "0.05", "retention": "0.8"}


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


def _idle_rollback(tolerance: object = "64MiB", settle: object = 5.0) -> dict[str, Any]:
    if isinstance(settle, bool) or not isinstance(settle, (int, float)) or not 0 < settle <= LONGEST_SETTLE:
        raise ValueError(f"settle={settle!r} is not a number of seconds above 0 and at most {LONGEST_SETTLE:g}")
    return {"tolerance": _size("tolerance", tolerance), "text": tolerance, "settle": float(settle)}


def _toolcall_accuracy(
    target: object,
    *,
    cases: object = None,
    mode: object = "not_below",
    confidence: object = 0.95,
    baseline: object = None,
    margin: object = 0.05,
    retries: object = 1,
    judge: object = "first_try",
) -> dict[str, Any]:
    from pytest_vram.toolcalls.verdict import JUDGES, MODES

    _one_of("mode", mode, MODES)
    _one_of("judge", judge, JUDGES)
    rate = share("target", target, most=1.0)
    level = share("confidence", confidence)
    if not 0.5 < level < 1:
        raise ValueError(f"confidence={confidence!r} is not between 0.5 and 1: write 0.95")
    drop = share("margin", margin)
    if not drop < 1:
        raise ValueError(f"margin={margin!r} is not below 1: write the drop that matters as a share, such as 0.05")
    if not drop < rate and (mode == "sprt" or baseline is not None):  # it decides nothing else
        raise ValueError(f"margin={margin!r} is not below target={target!r}: write the drop that matters, such as 0.05")
    if mode == "sprt" and rate >= 1:
        raise ValueError(
            f"target={target!r} is beyond mode='sprt', which needs a target below 1: write 0.98, or mode='proven'"
        )
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= RETRIES:
        raise ValueError(f"retries={retries!r} is not a whole number from 0 to {RETRIES}")
    if judge == "after_retry" and retries == 0:
        raise ValueError("judge='after_retry' with retries=0 has no retry to judge: write retries=1")
    return {
        "target": rate,
        "cases": _place("cases", cases, "'shipped', a JSONL file, a folder of them, or 'bfcl:simple_python'"),
        "mode": mode,
        "confidence": level,
        "baseline": _place("baseline", baseline, "a backend of the config file, or an earlier results file"),
        "margin": drop,
        "retries": retries,
        "judge": judge,
    }


def share(argument: str, value: object, *, most: float = math.inf) -> float:
    """A number above 0 that is a share of 1, at most ``most``.

    :raises ValueError: naming what is accepted; a percentage is told how to be written as a share.
    """
    said = f"{argument}={_shown(value)}"
    if isinstance(value, str):
        raise ValueError(f"{said} is a string and not a number: write it without quotes, such as {_EXAMPLES[argument]}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise ValueError(f"{said} is not a number: write a share such as {_EXAMPLES[argument]}")
    if 1 < value <= 100 and most <= 1:
        raise ValueError(f"{said} is not a share: write {value / 100:.10g}")
    if not 0 < value <= most:
        raise ValueError(
            f"{said} is not a share above 0{' and at most 1' if most <= 1 else ''}: write such as {_EXAMPLES[argument]}"
        )
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"(a number of {value.bit_length()} bits)"  # Python writes none of more than 4,300 digits
    return repr(value)


def _place(argument: str, value: object, accepted: str) -> str | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{argument}={value!r} is not a place: write {accepted}")
    return text


def _vram_soak(turns: object = None, hours: object = None) -> dict[str, Any]:
    from pytest_vram.settings import MOST_HOURS, MOST_TURNS
    from pytest_vram.spec import Amount

    if turns is not None and hours is not None:
        raise ValueError(f"turns={turns!r} and hours={hours!r} are two amounts: write one")
    if hours is not None:
        if isinstance(hours, bool) or not isinstance(hours, (int, float)) or not 0 < hours <= MOST_HOURS:
            raise ValueError(f"hours={hours!r} is not a number of hours above 0 and at most {MOST_HOURS}")
        return {"amount": Amount(text=f"{hours:g}h", seconds=hours * 3600.0)}
    count = SOAK_TURNS if turns is None else turns
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_TURNS:
        raise ValueError(f"turns={turns!r} is not a whole number of turns from 1 to {MOST_TURNS}")
    return {"amount": Amount(text=f"{count}turns", turns=count)}


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
    "toolcall_accuracy": Marker(
        'toolcall_accuracy(target, *, cases=None, mode="not_below", confidence=0.95, baseline=None, margin=0.05,'
        ' retries=1, judge="first_try")',
        "fail the test when the share of tool calls that are right is below target, such as 0.94",
        _toolcall_accuracy,
    ),
    "idle_rollback": Marker(
        'idle_rollback(tolerance="64MiB", settle=5.0)',
        "fail the test when idle memory is not back within tolerance after its teardown",
        _idle_rollback,
    ),
    "vram_soak": Marker(
        "vram_soak(turns=None, hours=None)",
        "run conversations for so many turns or hours, resumable; fail the test when memory or speed does not last",
        _vram_soak,
    ),
}

#: Fixtures whose use makes the plugin take part in a test.
FIXTURES = frozenset(
    {
        "vram",
        "vram_async_client",
        "vram_backend",
        "vram_backends",
        "vram_client",
        "vram_estimate",
        "vram_session",
        "vram_soak",
        "vram_toolcalls",
    }
)


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
    except (ValueError, OverflowError) as error:
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

"""Several servers of one model beside each other: whether each got the KV cache that its settings ask for.

A share of the card, such as vLLM's ``--gpu-memory-utilization`` and SGLang's ``--mem-fraction-static``, is no part that
adds up: each server computes what its cache may take from what is free when it starts. Servers that are started one
after another on one card with the same share get less and less, and none of them says so: only the tokens that their
caches hold do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pytest_vram.bootlog.boot import Boot
from pytest_vram.errors import BadInput
from pytest_vram.units import mib

#: Caches that differ by no more than this part are alike: processes do not find exactly the same room.
ALIKE = 0.05
#: A cache below this part of the largest one is starved.
STARVED = 0.5
#: Facts that replicas have in common.
_SAME = (
    "model_name",
    "context",
    "memory_share",
    "cache_type",
    "cache_type_k",
    "cache_type_v",
    "quantization",
    "tensor_parallel",
    "pipeline_parallel",
    "build",
)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One server of several.

    :ivar kv_tokens: tokens that its KV cache holds, ``None`` where its log does not say. :ivar part: of the largest
        cache, 0 to 1. :ivar free: bytes that were free on its card when it began, where printed.
    """

    name: str
    kv_tokens: int | None = None
    part: float | None = None
    free: int | None = None


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """What is seen of several servers of one model.

    :ivar kind: ``alike``, ``unequal``, ``starved`` (one has less than half of the largest cache, or no room for one
        request of full length) or ``unknown``. :ivar starved: names of those.
    :ivar certainty: how sure the reason is that ``text`` gives: ``certain``, ``likely`` or ``unknown``.
    :ivar differing: facts in which their settings differ, so that they are no replicas.
    """

    replicas: tuple[Replica, ...]
    kind: Literal["alike", "unequal", "starved", "unknown"]
    certainty: Literal["certain", "likely", "unknown"]
    text: str
    starved: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


def replicas(boots: Sequence[Boot], names: Sequence[str] = ()) -> Replicas:
    """Hold the KV caches of several servers against each other, in the order in which they were started.

    :param names: of the servers; by default ``#1``, ``#2`` and so on.
    :raises BadInput: less than two boots, or not as many names.
    """
    if len(boots) < 2:
        raise BadInput("one server has nothing to be held against: give the boots of two or more")
    if names and len(names) != len(boots):
        raise BadInput(f"{len(names)} names were given for {len(boots)} servers")
    names = names or [f"#{number}" for number in range(1, len(boots) + 1)]
    tokens = [_tokens(boot) for boot in boots]
    largest = max((count for count in tokens if count is not None), default=0)
    rows = tuple(
        Replica(
            name=name,
            kv_tokens=count,
            part=None if count is None or largest <= 0 else max(0.0, count / largest),
            free=_whole(boot.facts.get("free_bytes")),
        )
        for name, boot, count in zip(names, boots, tokens, strict=True)
    )
    differing = tuple(name for name in _SAME if _differs([boot.facts.get(name) for boot in boots]))
    silent = [row.name for row in rows if row.kv_tokens is None]
    if silent:
        text = f"the log of {', '.join(silent)} does not say how many tokens its KV cache holds, so nothing is compared"
        return Replicas(replicas=rows, kind="unknown", certainty="unknown", text=text, differing=differing)
    starved = tuple(row.name for row, boot in zip(rows, boots, strict=True) if _starved(row, boot))
    smallest = min(count for count in tokens if count is not None)
    said = f"KV caches of {', '.join(f'{row.kv_tokens:,}' for row in rows)} tokens"
    if not starved and smallest >= largest * (1 - ALIKE):
        return Replicas(replicas=rows, kind="alike", certainty="certain", text=f"{said}: alike", differing=differing)
    certainty, reason = _reason(rows, differing)
    who = f", of which {', '.join(starved)} {'is' if len(starved) == 1 else 'are'} starved" if starved else ""
    return Replicas(
        replicas=rows,
        kind="starved" if starved else "unequal",
        certainty=certainty,
        text=f"{said}{who}: {reason}",
        starved=starved,
        differing=differing,
    )


def _starved(row: Replica, boot: Boot) -> bool:
    context = _whole(boot.facts.get("context"))
    short = row.kv_tokens is not None and context is not None and row.kv_tokens < context
    return short or (row.part is not None and row.part < STARVED) or (row.kv_tokens or 0) <= 0


def _reason(rows: Sequence[Replica], differing: tuple[str, ...]) -> tuple[Literal["certain", "likely", "unknown"], str]:
    if differing:
        return "unknown", f"their settings differ ({', '.join(differing)}), so that they are no replicas of each other"
    share = "the share of the card does not add up, each server takes it of what is free when it starts"
    free = [row.free for row in rows if row.free is not None]
    falls = all((a.kv_tokens or 0) > (b.kv_tokens or 0) for a, b in itertools.pairwise(rows))
    if len(free) == len(rows):
        had = f"they had {', '.join(mib(size) for size in free)} free when they began"
        if falls and all(a > b for a, b in itertools.pairwise(free)):
            return "certain", f"{had}: {share}"
        return "unknown", f"{had}, which does not explain it"
    if falls:
        return "likely", f"each has less than the one before it, as on one card, where {share}"
    return "unknown", "nothing in their logs says why"


def _tokens(boot: Boot) -> int | None:
    found = boot.facts.get("kv_tokens", boot.facts.get("profiled_tokens"))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _differs(values: Sequence[Any]) -> bool:
    """Whether a fact has two values; one that a log does not print says nothing."""
    printed = [value for value in values if value is not None]
    return any(value != printed[0] for value in printed[1:])

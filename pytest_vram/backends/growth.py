"""What a deployment takes beyond its boot while it serves, as data: the steps of a probe and what they left behind.

Growth is what stays: idle memory after a step over idle memory before. A transient is what comes and goes: the peak of
a step over what was held when it began. A device whose memory counts when it is first written, which is the host's and
that of a software GPU, also grows by pages of buffers that the engine printed at boot; they are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from pytest_vram.bootlog.boot import Failure
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.readings import Measured, Reading, Unmeasurable, larger, rise

Outcome = Literal["served", "shortened", "skipped", "no_time", "refused", "timed_out", "out_of_memory", "died"]
#: Beginning of the detail of a ledger's entries for growth.
DETAIL = "growth while serving"
HOST = "host"
#: What was there before the first step and after the boot: other requests.
EARLIER = "requests before the probe"
#: Beginnings of sources whose figures count a page when it is first written.
_WHEN_TOUCHED = ("host-", "rpc-")


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a probe; every table is device label → figure of the backend alone.

    :ivar name: ``short prompts``, ``full ubatch``, ``near-full context``, ``2 in flight``, ``image``, ``idle`` …
    :ivar outcome: ``served``; ``shortened`` (served with fewer tokens than wanted, ``reason`` says why); ``skipped``
        (nothing here to ask it for); ``no_time`` (its time was used up before); else how it failed.
    :ivar requests: that were sent. :ivar in_flight: most of them at once, as the client saw it.
    :ivar tokens: of each prompt, as the server counted them; ``wanted``: of each, at most.
    :ivar before: idle memory before it. :ivar base: what was held when it began, in the terms of peaks. :ivar peak: the
        most that was held. :ivar after: idle memory after it. :ivar growth: ``after`` over ``before``, never negative.
    :ivar transient: ``peak`` over ``base``. :ivar settled: whether memory was at rest afterwards.
    :ivar prompt_cache: bytes of prompts and checkpoints that the engine says it keeps on the host after it.
    :ivar failure: what the engine's log says of it, where it failed.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    requests: int = 0
    in_flight: int = 0
    tokens: list[int] = []
    wanted: int | None = None
    before: dict[str, Measured] = {}
    base: dict[str, Measured] = {}
    peak: dict[str, Measured] = {}
    after: dict[str, Measured] = {}
    growth: dict[str, Measured] = {}
    transient: dict[str, Measured] = {}
    settled: bool = True
    prompt_cache: int | None = None
    failure: Failure | None = None
    seconds: float = 0.0


class Growth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole probe; every table is device label → figure of the backend alone.

    :ivar at_ready: idle memory when the boot was over. :ivar idle: after the last step. :ivar growth: ``idle`` over
        ``at_ready``. :ivar transient: the largest of the steps. :ivar peak: the largest of the steps.
    :ivar touched: part of the growth, in bytes, that may be buffers of the boot whose memory counts since it is
        written. :ivar entries: the rest as lines of the ledger, by step.
    :ivar unmeasured: why there is no figure at all.
    """

    steps: tuple[Step, ...] = ()
    at_ready: dict[str, Measured] = {}
    idle: dict[str, Measured] = {}
    growth: dict[str, Measured] = {}
    transient: dict[str, Measured] = {}
    peak: dict[str, Measured] = {}
    touched: dict[str, int] = {}
    entries: tuple[Entry, ...] = ()
    unmeasured: str = ""

    @property
    def failed(self) -> Step | None:
        """The first step that the deployment did not serve."""
        failures = ("refused", "timed_out", "out_of_memory", "died")
        return next((step for step in self.steps if step.outcome in failures), None)


def growth_of(
    steps: Sequence[Step],
    at_ready: Mapping[str, Measured],
    printed: Iterable[Entry],
    *,
    cached: int = 0,
    unmeasured: str = "",
) -> Growth:
    """Put the steps of a probe together.

    :param at_ready: idle memory when the boot was over; a device without a figure there counts from the first step on.
    :param printed: buffers that the engine printed at boot. :param cached: bytes that the prompt cache had before.
    """
    ready = {**_first(steps), **at_ready}
    idle = _last(steps)
    entries, touched = _entries(steps, ready, list(printed), cached)
    return Growth(
        steps=tuple(steps),
        at_ready=ready,
        idle=idle,
        growth={label: rise(figure, ready[label]) for label, figure in idle.items()},
        transient=_largest(step.transient for step in steps),
        peak=_largest(step.peak for step in steps),
        touched=touched,
        entries=entries,
        unmeasured=unmeasured,
    )


def risen(after: Mapping[str, Measured], before: Mapping[str, Measured]) -> dict[str, Measured]:
    """Label → the rise from ``before`` to ``after``; unmeasurable where one of the two is."""
    missing = Unmeasurable(reason="nothing was read before it")
    return {label: rise(figure, before.get(label, missing)) for label, figure in after.items()}


def _first(steps: Iterable[Step]) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for step in steps:
        for label, figure in step.before.items():
            found.setdefault(label, figure)
    return found


def _last(steps: Iterable[Step]) -> dict[str, Measured]:
    """The last idle figures; a step that ended the server has none, and what was idle before it is no answer."""
    found: dict[str, Measured] = {}
    for step in steps:
        found.update(step.after)
    return found


def _largest(tables: Iterable[Mapping[str, Measured]]) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for table in tables:
        for label, figure in table.items():
            found[label] = larger([found[label], figure]) if label in found else figure
    return found


def _entries(
    steps: Sequence[Step], ready: Mapping[str, Measured], printed: list[Entry], cached_before: int
) -> tuple[tuple[Entry, ...], dict[str, int]]:
    """Lines of the ledger for what stayed, and what of it may be buffers that were printed already.

    What a step took counts above the highest idle figure before it, so that memory that is used again counts once.
    """
    entries: list[Entry] = []
    touched: dict[str, int] = {}
    for label, figure in ready.items():
        if not isinstance(figure, Reading):
            continue
        known = 0  # of the prompt cache
        hidden = _not_yet_there(label, figure, printed)
        high = figure.bytes
        for name, after, caches in _stages(steps, label, cached_before):
            grown = after - high
            if grown <= 0:
                continue
            high = after
            cached = min(grown, max(0, caches - known)) if label == HOST else 0
            known += cached
            old = min(grown - cached, hidden)
            hidden -= old
            if old:
                touched[label] = touched.get(label, 0) + old
            rest = grown - cached - old
            detail = f"{DETAIL}: {name}"
            rows: list[tuple[Bucket, int, str, str]] = [
                ("kv", cached, "engine-log", f"{detail} (prompt cache and checkpoints)"),
                ("other", rest, figure.source, detail),
            ]
            entries += [
                Entry(bucket=bucket, device=label, bytes=size, source=source, detail=text)
                for bucket, size, source, text in rows
                if size
            ]
    return tuple(entries), touched


def _stages(steps: Sequence[Step], label: str, cached: int) -> Iterable[tuple[str, int, int]]:
    """(name, idle bytes after it, prompt cache after it) of each step, with what came before the first one."""
    first = True
    for step in steps:
        before, after = step.before.get(label), step.after.get(label)
        if first and isinstance(before, Reading):
            first = False
            yield EARLIER, before.bytes, cached
        if isinstance(after, Reading):
            yield step.name, after.bytes, step.prompt_cache or 0


def _not_yet_there(label: str, ready: Reading, printed: Iterable[Entry]) -> int:
    """Bytes of printed buffers that may have been missing in the figure of the boot, where memory counts when written.

    What the program holds for itself is in that figure too, so that it may be as large as all buffers and lack some.
    Compute buffers are the ones that nobody writes before a full ubatch comes; caches are cleared at boot.
    """
    if not ready.source.startswith(_WHEN_TOUCHED):
        return 0
    # A mapped file is no anonymous memory, before or after.
    mine = [entry for entry in printed if entry.device == label and "Mapped" not in entry.detail]
    return max(
        sum(entry.bytes for entry in mine) - ready.bytes,
        sum(entry.bytes for entry in mine if entry.bucket == "compute"),
    )

"""Memory moved: what a boot loaded is held by its server, on each device that was to hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_vram.bootlog import Boot
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import amount, block, provenance
from pytest_vram.ledger import Bucket
from pytest_vram.readings import Measured, Reading
from pytest_vram.units import MIB, mib

#: Buckets that are filled while a server loads. Buffers for computing may stay untouched until the first request.
_FILLED: tuple[Bucket, ...] = ("weights", "experts", "kv", "recurrent", "projector", "draft", "lora")
#: A rise may be less than what was printed by this part, and by this many bytes: pages, rounding, what was held before.
_PART, _BYTES = 0.10, 32 * MIB
#: By how many bytes a server's memory may fall while it answers: allocators give memory back.
_FALL = 64 * MIB


def judge_loaded(at_start: Measured, at_ready: Measured, *, check: str = "loaded") -> Finding | None:
    """Hold the server's memory at ``ready`` against that at ``start``: a model that was loaded takes memory."""
    missing = _missing(("start", at_start), ("ready", at_ready), check=check)
    if missing is not None:
        return missing
    assert isinstance(at_start, Reading)
    assert isinstance(at_ready, Reading)
    if at_ready.bytes > at_start.upper:
        return None
    rows = _rows(("at start", at_start), ("at ready", at_ready))
    if at_ready.upper <= at_start.bytes:
        title = "The server holds no more memory when it is ready than when it started: nothing was loaded by it."
        return _finding(check, "failed", "nothing was loaded", title, rows)
    title = "The server's memory at start and at ready cannot be told apart."
    return _finding(check, "inconclusive", "load not provable", title, rows)


def judge_moved(
    at_start: Mapping[str, Measured],
    at_ready: Mapping[str, Measured],
    boot: Boot | None = None,
    *,
    check: str = "moved",
) -> list[Finding]:
    """Hold the rise from ``start`` to ``ready`` on each device against the buffers that were printed for it.

    On a device, weights and cache that were printed must have become the server's: 90 % of them less 32 MiB, as pages,
    rounding and what was held before are no fault. Host memory must only have risen, as mapped weights are the kernel's
    pages until they are read. Of a device for which nothing was printed nothing is asked.

    :param boot: where it printed no buffer, one device at least must have risen.
    :returns: what does not hold or cannot be known, device by device; empty: memory moved everywhere it had to.
    """
    printed = {} if boot is None else _printed(boot)
    labels = sorted(label for label in at_start.keys() & at_ready.keys() if label in printed or not printed)
    found: list[Finding] = []
    rose = False
    for label in labels:
        finding = judge_loaded(at_start[label], at_ready[label], check=check)
        if finding is None and label != "host" and label in printed:
            finding = _short(label, at_start[label], at_ready[label], printed[label], check)
        if finding is None:
            rose = True
        else:
            found.append(finding)
    if not printed and rose:
        return []
    if printed and not labels:
        devices = ", ".join(f"{mib(size)} on {label}" for label, size in printed.items())
        text = f"The log tells of {devices}; there the server's memory was not measured."
        return [_finding(check, "inconclusive", "load not provable", text, [])]
    return found


def judge_answered(before: Measured, after: Measured, *, check: str = "answered") -> Finding | None:
    """Hold the server's memory after a tiny request against that before it: it must not have fallen.

    A server that unloads its model to answer, or that hands the request on to another process, loses memory while it
    answers. That the figure rises or stays proves no more than that this did not happen: a server whose compute buffers
    were touched before answers without a byte of its own.
    """
    missing = _missing(("before", before), ("after", after), check=check)
    if missing is not None:
        return missing
    assert isinstance(before, Reading)
    assert isinstance(after, Reading)
    if after.upper >= before.bytes - _FALL:
        return None
    rows = _rows(("before the request", before), ("after it", after))
    title = f"The server gave up {mib(before.bytes - after.upper)} while it answered: it holds no model for requests."
    return _finding(check, "failed", "memory fell", title, rows)


def _printed(boot: Boot) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in boot.entries:
        if entry.bucket in _FILLED and entry.bytes > 0:
            found[entry.device] = found.get(entry.device, 0) + entry.bytes
    return found


def _short(label: str, at_start: Measured, at_ready: Measured, printed: int, check: str) -> Finding | None:
    assert isinstance(at_start, Reading)
    assert isinstance(at_ready, Reading)
    if at_ready.upper - at_start.bytes >= printed * (1 - _PART) - _BYTES:
        return None
    rows = [("printed", f"{mib(printed)} of weights and cache"), *_rows(("at start", at_start), ("at ready", at_ready))]
    title = (
        f"On {label} the server took {mib(at_ready.upper - at_start.bytes)} at most while it loaded, less than its log"
        " says that it put there."
    )
    return _finding(check, "failed", "less was loaded than printed", title, rows)


def _missing(*figures: tuple[str, Measured], check: str) -> Finding | None:
    for when, figure in figures:
        if not isinstance(figure, Reading):
            title = f"The server's memory at {when} could not be measured: {figure.reason}."
            return _finding(check, "inconclusive", "load not provable", title, [])
    return None


def _rows(*figures: tuple[str, Measured]) -> list[tuple[str, str]]:
    return [(name, f"{amount(one)} ({provenance(one)})") for name, one in figures if isinstance(one, Reading)]


def _finding(check: str, verdict: str, section: str, title: str, rows: Sequence[tuple[str, str]]) -> Finding:
    return Finding(
        check=check,
        verdict="failed" if verdict == "failed" else "inconclusive",
        section=section,
        text=block(title, rows),
    )

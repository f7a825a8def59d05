"""``vram watch`` as lines for a terminal of any width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from pytest_vram.report.watched import (
    Watched,
    WatchedBackend,
    WatchedDevice,
    WatchedLease,
    WatchedTest,
    WatchedWaiting,
)
from pytest_vram.text import printable
from pytest_vram.units import mib, written

NARROWEST = 20
_GONE = ("stopped", "failed", "died")
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_MOST_ROWS = 12


def watch_lines(seen: Watched, width: int = 80, *, unicode: bool = True) -> list[str]:
    """The picture of a run, no line wider than ``width`` cells; nothing in it can command a terminal."""
    width = max(NARROWEST, width)
    return [_fit(line, width, unicode=unicode) for line in _rows(seen, width, unicode=unicode)]


def _rows(seen: Watched, width: int, *, unicode: bool) -> Iterator[str]:
    yield from _head(seen, width)
    for device in seen.devices:
        yield from _device(device, width, unicode=unicode)
    yield from _some([_backend(one, live=seen.state == "running") for one in _backends(seen)], "backends")
    yield from _some([_test(one, width) for one in seen.tests], "tests")
    for rows in _some_rows([list(_waits(one, width)) for one in seen.waiting], "waiting tests"):
        yield from rows
    held = [one for one in seen.leases if one.holds or one.exclusive]
    yield from _some([_lease(one, width) for one in held], "leases")
    if seen.process_count:
        yield from _processes(seen, width)
    yield from _wrapped("done", [f"{count} {outcome}" for outcome, count in seen.counts.items()], width)
    if seen.last_test:
        yield f"last      {_tail(f'{seen.last_test}', width - 12 - len(str(seen.last_outcome)))} {seen.last_outcome}"
    yield from (f"note      {text}" for text in seen.notes)
    trouble = []
    if seen.gaps:
        trouble.append(f"{seen.gaps} gap{'s' if seen.gaps > 1 else ''} in sampling")
    if seen.torn:
        trouble.append(f"torn lines: {seen.torn}")
    if seen.unreadable:
        trouble.append(f"unreadable lines: {seen.unreadable}")
    yield from _wrapped("journal", trouble, width)


def _wrapped(head: str, parts: list[str], width: int) -> Iterator[str]:
    """The parts with commas between them, on as many lines as they need; nothing where there are none."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width - 11:
            yield f"{head:<9} {line},"
            head, line = "", ""
        line = f"{line}, {part}" if line else part
    if line:
        yield f"{head:<9} {line}"


def _head(seen: Watched, width: int) -> Iterator[str]:
    state = {
        "waiting": "nothing is written yet",
        "running": "running",
        "finished": seen.verdict or "finished",
        "lost": "lost: nothing of it lives, and its journal has no end",
    }[seen.state]
    seconds = f" {_seconds(seen.seconds)}" if seen.seconds is not None else ""
    yield f"run       {seen.run}"
    parts = [f"{state}{seconds}"]
    if seen.started is not None and seen.state in ("finished", "lost"):
        parts.append(f"begun {_moment(seen.started)}")
    if seen.device:
        parts.append(f"device {seen.device}")
    if seen.interval_ms is not None:
        parts.append(f"every {seen.interval_ms:g} ms")
    if seen.state == "running":
        parts.append("its keeper answers" if seen.live else "its keeper does not answer: from the journal alone")
    yield from _wrapped("", parts, width)


def _device(device: WatchedDevice, width: int, *, unicode: bool) -> Iterator[str]:
    size = device.capacity
    if device.trouble is not None:
        yield f"{device.label:<9} cannot be read: {device.trouble}"
        return
    whole = f" of {mib(size)}" if size is not None else ""
    if device.held is None and device.peak is not None:
        parts = [f"peak {mib(device.peak)}{whole}"]
    else:
        parts = [f"{'–' if device.held is None else mib(device.held)}{whole}"]
        if device.peak is not None:
            parts.append(f"peak {mib(device.peak)}")
    if device.limit_from == "emulated":
        parts.append("played")
    words = ", ".join(parts)
    room = width - 11 - len(words)
    bar = ""
    if size and device.held is not None and room >= 8:
        length = min(20, room)
        full = min(length, round(length * device.held / size))
        bar = ("█" if unicode else "#") * full + ("░" if unicode else ".") * (length - full) + " "
    yield from _wrapped(device.label, [bar + parts[0], *parts[1:]], width)
    if len(device.series) > 1:
        # By its own highest point: on a card that is hardly used nothing else would be seen of it.
        top = max(device.series)
        scale = f" to {mib(top)}"
        room = width - 10 - len(scale)
        strip = _strip(device.series, min(60, max(room, 8)), top, unicode=unicode)
        yield f"          {strip}{scale if room >= 8 else ''}"


def _strip(values: list[int], width: int, top: int, *, unicode: bool) -> str:
    """The values as one row of bars; of several that share a cell, the largest."""
    marks = _BARS if unicode else _ASCII_BARS
    cells = min(width, len(values))
    groups = [values[len(values) * at // cells : len(values) * (at + 1) // cells] for at in range(cells)]
    steps = len(marks) - 1
    # What is there at all is seen.
    return "".join(marks[min(steps, -(-max(group) * steps // top)) if top else 0] for group in groups)


def _backends(seen: Watched) -> list[WatchedBackend]:
    """Those that are there, and of the others the last of each name."""
    last = {one.name: one for one in seen.backends}
    return [one for one in seen.backends if one.state not in _GONE or last[one.name] is one]


def _backend(one: WatchedBackend, *, live: bool) -> str:
    state = f"{one.state}: {one.phase}" if one.phase else one.state
    pid = f", PID {one.pid}" if one.pid and one.state not in _GONE else ""
    why = f": {one.reason}" if one.reason and one.state in _GONE else ""
    gone = one.state in _GONE
    since = "" if gone and not live else f" {_seconds(one.seconds)} ago" if gone else f", {_seconds(one.seconds)}"
    return f"backend   {one.name}#{one.generation} {state}{pid}{since}{why}"


def _test(one: WatchedTest, width: int) -> str:
    parts = [_seconds(one.seconds)]
    if one.phase:
        parts.append(f"phase {one.phase}")
    if one.requests:
        parts.append(f"{one.requests} request{'s' if one.requests > 1 else ''}")
    if one.exclusive:
        parts.append("alone")
    rest = ", ".join(parts)
    return f"test      {_who(one.worker)}{_tail(one.name, width - 11 - len(_who(one.worker)) - len(rest))} {rest}"


def _waits(one: WatchedWaiting, width: int) -> Iterator[str]:
    parts = [_seconds(one.seconds)]
    if one.takes:
        parts.append(f"for {_sizes(one.takes)}")
    if one.exclusive:
        parts.append("to be alone")
    rest = ", ".join(parts)
    yield f"waits     {_who(one.worker)}{_tail(one.name, width - 11 - len(_who(one.worker)) - len(rest))} {rest}"
    yield from (f"          {reason}" for reason in one.reasons[:3])


def _lease(one: WatchedLease, width: int) -> str:
    parts = [_sizes(one.holds)] if one.holds else []
    if one.exclusive:
        parts.append("alone")
    if one.idle:
        parts.append("idle")
    if not one.mine:
        parts.append(f"of run {one.run}" if one.run else "of another run")
    rest = ", ".join(parts)
    what = f"{one.kind} {_who(one.worker)}"
    return f"lease     {what}{_tail(one.name, width - 11 - len(what) - len(rest))} {rest}"


def _processes(seen: Watched, width: int) -> Iterator[str]:
    owners: dict[str, list[int]] = {}
    for one in seen.processes:
        owners.setdefault(one.owner, []).append(one.host or 0)
    parts = [f"{len(sizes)} of {owner} with {mib(sum(sizes))} on the host" for owner, sizes in owners.items()]
    if seen.process_count > len(seen.processes):
        parts.append(f"{seen.process_count} in all")
    yield from _wrapped("processes", parts, width)


def _some(rows: list[str], what: str) -> Iterator[str]:
    yield from rows[:_MOST_ROWS]
    if len(rows) > _MOST_ROWS:
        yield f"          and {len(rows) - _MOST_ROWS} more {what}"


def _some_rows(groups: list[list[str]], what: str) -> Iterator[list[str]]:
    yield from groups[:_MOST_ROWS]
    if len(groups) > _MOST_ROWS:
        yield [f"          and {len(groups) - _MOST_ROWS} more {what}"]


def _who(worker: str | None) -> str:
    return f"{worker} " if worker else ""


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{mib(size) if size % 10**6 else written(size)} of {label}" for label, size in sizes.items())


def _moment(wall: float) -> str:
    """A time on the clock of whoever reads it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
    except (OverflowError, ValueError, OSError):
        return "at no time of this clock"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _tail(text: str, room: int) -> str:
    """The end of a name, where its difference to others is."""
    text = printable(text)
    room = max(8, room)
    return text if len(text) <= room else "…" + text[1 - room :]


def _fit(line: str, width: int, *, unicode: bool) -> str:
    """The line in at most ``width`` cells of a terminal."""
    from rich.cells import cell_len, set_cell_size  # which every import of this package would pay for

    text = printable(line)
    if not unicode:
        text = text.translate({ord("–"): "-", ord("…"): "."}).encode("ascii", "replace").decode("ascii")
    if cell_len(text) <= width:
        return text
    mark = "…" if unicode else "."
    return set_cell_size(text, width - 1).rstrip() + mark

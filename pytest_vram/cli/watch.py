"""``vram watch``: what a run is doing, while it does it."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram import keeper
from pytest_vram.cli import project
from pytest_vram.cli.following import Picture, open_regular
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer, speaks_unicode
from pytest_vram.errors import BadInput, VramError
from pytest_vram.journal import FILE_NAME
from pytest_vram.keeper.messages import State, Status
from pytest_vram.measure import procfs
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.report.watch_lines import watch_lines
from pytest_vram.report.watched import Watched, WatchedDevice, WatchedLease, WatchedWaiting
from pytest_vram.text import printable

RUN_FILE = "run.json"
#: Seconds between two looks at the journal, and between two questions to the keeper.
_LOOK = 0.25
_ASK = 1.0
_ANSWER_SECONDS = 2.0
#: Seconds without a living process of the run before it is called lost; a keeper may be replaced meanwhile.
_PATIENCE = 3.0
#: Seconds that a finished run gets to write its verdict.
_VERDICT_SECONDS = 5.0
_CODES = {"passed": HOLDS, "inconclusive": INCONCLUSIVE}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Show a run until it ends; exit code by its verdict, or 0 for one look at a run that goes on.

    :raises BadInput: there is no run, or it is not one.
    """
    if rest:
        raise BadInput(f"vram watch takes one run and its own options, not {rest[0]!r}")
    where = Runs(project.find(Path.cwd()).root)
    folder = where.named(options.run) if options.run is not None else where.newest()
    if folder is None and not options.follow:
        raise BadInput(
            f"no run was found in {' or '.join(str(base) for base in where.bases)}: start pytest with a VRAM option or"
            " marker first, wait for the next one with --follow, or name the folder of a run"
        )
    if options.json or options.once:
        if folder is None:
            raise BadInput("there is no run yet, and --json and --once look once: leave out one of the two")
        return _once(folder)
    terminal = sys.stdout is not None and sys.stdout.isatty()
    seen = _live(where, folder, follow=options.follow) if terminal else _log(where, folder, follow=options.follow)
    return Answer(code=_code(seen), document=None)


def _once(folder: Path) -> Answer:
    watcher = Watcher(folder)
    try:
        seen = watcher.look(patient=False)
    finally:
        watcher.close()
    unicode = sys.stdout is None or speaks_unicode(sys.stdout)
    return Answer(code=_code(seen), document=seen, lines=tuple(watch_lines(seen, _width(), unicode=unicode)))


def _code(seen: Watched) -> int:
    if seen.state in ("running", "waiting"):
        return HOLDS
    return _CODES.get(seen.verdict or "", FAILS)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


# ------------------------------------------------------------ the runs


class Runs:
    """Where the runs of a project are. :ivar bases: their folders."""

    def __init__(self, root: Path) -> None:
        self.bases = [root / ".vram" / "runs"]
        try:
            # Where the project cannot be written, its runs are beside the keepers' sockets.
            self.bases.append(Path(keeper.socket_path("any")).parent / "runs")
        except VramError:
            pass

    def named(self, text: str) -> Path:
        """The folder of the run that a user names: its id, its folder or its journal.

        :raises BadInput: there is none.
        """
        if text and "\0" not in text:
            candidates = [Path(text), *(base / text for base in self.bases)]
            for path in candidates:
                folder = path.parent if path.name == FILE_NAME else path
                try:
                    if (folder / FILE_NAME).is_file() or (folder / RUN_FILE).is_file():
                        return folder
                except OSError:
                    break  # such as a name that is too long for any file
        known = ", ".join(path.name for path in self.all()[-3:]) or "none"
        raise BadInput(f"there is no run {text!r}: name its id, its folder or its journal (the last ones are {known})")

    def newest(self, *, but: Collection[Path] = ()) -> Path | None:
        """The run that began last, of those that are not among ``but``."""
        found = [path for path in self.all() if path not in but]
        return found[-1] if found else None

    def all(self) -> list[Path]:
        """Every run, the one that began last at the end."""
        # The first base is the project's; runs of others lie in the second.
        for base in self.bases:
            try:
                found = [path for path in base.iterdir() if path.is_dir()]
            except OSError:
                continue
            if found:
                return sorted(found, key=_began)
        return []


def _began(folder: Path) -> tuple[str, float]:
    """By the time in its name, to the second; within one by what its journal says of its beginning."""
    match = re.match(r"\d{8}T\d{6}Z", folder.name)
    try:
        with os.fdopen(open_regular(folder / FILE_NAME), "rb") as stream:
            wall = float(msgspec.json.decode(stream.readline(1 << 20))["wall"])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError):
        wall = time.time()  # one that has not begun to write
    wall = min(max(0.0, wall), 1e11)
    return (match[0] if match else time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall)), wall)


# ------------------------------------------------------------ one run


class Watcher:
    """One run: its journal, its keeper where that answers, and its verdict.

    :param events: takes (seconds since the run began, sentence) of every change, where somebody wants them.
    """

    def __init__(self, folder: Path, events: list[tuple[float, str]] | None = None) -> None:
        self.folder = folder
        tell = (lambda seconds, text: events.append((seconds, text))) if events is not None else None
        self._picture = Picture(folder, tell)
        self._client: keeper.KeeperClient | None = None
        self._state: State | None = None
        self._asked = 0.0
        self._silent: float | None = None
        self._ended: float | None = None

    def look(self, *, patient: bool = True) -> Watched:
        """The run as it is now.

        :param patient: give a run without a living process, or one that just ended, a moment before it is called lost.
        """
        picture = self._picture
        picture.read()
        now = time.monotonic()
        if picture.end is not None:
            self._hang_up()
            self._ended = self._ended or now
            verdict = _verdict(self.folder)
            if verdict is None and patient and now - self._ended < _VERDICT_SECONDS and self._controller_lives():
                return picture.show("running")
            return picture.show("finished", verdict=verdict or _by_exit(picture.end.outcome))
        self._ended = None
        if not picture.begun:
            verdict = _verdict(self.folder)
            if verdict is not None:
                return picture.show("finished", verdict=verdict)
        state = self._ask(now)
        if state is None and not self._lives():
            self._silent = self._silent or now
            if not patient or now - self._silent >= _PATIENCE:
                # Its last words may have come between the look at the journal and the look at its processes.
                return self.look(patient=patient) if picture.read() else picture.show("lost")
        else:
            self._silent = None
        seen = picture.show("running" if picture.begun else "waiting", live=state is not None)
        return merged(seen, state) if state is not None else seen

    def close(self) -> None:
        """Let go of the journal and of the keeper."""
        self._hang_up()
        self._picture.close()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._state = None

    def _ask(self, now: float) -> State | None:
        """What the keeper says, at most a second old; ``None`` where it does not answer."""
        if now - self._asked < _ASK:
            return self._state
        self._asked = now
        self._state = None
        try:
            if self._client is None:
                path = keeper.socket_path(self._picture.run.run or self.folder.name)
                if not os.path.exists(path):
                    return None
                self._client = keeper.KeeperClient(path, role="viewer", name="watch", timeout=_ANSWER_SECONDS)
            reply = self._client.call(Status(), _ANSWER_SECONDS)
            self._state = reply if isinstance(reply, State) else None
        except (VramError, OSError):
            self._hang_up()
        return self._state

    def _lives(self) -> bool:
        """Whether a process of the run may still write: its keeper, or a controller that would start one."""
        pid = self._picture.keeper
        return self._controller_lives() or (pid is not None and procfs.read_stat(pid) is not None)

    def _controller_lives(self) -> bool:
        pid = self._picture.run.controller
        if pid is None:
            return not self._picture.begun and _fresh(self.folder)
        stat = procfs.read_stat(pid)
        return stat is not None and stat.state not in "ZX" and _is_older(stat, self._picture.first)


def _fresh(folder: Path) -> bool:
    """Whether a folder without a journal was made a moment ago, so that one may come."""
    try:
        return time.time() - folder.stat().st_mtime < 30
    except OSError:
        return False


def _is_older(stat: procfs.Stat, first: int | None) -> bool:
    """Whether a process was there before the journal began, and does not merely have the number of one that was."""
    if first is None:
        return True
    return procfs.age(stat) + 0.1 >= (time.monotonic_ns() - first) / 1e9


def _verdict(folder: Path) -> str | None:
    """The verdict that the run itself wrote."""
    try:
        with os.fdopen(open_regular(folder / RUN_FILE), "rb") as stream:
            found: Any = msgspec.json.decode(stream.read())
        verdict = found["run"]["verdict"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    return verdict if verdict in ("passed", "failed", "inconclusive") else None


def _by_exit(outcome: str) -> str | None:
    """The verdict by pytest's exit status, where the run could not write its own."""
    return "passed" if outcome == "0" else "failed" if outcome.isdigit() else None


def merged(seen: Watched, state: State) -> Watched:
    """The picture with what the keeper knows better: what is held now, who waits for what, and what others hold."""
    devices = []
    for device in seen.devices:
        figure = state.held.get(device.label)
        if isinstance(figure, Reading):
            peak = max(device.peak or 0, figure.bytes)
            device = msgspec.structs.replace(device, held=figure.bytes, peak=peak)
        elif isinstance(figure, Unmeasurable):
            device = _broken(device, figure.reason)
        devices.append(device)
    exclusive = {str(row.get("name")) for row in state.windows if row.get("exclusive")}
    tests = [msgspec.structs.replace(test, exclusive=test.name in exclusive) for test in seen.tests]
    leases = [
        WatchedLease(
            kind=str(row.get("kind", "")),
            name=str(row.get("name", "")),
            holds=row.get("holds") or {},
            worker=row.get("worker") or None,
            exclusive=bool(row.get("exclusive")),
            idle=bool(row.get("idle")),
            mine=bool(row.get("mine", True)),
            run=row.get("run"),
        )
        for row in state.leases
    ]
    waiting = [
        WatchedWaiting(
            name=str(row.get("name", "")),
            seconds=float(row.get("seconds", 0.0)),
            worker=row.get("worker") or None,
            takes=row.get("takes") or {},
            exclusive=bool(row.get("exclusive")),
            mine=bool(row.get("mine", True)),
            run=row.get("run"),
            reasons=[str(text) for text in row.get("for") or []],
        )
        for row in state.waiting
    ]
    return msgspec.structs.replace(seen, devices=devices, tests=tests, leases=leases, waiting=waiting)


def _broken(device: WatchedDevice, reason: str) -> WatchedDevice:
    return msgspec.structs.replace(device, held=None, trouble=reason)


# ------------------------------------------------------------ following


def pictures(
    where: Runs, folder: Path | None, *, on: bool, events: list[tuple[float, str]] | None
) -> Iterator[Watched]:
    """The run again and again until it ends, and with ``on`` the next ones after it, for ever."""
    watcher = Watcher(folder, events) if folder is not None else None
    known: list[Path] = []
    try:
        while True:
            if watcher is None:
                folder = where.newest(but=known)
                if folder is None:
                    time.sleep(_LOOK)
                    continue
                watcher = Watcher(folder, events)
            seen = watcher.look()
            yield seen
            if seen.state in ("finished", "lost"):
                if not on:
                    return
                # What began before it is not gone back to; one that came meanwhile is not missed.
                known = [path for path in where.all() if _began(path) <= _began(watcher.folder)]
                watcher.close()
                watcher = None
            time.sleep(_LOOK)
    finally:
        if watcher is not None:
            watcher.close()


def _live(where: Runs, folder: Path | None, *, follow: bool) -> Watched:
    """Redraw in place; returns the last picture, which stays on the terminal."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    unicode = speaks_unicode(sys.stdout)
    seen: Watched | None = None

    def picture() -> Group:
        if seen is None:
            return Group(Text("waiting for a run …" if unicode else "waiting for a run ..."))
        # A terminal cannot redraw more rows than it has.
        rows = watch_lines(seen, console.width, unicode=unicode)[: max(1, console.height - 1)]
        return Group(*(Text(row, no_wrap=True, overflow="crop") for row in rows))

    with Live(console=console, get_renderable=picture, auto_refresh=False, vertical_overflow="crop") as live:
        live.refresh()
        for one in pictures(where, folder, on=follow, events=None):
            seen = one
            live.refresh()
    assert seen is not None
    return seen


def _log(where: Runs, folder: Path | None, *, follow: bool) -> Watched:
    """A line for each change: what a file or a pipe can take. Returns the last picture."""
    events: list[tuple[float, str]] = []
    seen: Watched | None = None
    last: Path | None = None
    for seen in pictures(where, folder, on=follow, events=events):
        if Path(seen.folder) != last:
            last = Path(seen.folder)
            print(printable(f"run {seen.run} in {seen.folder}"), flush=True)
        for seconds, text in events:
            print(printable(f"{seconds:9.2f} s  {text}"), flush=True)
        events.clear()
    assert seen is not None
    print("\n".join(watch_lines(seen, _width(), unicode=speaks_unicode(sys.stdout))), flush=True)
    return seen

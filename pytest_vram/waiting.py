"""Telling a person who waits for whom, while tests wait.

With xdist the controller runs no test, and a thread of it asks the keeper now and then. Without xdist the only process
is the one that waits, so it asks in between; a thread there would make Python warn every test that forks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator

import pytest

from pytest_vram.errors import KeeperError
from pytest_vram.keeper import KeeperClient, waiting_lines
from pytest_vram.keeper.messages import State, Status

#: Seconds that a test waits before it is told, and between two lines about the same test.
AFTER = 2.0
AGAIN = 60.0
_EVERY = 1.0
_PATIENCE = 5.0


class Told:
    """What was told already.

    :param socket: of the keeper; before there is one, nobody waits. :param write: writes a line.
    """

    def __init__(self, socket: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._write = write
        self._clock = clock
        self._said: dict[str, float] = {}
        self._viewer: KeeperClient | None = None

    def look(self) -> None:
        """Ask once, and tell what is new; without a word where no keeper answers."""
        try:
            if self._viewer is None:
                self._viewer = KeeperClient(self._socket, role="viewer", name="waiting", timeout=_PATIENCE)
            state = self._viewer.call(Status(), _PATIENCE)
        except KeeperError:
            self.close()
            return
        if isinstance(state, State):
            self.tell(state)

    def tell(self, state: State) -> None:
        """Tell who waits according to this state."""
        now = self._clock()
        for row in state.waiting:
            name = f"{row['name']} {row['worker']}"
            if now - self._said.get(name, -AGAIN) < AGAIN:
                continue
            for line in waiting_lines([row], AFTER):
                self._said[name] = now
                self._write(line)

    def close(self) -> None:
        """Drop the connection."""
        if self._viewer is not None:
            self._viewer.close()
            self._viewer = None


class Teller:
    """A plugin of the process that people look at.

    :param meanwhile: takes what is to be called while this process waits for the keeper.
    """

    NAME = "vram-waiting"

    def __init__(
        self, config: pytest.Config, socket: str, meanwhile: Callable[[Callable[[], None] | None], None]
    ) -> None:
        self._config = config
        self._told = Told(socket, writer(config))
        self._meanwhile = meanwhile
        self._over = threading.Event()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Tell who waits while the tests run."""
        if not self._config.pluginmanager.has_plugin("dsession"):
            self._meanwhile(self._told.look)
            try:
                return (yield)
            finally:
                self._meanwhile(None)
                self._told.close()
        thread = threading.Thread(target=self._run, name=self.NAME, daemon=True)
        thread.start()
        try:
            return (yield)
        finally:
            self._over.set()
            thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self._told.look()
        self._told.close()


def writer(config: pytest.Config) -> Callable[[str], None]:
    """Writes a line to pytest's terminal, on a line of its own, also while the output of a test is captured."""

    def write(line: str) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(line)
            reporter.flush()  # whoever reads a file or a pipe waits for it now

    return write

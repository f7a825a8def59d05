"""A program that ends when it is told to, or when this process dies, with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SECONDS_TO_END = 15.0


class Confined:
    """A program under a guard (:mod:`pytest_vram.keeper.confined`), which this process holds by a pipe.

    However this process dies, the pipe ends, and the guard kills the program and everything that it started.

    :ivar pid: of the program. :ivar output: a file descriptor with what the program prints. :ivar code: as in
        :class:`subprocess.Popen`, after :meth:`end`; ``None`` where the guard could not say.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        most_data: int | None = None,
        remove: Path | None = None,
    ) -> None:
        """Start it.

        :param most_data: bytes of data that the program may have. :param remove: a folder of links, which goes if this
            process dies.
        :raises OSError: it, or its guard, cannot be started.
        """
        self.code: int | None = None
        self.pid = 0
        self._said = b""
        self._report, report = os.pipe()
        try:
            # -P: a module of the project under test must not stand in for one of the standard library.
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "pytest_vram.keeper.confined"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(report,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(report)
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self.output = self._guard.stdout.fileno()
        order = {
            "argv": list(argv),
            "environment": dict(environment),
            "folder": None if folder is None else str(folder),
            "most_data": most_data,
            "remove": "" if remove is None else str(remove),
            "report": report,
        }
        try:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(json.dumps(order).encode() + b"\n")
                self._guard.stdin.flush()
            word, _, reason = self._line().partition(" ")
        except BaseException:
            self.end()
            raise
        if word == "started":
            self.pid = int(reason)
        else:
            self.end()
            raise OSError(0, reason or "its guard ended")

    def _line(self) -> str:
        """The next line of the guard's report; empty at its end."""
        while b"\n" not in self._said:
            more = os.read(self._report, 512)
            if not more:
                break
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        """Kill it, and wait until it is gone. Does nothing the second time."""
        if self._report < 0:
            return
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(b"end\n")
            self._guard.stdin.flush()
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        try:
            self._guard.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode != 0 and self.pid:
            with contextlib.suppress(OSError):  # the guard was killed: its child goes with it, the group may not
                os.killpg(self.pid, signal.SIGKILL)
        while line := self._line():
            word, _, code = line.partition(" ")
            if word == "ended":
                self.code = int(code)
        self._guard.stdout.close()
        os.close(self._report)
        self._report = -1

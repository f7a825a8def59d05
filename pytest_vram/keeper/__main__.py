"""The guard: forks the keeper, waits for its end, and ends everything that it leaves behind.

A keeper that is killed cannot tidy up. Whatever it started then becomes a child of the guard (a *subreaper*), however
often it forked, and the guard ends all of it.

Nor can a keeper that hangs: it has one thread, and a call of a graphics driver may never return. It shows a sign of
life with each sample (:mod:`pytest_vram.keeper.pulse`). Where that stays away for long, or when the run is over, the
guard kills it: what a keeper says that did not look for so long is of no use. The guard imports next to nothing.

Three processes are made: the launcher, which ends at once so that pytest has no child to wait for; the guard; and the
keeper. When the guard is killed, the keeper is told by a signal (SIGTERM) and ends in order.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_vram.keeper.pulse import Pulse

#: Seconds without a sign of life after which a keeper hangs; a driver may take some for an answer.
_HANGS = 30.0
#: The same once the run is over, by when it was to be gone.
_HANGS_AT_END = 3.0
#: Seconds for a keeper that does show signs of life to end; the kernel may hold a server's process for some of them.
_ENDS = 12.0
#: Seconds between two looks. A longer time between two was not the keeper's: the machine stood still.
_LOOK, _LOOK_AT_END = 1.0, 0.1


def main() -> None:
    """Read a launch from standard input, become guard and keeper. Writes ``ready`` or a reason to standard output."""
    text = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    from pytest_vram.keeper import parents

    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)
    from pytest_vram.keeper.pulse import Pulse

    parents.adopt_orphans()
    guard = os.getpid()
    pulse = Pulse()
    keeper = os.fork()
    if keeper == 0:
        parents.die_with_parent(signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(1)
        from pytest_vram.keeper.service import run

        run(text, guard, pulse)
        return
    watch = _Watch(keeper, pulse, _controller(text))
    # A person who ends the guard means the run: the keeper ends it in order.
    signal.signal(signal.SIGTERM, lambda *_: watch.end())
    # The launcher's caller waits for the end of this pipe; the keeper's copy is the one that counts.
    os.dup2(2, 1)
    watch.wait()
    _lift_limits(text)
    _end_all(guard)


def _controller(text: bytes) -> tuple[int, int] | None:
    """PID and start time of the run's controller."""
    import json

    try:
        pid, start = json.loads(text)["controller"]
        return int(pid), int(start)
    except (ValueError, TypeError, KeyError):
        return None  # no launch at all; the keeper says so and ends


class _Watch:
    """Waits for the keeper's end, and brings it about where it does not come by itself."""

    def __init__(self, keeper: int, pulse: Pulse, controller: tuple[int, int] | None) -> None:
        self._keeper = keeper
        self._pulse = pulse
        self._controller = controller
        self._told = False
        self._killed = False
        # Every signal wakes the wait below.
        self._wake, told = os.pipe()
        for descriptor in (self._wake, told):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def end(self) -> None:
        """Somebody wants the run to end."""
        self._told = True
        os.kill(self._keeper, signal.SIGTERM)

    def wait(self) -> None:
        """Return when the keeper has ended."""
        import select
        import time

        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        descriptor = self._open_controller()
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        over = silent = 0.0
        seen, is_over = self._pulse.last, False
        while not self._has_ended():
            before = time.monotonic()
            poll.poll(1e3 * (_LOOK_AT_END if is_over else _LOOK))
            self._drain()
            passed = min(time.monotonic() - before, 2 * _LOOK)
            beat, seen = self._pulse.last != seen, self._pulse.last
            silent = 0.0 if beat or self._is_stopped() else silent + passed
            if not is_over and self._is_over():
                is_over, silent = True, min(silent, _HANGS_AT_END / 2)
                if descriptor is not None:
                    poll.unregister(descriptor)
            over += passed if is_over else 0.0
            if silent >= (_HANGS_AT_END if is_over else _HANGS):
                self._kill(f"hangs, most likely in a call of the graphics driver: no sign of life for {silent:.0f} s")
            elif over >= _ENDS:
                self._kill(f"did not end within {over:.0f} s of the run's end")

    def _open_controller(self) -> int | None:
        """A descriptor that becomes readable when the controller ends; ``None`` where the kernel has none."""
        try:
            return os.pidfd_open(self._controller[0]) if self._controller is not None else None
        except (OSError, AttributeError):
            return None

    def _is_over(self) -> bool:
        from pytest_vram.keeper import limits

        if self._told or self._pulse.finished:
            return True
        return self._controller is not None and limits.started(self._controller[0]) != self._controller[1]

    def _is_stopped(self) -> bool:
        """Whether a debugger, or whoever stopped it, holds the keeper."""
        try:
            with open(f"/proc/{self._keeper}/stat", "rb") as stream:
                return stream.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def _kill(self, why: str) -> None:
        """Kill the keeper and all that it started; a keeper within the driver may stay until that returns."""
        from pytest_vram.keeper import parents

        if not self._killed:
            self._killed = True
            os.write(2, f"the keeper (PID {self._keeper}) {why}; it is killed\n".encode())
        for pid in parents.descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def _drain(self) -> None:
        try:
            while os.read(self._wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _has_ended(self) -> bool:
        """Collect what has ended. A keeper that is stopped is told to go on: pytest waits for it, and servers live."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WUNTRACED | os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid != self._keeper:
                continue
            if not os.WIFSTOPPED(status):
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                    os.write(
                        2, b"the keeper computed without a pause, perhaps in a regular expression, and was ended\n"
                    )
                return True
            name = signal.Signals(os.WSTOPSIG(status)).name
            os.write(2, f"the keeper was stopped ({name}); it goes on\n".encode())
            os.kill(pid, signal.SIGCONT)


def _lift_limits(text: bytes) -> None:
    """Give processes of others the memory limits back that a keeper, which was killed, had taken from them."""
    import json

    from pytest_vram.keeper import limits

    try:
        path = limits.path_of(json.loads(text)["socket"])
        if path.exists():
            limits.lift(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        os.write(2, f"limits that --vram-emulate set could not be lifted: {error}\n".encode())


def _end_all(guard: int) -> None:
    """Kill descendants until there are none; a process may fork between the look and the kill."""
    import time

    from pytest_vram.keeper import parents

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    quiet = 0
    deadline = time.monotonic() + 30
    while quiet < 2 and time.monotonic() < deadline:
        found = parents.descendants(guard)
        quiet = 0 if found else quiet + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if found:
            time.sleep(0.005)


if __name__ == "__main__":
    main()

"""The guard: forks the keeper, waits for its end, and ends everything that it leaves behind.

A keeper that is killed cannot tidy up. Whatever it started then becomes a child of the guard (a *subreaper*), however
often it forked, and the guard ends all of it. The guard has nothing else to do and imports next to nothing.

Three processes are made: the launcher, which ends at once so that pytest has no child to wait for; the guard; and the
keeper. When the guard is killed, the keeper is told by a signal (SIGTERM) and ends in order.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Read a launch from standard input, become guard and keeper. Writes ``ready`` or a reason to standard output."""
    text = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    from pytest_vram.keeper import parents

    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)
    parents.adopt_orphans()
    guard = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        parents.die_with_parent(signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(1)
        from pytest_vram.keeper.service import run

        run(text, guard)
        return
    # A person who ends the guard means the run: the keeper ends it in order.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(keeper, signal.SIGTERM))
    # The launcher's caller waits for the end of this pipe; the keeper's copy is the one that counts.
    os.dup2(2, 1)
    _wait(keeper)
    _lift_limits(text)
    _end_all(guard)


def _wait(keeper: int) -> None:
    """Wait for the keeper's end. A keeper that is stopped is told to go on: pytest waits for it, and servers live."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WUNTRACED)
        except ChildProcessError:
            return
        if pid != keeper:
            continue
        if not os.WIFSTOPPED(status):
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                os.write(2, b"the keeper computed without a pause, perhaps in a regular expression, and was ended\n")
            return
        os.write(2, b"the keeper was stopped (%s); it goes on\n" % signal.Signals(os.WSTOPSIG(status)).name.encode())
        os.kill(keeper, signal.SIGCONT)


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

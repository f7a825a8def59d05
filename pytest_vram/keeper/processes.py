"""Starting and ending the processes of a server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_vram.keeper import parents
from pytest_vram.measure import Members, procfs
from pytest_vram.units import mib

#: Seconds to wait for the kernel after SIGKILL; a process in uninterruptible sleep may take longer.
_AFTER_KILL = 5.0
_ROUND = 0.01
#: Control characters, and marks that turn the direction of writing.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def spawn(argv: list[str], *, cwd: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own that dies with the keeper; its output is appended to ``log``.

    :raises OSError: the program, its folder or the log cannot be used. :raises subprocess.SubprocessError: the same,
        from within the new process.
    """
    keeper = os.getpid()

    def in_child() -> None:
        parents.die_with_parent(signal.SIGKILL)
        # The keeper may have died before that took effect.
        if os.getppid() != keeper:
            os._exit(1)

    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
            # The keeper has one thread, so that running Python between fork and exec is safe.
            preexec_fn=in_child,
        )
    finally:
        os.close(fd)


class Watch:
    """Calls back once when a process has ended, whoever's child it is.

    :param start: its start time, so that a reused PID is not taken for it.
    """

    def __init__(self, pid: int, start: int, ended: Callable[[], None]) -> None:
        self.pid = pid
        self.start = start
        self._ended: Callable[[], None] | None = ended
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self._fd = -1
        # Verified after the descriptor was opened: from here on it means this process and no other.
        if not procfs.alive(pid, start):
            self._loop.call_soon(self._fire)
        elif self._fd >= 0:
            self._loop.add_reader(self._fd, self._fire)
        else:
            self._poll()

    def _poll(self) -> None:
        """For kernels without pidfd."""
        if procfs.alive(self.pid, self.start):
            self._timer = self._loop.call_later(0.02, self._poll)
        else:
            self._fire()

    def _fire(self) -> None:
        ended = self._ended
        self.cancel()
        if ended is not None:
            ended()

    def cancel(self) -> None:
        """Do not call back any more."""
        self._ended = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def reap_orphans(own: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Collect ended children: servers through their own handles, orphans that the keeper inherited directly."""
    while True:
        try:
            # Only looks: taking a server's status here would hide its exit code from its handle.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        process = own.get(found.si_pid)
        if process is not None and process.poll() is not None:
            continue
        try:
            os.waitpid(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            continue


def living(members: Members, owner: str) -> list[int]:
    """PIDs of an owner's processes that run now; looks twice, because young processes join at the second look."""
    members.scan()
    members.scan()
    return [member.pid for member in members.of(owner) if procfs.alive(member.pid, member.start)]


async def end_tree(members: Members, owner: str, *, grace: float, reap: Callable[[], None]) -> list[int]:
    """End all processes of an owner: SIGTERM, ``grace`` seconds, SIGKILL, and wait until they are gone.

    Returns PIDs that are still there 5 s after SIGKILL (the kernel holds them), normally none.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while True:
        reap()
        left = living(members, owner)
        if not left:
            return []
        if time.monotonic() >= deadline:
            break
        for pid in left:
            if pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGTERM)
                # A stopped process gets no signal but SIGKILL until it goes on.
                _signal(pid, signal.SIGCONT)
        await asyncio.sleep(_ROUND)
    deadline = time.monotonic() + _AFTER_KILL
    while True:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        await asyncio.sleep(_ROUND)
        reap()
        left = living(members, owner)
        if not left or time.monotonic() >= deadline:
            return left


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


#: What shells, and programs that start others, exit with after SIGKILL ended what they ran.
_KILLED_CHILD = 128 + signal.SIGKILL


def exit_words(code: int | None, *, mark: int | None = None, kernel_kills: int = 0) -> str:
    """How a process ended, for a person, after "it": "exited with code 1", "was killed by SIGSEGV …".

    :param code: as in :attr:`subprocess.Popen.returncode`; ``None`` for a process that is not our child.
    :param mark: its last high-water mark in bytes. :param kernel_kills: out-of-memory kills counted meanwhile.
    """
    if code is None:
        return "ended"
    if code == _KILLED_CHILD:
        if kernel_kills:
            return f"exited with code {code}: the kernel ran out of memory and killed what it had started"
        return f"exited with code {code}: somebody, or the kernel for lack of memory, killed what it had started"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    held = f"; it had held up to {mib(mark)} of host memory" if mark else ""
    if -code == signal.SIGILL:
        return f"was killed by {name}: this build uses CPU instructions that this machine lacks"
    if -code == signal.SIGKILL:
        if kernel_kills:
            return f"was killed by {name}: the kernel ran out of memory and killed it{held}"
        return f"was killed by {name}, by somebody or by the kernel for lack of memory{held}"
    return f"was killed by {name}"


def disk_full(path: Path) -> bool:
    """Whether nothing can be added to this file for want of space."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < 4096 and found.f_blocks > 0


#: What a program says when it ends itself: more of a reason than whatever a debugger writes after it.
_CAUSE = re.compile(
    r"GGML_(?:ASSERT|ABORT)\b|terminate called|^\s*what\(\):|\b(?:CUDA|HIP|ROCm|MUSA|SYCL|Vulkan|Metal) error\b"
    r"|ggml_abort|[Ss]egmentation fault|Assertion .* failed|panicked at"
)
#: Lines of a debugger that a crashing program (ggml does) calls for a backtrace.
_DEBUGGER = re.compile(
    r"\[(?:New LWP|Thread debugging|Inferior)|Using host libthread|#\d+ |\d+\t|0x[0-9a-f]+ in |warning: |This GDB"
    r"|Enable debuginfod|<https?://|Debuginfod|To make this setting"
)


def tail(path: Path | None, lines: int = 15, *, secrets: tuple[str, ...] = ()) -> str:
    """The last lines of a log, indented, without control characters and secrets; empty when there are none.

    Where the program said why it ends, and a debugger wrote more after it, those lines are the last ones.
    """
    kept = _last(path, secrets)
    found = [index for index, line in enumerate(kept) if _CAUSE.search(line)]
    if found:
        after = kept[found[-1] + 1 :]
        plain = [line for line in after if not _DEBUGGER.match(line)]
        if len(plain) < len(after):
            kept = kept[: found[-1] + 1] + (plain if len(plain) < lines else [])
    return "\n".join("  " + line for line in kept[-lines:])


def cause(path: Path | None, *, secrets: tuple[str, ...] = ()) -> str:
    """What a program said when it ended itself, such as a failed assertion; empty where it said nothing."""
    return next((line.strip() for line in reversed(_last(path, secrets)) if _CAUSE.search(line)), "")


def _last(path: Path | None, secrets: tuple[str, ...]) -> list[str]:
    if path is None:
        return []
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - (64 << 10)))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    for secret in secrets:
        text = text.replace(secret, "***")
    return [_UNPRINTABLE.sub("?", line.rstrip()[:400]) for line in text.splitlines() if line.strip()]

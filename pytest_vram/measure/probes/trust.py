"""Whether a driver's figures by process are about the processes of this run: checked by evidence, not by settings.

In a container the driver may list the PIDs of the host, or nobody; under WSL, and on some MIG set-ups, it lists
processes without figures. Then only the device's figure is left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping

from pytest_vram.units import mib

#: Growth of the device that some process of this run must show for: bytes.
GROWTH = 64 << 20
#: Nanoseconds after which a listed PID that is not here is no process that ended a moment ago.
_PATIENCE = 1_000_000_000
#: How device files of GPUs begin: NVIDIA's, those of WSL, and those that all makers' drivers for Vulkan open.
_DEVICE_FILES = ("/dev/nvidia", "/dev/dxg", "/dev/dri/renderD")
#: Inode of the first PID namespace of every Linux kernel (``PROC_PID_INIT_INO``).
_INITIAL = "pid:[4026531836]"


def in_container(proc: str = "/proc") -> bool:
    """Whether this process lives in a PID namespace of its own, so that the driver's PIDs may not be its PIDs."""
    try:
        return os.readlink(f"{proc}/self/ns/pid") != _INITIAL
    except OSError:
        return False


def exists(pid: int, proc: str = "/proc") -> bool:
    """Whether there is such a process in this namespace, also one that this user may not see."""
    if os.path.exists(f"{proc}/{pid}"):
        return True
    if proc != "/proc":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def at_work(pids: Collection[int], listed: Collection[int], proc: str = "/proc") -> int | None:
    """The first of these processes that may hold memory of a GPU: it is listed, or has a GPU's device file open.

    Memory can be held by no process without one of these files; one that only looks at the GPU has them open as well.
    """
    for pid in pids:
        if pid in listed:
            return pid
        try:
            names = os.listdir(f"{proc}/{pid}/fd")
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"{proc}/{pid}/fd/{name}").startswith(_DEVICE_FILES):
                    return pid
    return None


def early(pid: int) -> str:
    """What a rise says whose baseline may hold memory of the run."""
    return (
        f"process {pid} of this run was on the device already when that was read, and may hold a part of it: the figure"
        " is at least the rise and at most all that is in use; what is loaded in fixtures and tests, and not at import,"
        " is told apart"
    )


class Trust:
    """Judges each read of a driver's process list, until it fails once.

    :param container: whether PIDs may be of another namespace.
    :ivar proven: a process of this run was listed with a figure.
    :ivar without_figures: processes of this run are listed without figures; the list is right otherwise.
    """

    def __init__(
        self,
        *,
        container: bool,
        exists: Callable[[int], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.container = container
        self.proven = False
        self.without_figures = False
        self._exists = exists
        self._clock = clock
        self._here: set[int] = set()
        self._unknown: dict[int, int] = {}

    def doubt(self, listed: Mapping[int, int | None], pids: Collection[int], grown: int) -> str | None:
        """Why the figures by process of this read cannot be this run's, or ``None``.

        :param listed: the driver's list. :param pids: the processes of this run.
        :param grown: bytes by which the device's figure lies above its quiet baseline.
        """
        ours = [pid for pid in pids if pid in listed]
        if any(listed[pid] is None for pid in ours) or (listed and all(used is None for used in listed.values())):
            self.without_figures = True
            return "the driver lists processes without saying what they hold (N/A), as under WSL and in some containers"
        if ours and not self._unknown:
            self.proven = True
        stranger = self._not_here(listed)
        if stranger is not None:
            return (
                f"the driver lists PID {stranger}, which does not exist here: its PIDs are those of the host, not of"
                " this container"
            )
        if self.container and not self.proven and grown > GROWTH:
            return (
                f"{mib(grown)} came onto the device while the driver lists no process of this run, as in containers"
                " that hide processes from the driver"
            )
        return None

    def _not_here(self, listed: Mapping[int, int | None]) -> int | None:
        """A listed PID that no process here has."""
        fresh = listed.keys() - self._here
        if not fresh:
            if self._unknown:
                self._unknown.clear()
            return None
        now = self._clock()
        for pid in fresh:
            if self._exists(pid):
                self._here.add(pid)
                self._unknown.pop(pid, None)
                continue
            since = self._unknown.setdefault(pid, now)
            # Outside of containers, and where the list was right before, one that just ended is the likelier reason.
            if (self.container and not self.proven) or (now - since >= _PATIENCE and not self.proven):
                return pid
        for pid in self._unknown.keys() - listed.keys():
            del self._unknown[pid]
        self._here &= listed.keys()
        return None

    @property
    def settled(self) -> bool:
        """Whether the next read is judged as the last one was, should it be the same."""
        return not self._unknown

    @property
    def pending(self) -> Collection[int]:
        """Listed PIDs that nobody here has, while it is open whether they are ended processes or those of this run."""
        return () if self.proven else self._unknown

    @property
    def open_question(self) -> str | None:
        """What is not known yet though nothing speaks against it."""
        if self.pending:
            return (
                f"the driver lists PID {min(self.pending)}, which does not exist here: whether that is a process of"
                " this run under another number was not known yet"
            )
        if self.container and not self.proven:
            return "in a container: it has not been seen yet whether the driver lists the processes of this run"
        return None

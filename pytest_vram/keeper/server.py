"""One generation of one backend, as the keeper knows it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_vram.keeper.logs import CappedLog
from pytest_vram.keeper.messages import BootPhase, Running
from pytest_vram.keeper.processes import Watch
from pytest_vram.measure import procfs
from pytest_vram.readings import Measured
from pytest_vram.spec import LaunchPlan

if TYPE_CHECKING:
    from pytest_vram.bootlog import Follower


class Server:
    """A server, from the moment it is asked for until it is gone.

    :ivar state: ``starting``, ``ready``, ``failed``, ``died``, ``stopping`` or ``stopped``.
    :ivar label: ``name#generation``, unique in the run; owner of its processes.
    :ivar timed_out: whether a request to it timed out, so that it is asked how it is before it is used again.
    :ivar doubt: why its figures may not be those of what answers; ``None`` when there is no reason to think so.
    :ivar most_held: device key → most bytes that were seen since it was ready.
    :ivar gone: set when its main process has ended. :ivar death: one sentence, once it died after it was ready.
    """

    def __init__(self, plan: LaunchPlan, generation: int, log: Path | None) -> None:
        self.plan = plan
        self.key = plan.key
        self.name = plan.name
        self.generation = generation
        self.label = f"{plan.name}#{generation}"
        self.log = log
        self.capped: CappedLog | None = None
        self.state = "starting"
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self.start = 0
        self.watch: Watch | None = None
        self.gone = asyncio.Event()
        self.exit_code: int | None = None
        self.url = ""
        self.api_key = plan.api_key
        self.t_start = 0
        self.t_ready = 0
        self.phases: list[BootPhase] = []
        self.boot_peak: dict[str, Measured] = {}
        self.host_boot_peak: Measured | None = None
        self.at_start: dict[str, Measured] = {}
        self.at_ready: dict[str, Measured] = {}
        self.most_held: dict[str, int] = {}
        self.death: str | None = None
        self.doubt: str | None = None
        self.timed_out = False
        self.follower: Follower | None = None
        self.kernel_kills: int | None = None
        self.burial: asyncio.Future[None] | None = None

    @property
    def attached(self) -> bool:
        """Whether it is somebody else's: watched, never ended."""
        return not self.plan.argv

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not appear in messages and in the journal."""
        return (self.api_key,) if self.api_key else ()

    def alive(self) -> bool:
        """Whether its main process runs, asked now; one that was killed and is on its way out does not."""
        if self.process is not None and self.process.poll() is not None:
            return False
        stat = procfs.read_stat(self.pid) if self.pid > 0 else None
        running = stat is not None and stat.start == self.start and stat.state not in "ZX"
        return running and stat is not None and not stat.flags & procfs.EXITING

    def watch_end(self) -> None:
        """Set :attr:`gone` when the main process ends."""
        self.watch = Watch(self.pid, self.start, self._ended)

    def _ended(self) -> None:
        if self.process is not None:
            # The descriptor may report the end a moment before the status can be collected.
            try:
                self.exit_code = self.process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                self.exit_code = None
        self.gone.set()

    def unwatch(self) -> None:
        """Do not watch the main process any more."""
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None

    def running(self, pids: list[int], fresh: bool) -> Running:
        """The reply to whoever acquired it."""
        return Running(
            key=self.key,
            name=self.name,
            generation=self.generation,
            pid=self.pid,
            pids=pids,
            url=self.url,
            log=str(self.log) if self.log else "",
            fresh=fresh,
            api_key=self.api_key,
            t_start=self.t_start,
            t_ready=self.t_ready,
            phases=list(self.phases),
            boot_peak=self.boot_peak,
            at_start=self.at_start,
            at_ready=self.at_ready,
            host_boot_peak=self.host_boot_peak,
        )

    def journal_fields(self) -> dict[str, Any]:
        """What every journal line about it says. Arguments are public (``ps`` shows them), except for keys."""
        command = list(self.plan.argv)
        for secret in self.secrets:
            command = [part.replace(secret, "***") for part in command]
        return {
            "name": self.name,
            "generation": self.generation,
            "key": self.key,
            "engine": self.plan.engine,
            "pid": self.pid,
            "url": self.url,
            "log": self.log.name if self.log else None,
            "command": command,
        }

    def table(self, pids: list[int]) -> dict[str, Any]:
        """What ``Status`` says about it."""
        return {**self.journal_fields(), "state": self.state, "pids": pids, "death": self.death}

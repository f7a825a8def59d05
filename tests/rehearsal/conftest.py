"""A real keeper with real engines, for tests that rehearse a deployment."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import PlanContext, Pool
from pytest_vram.errors import KeeperLost
from pytest_vram.keeper import KeeperClient, ensure, socket_path, start_time
from pytest_vram.keeper.messages import Closed, Finish, Launch, Open, Opened, Peek, Reply, Request
from pytest_vram.spec import BackendSpec, DeviceSpec


class Rehearsal:
    """One run: a keeper, a window that is open, and the pool of its backends."""

    def __init__(
        self, folder: Path, kind: str, rpc: Sequence[str], specs: Sequence[BackendSpec], emulate: int | None = None
    ) -> None:
        run = f"rehearsal-{uuid.uuid4().hex[:8]}"
        self.socket = socket_path(run)
        ensure(
            Launch(
                run=run,
                folder=str(folder),
                socket=self.socket,
                controller=(os.getpid(), start_time(os.getpid())),
                devices=[DeviceSpec(kind=kind, text=kind)],
                rpc=list(rpc),
                emulate=emulate,
                leases=False,  # one test may rehearse several runs on one device, one after the other
            )
        )
        self.client = KeeperClient(self.socket, role="controller")
        opened = self.client.call(Open(kind="test", name="rehearsal"))
        assert isinstance(opened, Opened)
        self.window = opened.window
        context = PlanContext(devices=tuple(self.client.welcome.devices), rpc=tuple(rpc), run=run, emulate=emulate)
        self.pool = Pool(self, context, {spec.name: spec for spec in specs}, specs[0].name, lambda: self.window)

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        return self.client.call(request, timeout)

    def peaks(self) -> Closed:
        """What the window saw so far."""
        seen = self.call(Peek(window=self.window))
        assert isinstance(seen, Closed)
        return seen

    def close(self) -> None:
        try:
            self.call(Finish(outcome="over"), timeout=20.0)
        except KeeperLost:
            pass
        self.client.close()


@pytest.fixture
def rehearse(tmp_path: Path) -> Iterator[Callable[..., Rehearsal]]:
    """Starts runs on the device kind that is named, with these specs; all end with the test."""
    made: list[Rehearsal] = []

    def start(*specs: BackendSpec, kind: str = "cpu", rpc: Sequence[str] = (), emulate: int | None = None) -> Rehearsal:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(Rehearsal(folder, kind, rpc, specs, emulate))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., BackendSpec]:
    """Makes specs of engine llama-server whose paths start from the test's folder."""

    def make(model: str | None, **changes: Any) -> BackendSpec:
        keys: dict[str, Any] = {"name": "agent", "engine": "llama-server", "boot_timeout": 60.0, **changes}
        return BackendSpec(origin="the test", base=str(tmp_path), model=model, **keys)

    return make

"""Tests that ask for leases of real keepers."""

from __future__ import annotations

import threading
from typing import Any

from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import Open, Opened
from tests.faults.keeper_kit import status, until

MB = 10**6


class Asking(threading.Thread):
    """A test that asks in a thread; ``window`` once it was let in."""

    def __init__(self, client: KeeperClient, name: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.request = Open(kind="test", name=name, **more)
        self.reply: Opened | None = None
        self.start()

    def run(self) -> None:
        reply = self.client.call(self.request)
        assert isinstance(reply, Opened)
        self.reply = reply

    @property
    def window(self) -> int:
        self.join(10)
        assert self.reply is not None, f"{self.request.name} was not let in"
        return self.reply.window

    def waits(self) -> bool:
        """Whether it stands among those who wait."""
        name = self.request.name
        return until(lambda: any(row["name"] == name for row in waiting(self.client)))


def waiting(client: KeeperClient, *, mine: bool = True) -> list[dict[str, Any]]:
    """Those who wait at the keeper of this client, which may itself be waiting."""
    viewer = KeeperClient(client._path, role="viewer")
    rows = [row for row in status(viewer).waiting if row["mine"] or not mine]
    viewer.close()
    return rows


def host(megabytes: int) -> dict[str, int]:
    return {"host": megabytes * MB}

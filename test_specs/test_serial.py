"""One request at a time: two at once would take the memory of two."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytest_vram import serial_only

from .requirements import need

if TYPE_CHECKING:
    from pytest_vram.backends import RunningBackend


@serial_only("two requests at once are sent on purpose")
def test_two_callers_take_turns(vram_backend: RunningBackend) -> None:
    """Two threads that ask at the same moment are served one after the other."""
    need(vram_backend, "chat")
    client = vram_backend.client
    earlier = len(client.requests)
    together = threading.Barrier(2)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            together.wait(10)
            client.chat("Name a colour.", max_tokens=8)
        except BaseException as error:  # noqa: BLE001  # handed to the test's own thread below
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

    first, second = sorted(client.requests[earlier:], key=lambda record: record.t)
    end = first.t + first.latency * 1e9
    assert second.t >= end, f"the second request was sent {(end - second.t) / 1e6:.1f} ms before the first had ended"

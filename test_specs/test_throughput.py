"""The deployment is fast enough: one that spilled into host memory fits its budget and is of no use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram import serial_only
from pytest_vram.checks import judge_rate

from .requirements import hold, need, need_measurements

if TYPE_CHECKING:
    from pytest_vram.backends import Pool


@serial_only("a rate is measured")
def test_decode_rate_is_above_its_floor(vram_backends: Pool) -> None:
    """The median decode rate of three answers is at least the config file's `floors.tokens_per_second`."""
    # Not the `vram_backend` fixture: where there is nothing to judge, no server is started for it.
    need_measurements(vram_backends, "a rate")
    spec = vram_backends.spec()
    floor = spec.floors.tokens_per_second
    if floor is None:
        pytest.skip(f"backend {spec.name!r} sets no floors.tokens_per_second")
    backend = vram_backends.acquire(spec)
    need(backend, "chat", "token-counts")
    replies = [backend.client.chat("Write a story about a river.", max_tokens=24) for _ in range(3)]
    rates = [reply.record.tokens_per_second for reply in replies]
    where = f"floors.tokens_per_second of backend {backend.name!r}"
    hold(judge_rate(rates, floor, limit_from=where))

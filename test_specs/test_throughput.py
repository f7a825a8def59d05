"""The deployment is fast enough: one that spilled into host memory fits its budget and is of no use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram import serial_only
from pytest_vram.checks import judge_rate

from .requirements import hold, need, need_measurements

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend


@serial_only("a rate is measured")
def test_decode_rate_is_above_its_floor(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """The median decode rate of three answers is at least the config file's `floors.tokens_per_second`."""
    need(vram_backend, "chat", "token-counts")
    floor = vram_backend.spec.floors.tokens_per_second
    if floor is None:
        pytest.skip(f"backend {vram_backend.name!r} sets no floors.tokens_per_second")
    need_measurements(vram_backends, "a rate")
    replies = [vram_backend.client.chat("Write a story about a river.", max_tokens=24) for _ in range(3)]
    rates = [reply.record.tokens_per_second for reply in replies]
    where = f"floors.tokens_per_second of backend {vram_backend.name!r}"
    hold(judge_rate(rates, floor, limit_from=where))

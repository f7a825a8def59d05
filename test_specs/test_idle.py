"""Memory comes back after use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_vram.backends import engine
from pytest_vram.checks import judge_idle_rollback
from pytest_vram.units import MIB

from . import prompts
from .requirements import context_per_slot, hold, need, need_measurements

if TYPE_CHECKING:
    from pytest_vram.backends import Pool
    from pytest_vram.meter import Meter

TOLERANCE = 64 * MIB
TURNS = 5


def test_idle_memory_returns_after_five_turns(vram: Meter, vram_backends: Pool) -> None:
    """With host caches off, five turns leave idle memory within 64 MiB of where the largest prompt had left it."""
    need_measurements(vram_backends, "idle memory")
    # Not the `vram_backend` fixture: where the caches are on, that server would run beside this one and count too.
    spec = vram_backends.spec()
    backend = vram_backends.acquire(engine(spec.engine).without_host_caches(spec))
    need(backend, "chat", "token-counts", "host-caches-off", "process")
    size = prompts.lengths(backend)
    largest = min(context_per_slot(backend) - 32, prompts.affordable(backend))
    backend.client.chat(prompts.text(size.words_for(largest)), max_tokens=1, temperature=0)
    before = vram.idle()

    messages: list[dict[str, str]] = []
    for turn in range(1, TURNS + 1):
        messages.append({"role": "user", "content": f"Count to {turn}."})
        reply = backend.client.chat(messages, max_tokens=8)
        messages.append({"role": "assistant", "content": reply.text})

    hold(judge_idle_rollback(before, vram.idle(), TOLERANCE, limit_from="the suite"))

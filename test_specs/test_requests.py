"""Requests of both extremes are answered, under the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import prompts
from .requirements import context_per_slot, need

if TYPE_CHECKING:
    from pytest_vram.backends import RunningBackend


def test_short_chat_is_answered(vram_backend: RunningBackend) -> None:
    """A short question gets an answer, under the budget."""
    need(vram_backend, "chat")
    reply = vram_backend.client.chat("Say hello in one short sentence.", max_tokens=12)
    said = reply.text.strip() or reply.message.get("reasoning_content") or reply.message.get("tool_calls")
    assert said, f"the server answered with nothing: {reply.message}"
    assert reply.finish_reason in ("stop", "length"), f"the answer ended for an unknown reason: {reply.finish_reason!r}"
    if reply.tokens_out is not None:
        assert 1 <= reply.tokens_out <= 12, f"12 tokens were allowed, {reply.tokens_out} were generated"


def test_full_ubatch_prompt_is_answered(vram_backend: RunningBackend) -> None:
    """A prompt of more than one full ubatch, which uses every compute buffer in full, is answered under the budget."""
    need(vram_backend, "chat", "token-counts")
    ubatch = prompts.ubatch(vram_backend)
    room = context_per_slot(vram_backend) - 32
    size = prompts.lengths(vram_backend)
    words = size.words_for(min(ubatch + 16, room))
    reply = vram_backend.client.chat(prompts.text(words), max_tokens=1, temperature=0)
    assert prompts.counted(reply) == size.tokens_of(words)

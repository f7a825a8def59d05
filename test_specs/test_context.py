"""The context that is served is the context that was asked for: nothing is cut in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram.errors import RequestFailed

from . import prompts
from .requirements import context_per_slot, need

if TYPE_CHECKING:
    from pytest_vram.backends import Reply, RunningBackend

#: Tokens that stay free for the answer.
ROOM = 32


def test_prompt_over_the_context_is_refused(vram_backend: RunningBackend) -> None:
    """A prompt that is a quarter longer than the context gets an error, not an answer to a part of it."""
    need(vram_backend, "chat", "token-counts")
    context = context_per_slot(vram_backend)
    size = prompts.lengths(vram_backend)
    words = size.words_for(context + max(context // 4, 2 * ROOM))
    sent = size.tokens_of(words)
    reply, refusal = _ask(vram_backend, prompts.text(words))
    if reply is None:
        answered = refusal is not None and refusal.status is not None and 400 <= refusal.status < 500
        assert answered, f"the server broke instead of refusing: {refusal}"
        return
    served = prompts.counted(reply)
    assert served >= sent, f"{sent:,} tokens were sent, {served:,} were served, and nothing said so"
    pytest.fail(f"{sent:,} tokens were served though the config file asks for a context of {context:,}")


def _ask(backend: RunningBackend, text: str) -> tuple[Reply | None, RequestFailed | None]:
    try:
        return backend.client.chat(text, max_tokens=1, temperature=0), None
    except RequestFailed as refusal:
        return None, refusal


def test_long_prompt_is_counted_in_full(vram_backend: RunningBackend) -> None:
    """Every token of the longest prompt that this machine evaluates in time is served, up to a full context."""
    need(vram_backend, "chat", "token-counts")
    _fill(vram_backend, min(context_per_slot(vram_backend) - ROOM, prompts.affordable(vram_backend)))


def test_context_can_be_filled(vram_backend: RunningBackend) -> None:
    """A prompt that fills the context, but for the answer's room, is served in full."""
    need(vram_backend, "chat", "token-counts")
    full = context_per_slot(vram_backend) - ROOM
    reach = prompts.affordable(vram_backend)
    if reach < full:
        seconds = prompts.seconds(vram_backend, full)
        pytest.skip(
            f"a prompt of {full:,} tokens may take {seconds:.0f} s here; one prompt may take"
            f" {prompts.SHARE * vram_backend.spec.request_timeout:.0f} s, {prompts.SHARE:.0%} of request_timeout;"
            f" {reach:,} tokens were proved"
        )
    _fill(vram_backend, full)


def _fill(backend: RunningBackend, tokens: int) -> None:
    size = prompts.lengths(backend)
    words = size.words_for(tokens)
    sent = size.tokens_of(words)
    served = prompts.counted(backend.client.chat(prompts.text(words), max_tokens=1, temperature=0))
    assert served == sent, f"{sent:,} tokens were sent and {served:,} were served"

"""Prompts of a known number of tokens, for any tokenizer.

A word repeated costs the same number of tokens each time, and a chat template costs a constant, so two short
requests whose token counts the server reports give both. All prompts are beginnings of one another: a server that keeps
the last prompt's cache evaluates only what a longer one adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram.backends.lengths import Lengths, measured
from pytest_vram.backends.lengths import text as text

if TYPE_CHECKING:
    from pytest_vram.backends import Reply, RunningBackend

#: Share of `request_timeout` that the evaluation of one prompt may take.
SHARE = 0.25
#: Attention makes a token of a long prompt dearer than one of a short prompt; this much of the short one's rate is
#: counted on.
_SLOWER = 0.7

_known: dict[tuple[str, int], Lengths] = {}
_probes: dict[tuple[str, int], tuple[float, int]] = {}


def counted(reply: Reply) -> int:
    """Tokens of the prompt, as the server counted them."""
    if reply.tokens_in is None:
        pytest.fail("the server answered without the number of prompt tokens in `usage`")
    return reply.tokens_in


def lengths(backend: RunningBackend) -> Lengths:
    """Measure, once per server, what a word and the chat template cost."""
    key = (backend.key, backend.generation)
    if key not in _known:
        try:
            _known[key] = measured(lambda words: counted(backend.client.chat(text(words), max_tokens=1, temperature=0)))
        except ValueError as error:
            pytest.fail(str(error))
    return _known[key]


def ubatch(backend: RunningBackend) -> int:
    """Tokens that the engine evaluates at once, as it says, else as it was asked, else llama.cpp's default of 512."""
    for value in (backend.boot.facts.get("ubatch"), backend.asked.get("ubatch")):
        if isinstance(value, int) and value > 0:
            return value
    return 512


def _probe(backend: RunningBackend) -> tuple[float, int]:
    key = (backend.key, backend.generation)
    if key not in _probes:
        size = lengths(backend)
        context = backend.asked.get("context")
        most = context // 2 if isinstance(context, int) else ubatch(backend)
        words = min(size.words_for(ubatch(backend)) + 8, size.words_for(most))
        reply = backend.client.chat(text(words), max_tokens=1, temperature=0)
        tokens = counted(reply)
        _probes[key] = reply.record.prompt_tokens_per_second or tokens / max(reply.record.latency, 1e-3), tokens
    return _probes[key]


def rate(backend: RunningBackend) -> float:
    """Prompt tokens per second, measured once per server.

    The prompt is one full ubatch and a little, at most half of the context.
    """
    return _probe(backend)[0]


def seconds(backend: RunningBackend, tokens: int) -> float:
    """Seconds that a prompt of so many tokens may take here: long ones are evaluated more slowly than short ones."""
    return tokens / (rate(backend) * _SLOWER)


def affordable(backend: RunningBackend) -> int:
    """Tokens of the longest prompt that this machine evaluates within a quarter of the backend's `request_timeout`.

    Never fewer than the rate was measured with, which were evaluated already.
    """
    measured, tokens = _probe(backend)
    return max(tokens, int(measured * _SLOWER * backend.spec.request_timeout * SHARE))

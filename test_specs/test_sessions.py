"""Conversations with tools: memory comes back after them, and what left the window is used out of a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pytest_vram import inconclusive
from pytest_vram.backends import engine
from pytest_vram.checks import judge_idle_rollback
from pytest_vram.sessions import Session, load, recall
from pytest_vram.units import MIB

from .requirements import context_per_slot, hold, need, need_measurements

if TYPE_CHECKING:
    from pytest_vram.backends import Pool
    from pytest_vram.meter import Meter

TOLERANCE = 64 * MIB
#: Turns of the conversation: a short, a medium and a long one. A whole cycle would take a slow server minutes.
TURNS = 3
#: Tokens of the longest prompt of those, by any tokenizer, and of the answers.
NEEDED = 3072
#: Tokens of the window that the recall check fills: more would only take longer.
WINDOW = 2048


def test_idle_memory_returns_after_a_conversation_with_tools(vram: Meter, vram_backends: Pool) -> None:
    """With host caches off, a short, a medium and a long turn leave idle memory within 64 MiB of where the longest
    prompt had left it."""
    need_measurements(vram_backends, "idle memory")
    spec = vram_backends.spec()
    backend = vram_backends.acquire(engine(spec.engine).without_host_caches(spec))
    need(backend, "chat", "token-counts", "host-caches-off", "process")
    context = context_per_slot(backend)
    if context < NEEDED:
        pytest.skip(f"the conversation needs a context of {NEEDED} tokens, and a request may fill {context}")
    conversation = load("cron-check")
    turns = [msgspec.structs.replace(turn, output_cap=16) for turn in conversation.turns[:TURNS]]
    session = Session(backend, msgspec.structs.replace(conversation, turns=turns), spec=spec, context=context)
    session.warm_up()
    before = vram.idle()
    session.run()
    hold(judge_idle_rollback(before, vram.idle(), TOLERANCE, limit_from="the suite"))


def test_early_facts_are_used_out_of_a_summary(vram_backends: Pool) -> None:
    """Of 30 facts that have left the window, a share that is proven to be at least the config file's `floors.recall` is
    used out of a summary that stays in it."""
    spec = vram_backends.spec()
    floor = spec.floors.recall
    if floor is None:
        pytest.skip(f"backend {spec.name!r} sets no floors.recall")
    need_measurements(vram_backends, "recall")
    backend = vram_backends.acquire(spec)
    need(backend, "chat")
    context = min(context_per_slot(backend), WINDOW)
    verdict = recall.judge(*recall.ask(backend, context=context, spec=spec), target=floor)
    if verdict.outcome == "failed":
        pytest.fail(verdict.text, pytrace=False)
    if verdict.outcome == "inconclusive":
        inconclusive(verdict.text)

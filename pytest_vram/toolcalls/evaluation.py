"""Asking a backend the cases: requests of a protocol, one retry, what counts as the model's failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pytest_vram.backends.reply import Reply
from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls.cases import CaseSet
from pytest_vram.toolcalls.protocols import request_of
from pytest_vram.toolcalls.results import CaseResult, Results

__all__ = ["Asker", "evaluate", "request_of"]


class Asker(Protocol):
    """What answers: :class:`pytest_vram.backends.VramClient` is one."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **body: Any) -> Reply:
        """A chat completion; raises as the client does."""


def evaluate(
    client: Asker,
    cases: CaseSet,
    *,
    sampling: Sampling,
    calling: ToolCalling,
    retries: int = 1,
    seed: int = 0,
    limit: int | None = None,
    enough: Callable[[Sequence[CaseResult]], str | None] = lambda results: None,
    told: Callable[[CaseResult, int], None] = lambda result, planned: None,
) -> Results:
    """Ask the cases one after another, in a stratified order that the seed decides.

    :param limit: ask that many of the cases, stratified. :param enough: says after each case why no more are needed
        (sequential stopping); ``None``: go on.
    :param told: of each result, with the number planned.
    :raises BackendDied: the server is gone: no verdict can be had.
    """
    raise NotImplementedError  # frame

"""One class to subclass, and a window of yours is tried by thousands of random conversations."""

from __future__ import annotations

import difflib
import importlib.util
from typing import ClassVar

from pytest_vram.errors import BadInput
from pytest_vram.windows.protocol import Window


class WindowSpec:
    """Checks of a token window as a pytest test; needs Hypothesis (``pip install pytest-vram[hypothesis]``).

    Subclass it under a name that pytest collects and say how a window is made::

        class TestMyWindow(WindowSpec):
            def make_window(self) -> Window:
                return MyWindow(limit=64)

    Conversations are random: questions, answers, tool calls with one to three results, summaries, evictions on request,
    pieces that are too large for the window, results that no call asked for. After each step everything that
    :data:`INVARIANTS` names must hold. A failure names the invariant and shows the shortest conversation that
    Hypothesis could find, step by step. Where no conversation came to the limit, the test fails, too: a pass would say
    nothing.

    :cvar max_examples: conversations. :cvar steps: most steps in one. :cvar vocabulary: token ids are below this.
    :cvar longest: most tokens of a piece that fits; ``None``: three sixteenths of the window's limit.
    :cvar system: tokens of the system prompt, and half as many of the tools; ``None``: a tenth of the limit.
    :cvar tolerance: how far scores of a fresh run may be from the window's, absolute.
    :cvar shrink: look for the shortest conversation that fails, which takes a while for a slow window.
    :cvar may_leave_more: a window that makes room in larger portions may let more leave than is needed.
    :cvar steps_done: steps done so far by the tests of the class; ``pushed_out``: pieces that left for an appended one.
    """

    max_examples: ClassVar[int] = 100
    steps: ClassVar[int] = 50
    vocabulary: ClassVar[int] = 256
    longest: ClassVar[int | None] = None
    system: ClassVar[int | None] = None
    tolerance: ClassVar[float] = 1e-3
    shrink: ClassVar[bool] = True
    may_leave_more: ClassVar[bool] = False
    steps_done: ClassVar[int] = 0
    pushed_out: ClassVar[int] = 0

    def make_window(self) -> Window:
        """A new, empty window; it is closed after its conversation."""
        # Not abstract: pytest passes over abstract classes without a word, and a misspelt method would never be seen.
        name = type(self).__name__
        own = [one for one in vars(type(self)) if not one.startswith("_")]
        near = difflib.get_close_matches("make_window", own, n=1)
        meant = f" ({near[0]!r} is not called)" if near else ""
        raise BadInput(f"{name} has no method make_window(self){meant}: write one that gives a new, empty window.")

    def test_window(self) -> None:
        """Every invariant of a token window holds after each step of random conversations."""
        if importlib.util.find_spec("hypothesis") is None:
            raise BadInput("WindowSpec needs Hypothesis, which is not installed: pip install pytest-vram[hypothesis]")
        _check(self)
        from pytest_vram.windows.machine import Broken, run

        before = type(self).pushed_out
        try:
            run(self)
        except Broken as error:
            said = str(error)
        else:
            if type(self).pushed_out > before or self.max_examples * self.steps < ENOUGH:
                return
            said = (
                f"In {self.max_examples} conversations nothing had to leave for what was appended, so that a pass"
                " would say nothing: raise `longest` or `steps`, or give the window a lower limit."
            )
        # Without the frames of Hypothesis and of the machine, in which nothing of the window is to be seen.
        raise AssertionError(said)


def _check(spec: WindowSpec) -> None:
    """:raises BadInput: a setting that is none."""
    for name, least in (("max_examples", 1), ("steps", 1), ("vocabulary", 2), ("longest", 1), ("system", 1)):
        given: object = getattr(spec, name)
        if given is None and name in ("longest", "system"):
            continue
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise BadInput(f"{name} of {type(spec).__name__} is {given!r:.60}: write a whole number, {least} or more.")


#: Steps of all conversations together in which a window of any limit is filled.
ENOUGH = 500
#: Name of each invariant → what it asks for.
INVARIANTS = {
    "limit": "the tokens held are at most the limit",
    "tokens": "the token list is that of the pieces held",
    "order": "pieces stay in the order of appending, as they were, and none comes back",
    "cells": "each token has its cell in the cache and each cell its token",
    "positions": "positions in the cache begin where they began, and have no gap and no double",
    "pinned": "system prompt, tool definitions and the last summary never leave",
    "calls": "a tool call and its results leave together, not while a result is awaited; no result is alone",
    "oldest": "the oldest leaves first, and no more than is needed",
    "bytes": "the cells take what the sizing formula says",
    "twice": "evicting a second time changes nothing",
    "refused": "a piece is refused where it cannot fit, and only there, and then nothing has changed",
    "decoding": "decoding goes on with finite scores, equal to those of a fresh run where these must be equal",
}

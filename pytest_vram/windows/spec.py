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

    Conversations are random: questions, answers, tool calls with one to three results, summaries, evictions on request.
    After each step everything that :data:`INVARIANTS` names must hold. A failure names the invariant and shows the
    shortest conversation that Hypothesis could find, step by step.

    :cvar max_examples: conversations. :cvar steps: most steps in one. :cvar vocabulary: token ids are below this.
    :cvar longest: most tokens of a piece. :cvar system: tokens of the system prompt, and half as many of the tools.
    :cvar tolerance: how far scores of a fresh run may be from the window's, absolute.
    :cvar shrink: look for the shortest conversation that fails, which takes a while for a slow window.
    :cvar may_leave_more: a window that makes room in larger portions may let more leave than is needed.
    :cvar steps_done: steps done so far by the tests of the class.
    """

    max_examples: ClassVar[int] = 100
    steps: ClassVar[int] = 50
    vocabulary: ClassVar[int] = 256
    longest: ClassVar[int] = 12
    system: ClassVar[int] = 6
    tolerance: ClassVar[float] = 1e-3
    shrink: ClassVar[bool] = True
    may_leave_more: ClassVar[bool] = False
    steps_done: ClassVar[int] = 0

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
        from pytest_vram.windows.machine import Broken, run

        try:
            run(self)
        except Broken as error:
            said = str(error)
        else:
            return
        # Without the frames of Hypothesis and of the machine, in which nothing of the window is to be seen.
        raise AssertionError(said)


#: Name of each invariant → what it asks for.
INVARIANTS = {
    "limit": "the tokens held are at most the limit",
    "tokens": "the token list is that of the pieces held",
    "order": "pieces stay in the order of appending, as they were, and none comes back",
    "cells": "each token has its cell in the cache and each cell its token",
    "positions": "positions in the cache have no gap and no double",
    "pinned": "system prompt, tool definitions and the last summary never leave",
    "calls": "a tool call and its results leave together, and not while a result is awaited",
    "oldest": "the oldest leaves first, and no more than is needed",
    "bytes": "the cells take what the sizing formula says",
    "twice": "evicting a second time changes nothing",
    "refused": "a piece is refused only where it cannot fit, and then nothing has changed",
    "decoding": "decoding goes on with finite scores, equal to those of a fresh run where these must be equal",
}

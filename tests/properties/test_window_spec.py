"""The window spec passes right windows in thousands of steps, and finds each planted bug."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.windows import INVARIANTS, Cell, Piece, Window, WindowFull, WindowSpec
from tests.unit.window_kit import ListWindow, OverMessages


class TestWindowOverAList(WindowSpec):
    """The reference policy over a cache that is a list."""

    max_examples = 40

    def make_window(self) -> Window:
        return ListWindow(64)


class TestTightWindow(WindowSpec):
    """The same with hardly more room than what must stay."""

    max_examples = 30

    def make_window(self) -> Window:
        return ListWindow(20)


class TestMessageWindow(WindowSpec):
    """The message window, in at least 5000 steps."""

    max_examples = 220

    def make_window(self) -> Window:
        return OverMessages(64)

    def test_window(self) -> None:
        """Every invariant holds of the message window in at least 5000 steps."""
        super().test_window()
        assert type(self).steps_done >= 5000


class _PositionsNotShifted(ListWindow):
    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        del self.cache[start:stop]


class _TokensNotTrimmed(ListWindow):
    def tokens(self) -> list[int]:
        return self.everything[: self.limit]

    def append(self, piece: Piece) -> None:
        super().append(piece)
        self.everything = [*getattr(self, "everything", []), *piece.tokens]


class _OldestWhatever(ListWindow):
    """Lets the oldest piece leave, whatever it is but the kinds named."""

    spared: tuple[str, ...] = ()

    def append(self, piece: Piece) -> None:
        spared = [one for one in self._pieces if self._spares(one)]
        if sum(len(one.tokens) for one in (*spared, piece)) > self.limit:
            raise WindowFull("too large")
        self._shrink(self.limit - len(piece.tokens))
        self._extend(piece.tokens)
        self._pieces.append(piece)
        self._tokens.extend(piece.tokens)

    def evict(self, to: int) -> list[Piece]:
        return self._shrink(to)

    def _spares(self, piece: Piece) -> bool:
        last = [one for one in self._pieces if one.kind == "summary"][-1:]
        return piece.kind in self.spared and (piece.kind != "summary" or piece in last)

    def _shrink(self, to: int) -> list[Piece]:
        gone: list[Piece] = []
        places = [place for place, one in enumerate(self._pieces) if not self._spares(one)]
        while len(self._tokens) > to and places:
            place = places.pop(0) - len(gone)
            gone.append(self._pieces[place])
            self._take_out([place])
        return gone


class _PinnedLeaves(_OldestWhatever):
    spared = ("tools", "summary")


class _ResultOrphaned(_OldestWhatever):
    spared = ("system", "tools", "summary")


class _NewestLeaves(ListWindow):
    def evict(self, to: int) -> list[Piece]:
        gone = []
        while len(self._tokens) > to and self._pieces[-1].kind in ("user", "assistant"):
            gone.append(self._pieces[-1])
            self._take_out([len(self._pieces) - 1])
        return gone


class _OverTheLimit(ListWindow):
    def __init__(self, limit: int) -> None:
        super().__init__(limit + 1)

    def pieces(self) -> list[Piece]:
        self.limit = 64
        return super().pieces()

    def append(self, piece: Piece) -> None:
        self.limit = 65
        try:
            super().append(piece)
        finally:
            self.limit = 64


class _CellsForgotten(ListWindow):
    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        super()._remove(start, min(stop + 1, len(self.cache)), behind)


class _WrongCells(ListWindow):
    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        tokens = [cell.token for cell in self.cache][: len(self.cache) - (stop - start)]
        self.cache = [Cell(place, token) for place, token in enumerate(tokens)]


class _EvictsOneMore(ListWindow):
    def evict(self, to: int) -> list[Piece]:
        return super().evict(len(self._tokens) - 1)


class _BytesStay(ListWindow):
    most = 0

    def bytes(self) -> int:
        self.most = max(self.most, super().bytes())
        return self.most


class _NotANumber(ListWindow):
    shifted = False

    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        super()._remove(start, stop, behind)
        self.shifted = True

    def logits(self) -> list[float]:
        return [float("nan") if self.shifted else one for one in super().logits()]


class _Stale(ListWindow):
    def logits(self) -> list[float]:
        return [one + (0.5 if self.number_gone else 0) for one in super().logits()]

    number_gone = 0

    def evict(self, to: int) -> list[Piece]:
        gone = super().evict(to)
        self.number_gone += len(gone)
        return gone


class _RefusesTooMuch(ListWindow):
    def append(self, piece: Piece) -> None:
        if len(self._tokens) + len(piece.tokens) > self.limit:
            raise WindowFull("full")
        super().append(piece)


class _ChangesThenRefuses(ListWindow):
    def append(self, piece: Piece) -> None:
        try:
            super().append(piece)
        except WindowFull:
            self.evict(0)
            raise


class _HoldsAnyAmount(ListWindow):
    def append(self, piece: Piece) -> None:
        self.limit, own = 10**6, self.limit
        super().append(piece)
        self.limit = own


class _PositionsBelowZero(ListWindow):
    def cells(self) -> list[Cell]:
        return [Cell(cell.position - 3, cell.token) for cell in super().cells()]


class _PositionsBeginElsewhere(ListWindow):
    moved = 0

    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        super()._remove(start, stop, behind)
        self.moved = 1

    def cells(self) -> list[Cell]:
        return [Cell(cell.position + self.moved, cell.token) for cell in super().cells()]


class _TakesOrphans(ListWindow):
    def append(self, piece: Piece) -> None:
        held = any(piece.answers in one.calls for one in self._pieces)
        super().append(piece if held or piece.answers is None else Piece(piece.number, "user", piece.tokens))


PLANTED: list[tuple[str, Callable[[int], Window], int]] = [
    ("positions", _PositionsNotShifted, 64),
    ("tokens", _TokensNotTrimmed, 64),
    ("pinned", _PinnedLeaves, 64),
    ("calls", _ResultOrphaned, 64),
    ("oldest", _NewestLeaves, 64),
    ("limit", _OverTheLimit, 64),
    ("cells", _CellsForgotten, 64),
    ("cells", _WrongCells, 64),
    ("bytes", _BytesStay, 64),
    ("decoding", _NotANumber, 64),
    ("decoding", _Stale, 64),
    ("refused", _RefusesTooMuch, 64),
    ("refused", _ChangesThenRefuses, 17),
    # The same whatever the limit is.
    ("refused", _ChangesThenRefuses, 64),
    ("refused", _ChangesThenRefuses, 4096),
    ("oldest", _NewestLeaves, 4096),
    ("limit", _HoldsAnyAmount, 64),
    ("limit", _HoldsAnyAmount, 400),
    ("positions", _PositionsBelowZero, 64),
    ("positions", _PositionsBeginElsewhere, 64),
    ("calls", _TakesOrphans, 64),
]


@pytest.mark.parametrize(
    ("name", "window", "limit"), PLANTED, ids=[f"{row[1].__name__.strip('_')}-{row[2]}" for row in PLANTED]
)  # type: ignore[attr-defined]
def test_planted_bugs_are_found(name: str, window: Callable[[int], Window], limit: int) -> None:
    """Within 200 conversations each planted bug breaks its invariant, and the message names it and the steps."""

    class Planted(WindowSpec):
        max_examples = 200
        shrink = False

        def make_window(self) -> Window:
            return window(limit)

    with pytest.raises(AssertionError) as caught:
        Planted().test_window()
    text = str(caught.value)
    assert text.startswith(f'invariant "{name}" is broken ({INVARIANTS[name]}): ')
    # Of a long conversation only the last steps are shown.
    assert re.search(r"\nsteps:\n(  \(\d+ earlier\)|    1\. append system 0)", text)


@pytest.mark.parametrize("limit", [2, 5, 400, 4096])
def test_a_right_window_of_any_limit_passes(limit: int) -> None:
    """Pieces are scaled to it, so that something leaves for what is appended."""

    class Right(WindowSpec):
        max_examples = 15

        def make_window(self) -> Window:
            return ListWindow(limit)

    Right().test_window()
    assert Right.pushed_out > 10 or limit < 5


def test_a_pass_without_evidence_is_none() -> None:
    """Pieces that never fill the window fail the test; settings that are none are told."""

    class Small(WindowSpec):
        max_examples = 20
        longest = system = 1

        def make_window(self) -> Window:
            return ListWindow(4096)

    with pytest.raises(AssertionError, match="nothing had to leave for what was appended, so that a pass would say"):
        Small().test_window()
    for name, value in (("max_examples", 0), ("steps", 0), ("longest", "x"), ("vocabulary", True), ("system", 0)):
        wrong = type("Wrong", (Small,), {name: value})()
        with pytest.raises(BadInput, match=f"{name} of Wrong is .*: write a whole number"):
            wrong.test_window()


def test_a_class_without_a_window_fails_and_says_why(pytester: pytest.Pytester) -> None:
    """A misspelt or missing ``make_window`` is a failed test and not one that is never collected; what it gives must be
    a window; a broken invariant is told without the frames of Hypothesis, what a window raises with the steps."""
    pytester.makepyfile(
        """
        from pytest_vram.windows import CachedWindow, WindowSpec

        class TestTypo(WindowSpec):
            def make_windows(self): ...

        class TestNothing(WindowSpec): ...

        class TestOther(WindowSpec):
            def make_window(self): return []

        class Silent(CachedWindow):
            def _extend(self, tokens): ...
            def _remove(self, start, stop, behind): ...
            def cells(self): return []

        class TestSilent(WindowSpec):
            def make_window(self): return Silent(limit=20)

        class Raises(Silent):
            def append(self, piece):
                raise KeyError(piece.number)

        class TestRaises(WindowSpec):
            def make_window(self): return Raises(limit=20)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(
        [
            "E *TestTypo has no method make_window(self) ('make_windows' is not called): write one*",
            "E *TestNothing has no method make_window(self): write one*",
            "E *make_window of TestOther gave a list, not a Window: derive*",
            'E *invariant "cells" is broken*',
            "E *KeyError: 0",
            "E *raised by the window; steps:",
            "E *1. append system 0 (1 token)",
        ]
    )
    silent = result.stdout.str().partition("_ TestSilent")[2].partition("_ TestRaises")[0]
    assert "run_state_machine" not in silent

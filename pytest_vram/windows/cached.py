"""The reference window over a KV cache: one policy, to which an engine's adapter adds how cells come and go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from pytest_vram.errors import BadInput
from pytest_vram.windows.leaving import Part, Unit, leaving, unanswerable, without
from pytest_vram.windows.protocol import PINNED, Piece, Window, WindowFull, checked_limit


class CachedWindow(Window):
    """Pieces, tokens and cells kept in step; an adapter says how cells are added and taken out.

    The system prompt, the tool definitions and the last summary stay. Of the rest the oldest leaves first, a call
    together with its results.

    :param limit: tokens that the window may hold, at most the cells of the cache. :raises BadInput: a limit below 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = checked_limit(limit, type(self).__name__)
        self._pieces: list[Piece] = []
        self._tokens: list[int] = []

    @abstractmethod
    def _extend(self, tokens: Sequence[int]) -> None:
        """Compute the cells of these tokens behind the last; ``self._tokens`` is still without them."""

    @abstractmethod
    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        """Take out the cells from ``start`` to before ``stop`` and close the gap, behind which are ``behind``."""

    def pieces(self) -> list[Piece]:
        return list(self._pieces)

    def tokens(self) -> list[int]:
        return list(self._tokens)

    def append(self, piece: Piece) -> None:
        wrong = unanswerable(_parts(self._pieces), piece.answers) if piece.answers is not None else ""
        if wrong:
            raise BadInput(f"The tool result for call {piece.answers} {wrong}: append the call, then one result.")
        pieces = [*self._pieces, piece]
        over = len(self._tokens) + len(piece.tokens) - self.limit
        gone = _chosen(pieces, leaving(_parts(pieces), keep=len(pieces) - 1), over)
        left = over - sum(len(pieces[place].tokens) for place in gone)
        if left > 0:
            raise WindowFull(
                f"What must stay in the window takes {self.limit + left} tokens, its limit is {self.limit}: shorten "
                "the piece, the system prompt, the tools or the summary, or raise the limit."
            )
        self._take_out(gone)
        if piece.tokens:
            self._extend(piece.tokens)
        self._pieces.append(piece)
        self._tokens.extend(piece.tokens)

    def evict(self, to: int) -> list[Piece]:
        gone = _chosen(self._pieces, leaving(_parts(self._pieces)), len(self._tokens) - to)
        left = [self._pieces[place] for place in sorted(gone)]
        self._take_out(gone)
        return left

    def _take_out(self, gone: Sequence[int]) -> None:
        """From the back to the front, so that places before a gap keep their meaning."""
        starts = [0]
        for piece in self._pieces:
            starts.append(starts[-1] + len(piece.tokens))
        for place, upto in _runs(gone):
            start, stop = starts[place], starts[upto]
            if stop > start:
                self._remove(start, stop, self._tokens[stop:])
            del self._tokens[start:stop]
        self._pieces = [self._pieces[place] for place in without(gone, len(self._pieces))]


def _parts(pieces: Sequence[Piece]) -> list[Part]:
    summary = max((place for place, piece in enumerate(pieces) if piece.kind == "summary"), default=-1)
    return [
        Part(
            pinned=piece.kind in ("system", "tools") or place == summary,
            calls=piece.calls,
            answers=piece.answers,
            user=piece.kind == "user",
            aside=piece.kind in PINNED,
        )
        for place, piece in enumerate(pieces)
    ]


def _chosen(pieces: Sequence[Piece], may_leave: Iterable[Unit], over: int) -> list[int]:
    """Places of the pieces of the first units that together free ``over`` tokens, or of all that may leave."""
    gone: list[int] = []
    for unit in may_leave:
        if over <= 0:
            break
        gone.extend(unit.members)
        over -= sum(len(pieces[place].tokens) for place in unit.members)
    return gone


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring places as ranges, the last range first."""
    runs: list[tuple[int, int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs[::-1]

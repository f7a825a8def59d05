"""A token window over a KV cache: what is appended in pieces, kept under a limit, and taken out oldest first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import msgspec

from pytest_vram.errors import BadInput, WindowFull

__all__ = ["PINNED", "Cell", "Kind", "Piece", "Window", "WindowFull", "checked_limit"]

Kind = Literal["system", "tools", "summary", "user", "assistant", "call", "result"]
#: Kinds that never leave; of several summaries the last.
PINNED: tuple[Kind, ...] = ("system", "tools", "summary")


class Piece(msgspec.Struct, frozen=True):
    """One part of a conversation in a window of tokens.

    :ivar number: tells pieces apart, rising in the order of appending. :ivar kind: who it is from; ``call`` is an
        assistant's message that asks for tools, ``result`` one tool's answer. :ivar tokens: ids, template included.
    :ivar calls: ids of the calls that a ``call`` asks for. :ivar answers: the id that a ``result`` belongs to.
    """

    number: int
    kind: Kind
    tokens: tuple[int, ...]
    calls: tuple[str, ...] = ()
    answers: str | None = None


class Cell(msgspec.Struct, frozen=True):
    """One occupied cell of a KV cache, in the order of positions.

    :ivar position: the position that its key is rotated to. :ivar token: the token that the cache itself shows to be
        there; ``None`` where a cache cannot show it, then only count and positions are compared.
    """

    position: int
    token: int | None = None


def checked_limit(limit: object, who: str) -> int:
    """A limit in tokens.

    :raises BadInput: not a whole number of at least 1.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadInput(f"{who} takes a limit of at least 1 token; {limit!r} is none.")
    return limit


class Window(ABC):
    """What :class:`pytest_vram.windows.WindowSpec` needs to see of a window; wrap your own class in one of these.

    The first group is needed. The second has defaults that say "not here": a window without a cache has no cells, and
    the checks that need them are left out.

    :ivar limit: tokens that the window may hold.
    """

    limit: int

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """What is held, in order."""

    @abstractmethod
    def tokens(self) -> list[int]:
        """The window's own list of tokens, as the next request would send it."""

    @abstractmethod
    def append(self, piece: Piece) -> None:
        """Take a piece in, and let older ones leave until the limit holds.

        :raises WindowFull: it cannot fit beside what must stay; nothing has changed then.
        :raises BadInput: a result whose call is not in the window, or has it already; nothing has changed then.
        """

    @abstractmethod
    def evict(self, to: int) -> list[Piece]:
        """Take the oldest out until at most ``to`` tokens are held or only what must stay is left; gives what left."""

    def cells(self) -> list[Cell] | None:
        """The cache's occupied cells by position; ``None``: there is no cache to look at."""
        return None

    def bytes(self) -> int | None:
        """Bytes that those cells take in the cache; ``None``: not known."""
        return None

    def expected_bytes(self) -> int | None:
        """What the sizing formula gives for the tokens held; ``None``: no model to size."""
        return None

    def logits(self) -> list[float] | None:
        """Scores of the next token after what is held, by decoding on the cache; ``None``: nothing decodes here."""
        return None

    def fresh_logits(self) -> list[float] | None:
        """The same from an empty cache and the tokens held; ``None`` where the two need not be equal.

        After a shift they are not: a kept cell was computed while what has left was still there. They are equal where
        eviction computes anew what follows the gap, and, with a shift, for a model of one layer, in which a key and
        a value depend on their own token alone.
        """
        return None

    def close(self) -> None:  # noqa: B027 (most windows hold nothing that needs closing)
        """Give back what the window holds."""

"""Windows for tests of the window spec: one over a cache that is a list, and one over the message window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_vram.windows import CachedWindow, Cell, MessageWindow, Piece, Window

BYTES_PER_TOKEN = 128


class ListWindow(CachedWindow):
    """A window whose cache is a list of cells; a shift renumbers the cells behind a gap."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.cache: list[Cell] = []

    def _extend(self, tokens: Sequence[int]) -> None:
        start = self.cache[-1].position + 1 if self.cache else 0
        self.cache.extend(Cell(start + place, token) for place, token in enumerate(tokens))

    def _remove(self, start: int, stop: int, behind: Sequence[int]) -> None:
        kept = self.cache[:start] + self.cache[stop:]
        self.cache = [Cell(place, cell.token) for place, cell in enumerate(kept)]

    def cells(self) -> list[Cell]:
        return list(self.cache)

    def bytes(self) -> int:
        return len(self.cache) * BYTES_PER_TOKEN

    def expected_bytes(self) -> int:
        return len(self._tokens) * BYTES_PER_TOKEN

    def logits(self) -> list[float]:
        return [float(cell.token or 0) for cell in self.cache]

    def fresh_logits(self) -> list[float]:
        return [float(token) for token in self._tokens]


class OverMessages(Window):
    """The message window as the spec sees it: each token is a word of a message."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.window = MessageWindow(limit, count=words, heading="")
        self.known: dict[int, Piece] = {}
        self.summary: int | None = None

    def pieces(self) -> list[Piece]:
        numbers = [message["number"] for message in self.window.messages if "number" in message]
        numbers += [] if self.summary is None else [self.summary]
        return [self.known[number] for number in sorted(numbers)]

    def tokens(self) -> list[int]:
        return [token for piece in self.pieces() for token in piece.tokens]

    def append(self, piece: Piece) -> None:
        if piece.kind == "summary":
            self.window.pin_summary(written(piece))
            self.summary = piece.number
        else:
            self.window.append(message_of(piece))
        self.known[piece.number] = piece

    def evict(self, to: int) -> list[Piece]:
        return [self.known[message["number"]] for message in self.window.evict(to)]


def words(messages: Sequence[Any], tools: Sequence[Any]) -> int:
    """Words of all messages and tools."""
    return sum(len(str(message["content"]).split()) for message in (*messages, *tools))


def written(piece: Piece) -> str:
    """The piece's tokens as words."""
    return " ".join(f"t{token}" for token in piece.tokens)


def message_of(piece: Piece) -> dict[str, Any]:
    """The piece as a message that remembers its number."""
    role = {"tools": "system", "call": "assistant", "result": "tool"}.get(piece.kind, piece.kind)
    message: dict[str, Any] = {"role": role, "content": written(piece), "number": piece.number}
    if piece.calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in piece.calls
        ]
    if piece.answers:
        message["tool_call_id"] = piece.answers
    return message

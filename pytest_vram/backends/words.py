"""A server's own words, as our messages repeat them."""

from __future__ import annotations

import re

#: Characters of a server's own message that are repeated in ours.
SHOWN = 300
#: Terminal colours and cursor movements, and titles of the terminal's window.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def said(words: str | bytes, longest: int = SHOWN) -> str:
    """One printable line of at most ``longest`` characters: no colours or line ends, ``?`` for what cannot be shown."""
    beginning = words[: 16 * longest]
    text = beginning if isinstance(beginning, str) else beginning.decode("utf-8", "replace")
    text = " ".join(_ESCAPES.sub("", text).split())
    if not text.isprintable():
        text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) <= longest and len(words) <= 16 * longest:
        return text
    return text[: longest - 1] + "…"

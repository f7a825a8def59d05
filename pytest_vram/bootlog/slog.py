"""Lines of Go's structured logger, as Ollama writes them: ``msg="model weights" device=CUDA0 size="18.5 GiB"``."""

from __future__ import annotations

import re

#: Keys begin after a space and are short, so that a long word costs no more than its length.
_PAIR = re.compile(
    r'(?:^|(?<=\s))(?:"(?P<quoted_key>(?:[^"\\]|\\.){1,80})"|(?P<key>[^\s="]{1,80}))'
    r'=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>\S*))'
)
_ESCAPED = re.compile(r"\\(.)")
_PLAIN = {"n": "\n", "t": "\t", "r": ""}
#: Pairs of one line that are looked at.
_MOST = 64


def attributes(text: str) -> dict[str, str]:
    """The pairs of a line, ``msg`` among them; of a key that comes twice the first.

    A value that a cut line left without its closing quotation mark keeps the opening one, and so reads as no figure.
    """
    found: dict[str, str] = {}
    for match in _PAIR.finditer(text):
        key = match["key"] if match["key"] is not None else _unquoted(match["quoted_key"])
        value = match["plain"] if match["plain"] is not None else _unquoted(match["quoted"])
        found.setdefault(key, value)
        if len(found) == _MOST:
            break
    return found


def _unquoted(text: str) -> str:
    return _ESCAPED.sub(lambda match: _PLAIN.get(match[1], match[1]), text) if "\\" in text else text

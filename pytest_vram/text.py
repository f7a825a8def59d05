"""Text of other people (names of files, of models, of tensors) made safe for a terminal and for JSON."""

from __future__ import annotations

import re

#: Everything but letters, marks, digits, punctuation, symbols and the plain space is looked at.
_UNUSUAL = re.compile(r"[^\w !-~]")


def printable(text: str) -> str:
    r"""``text`` as one line that a terminal shows and does not obey.

    Control characters, line ends, marks that turn the direction of writing, and halves of surrogate pairs (which stand
    for bytes of a file name that are no UTF-8) are written as Python writes them: ``\x1b``, ``\n``, ``\u202e``,
    ``\udcff``.
    """
    return text if text.isprintable() else _UNUSUAL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else repr(character)[1:-1]


def encoded(document: object) -> bytes:
    """A document as JSON, also where it holds names of files that are no UTF-8, which are escaped then."""
    import msgspec  # the plugin loads this module at every pytest start

    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(encodable(msgspec.to_builtins(document, str_keys=True)))


def encodable(value: object) -> object:
    """A JSON value whose texts can be encoded: halves of surrogate pairs are written as escapes, keys included."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {encodable(key): encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(one) for one in value]
    return value


def behind(pattern: re.Pattern[str], text: str, start: int, end: int | None = None) -> int:
    """Where a match at ``start`` ends: ``start`` itself where there is none, as in ``\\s*`` before a letter."""
    found = pattern.match(text, start) if end is None else pattern.match(text, start, end)
    return start if found is None else found.end()

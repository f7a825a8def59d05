"""JSON of calls with one defect in its text, as small or quantised models write it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

#: A string of well-formed JSON, or one character of it that is outside of strings.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\S', re.DOTALL)
_KEY = re.compile(r'"([A-Za-z_]\w*)"(?=\s*:)', re.ASCII)
_COLON = re.compile(r"\s*:")
LEAKED = ("<|im_end|>", "<|eot_id|>", "</s>", "<|endoftext|>")


def _signs(text: str, wanted: str) -> list[int]:
    """Offsets of these signs outside of strings."""
    return [part.start() for part in _PART.finditer(text) if part[0] in wanted]


def _strings(text: str, *, keys: bool) -> list[re.Match[str]]:
    """Strings of the text: its keys, or its values."""
    parts = (part for part in _PART.finditer(text) if part[0][0] == '"')
    return [part for part in parts if (_COLON.match(text, part.end()) is not None) == keys]


def _without(text: str, at: int) -> str:
    return text[:at] + text[at + 1 :]


def missing_bracket(text: str, chance: random.Random) -> str | None:
    """The last closing bracket is missing."""
    return text[:-1] if text.endswith(("}", "]")) else None


def extra_bracket(text: str, chance: random.Random) -> str | None:
    """The last closing bracket stands twice."""
    return text + text[-1] if text.endswith(("}", "]")) else None


def missing_comma(text: str, chance: random.Random) -> str | None:
    """A comma between two members is missing."""
    commas = _signs(text, ",")
    return _without(text, chance.choice(commas)) if commas else None


def trailing_comma(text: str, chance: random.Random) -> str | None:
    """A comma stands before a closing bracket."""
    closing = [at for at in _signs(text, "}]") if text[:at].rstrip()[-1] not in "{["]
    if not closing:
        return None
    at = chance.choice(closing)
    return f"{text[:at]},{text[at:]}"


def single_quotes(text: str, chance: random.Random) -> str | None:
    """Strings stand in single quotes."""
    strings = [part for part in _PART.finditer(text) if part[0][0] == '"']
    if not strings or "'" in text or '\\"' in text:
        return None
    return _PART.sub(lambda part: f"'{part[0][1:-1]}'" if part[0][0] == '"' else part[0], text)


def unquoted_key(text: str, chance: random.Random) -> str | None:
    """A key stands without quotes."""
    keys = [part for part in _strings(text, keys=True) if _KEY.match(text, part.start())]
    if not keys:
        return None
    part = chance.choice(keys)
    return text[: part.start()] + part[0][1:-1] + text[part.end() :]


def duplicate_key(text: str, chance: random.Random) -> str | None:
    """The first member stands twice."""
    value = json.loads(text)
    if not isinstance(value, dict) or not value:
        return None
    name, first = next(iter(value.items()))
    member = f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(first, ensure_ascii=False)}"
    return "{" + member + ", " + text[1:]


def non_finite_number(text: str, chance: random.Random) -> str | None:
    """A number is NaN or infinite."""
    numbers = _numbers(text)
    if not numbers:
        return None
    start, end = chance.choice(numbers)
    return text[:start] + chance.choice(("NaN", "Infinity", "-Infinity")) + text[end:]


def _numbers(text: str) -> list[tuple[int, int]]:
    strings = [(part.start(), part.end()) for part in _PART.finditer(text) if part[0][0] == '"']
    blank = list(text)
    for start, end in strings:
        blank[start:end] = '"' * (end - start)
    return [(part.start(), part.end()) for part in re.finditer(r"-?\d[\d.eE+-]*", "".join(blank), re.ASCII)]


def unterminated_string(text: str, chance: random.Random) -> str | None:
    """The text ends within a string."""
    values = [part for part in _strings(text, keys=False) if len(part[0]) > 4 and "\\" not in part[0]]
    if not values:
        return None
    part = values[-1]
    return text[: part.end() - 2]


def truncated(text: str, chance: random.Random) -> str | None:
    """The reply ends at its length limit, somewhere."""
    return text[: chance.randrange(1, len(text))] if len(text) > 2 else None


def runaway(text: str, chance: random.Random) -> str | None:
    """White space in place of the end, until the length limit."""
    if not text.endswith(("}", "]")):
        return None
    return text[:-1].rstrip("}]") + chance.choice((" ", "\n", "\t")) * 600


def leaked_token(text: str, chance: random.Random) -> str | None:
    """A special token stands behind it."""
    return text + chance.choice(LEAKED)


def double_encoded(text: str, chance: random.Random) -> str | None:
    """The object is the text of a JSON string; where the text has calls, the arguments are."""
    value: Any = json.loads(text)
    made = value.get("calls") if isinstance(value, dict) else None
    if not isinstance(made, list):
        return json.dumps(text, ensure_ascii=False)
    made[-1]["arguments"] = json.dumps(made[-1]["arguments"], ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def over_escaped(text: str, chance: random.Random) -> str | None:
    """Every quote stands behind a backslash."""
    return None if "\\" in text or '"' not in text else text.replace('"', '\\"')


#: Kind → what puts it into a well-formed text; ``None`` where the text has no room for it.
GARBLED: dict[str, Callable[[str, random.Random], str | None]] = {
    "missing_bracket": missing_bracket,
    "extra_bracket": extra_bracket,
    "missing_comma": missing_comma,
    "trailing_comma": trailing_comma,
    "single_quotes": single_quotes,
    "unquoted_key": unquoted_key,
    "duplicate_key": duplicate_key,
    "non_finite_number": non_finite_number,
    "unterminated_string": unterminated_string,
    "truncated": truncated,
    "runaway": runaway,
    "leaked_token": leaked_token,
    "double_encoded": double_encoded,
    "over_escaped": over_escaped,
}

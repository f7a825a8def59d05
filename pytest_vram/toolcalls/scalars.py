"""Strings, numbers, words and special tokens in JSON that a model wrote, and JSON to the letter (RFC 8259)."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, NamedTuple

from pytest_vram.text import behind, printable

#: A value that is nested deeper, or has more values, is not read: RFC 8259, section 9, lets a reader set both limits,
#: and what reads it next would exhaust its stack or the memory.
MAX_DEPTH, MAX_VALUES = 256, 200_000
#: Longer texts are read token by token: the decoder's own errors count lines from the beginning of the text.
_DECODED = 256 * 1024
_KEPT = 10  # defects of a kind

#: Tokens of chat templates that end turns and texts, which a server should have removed.
LEAKED = re.compile(
    r"<\|\"\|>|<\|(?![^|<>\s]{0,60}(?:tool|call|channel|message|python_tag))[^|<>\s]{1,60}\|>"
    r"|<｜(?![^｜<>\s]{0,60}(?:tool|call))[^｜<>\s]{1,60}｜>"
    r"|</?(?:s|eos|bos|pad|unk|end_of_turn|start_of_turn)>|<0x[0-9A-Fa-f]{2}>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|ARGS|CALL_ID)\]"
)
#: What ends the block that JSON stands in: a fence, a tag, the tokens around a call.
FOREIGN_END = re.compile(
    r"```|~~~|</?[A-Za-z_][^<>\n]{0,80}>|<\w{1,60}\|>|<\|\w{1,60}>|<[|｜][^<>|｜\s]{1,60}[|｜]>", re.ASCII
)
_LEAKED_LAST = re.compile(rf"(?:{LEAKED.pattern}|{FOREIGN_END.pattern})$")
_HALF = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.|$)", re.DOTALL)
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CUT_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}$")
_BACKSLASHES = re.compile(r"\\*")
_SPACE = re.compile(r"[ \t\n\r]*")
_KEY_AFTER = re.compile(r"""["'][^"'\\]{0,200}["'][ \t\n\r]*:""")
_WORD_AFTER = re.compile(r"(?:true|false|null|True|False|None)\b|\w{1,100}[ \t\n\r]*:")
#: After a comma, words up to a quote, also behind another string, are prose: the quote before the comma is one inside
#: of a string. In well-formed JSON no such words stand there.
_PROSE_AFTER = re.compile(
    r""",[ \t\n\r]*(?:"[^"\\]{0,200}"[ \t\n\r]*)?"""
    r"""(?!(?:true|false|null|True|False|None)\b)[^\W\d][^",:{}\[\]\n]{0,200}\""""
)
_SIGN_AFTER = re.compile(r"""//|/\*|#|~~~|[-+]\.?[0-9]|<[/|｜A-Za-z]|\\+["'nrt]""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.+-])")
_ODD_NUMBER = re.compile(
    r"[+-]?(?:0[xX][0-9A-Fa-f]+|[0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]*)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)"
)
_NEXT_VALUE = re.compile(r"""[-0-9]|//|/\*|#|["'{\[]|(?:true|false|null)\b|\w+[ \t]*:""")
_WORD = re.compile(r"[-+]?\w+")
_OTHER_WORDS = {
    "True": True, "TRUE": True, "False": False, "FALSE": False,
    "None": None, "NULL": None, "Null": None, "nil": None, "undefined": None,
}  # fmt: skip
_NOT_FINITE = {
    "nan": math.nan, "infinity": math.inf, "-infinity": -math.inf, "+infinity": math.inf, "inf": math.inf,
    "-inf": -math.inf, "+inf": math.inf, "-nan": math.nan, "+nan": math.nan,
}  # fmt: skip
_LITERALS = {"true": True, "false": False, "null": None}
_CLOSING = {
    '"': '"', "'": "'", "`": "`", "“": '”“"', "”": '”"', "„": '“”"', "«": '»"',
    "‘": "’'", "’": "’'", "‚": "‘’'",
}  # fmt: skip

Place = Literal["key", "value", "item", "whole"]


class Defect(NamedTuple):
    """One thing that is wrong.

    :ivar kind: of :data:`pytest_vram.toolcalls.diagnosis.KINDS`. :ivar at: character offset in the text, -1 where
        it has none.
    :ivar detail: a clause for a person, such as ``the object that begins at character 4 is never closed``; characters
        are counted from 1 there.
    """

    kind: str
    at: int
    detail: str


class Notes:
    """What was found to be wrong, at most ten of a kind."""

    def __init__(self) -> None:
        self._found: list[Defect] = []
        self._of_kind: dict[str, int] = {}
        self.count = 0

    def add(self, kind: str, at: int, detail: str) -> None:
        self.count += 1
        number = self._of_kind[kind] = self._of_kind.get(kind, 0) + 1
        if number <= _KEPT:
            self._found.append(Defect(kind, at, detail))

    @property
    def kinds(self) -> set[str]:
        return set(self._of_kind)

    def in_order(self) -> list[Defect]:
        return sorted(self._found, key=lambda defect: defect.at)


def shown(text: str) -> str:
    """A piece of an answer for a sentence: in quotes that it does not have, on one line, at most 60 characters."""
    quote = "'" if '"' in text and "'" not in text else '"'
    return f"{quote}{printable(text if len(text) <= 60 else text[:59] + '…')}{quote}"


# ---------------------------------------------------------------------------------------------- JSON to the letter


def decode_strictly(text: str, begin: int) -> tuple[Any, int] | None:
    """The value that begins at ``begin`` and the offset after it, ``None`` where it is not JSON to the letter."""
    if len(text) > _DECODED:
        return None
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    halves = _HALF_ESCAPED.search(text, begin, end) or _HALF.search(text, begin, end)
    return (value, end) if _acceptable(value, halves=halves is not None) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _integer(text: str) -> int:
    _number(text)  # so that there are at most 309 digits: longer ones take Python quadratic time, or it refuses them
    return int(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_number, parse_int=_integer, parse_constant=_constant
)


def _acceptable(value: object, *, halves: bool) -> bool:
    """Whether a value is not too deep and, where ``halves`` asks, has no half of a surrogate pair."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if halves and any(isinstance(one, str) and _HALF.search(one) for one in level):
            return False
        below: list[object] = []
        nested = False
        for one in level:
            if isinstance(one, dict):
                nested = True
                below += one.values()
                if halves:
                    below += one
            elif isinstance(one, list):
                nested = True
                below += one
        if not nested:
            return True
        level = below
    return False


# ------------------------------------------------------------------------------------------------- numbers and words


class Word(NamedTuple):
    """A number or a word. :ivar used: characters of it. :ivar defect: kind and detail."""

    value: Any
    used: int
    defect: tuple[str, str] | None = None


def literal(raw: str, *, last: bool) -> Word:
    """The number or word that ``raw`` begins with, all of it where it is neither.

    :param last: the text ends with it, so that it may be the beginning of something.
    """
    if match := _NUMBER.match(raw):
        rest = raw[match.end() : match.end() + 200].lstrip()
        if not rest or _NEXT_VALUE.match(rest):
            return _read_number(match[0])
    word = match[0] if (match := _WORD.match(raw)) else ""
    rest = raw[len(word) : len(word) + 200].lstrip()
    if word and (not rest or _NEXT_VALUE.match(rest)):
        if word in _LITERALS:
            return Word(_LITERALS[word], len(word))
        if word in _OTHER_WORDS:
            return Word(_OTHER_WORDS[word], len(word), ("unquoted_key", _other_word(word)))
        if word.lower() in _NOT_FINITE:
            return Word(_NOT_FINITE[word.lower()], len(word), ("non_finite_number", f"{word} is no number of JSON"))
    whole = raw.rstrip()
    if last and (whole in ("-", "") or any(one.startswith(whole) for one in _LITERALS)):
        return Word(None, len(raw))
    if (match := _ODD_NUMBER.match(raw)) and match.end() == len(whole):
        if last and whole[-1] in ".eE+-":
            return Word(None, len(raw))
        return Word(_odd_number(whole), len(whole), ("unquoted_key", f"{shown(whole)} is no number of JSON"))
    return Word(encodable(whole), len(whole), ("unquoted_key", f"the text {shown(whole)} has no quotes"))


def _other_word(word: str) -> str:
    value = _OTHER_WORDS[word]
    meant = "null" if value is None else str(value).lower()
    return f"{word} is no word of JSON, which has {meant}"


def _read_number(digits: str) -> Word:
    value = float(digits)
    if math.isinf(value):
        detail = f"the number {shown(digits)} is larger than any number that programs compute with"
        return Word(value, len(digits), ("non_finite_number", detail))
    return Word(value if set(digits) & set(".eE") else int(digits), len(digits))


def _odd_number(text: str) -> Any:
    if len(text) > 300:
        return text
    plain = text.replace("_", "")
    try:
        return int(plain, 16) if "x" in plain.lower() else int(plain)
    except ValueError:
        pass
    try:
        return float(plain)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------------------------ strings


class Quoted(NamedTuple):
    """A string. :ivar end: offset after it."""

    value: str
    end: int


class QuoteReader:
    """Reads strings in quotes of any kind out of a text, and notes what is wrong with them."""

    def __init__(self, text: str, notes: Notes) -> None:
        self._text = text
        self._notes = notes

    def read(self, at: int, place: Place, closers: str) -> Quoted | None:
        """The string that begins at ``at``, ``None`` where none does.

        :param place: what it stands for. :param closers: the brackets that are open around it, innermost first.
        """
        text = self._text
        begin = behind(_BACKSLASHES, text, at)
        escaped = begin - at
        if not escaped and text.startswith('<|"|>', at):
            self._notes.add("leaked_token", at, 'the token <|"|> stands for a quote')
            return self._until_mark(at, at + 5, '<|"|>', closers)
        mark = text[begin : begin + 1]
        if not mark or mark not in _CLOSING or (escaped and mark not in "\"'"):
            return None
        if mark != '"':
            self._notes.add("single_quotes", at, f"there is {mark} instead of a double quote")
        if escaped:
            number = "there is a backslash" if escaped == 1 else f"there are {escaped:,} backslashes"
            self._notes.add("over_escaped", at, f"{number} before a quote that begins a string")
            return self._over_escaped(at, begin + 1, mark, escaped, closers)
        tripled = mark * 3
        if mark in "\"'" and text.startswith(tripled, at) and not _KEY_AFTER.match(text, at + 2):
            end = text.find(tripled, at + 3)
            if end >= 0:
                if mark == '"':
                    self._notes.add("single_quotes", at, "there are three quotes, as in Python")
                return Quoted(encodable(text[at + 3 : end]), end + 3)
        return self._plain(at, place, mark, closers)

    def _plain(self, at: int, place: Place, mark: str, closers: str) -> Quoted:
        text, begin = self._text, at + 1
        closing = re.compile(f"[{_CLOSING[mark]}]")
        inner = -1  # the last quote that did not end the string though it was not escaped
        position = begin
        while match := closing.search(text, position):
            quote = match.start()
            position = quote + 1
            if self._backslashes(begin, quote) % 2:
                continue
            ends = self._ends(quote + 1, place, tried=inner >= 0)
            if ends == "key" and inner >= 0:
                return self._ended_before(at, begin, inner)
            if ends == "no" and closing.search(text, position):
                if inner < 0:
                    detail = "there is a quote that is not escaped inside of the string, or the string is not closed"
                    self._notes.add("unterminated_string", quote, detail)
                inner = quote
                continue
            return self._closed(at, begin, quote, mark)
        return self._unclosed(at, begin, closers, levels=1)

    def _backslashes(self, begin: int, end: int) -> int:
        """How many backslashes stand before ``end``."""
        first = end
        while first > begin and self._text[first - 1] == "\\":
            first -= 1
        return end - first

    def _ends(self, after: int, place: Place, *, tried: bool) -> Literal["yes", "no", "key"]:
        """Whether a quote before ``after`` ends a string, by what follows it."""
        if place == "whole":
            return "yes"
        text = self._text
        next_ = behind(_SPACE, text, after)
        mark = text[next_ : next_ + 1]
        if mark == ":":
            return "key" if place == "value" else "yes"
        if not mark or mark in "}]{[0123456789;" or (mark == "=" and place == "key"):
            return "yes"
        if mark == ",":
            return "no" if _PROSE_AFTER.match(text, next_) else "yes"
        if mark in "/#~-+<\\":
            return "yes" if _SIGN_AFTER.match(text, next_) else "no"
        if mark in _CLOSING:
            # "he said "no"": the first of two quotes is the inner one, if another came before.
            beyond = behind(_SPACE, text, next_ + 1)
            last = tried and next_ == after and text[beyond : beyond + 1] in (",", "}", "]")
            return "no" if last else "yes"
        return "yes" if _WORD_AFTER.match(text, next_) else "no"

    def _ended_before(self, at: int, begin: int, key: int) -> Quoted:
        """{"a": "b, "c": 1}: the quote at ``key`` begins the next key, so that the string ended before."""
        content = self._text[begin:key].rstrip()
        if content.endswith(","):
            content = content[:-1]
        return Quoted(self._unescaped(content, begin), begin + len(content))

    def _closed(self, at: int, begin: int, quote: int, mark: str) -> Quoted:
        raw = self._text[begin:quote]
        if control := _CONTROL.search(raw):
            named = {"\n": "line break", "\r": "line break", "\t": "tab"}.get(control[0], "control character")
            detail = f"there is a raw {named} in the string that begins at character {at + 1}; JSON writes an escape"
            self._notes.add("unterminated_string", begin + control.start(), detail)
        return Quoted(self._unescaped(raw, begin, mark), quote + 1)

    def _until_mark(self, at: int, begin: int, mark: str, closers: str) -> Quoted:
        end = self._text.find(mark, begin)
        if end < 0:
            return self._unclosed(at, begin, closers, levels=0)
        return Quoted(encodable(self._text[begin:end]), end + len(mark))

    def _over_escaped(self, at: int, begin: int, mark: str, escaped: int, closers: str) -> Quoted:
        r"""A string whose quotes are escaped: ``\"a\"``, ``\\"a\\"``, with ``\\\"`` for a quote inside."""
        text = self._text
        round_ = 2 * (escaped + 1)
        quote = text.find(mark, begin)
        while quote >= 0:
            number = self._backslashes(begin, quote)
            before = quote - number
            if number < escaped or number % round_ == escaped:
                kept = max(number - escaped, 0)
                return Quoted(self._unescaped_twice(text[begin : before + kept]), quote + 1)
            quote = text.find(mark, quote + 1)
        return self._unclosed(at, begin, closers, levels=2)

    def _unclosed(self, at: int, begin: int, closers: str, *, levels: int) -> Quoted:
        """A string that the text ends in, without the closing brackets, tags and tokens that are none of it."""
        text = self._text
        self._notes.add("unterminated_string", at, f"the string that begins at character {at + 1} is never closed")
        end = len(text)
        for _ in range(8):
            while end > begin and text[end - 1] in " \t\n\r":
                end -= 1
            last = _LEAKED_LAST.search(text[max(begin, end - 90) : end])
            if last is None:
                break
            end -= len(last[0])
        brackets = end
        for closer in reversed(closers):
            while brackets > begin and text[brackets - 1] in " \t\n\r":
                brackets -= 1
            if brackets <= begin or text[brackets - 1] != closer:
                brackets = end
                break
            brackets -= 1
        content = text[begin:brackets]
        if (len(content) - len(content.rstrip("\\"))) % 2:
            content = content[:-1]
        content = _CUT_ESCAPE.sub("", content)
        if levels == 0:
            return Quoted(encodable(content), brackets)
        value = self._unescaped(content, begin) if levels == 1 else self._unescaped_twice(content)
        return Quoted(value, brackets)

    def _unescaped(self, raw: str, begin: int, mark: str = '"') -> str:
        if "\\" in raw:
            value, wrong = unescape(raw, mark)
            if wrong is not None:
                detail = f"JSON has no escape {shown(wrong[1])}; a backslash itself is written twice"
                self._notes.add("over_escaped", begin + wrong[0], detail)
        else:
            value = raw
        if _HALF.search(value):
            whole = encodable(value)
            if whole != value:
                self._notes.add("over_escaped", begin, "half of a surrogate pair is escaped, which is no character")
            return whole
        return value

    def _unescaped_twice(self, raw: str) -> str:
        once, _ = unescape(raw)
        twice, wrong = unescape(once)
        return encodable(once if wrong else twice)


def unescape(raw: str, mark: str = '"') -> tuple[str, tuple[int, str] | None]:
    """The text that the inside of a JSON string stands for, and the first escape that is none: offset, escape.

    An escape that is none is kept as it is, because what it has a backslash for is most likely a pattern or a path.
    """
    wrong: list[tuple[int, str]] = []

    def character(match: re.Match[str]) -> str:
        escape = match[0]
        if len(escape) == 6:
            return chr(int(escape[2:], 16))
        one = escape[1:]
        if one in _ESCAPES and one:
            return _ESCAPES[one]
        if not wrong and not (one == mark and mark != '"'):
            wrong.append((match.start(), escape))
        if len(escape) == 4:
            return chr(int(escape[2:], 16))
        return one if one in "'`" else escape

    return _paired(_ESCAPE.sub(character, raw)), wrong[0] if wrong else None


def _paired(text: str) -> str:
    """Halves of surrogate pairs that belong together as the character they stand for."""
    if not _HALF.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def encodable(text: str) -> str:
    """``text`` with U+FFFD for every half of a surrogate pair, so that it can be written as UTF-8."""
    return _HALF.sub("\ufffd", _paired(text)) if _HALF.search(text) else text


# --------------------------------------------------------------------------------------------------------- repetition


def runaway(text: str, start: int = 0) -> Defect | None:
    """The repetition that a text ends in, if there is any from ``start`` on.

    That is more than 64 characters of white space, or a cycle of at most 256 characters that is there more than 20
    times and takes more than 200 characters.
    """
    length = len(text)
    if length - start > 64 and text[-65:].isspace():
        space = max(len(text.rstrip()), start)
        return Defect("runaway", space, f"the text ends in {length - space:,} characters of white space")
    tail = text[max(start, length - 256 * 21) :]
    for cycle in range(1, 257):
        needed = max(201, 21 * cycle)
        if needed > len(tail):
            break
        last = tail[-needed:]
        if last[cycle:] == last[:-cycle]:
            begin = _first_of(text, start, length - needed, cycle)
            times = (length - begin) // cycle
            repeated = shown(text[begin : begin + cycle])
            return Defect("runaway", begin, f"the text ends in {repeated}, {times:,} times in a row")
    return None


def _first_of(text: str, start: int, begin: int, cycle: int) -> int:
    """Where a cycle that goes on at ``begin`` begins, not before ``start``."""
    for step in (65_536, 1_024, 16, 1):
        while begin - step >= start and text[begin - step : begin] == text[begin - step + cycle : begin + cycle]:
            begin -= step
    return begin

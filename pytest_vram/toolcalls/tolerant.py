"""Reading JSON that a model wrote: what it means, and everything that is wrong with it.

Nothing here repairs a score: a text with a defect is malformed, whatever was read out of it.

What JSON to the letter is, and how its strings and words are read, is in :mod:`pytest_vram.toolcalls.scalars`; here is
what stands where: brackets, commas, colons, keys, and what does not belong there at all.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, NamedTuple

from pytest_vram.text import behind, printable
from pytest_vram.toolcalls.scalars import (
    FOREIGN_END,
    LEAKED,
    MAX_DEPTH,
    MAX_VALUES,
    Defect,
    Notes,
    QuoteReader,
    decode_strictly,
    encodable,
    literal,
    runaway,
    shown,
)

__all__ = ["MISSING", "Defect", "Missing", "Parsed", "double_encoded", "parse", "runaway", "strict"]


class Parsed(NamedTuple):
    """A value read tolerantly.

    :ivar value: what was meant, as far as it can be told. :ivar defects: in the order of the text, at most ten of a
        kind. :ivar end: offset after it, closing brackets that are too many included.
    """

    value: Any
    defects: tuple[Defect, ...]
    end: int


class Missing:
    """There is no such value; JSON's ``null`` is one."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()

_SPACE = re.compile(r"[ \t\n\r]*")
_ODD_SPACE = re.compile(r"[\s\ufeff\u200b\u2060]+")
_LINE_COMMENT = re.compile(r"(?://|#)[^\n]*")
_ESCAPED_SPACE = re.compile(r"""\\+[nrt](?=[\s\\"'{}\[\],:]|$)""")
_QUOTED_JSON = re.compile(r""""[ \t\n\r]*(?=[{\[][ \t\n\r]*(?:\{[ \t\n\r]*)?"\w[^"\\]{0,200}"[ \t\n\r]*:)""")
_PLACEHOLDER = re.compile(r"<(?!\w*(?:tool|call|func|think|param|arg))[A-Za-z_][\w .-]{0,60}>")
_ARROW = re.compile(r"=>?|->")
_CLOSERS = re.compile(r"[ \t\n\r}\]]*")
_NEXT_KEY = re.compile(
    r"""[ \t\n\r]*,[ \t\n\r]*(?:\\?"[^"\\]{0,200}\\?"|'[^'\\]{0,200}'|[A-Za-z_]\w{0,100})[ \t\n\r]*:"""
)
_NEXT_ITEM = re.compile(r"""[ \t\n\r]*,[ \t\n\r]*["{\[0-9tfn-]""")
_BARE_KEY = re.compile(r"[^\s,:{}\[\]\"'<`]+|<(?![|/｜])|[`']")
_BARE_VALUE = re.compile(r"(?:[^,{}\[\]\"\n<`]|<(?![|/｜])|`(?!``))+")
_BEGINS = re.compile(
    r"""[{\["'“”„‘’‚«]|\\+["']|[-+]?\.?\d|[-+]?(?:NaN|nan|[Ii]nfinity|inf)\b"""
    r"""|(?:[Tt]rue|[Ff]alse|null|None|undefined)\b"""
)
_QUOTES = "\"'“”„‘’‚«`"
_CLOSER = {"{": "}", "[": "]"}
_NAMES = {"}": "object", "]": "array"}
#: How far is looked ahead, and how often, to tell which bracket is the wrong one.
_AHEAD, _LOOKS = 32, 1000
#: A text with more defects than this is no JSON: reading stops.
_MAX_DEFECTS = 100_000

_Expects = Literal["key", "colon", "value", "comma"]


def parse(text: str, start: int = 0, *, within: bool = False) -> Parsed | None:
    """Read one JSON value that begins at or after ``start`` (white space is skipped); ``None``: none begins there.

    A well-formed value (RFC 8259, without NaN, duplicate keys and halves of surrogate pairs, at most 256 levels deep
    and of at most 200,000 values) has no defects and reads as :func:`json.loads` reads it. Text after the value is
    left alone, except for closing brackets: those are too many, and belong to it. Linear in time and memory for any
    input.

    :param within: the value stands in something else that has brackets: those after it are left alone, too.
    """
    begin = behind(_SPACE, text, start)
    marked = text.startswith("\ufeff", begin)
    if not _BEGINS.match(text, begin + marked):
        return None
    if not marked:
        found = decode_strictly(text, begin)
        if found is not None and (within or not _goes_on(text, found[1], found[0])):
            return Parsed(found[0], (), found[1])
    return read_tolerantly(text, begin, within=within)


def strict(text: str) -> Any:
    """The value of a whole text that is JSON to the letter: no NaN or Infinity, no duplicate key, nothing around it.

    :raises ValueError: naming what is wrong.
    """
    parsed = parse(text)
    if parsed is None:
        raise ValueError("there is no JSON" if text.strip() else "the text is empty")
    if parsed.defects:
        raise ValueError(parsed.defects[0].detail)
    if behind(_SPACE, text, parsed.end) != len(text):
        raise ValueError(f"there is text after the JSON: {shown(text[parsed.end : parsed.end + 40].strip())}")
    return parsed.value


def double_encoded(value: Any) -> Any:
    """The object or array that a JSON string holds as text, itself read tolerantly; :data:`MISSING`: it holds none."""
    for _ in range(3):  # encoded three times happens, more is no call any more
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", '"'):
            break
        parsed = parse(value)
        if parsed is None or value[parsed.end :].strip():
            break
        value = parsed.value
        if isinstance(value, dict | list):
            return value
    return MISSING


def read_tolerantly(text: str, start: int, *, within: bool = False) -> Parsed:
    """As :func:`parse`, always by the tolerant reader, of a value that begins at ``start``."""
    reader = _Reader(text, within=within)
    reader.read(start)
    return Parsed(reader.root, tuple(reader.notes.in_order()), reader.position)


def _goes_on(text: str, end: int, value: object) -> bool:
    """Whether what follows a well-formed object or array shows that a bracket of it was too many."""
    if not isinstance(value, dict | list):
        return False
    after = behind(_SPACE, text, end)
    if text[after : after + 1] in ("}", "]"):
        return True
    if isinstance(value, dict):
        return _NEXT_KEY.match(text, end) is not None
    return _NEXT_ITEM.match(text, end) is not None and text[end:].rstrip().endswith("]")


class _Frame:
    """An object or array that is open. A ghost repeats the object around it: its opening bracket is too many."""

    __slots__ = ("at", "closer", "comma", "container", "expects", "ghost", "key", "named", "quoted")

    def __init__(self, container: dict[str, Any] | list[Any], at: int, closer: str, *, ghost: bool = False) -> None:
        self.container = container
        self.at = at
        self.closer = closer
        self.ghost = ghost
        self.expects: _Expects = "key" if isinstance(container, dict) else "value"
        self.key = ""
        self.comma = -1  # where the comma is that nothing has followed
        self.named = False  # the last value is a string that a colon may turn into a key
        self.quoted = False  # there is a quote before and after it

    @property
    def name(self) -> str:
        return f"{_NAMES[self.closer]} that begins at character {self.at + 1}"

    def put(self, value: Any, *, named: bool = False) -> None:
        if isinstance(self.container, dict):
            self.container[self.key] = value
        else:
            self.container.append(value)
        self.expects, self.comma, self.named = "comma", -1, named


class _Reader:
    """The tolerant reader of one value: a stack of open brackets, and what may stand next in the innermost."""

    def __init__(self, text: str, *, within: bool) -> None:
        self.text = text
        self.notes = Notes()
        self.strings = QuoteReader(text, self.notes)
        self.stack: list[_Frame] = []
        self.root: Any = None
        self.position = 0
        self.within = within
        self.values = 0
        self.looks = 0
        self.closing: bool | None = None  # whether the text ends in a closing square bracket
        self.ghosts = 0  # closed ones: their closing brackets may have been meant for what is open
        self.stopped = False  # reading ended before the value did, for a reason that was noted

    def read(self, start: int) -> None:
        self.position = start
        self._skip()
        mark = self.text[self.position]
        if mark not in "{[":
            self.root, _ = self._scalar(None)
            self._look_for_runaway()
            return
        self._open(mark)
        while self.stack and not self.stopped:
            self._skip()
            if self.position >= len(self.text):
                self._cut()
                break
            mark = self.text[self.position]
            if mark in "}]":
                self._close(mark)
            elif mark == "," or (mark == ";" and self.stack[-1].expects == "comma"):
                self._comma()
            elif mark == ":":
                self._colon()
            elif self._foreign(mark):
                pass
            elif mark in "{[":
                self._open(mark)
            else:
                self._item()
            if self.notes.count > _MAX_DEFECTS:
                self._give_up()
        self._look_for_runaway()

    # ------------------------------------------------------------------------------------------ around the tokens

    def _skip(self) -> None:
        self.position = behind(_SPACE, self.text, self.position)
        while odd := _ODD_SPACE.match(self.text, self.position):
            character = f"U+{ord(odd[0][0]):04X}"
            self.notes.add("leaked_token", odd.start(), f"the character {character} is no white space in JSON")
            self.position = odd.end()

    def _foreign(self, mark: str) -> bool:
        """Skip what is no JSON: a comment, a leaked token; end at what ends a block. Whether there was any."""
        text, at = self.text, self.position
        if mark == "\\" and (space := _ESCAPED_SPACE.match(text, at)):
            self.notes.add("over_escaped", at, f"there is {shown(space[0])} outside of a string")
            self.position = space.end()
            return True
        if mark in "/#" and (end := _comment_end(text, at)):
            self.notes.add("unquoted_key", at, f"there is a comment, which JSON does not have: {shown(text[at:end])}")
            self.position = end
            return True
        if text.startswith('<|"|>', at):
            return False
        if mark in "<[" and (token := LEAKED.match(text, at)):
            self.notes.add("leaked_token", at, f"the token {printable(token[0])} stands outside of a string")
            self.position = token.end()
            return True
        if self.stack[-1].expects == "value" and _PLACEHOLDER.match(text, at):
            return False
        if mark in "<`~" and FOREIGN_END.match(text, at):
            self._cut()
            return True
        return False

    def _cut(self) -> None:
        """The value ends here, whatever is open."""
        open_ = [frame for frame in self.stack if not frame.ghost]
        if len(open_) > self.ghosts:
            more = f", nor {len(open_) - 1} more inside it" if len(open_) > 1 else ""
            self.notes.add("missing_bracket", open_[0].at, f"the {open_[0].name} is never closed{more}")
        self.stack.clear()

    def _give_up(self) -> None:
        self.stopped = True
        self.position = len(self.text)

    def _count(self) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            self.notes.add("runaway", self.position, f"there are more than {MAX_VALUES:,} values")
            self._give_up()

    def _look_for_runaway(self) -> None:
        """Repetition at the end explains what was never closed; beside a closed value it is the caller's."""
        kinds = self.notes.kinds
        if kinds & {"missing_bracket", "unterminated_string", "extra_bracket"} and "runaway" not in kinds:
            rest = behind(_SPACE, self.text, self.position)
            if rest == len(self.text) and (found := runaway(self.text)):
                self.notes.add(*found)

    # ---------------------------------------------------------------------------------------------------- brackets

    def _open(self, mark: str) -> None:
        at = self.position
        if self.stack and not self._room_for_a_bracket(mark, at):
            return
        if len(self.stack) >= MAX_DEPTH:
            self.notes.add("runaway", at, f"brackets are nested more than {MAX_DEPTH} levels deep")
            self._give_up()
            return
        container: dict[str, Any] | list[Any] = {} if mark == "{" else []
        if self.stack:
            self.stack[-1].put(container)
        else:
            self.root = container
        self.stack.append(_Frame(container, at, _CLOSER[mark]))
        self.position = at + 1
        self._count()

    def _room_for_a_bracket(self, mark: str, at: int) -> bool:
        """Whether a value may begin here, after whatever that takes: closing what was left open, a missing comma."""
        frame = self.stack[-1]
        if frame.expects == "value":
            return True
        if isinstance(frame.container, list):
            self.notes.add("missing_comma", at, f"a comma is missing before {mark}")
            return True
        if frame.expects == "colon":
            self.notes.add("missing_comma", at, f"a colon is missing after the key {shown(frame.key)}")
            return True
        fresh = frame.expects == "key" and frame.comma < 0
        if not fresh and any(isinstance(one.container, list) for one in self.stack):
            while isinstance(self.stack[-1].container, dict):
                left = self.stack.pop()
                self.notes.add("missing_bracket", left.at, f"the {left.name} is not closed before the next item")
            if self.stack[-1].expects == "comma" and frame.comma < 0:
                self.notes.add("missing_comma", at, f"a comma is missing before {mark}")
            return True
        self.notes.add("extra_bracket", at, f"there is a bracket {mark} where a key belongs")
        if len(self.stack) >= MAX_DEPTH:
            self._give_up()
            return False
        ghost = _Frame(frame.container, at, _CLOSER[mark], ghost=True)
        ghost.key, ghost.expects = frame.key, "key"
        self.stack.append(ghost)
        self.position = at + 1
        return False

    def _close(self, mark: str) -> None:
        at = self.position
        if self.stack[-1].closer == mark:
            self._finish(at)
            return
        way = self._way_out(mark)
        frame = self.stack[-1]
        if way == "stray":
            self.notes.add("extra_bracket", at, f"there is a bracket {mark} that nothing opened")
            self.position = at + 1
        elif way == "wrong":
            self.notes.add("missing_bracket", at, f"the {frame.name} is closed by {mark} instead of {frame.closer}")
            self._finish(at)
        else:
            while self.stack[-1].closer != mark:
                left = self.stack[-1]
                self.notes.add("missing_bracket", left.at, f"the {left.name} is not closed before {mark}")
                self._settle(left, -1)
                self.stack.pop()
                self.stack[-1].expects = "comma"
            self._finish(at)

    def _finish(self, at: int) -> None:
        """Close the innermost bracket at ``at``."""
        frame = self.stack[-1]
        self._settle(frame, at)
        self.position = at + 1
        if len(self.stack) == 1 and not self.within and self._reopened(at):
            frame.expects, frame.comma, frame.named = "comma", -1, False
            return
        self.stack.pop()
        self.ghosts += frame.ghost
        if frame.quoted and self.text.startswith('"', self.position):
            self.position += 1
        if self.stack:
            above = self.stack[-1]
            above.expects, above.comma, above.named = "comma", -1, False
            return
        if not self.within:
            self._extra_closers()

    def _settle(self, frame: _Frame, at: int) -> None:
        """Say what is open inside of a bracket that closes at ``at``, -1 where the bracket itself is missing."""
        if frame.expects in ("key", "value") and frame.comma >= 0:
            if at >= 0:
                closer = self.text[at]
                self.notes.add("trailing_comma", frame.comma, f"there is a comma before the closing bracket {closer}")
        elif isinstance(frame.container, dict) and frame.expects in ("colon", "value"):
            self.notes.add("missing_comma", max(at, frame.at), f"the key {shown(frame.key)} has no value")
            frame.container.setdefault(frame.key, None)

    def _reopened(self, at: int) -> bool:
        """Whether what follows shows that the bracket at ``at`` did not close the outermost value."""
        after = at + 1
        if isinstance(self.stack[0].container, dict):
            goes_on = _NEXT_KEY.match(self.text, after) is not None
        else:
            if self.closing is None:
                self.closing = self.text.rstrip().endswith("]")
            goes_on = self.closing and _NEXT_ITEM.match(self.text, after) is not None
        if goes_on:
            self.notes.add("extra_bracket", at, f"there is a bracket {self.text[at]} too many: more follows")
        return goes_on

    def _extra_closers(self) -> None:
        end = self.position
        extra = _CLOSERS.match(self.text, end)
        brackets = extra[0].rstrip() if extra else ""
        if brackets:
            self.position = end + len(brackets)
            first = end + len(brackets) - len(brackets.lstrip())
            number = brackets.count("}") + brackets.count("]")
            too_many = "a closing bracket is too many" if number == 1 else f"{number:,} closing brackets are too many"
            self.notes.add("extra_bracket", first, f"{too_many}: {shown(brackets.strip())}")

    def _way_out(self, mark: str) -> Literal["missing", "wrong", "stray"]:
        """What a closing bracket that does not fit most likely is, by how well what follows it fits then.

        ``missing``: inner brackets were not closed; ``wrong``: it stands for the other closing bracket; ``stray``: it
        is too many.
        """
        closers = [frame.closer for frame in self.stack]
        known = mark in closers
        self.looks += 1
        if self.looks > _LOOKS:
            return "missing" if known else "stray"
        text, position, run = self.text, self.position + 1, ""
        while len(run) < _AHEAD:
            position = behind(_SPACE, text, position)
            if text[position : position + 1] not in ("}", "]"):
                break
            run += text[position]
            position += 1
        follows: str | None = None
        if _NEXT_KEY.match(text, position):
            follows = "}"
        elif text[position : position + 1] == ",":
            follows = "]"
        ways: list[tuple[int, int, Literal["missing", "wrong", "stray"]]] = []
        doubled = text[self.position - 1 : self.position] == mark
        if known:
            rest = closers[: len(closers) - 1 - closers[::-1].index(mark)]
            ways.append((_misfit(rest, run, follows), 1, "missing"))
        ways.append((_misfit(closers[:-1], run, follows), 2, "wrong"))
        ways.append((_misfit(closers, run, follows), 0 if doubled else 3, "stray"))
        return min(ways)[2]

    # ------------------------------------------------------------------------------------------- commas and colons

    def _comma(self) -> None:
        frame, at = self.stack[-1], self.position
        self.position = at + 1
        if frame.expects == "comma":
            if self.text[at] == ";":
                self.notes.add("missing_comma", at, "there is ; instead of a comma")
        elif isinstance(frame.container, dict) and frame.expects in ("colon", "value"):
            self.notes.add("missing_comma", at, f"the key {shown(frame.key)} has no value")
            frame.container.setdefault(frame.key, None)
        else:
            where = "two commas in a row" if frame.comma >= 0 else "a comma before the first item"
            self.notes.add("trailing_comma", at, f"there {'are' if frame.comma >= 0 else 'is'} {where}")
        frame.expects = "key" if isinstance(frame.container, dict) else "value"
        frame.comma = at

    def _colon(self) -> None:
        frame, at = self.stack[-1], self.position
        self.position = at + 1
        if isinstance(frame.container, dict):
            if frame.expects == "colon":
                frame.expects = "value"
            elif frame.expects == "comma" and frame.named:
                # {"arguments": "job": "backup"}: what was read as a value is the first key of an object.
                self.notes.add("missing_bracket", at, f"an opening bracket is missing after {shown(frame.key)}")
                self._rename(frame, str(frame.container.pop(frame.key)))
            else:
                self.notes.add("missing_comma", at, "there is a colon where none belongs")
            return
        objects = [index for index, one in enumerate(self.stack) if isinstance(one.container, dict)]
        if frame.expects == "comma" and frame.named and objects:
            # {"a": [1, "b": 2}: the array ended before the key.
            key = str(frame.container.pop())
            while isinstance(self.stack[-1].container, list):
                left = self.stack.pop()
                self.notes.add("missing_bracket", left.at, f"the {left.name} is not closed before {shown(key)}")
            self._rename(self.stack[-1], key)
        else:
            self.notes.add("missing_comma", at, "there is a colon in an array")
            frame.expects = "value" if frame.expects == "value" else "comma"

    def _rename(self, frame: _Frame, key: str) -> None:
        frame.key, frame.expects, frame.comma, frame.named = key, "value", -1, False

    # ------------------------------------------------------------------------------------------------ keys, scalars

    def _item(self) -> None:
        """A key or a scalar."""
        frame, at = self.stack[-1], self.position
        if frame.expects == "comma":
            before = shown(self.text[at : at + 12])
            self.notes.add("missing_comma", at, f"a comma is missing before {before}")
            frame.expects = "key" if isinstance(frame.container, dict) else "value"
        elif frame.expects == "colon":
            if arrow := _ARROW.match(self.text, at):
                self.notes.add("missing_comma", at, f"there is {arrow[0]} instead of a colon")
                self.position = arrow.end()
            else:
                self.notes.add("missing_comma", at, f"a colon is missing after the key {shown(frame.key)}")
            frame.expects = "value"
            return
        if frame.expects == "key":
            self._key(frame)
            return
        if self.text[at] == '"' and (quoted := _QUOTED_JSON.match(self.text, at)):
            self.notes.add("double_encoded", at, "there are quotes around JSON, which is not escaped in them")
            self.position = quoted.end()
            self._open(self.text[self.position])
            if not self.stopped:
                self.stack[-1].quoted = True
            return
        value, named = self._scalar(frame)
        frame.put(value, named=named)
        self._count()

    def _key(self, frame: _Frame) -> None:
        at = self.position
        quoted = self._quoted("key", at)
        if quoted is not None:
            frame.key = quoted
        else:
            bare = _BARE_KEY.match(self.text, at)
            word = bare[0] if bare else self.text[at]
            frame.key = encodable(word)
            self.notes.add("unquoted_key", at, f"the key {shown(word)} has no quotes")
            self.position = at + len(word)
        container = frame.container
        if isinstance(container, dict) and frame.key in container:
            self.notes.add("duplicate_key", at, f"the key {shown(frame.key)} is there twice")
        frame.expects, frame.comma = "colon", -1

    def _scalar(self, frame: _Frame | None) -> tuple[Any, bool]:
        """A string, a number or a word, and whether it is a string."""
        at = self.position
        place: Literal["value", "item", "whole"] = "whole"
        if frame is not None:
            place = "value" if isinstance(frame.container, dict) else "item"
        quoted = self._quoted(place, at)
        if quoted is not None:
            return quoted, True
        bare = _BARE_VALUE.match(self.text, at)
        raw = bare[0] if bare else self.text[at]
        value, used, defect = literal(raw, last=at + len(raw) == len(self.text))
        self.position = at + max(used, 1)
        if defect is not None:
            self.notes.add(defect[0], at, defect[1])
        return value, False

    def _quoted(self, place: Literal["key", "value", "item", "whole"], at: int) -> str | None:
        """A string in quotes of any kind, ``None`` where there is none."""
        mark = self.text[at]
        if mark not in _QUOTES and mark not in "\\<":
            return None
        found = self.strings.read(at, place, "".join(frame.closer for frame in reversed(self.stack)))
        if found is None:
            return None
        self.position = found.end
        return found.value


def _comment_end(text: str, at: int) -> int:
    """The offset after the comment that begins at ``at``, 0 where none does."""
    if text.startswith("/*", at):
        end = text.find("*/", at + 2)
        return len(text) if end < 0 else end + 2
    line = _LINE_COMMENT.match(text, at)
    return line.end() if line else 0


def _misfit(closers: list[str], run: str, follows: str | None) -> int:
    """How badly a run of closing brackets, and what follows it, fit the brackets that are open then.

    :param follows: the closing bracket of what an item like the next one stands in; ``None``: nothing follows.
    """
    open_ = list(closers)
    wrong = 0
    for mark in run:
        if open_ and open_[-1] == mark:
            open_.pop()
        else:
            wrong += 1
    if follows is None:
        return wrong + len(open_)
    return wrong + (not open_ or open_[-1] != follows)

"""What there is in an answer: calls, text that belongs to none, thinking, and what is wrong with the form of each.

An answer is raw text of a model or an assistant message of a server; both end up as the same evidence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.text import printable
from pytest_vram.toolcalls import formats
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.formats.pairs import CLOSERS
from pytest_vram.toolcalls.formats.tokens import AT_END, END_OF_TURN, HEADER, SPECIAL
from pytest_vram.toolcalls.tolerant import MISSING, Defect, double_encoded, parse, runaway

#: Characters of an answer that are read. Two million are about half a million tokens: no model writes a call that long.
LONGEST = 2_000_000
#: Characters of a call's text that are kept.
KEPT = 4000
#: Equal calls in a row that are a repetition and no longer several calls.
_EQUAL_CALLS = 16
_LONGEST_THINKING = 200_000
#: Characters that are looked at to see whether a text is words.
_SAID = 2000
#: A longer text is looked at for repetition, not for words.
_SHORT = 1000
#: Defects of one sort that are told.
_TOLD = 5
_STRAY = re.compile("|".join(map(re.escape, CLOSERS)))
_QUOTED = "`\"'“‘"
_LINE = 400
_COLON = re.compile(r"[ \t\n\r]*:")
#: How a sentence goes on after a word.
_GOES_ON = re.compile(r" (?:[^\W\d_A-Z]|\d)|[.,;:!?)](?:[ \n]|$)")
_WRAPPED = {
    "hermes": "the tags of Hermes and Qwen", "qwen3-coder": "the tags of Qwen3-Coder", "glm": "GLM's tags",
    "llama": "Llama's tokens", "mistral": "Mistral's tokens", "gemma": "Gemma's notation",
    "gemma3": "Gemma's notation", "deepseek": "DeepSeek's tokens", "kimi": "Kimi's tokens",
    "harmony": "gpt-oss's channels", "granite": "Granite's tokens", "pythonic": "Python's notation",
    "qwen-agent": "Qwen-Agent's notation", "react": "ReAct's notation", "command": "Command's tokens",
}  # fmt: skip
#: Notations of prompts, which no server reads.
_NOTATIONS = ("pythonic", "qwen-agent", "react")


class Piece(NamedTuple):
    """A call in an answer.

    :ivar plain_name: its name without special tokens that leaked into it. :ivar broken: it could not be read without
        repair. :ivar native: a server that knows the format would find it.
    """

    name: str | None
    plain_name: str | None
    arguments: Any
    text: str
    form: str
    native: bool
    broken: bool
    defects: tuple[Defect, ...] = ()
    id: str | None = None


class Evidence:
    """All of an answer. :ivar text: what positions of defects refer to, "" where they refer to several texts."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.defects: list[Defect] = []
        self.text = ""
        self.content = ""
        self.thinking = ""
        self.empty = False
        self.answered = False
        #: Text, or other JSON, in place of the object that the protocol asks for.
        self.unasked: Defect | None = None

    def note(self, kind: str, at: int, detail: str) -> None:
        """Add a defect of no call."""
        self.defects.append(Defect(kind, at, detail))


#: Kinds that leave a call readable.
_READABLE = frozenset({"text_around", "call_in_text", "alias_key", "arguments_as_object", "wrong_type", "extra_field"})


def _broken(defects: Iterable[Defect]) -> bool:
    return any(defect.kind not in _READABLE for defect in defects)


def of_text(text: str, tools: Sequence[Tool], protocol: str, *, in_message: bool) -> Evidence:
    """The evidence of a text. :param in_message: it is the content of a message in which a server found no call."""
    found = Evidence()
    if len(text) > LONGEST:
        detail = f"the answer is {len(text):,} characters long, no call needs more than {LONGEST:,}"
        found.note("runaway", -1, detail)
        text = text[:LONGEST]
    found.text = text
    header = HEADER.match(text) if not in_message else None
    if header is not None:
        text = " " * header.end() + text[header.end() :]
    if not text.strip():
        _nothing(found, text)
        return found
    asked = "" if protocol == "tools" else protocol
    scan = formats.read(text, tools, asked)
    found.answered = scan.answered > 0
    found.defects += scan.defects
    found.thinking = "\n".join(text[start:end] for start, end in scan.thinking)[:_LONGEST_THINKING]
    plain = [(start, end) for start, end in scan.plain if text[start:end].strip(" \t\r\n,;")]
    found.content = "\n".join(text[start:end].strip() for start, end in plain)
    plain = _without_end_of_turn(scan, plain)
    _repetition(found, scan)
    for start, end in plain:
        _leftovers(found, scan, start, end)
    found.pieces = [_piece(call, text, protocol, in_message=in_message) for call in scan.calls]
    around = "\n".join(text[start:end].strip() for start, end in plain)
    if protocol != "tools" and around and (found.pieces or scan.answered) and not _only_special(around):
        at = plain[0][0] + len(text[plain[0][0] : plain[0][1]]) - len(text[plain[0][0] : plain[0][1]].lstrip())
        found.note("text_around", at, f"text stands around the JSON: {printable(around[:60])!r}")
    elif scan.answered > 1 or (scan.answered and found.pieces):
        found.note("text_around", -1, "there is more than one object, where one was asked for")
    prose = asked == "few_shot" and _is_said(found.content)  # no grammar kept it from answering a person
    if asked and not found.pieces and not scan.answered and found.content and not prose:
        detail = f"the answer is not the JSON that was asked for: {printable(found.content[:60])!r}"
        found.unasked = Defect("wrapper_mismatch", -1, detail)
    elif not found.pieces and found.content and not scan.defects and _says_nothing(found.content):
        shown = f"there is nothing but {printable(found.content[:40])!r}"
        found.empty = True
        marks = set(found.content)
        closed = marks & set("}]") and not marks & set("{[")
        found.note("extra_bracket" if closed else "empty", -1, shown)
        return found
    found.empty = not found.pieces and not found.content and not scan.answered
    if found.empty and not any(defect.kind == "runaway" for defect in found.defects):
        found.note("empty", -1, _only_thinking(found.thinking, tools) if scan.thinking else "there is no answer")
    return found


def _is_said(text: str) -> bool:
    """Whether a text is words for a person: no brackets or tags, and more than one word of ASCII letters alone."""
    words = text[:_SAID].strip().strip(".,;:!?\"'`*_")
    letters = sum(one.isalpha() for one in words)
    return letters >= 4 and not (words.isascii() and len(words.split()) < 2) and not set("{}[]<>|\ufffd") & set(text)


def _says_nothing(text: str) -> bool:
    """Whether a text has neither words nor signs that people answer with: brackets, or what could not be decoded."""
    return len(text) <= _SHORT and all(one == "\ufffd" or unicodedata.category(one)[0] in "PZC" for one in text)


def _only_special(text: str) -> bool:
    return AT_END.fullmatch(text) is not None


def _only_thinking(thinking: str, tools: Sequence[Tool]) -> str:
    if formats.read(thinking, tools).calls:
        return "there is nothing but thinking, with a call inside of it, where nothing executes it"
    return "there is nothing but thinking"


def _nothing(found: Evidence, text: str) -> None:
    found.empty = True
    repeated = runaway(text)
    if repeated is not None:
        found.defects.append(repeated)
    elif not any(defect.kind == "runaway" for defect in found.defects):
        found.note("empty", -1, "there is no answer")


def _without_end_of_turn(scan: formats.Scan, plain: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Plain text without the token that ends a turn, where it follows a call in a chat template's own wrapper."""
    if not plain or not scan.calls or not scan.calls[-1].native or plain[-1][0] < scan.calls[-1].end:
        return plain
    start, end = plain[-1]
    match = END_OF_TURN.search(scan.text, start, end)
    if match is None or end != len(scan.text):
        return plain
    return plain[:-1] if scan.blank(start, match.start()) else [*plain[:-1], (start, match.start())]


def _repetition(found: Evidence, scan: formats.Scan) -> None:
    if len(scan.calls) >= formats.MOST_CALLS:
        found.note("runaway", -1, f"there are {formats.MOST_CALLS:,} calls or more")
    elif len(scan.calls) >= _EQUAL_CALLS:
        last = scan.calls[-1]
        equal = 0
        for call in reversed(scan.calls):
            if call.name != last.name or call.arguments != last.arguments:
                break
            equal += 1
        if equal >= _EQUAL_CALLS:
            found.note("runaway", -1, f"the answer ends in the same call {equal} times in a row")
    kinds = {defect.kind for defect in found.defects} | {one.kind for call in scan.calls for one in call.defects}
    if "runaway" not in kinds:
        repeated = runaway(scan.text, scan.calls[-1].end if scan.calls else 0)
        if repeated is not None:
            found.defects.append(repeated)


def _leftovers(found: Evidence, scan: formats.Scan, start: int, end: int) -> None:
    """Special tokens and closing tags that are left in plain text."""
    told = 0
    for pattern, kind in ((SPECIAL, "leaked_token"), (_STRAY, "wrapper_mismatch")):
        for match in pattern.finditer(scan.text, start, end):
            at = match.start()
            if (at and scan.text[at - 1] in _QUOTED) or any(left <= at < right for left, right in scan.fences):
                continue
            if _mentioned(scan.text, at, match.end()):
                continue
            if kind == "leaked_token":
                if _STRAY.match(match[0]):
                    continue
                found.note(kind, at, f"the special token {match[0]} is left in the text")
            else:
                found.note(kind, at, f"{match[0]} closes nothing")
            told += 1
            if told >= _TOLD:
                return


def _mentioned(text: str, start: int, end: int) -> bool:
    """Whether a sentence is about a token, or it is a tag of HTML: words of the same line stand on both sides.

    A token that leaked stands where a turn ended: after a full stop, or before a line or a sentence that begins.
    """
    if text[start:end] == "</s>":
        near = max(0, start - _LINE)
        if text.find("<s>", max(near, text.rfind("\n", near, start)), start) >= 0:
            return True
    before = text[max(0, start - 2) : start]
    if len(before) < 2 or before[1] not in " (" or not (before[0].isalnum() or before[0] in ",-"):
        return False
    return _GOES_ON.match(text, end) is not None


def _piece(call: formats.FoundCall, text: str, protocol: str, *, in_message: bool) -> Piece:
    defects = list(call.defects)
    wrapped = _WRAPPED.get(call.form, "a chat template's wrapper")
    if call.name is None and call.arguments is None and call.defects and not call.native:
        pass  # malformed JSON, of which nothing says that it is a call
    elif protocol == "tools" and in_message:
        where = f" in {wrapped}, which the server did not read" if call.native else ""
        defects.append(Defect("call_in_text", call.start, f"the call stands in the text of the answer{where}"))
    elif protocol == "tools" and not call.native and call.form != "arguments":
        detail = "the call stands in the text, without what a chat template has around a call"
        if call.form in _NOTATIONS:
            detail = f"the call stands in the text, in {wrapped}"
        elif call.form == "fenced":
            detail = "the call stands in the text, in a code fence"
        defects.append(Defect("call_in_text", call.start, detail))
    elif protocol != "tools":
        if call.form in _NOTATIONS:
            detail = f"the call is written in {wrapped}, JSON was asked for"
            defects.append(Defect("wrapper_mismatch", call.start, detail))
        elif call.native:
            defects.append(Defect("text_around", call.start, f"the call stands in {wrapped}, JSON alone was asked for"))
        elif call.form == "fenced" and protocol == "json_schema":
            defects.append(Defect("text_around", call.start, "a code fence stands around the JSON"))
        elif call.form == "arguments":
            defects.append(Defect("alias_key", call.start, "the arguments stand alone, without the tool's name"))
    name, leak = _named(call.name)
    defects += leak
    broken = _broken(defects)
    if not broken and not isinstance(call.arguments, Mapping):
        defects.append(_not_an_object(call.arguments))
    shown = text[call.start : min(call.end, call.start + KEPT)]
    return Piece(call.name, name, call.arguments, shown, call.form, call.native, broken, tuple(defects))


def _named(name: str | None) -> tuple[str | None, list[Defect]]:
    """A name without special tokens, and their defect."""
    match = SPECIAL.search(name[:1000]) if name is not None else None
    if name is None or match is None:
        return name, []
    detail = f"the special token {match[0]} is left in the tool's name {printable(name[:80])!r}"
    return name[: match.start()].strip(), [Defect("leaked_token", -1, detail)]


def _not_an_object(value: Any) -> Defect:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return Defect("wrong_type", -1, f"the arguments are {kinds.get(type(value), 'null')}, not an object")


def of_message(message: Mapping[str, Any], tools: Sequence[Tool], protocol: str) -> Evidence:
    """The evidence of an OpenAI assistant message."""
    content = _content(message.get("content"))
    if not content and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    listed = message.get("tool_calls")
    entries = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str | bytes) else []
    if not entries and isinstance(message.get("function_call"), Mapping):
        entries = [{"function": message["function_call"]}]
    reasoning = next(
        (one for key in ("reasoning_content", "reasoning") if isinstance(one := message.get(key), str)), ""
    )
    if not entries:
        found = of_text(content, tools, protocol, in_message=True)
        found.thinking = (found.thinking or reasoning)[:_LONGEST_THINKING]
        if found.empty and reasoning.strip():
            found.defects = [
                one._replace(detail=_only_thinking(found.thinking, tools)) if one.kind == "empty" else one
                for one in found.defects
            ]
        return found
    found = of_text(content, tools, "tools", in_message=True) if content.strip() else Evidence()
    beside = found.pieces
    found.empty, found.text, found.thinking = False, "", reasoning[:_LONGEST_THINKING]
    # Text beside calls is as it should be; so is text that says the same call once more.
    kept = ("leaked_token", "runaway", "wrapper_mismatch")
    found.defects = [defect for defect in found.defects if defect.kind in kept]
    found.pieces = [_openai(entry, protocol) for entry in entries[: formats.MOST_CALLS]]
    if len(entries) >= formats.MOST_CALLS:
        found.note("runaway", -1, f"there are {len(entries):,} calls")
    executed = [(piece.plain_name, piece.arguments) for piece in found.pieces]
    for piece in beside:
        if piece.form != "arguments" and (piece.plain_name, piece.arguments) not in executed:
            found.note("call_in_text", -1, f"one more call stands in the text: {printable(piece.text[:80])!r}")
            break
    return found


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))


def _openai(entry: Any, protocol: str) -> Piece:
    """One of a message's ``tool_calls``."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping):
        defect = Defect("wrapper_mismatch", -1, "an entry of 'tool_calls' has no 'function'")
        return Piece(None, None, None, printable(repr(entry)[:200]), "openai", True, True, (defect,))
    written = function.get("name")
    name, defects = _named(written if isinstance(written, str) else None)
    if not name:
        name = None
    given = function.get("arguments")
    text = given if isinstance(given, str) else ""
    value: Any = {}
    broken = bool(defects)
    if isinstance(given, str):
        value, own, unreadable = read_arguments(given)
        defects += own
        broken = broken or unreadable
    elif given is not None:
        value = given
        defects.append(Defect("arguments_as_object", -1, "'arguments' is an object, where a string of JSON belongs"))
        if not isinstance(given, Mapping):
            defects = [*defects[:-1], _not_an_object(given)]
    identity = entry.get("id")
    return Piece(
        written if isinstance(written, str) else None, name, value, text[:KEPT], "openai", True, broken,
        tuple(defects), identity if isinstance(identity, str) else None,
    )  # fmt: skip


def read_arguments(text: str) -> tuple[Any, list[Defect], bool]:
    """Arguments of an OpenAI call: value, defects, and whether reading them took repair.

    An empty text is ``{}``: servers write it for a tool without parameters, and clients take it.
    """
    if len(text) > LONGEST:
        detail = f"the arguments are {len(text):,} characters long, no call needs more than {LONGEST:,}"
        return None, [Defect("runaway", -1, detail)], True
    if not text.strip():
        repeated = runaway(text)
        return {}, [repeated] if repeated is not None else [], repeated is not None
    parsed = parse(text)
    if parsed is None:
        at = text.find("{")
        parsed = parse(text, at) if at >= 0 else None
        if parsed is None or not isinstance(parsed.value, dict):
            repeated = runaway(text)
            detail = f"the arguments are not JSON: {printable(text.strip()[:60])!r}"
            kept = [repeated] if repeated is not None else []
            return None, [*kept, Defect("wrapper_mismatch", 0, detail)], True
        defects = [*parsed.defects]
        defects.append(Defect("text_around", 0, f"text stands before the arguments: {printable(text[:at][:60])!r}"))
    elif isinstance(parsed.value, str) and _COLON.match(text, parsed.end) and (opened := parse("{" + text)) is not None:
        moved = [one._replace(at=max(0, one.at - 1)) if one.at >= 0 else one for one in opened.defects]
        missing = Defect("missing_bracket", 0, "the opening bracket of the arguments is missing")
        parsed = opened._replace(end=max(0, opened.end - 1))
        defects = [missing, *moved]
    else:
        defects = list(parsed.defects)
    value = parsed.value
    rest = text[parsed.end :].strip()
    if rest and (space := AT_END.fullmatch(rest)):
        defects.append(Defect("leaked_token", parsed.end, f"the special token {space[0]} follows the arguments"))
    elif rest or len(text) - parsed.end > 64:
        repeated = runaway(text, parsed.end)
        if repeated is not None:
            defects.append(repeated)
        else:
            defects.append(Defect("text_around", parsed.end, f"text follows the arguments: {printable(rest[:60])!r}"))
    broken = bool(defects)
    if isinstance(value, str):
        inner = double_encoded(value)
        if inner is MISSING:
            defects.append(_not_an_object(value))
        else:
            value, broken = inner, True
            defects.append(Defect("double_encoded", 0, "the arguments are a string of JSON inside of a string"))
    if not isinstance(value, str | Mapping):
        defects.append(_not_an_object(value))
    return value, defects, broken

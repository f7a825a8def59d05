"""JSON and Python in texts for people: code fences of Markdown, bare JSON, calls written as Python."""

from __future__ import annotations

import re
from typing import Any

from pytest_vram.text import behind, printable
from pytest_vram.toolcalls.formats import pythonic
from pytest_vram.toolcalls.formats.envelope import looks_like_arguments, shapes
from pytest_vram.toolcalls.formats.scan import Scan, Step, after
from pytest_vram.toolcalls.tolerant import Defect, Parsed, double_encoded

_OPENER = re.compile(r"(```+|~~~+)[ \t]*([\w+-]{0,30})[ \t]*\n?")
_CLOSERS = {"`": re.compile(r"```+"), "~": re.compile(r"~~~+")}
#: What may begin a call in JSON: an object with a key, or a list of objects.
JSON_OPENER = re.compile(r"\{\s*(?:[\"'“”‘’„\\}{,<]|//|/\*|#|[A-Za-z_]\w*\s*[:=])|\{\s*$|\[\s*\{")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[\s;,]*")
#: What may stand around a value that is the whole answer.
_AROUND = re.compile(r"[\s\])}`~]*(?:(?:<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</s>|<eos>|<end_of_turn>)\s*)*$")
#: Kinds that show that a value was cut, so that its beginning is all that can be recognised.
_CUT = frozenset({"missing_bracket", "unterminated_string", "runaway"})


def fence(scan: Scan, match: re.Match[str]) -> Step:
    """Read a code fence: calls in it, or code."""
    opened = _OPENER.match(scan.text, match.start())
    assert opened is not None
    body = behind(_SPACE, scan.text, opened.end())
    closer = _CLOSERS[opened[1][0]]
    text = scan.text
    if text.startswith("<", body):
        # Tags inside of a fence are read as if it were not there.
        return Step(opened.end(), plain=True)
    if text[body : body + 1] in ("{", "[") and not pythonic.CALL.match(text, body) and scan.may_try():
        step = _json_in_fence(scan, opened.start(), body, closer)
        if step is not None:
            return step
    elif opened[2].lower() in ("tool_code", "python", "py", "tool_call", ""):
        end = _calls_of_code(scan, opened, body, closer)
        if end is not None:
            return Step(end)
    ended = closer.search(text, opened.end())
    if ended is None:
        return Step(opened.end(), plain=True)
    scan.fences.append((opened.start(), ended.end()))
    return Step(ended.end(), plain=True)


def _json_in_fence(scan: Scan, start: int, body: int, closer: re.Pattern[str]) -> Step | None:
    """Calls in a fence, one or several; ``None``: they are none."""
    at = body
    before = len(scan.calls)
    while scan.text[at : at + 1] in ("{", "["):
        parsed = scan.parse(at, closer)
        if parsed is None or not _note(scan, parsed, start, at, "fenced"):
            break
        at = behind(_SEPARATOR, scan.text, after(scan.text, parsed)[0])
    if at == body:
        return None
    ended = closer.match(scan.text, at)
    if ended is not None:
        return Step(ended.end())
    late = closer.search(scan.text, at, at + 2000)
    if late is not None:
        scan.loose("text_around", at, "text stands between the JSON and the end of its code fence")
        return Step(late.end())
    if len(scan.calls) > before:
        _blame(scan, at, "the code fence is never closed")
    return Step(at)


def _blame(scan: Scan, at: int, detail: str) -> None:
    last = scan.calls[-1]
    scan.calls[-1] = last._replace(defects=(*last.defects, Defect("wrapper_mismatch", at, detail)))


def _calls_of_code(scan: Scan, opened: re.Match[str], body: int, closer: re.Pattern[str]) -> int | None:
    """Where a fence ends that has calls of offered tools, and nothing else; Gemma 3's ``tool_code`` has any calls."""
    at = body
    native = opened[2].lower() == "tool_code"
    found: list[tuple[str, Any, int, list[Defect]]] = []
    while pythonic.CALL.match(scan.text, at) and scan.may_try():
        written = pythonic.read(scan.text, at, scan.tools)
        if written is not None and any(defects for _, _, defects in written.calls):
            # A closer inside of a string is a part of it, where the strings can be told.
            ended = closer.search(scan.text, at)
            if ended is not None:
                written = pythonic.read(scan.text[: ended.start()], at, scan.tools)
        if written is None or not (native or all(name in scan.tools for name, _, _ in written.calls)):
            return None
        found += [(name, value, written.end, defects) for name, value, defects in written.calls]
        at = behind(_SEPARATOR, scan.text, written.end)
    ended = closer.match(scan.text, at)
    if not found or (ended is None and at < scan.last):
        return None
    for name, value, end, defects in found:
        form = "gemma3" if native else "pythonic"
        scan.call(name, value, (opened.start(), end), form, native=native, defects=defects)
    if ended is None:
        _blame(scan, at, "the code fence is never closed")
    return ended.end() if ended is not None else at


def bare(scan: Scan, match: re.Match[str]) -> Step:
    """Read JSON, or a list of calls as Python, that begins with a bracket in the middle of text."""
    start = match.start()
    if scan.text[start] == "[" and pythonic.CALL.match(scan.text, start):
        return python(scan, match)
    if not scan.may_try():
        return Step(start + 1, plain=True)
    parsed = scan.parse(start)
    if parsed is None:
        return Step(start + 1, plain=True)
    end, _ = after(scan.text, parsed)
    if _note(scan, parsed, start, start, "bare"):
        return Step(end)
    if parsed.defects:
        # A bracket in prose may have taken a call along.
        return Step(start + 1, plain=True)
    return Step(end, plain=True)


def python(scan: Scan, match: re.Match[str]) -> Step:
    """Read calls written as Python: a list of them, or one of a tool that is offered and that is all the answer."""
    start = match.start()
    listed = scan.text[start] == "["
    if not scan.may_try() or scan.quoted(start):
        return Step(match.end(), plain=True)
    written = pythonic.read(scan.text, start, scan.tools)
    if written is None:
        scan.spend(min(pythonic.LONGEST, len(scan.text) - start))
        return Step(match.end(), plain=True)
    known = any(name in scan.tools for name, _, _ in written.calls)
    malformed = any(defects for _, _, defects in written.calls)
    alone = scan.before_is_blank and _AROUND.match(scan.text, written.end) is not None
    if not (known and (listed or alone)) and not (listed and alone and not malformed):
        scan.spend(min(pythonic.LONGEST, written.end - start))
        return Step(match.end(), plain=True)
    for name, value, defects in written.calls:
        scan.call(name, value, (start, written.end), "pythonic", native=False, defects=defects)
    return Step(written.end)


def encoded(scan: Scan, match: re.Match[str]) -> Step:
    """Read an answer that is a JSON string holding the call."""
    parsed = scan.parse(match.start()) if scan.before_is_blank else None
    inner = double_encoded(parsed.value) if parsed is not None else None
    found = shapes(inner, scan.tools, asked=bool(scan.asked)) if isinstance(inner, dict | list) else None
    if parsed is None or not found or not _AROUND.match(scan.text, parsed.end):
        return Step(match.end(), plain=True)
    defect = Defect(
        "double_encoded", match.start(), "the call is a string that holds JSON, where the JSON itself belongs"
    )
    for shape in found:
        defects = (*parsed.defects, defect, *shape.defects)
        scan.call(shape.name, shape.arguments, (match.start(), parsed.end), "bare", native=False, defects=defects)
    return Step(parsed.end)


def _note(scan: Scan, parsed: Parsed, start: int, at: int, form: str) -> bool:
    """Note the calls that a value is; whether it is any, or malformed and all of the answer."""
    end, defects = after(scan.text, parsed)
    alone = scan.before_is_blank and _AROUND.match(scan.text, end) is not None
    only = next(iter(scan.tools.values())) if len(scan.tools) == 1 else None
    value = parsed.value
    if alone and only is not None and _all_arguments(value, only):
        scan.call(only.name, value, (start, end), "arguments", native=False, defects=defects)
        return True
    found = shapes(value, scan.tools, asked=bool(scan.asked))
    if found is not None and (found or alone or scan.asked):
        defects = [*defects, *_beside(scan, value)]
        for index, shape in enumerate(found):
            mine = [*(defects if index == 0 else ()), *shape.defects]
            scan.call(shape.name, shape.arguments, (start, end), form, native=False, defects=mine)
        if not found:
            scan.defects += defects
            scan.plain.append((start, start))
            scan.answered += 1
            if form == "fenced" and scan.asked == "json_schema":
                scan.loose("text_around", start, "a code fence stands around the JSON")
        return True
    if not alone or not isinstance(value, dict):
        return _malformed_list(scan, value, defects, start, end, alone=alone)
    if only is not None and looks_like_arguments(value, only):
        scan.call(only.name, value, (start, end), "arguments", native=False, defects=defects)
        return True
    if not scan.tools:
        scan.call(None, value, (start, end), "arguments", native=False, defects=defects)
        return True
    if defects:
        name = value.get("name")
        meant = name if isinstance(name, str) and (name in scan.tools or _was_cut(defects)) else None
        scan.call(meant, None, (start, end), form, native=False, defects=defects)
        return True
    return False


def _beside(scan: Scan, value: Any) -> list[Defect]:
    """Keys that the JSON Schema of an answer forbids."""
    if scan.asked != "json_schema" or not isinstance(value, dict) or "calls" not in value:
        return []
    extra = [key for key in value if key not in ("calls", "answer")]
    if not extra:
        return []
    detail = f"the answer has a key {printable(extra[0][:60])!r}, which the schema of answers does not have"
    return [Defect("extra_field", -1, detail)]


def _malformed_list(scan: Scan, value: Any, defects: list[Defect], start: int, end: int, *, alone: bool) -> bool:
    """Note a list that is all of the answer, and malformed."""
    if not alone or not defects or not isinstance(value, list):
        return False
    scan.call(None, None, (start, end), "bare", native=False, defects=defects)
    return True


def _was_cut(defects: list[Defect]) -> bool:
    return any(defect.kind in _CUT for defect in defects)


def _all_arguments(value: Any, tool: Any) -> bool:
    """Whether every key is a parameter of the only tool, also where one of them is ``name``."""
    properties = tool.parameters.get("properties")
    if not isinstance(value, dict) or not value or not isinstance(properties, dict):
        return False
    return set(value) <= set(properties) and value.get("name") != tool.name

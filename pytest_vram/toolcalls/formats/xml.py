"""Arguments as tags: Qwen3-Coder's ``<function=…><parameter=…>``, GLM's ``<arg_key>``, others' ``<invoke>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_vram.text import behind, printable
from pytest_vram.toolcalls.formats.scan import Scan, Step, after
from pytest_vram.toolcalls.schemas import TYPES
from pytest_vram.toolcalls.tolerant import Defect, strict

FUNCTION = re.compile(r"<function=\s{0,5}([^<>{}\s]{1,150}?)\s{0,5}(>|(?=\{))")
INVOKE = re.compile(r"<(?:｜DSML｜)?invoke\s{1,5}name=\"([^\"<>]{1,150})\"\s{0,5}>")
_FUNCTION_PARAMETER = re.compile(r"\s*<parameter=\s{0,5}([^<>]{1,150}?)\s{0,5}>\n?")
_INVOKE_PARAMETER = re.compile(
    r"\s*<(?:｜DSML｜)?parameter\s{1,5}name=\"([^\"<>]{1,150})\"(?:\s{1,5}string=\"(true|false)\")?\s{0,5}>"
)
# A value may hold the closing tag: only one that something of the format follows ends it.
_FUNCTION_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))")
_INVOKE_VALUE_END = re.compile(
    r"</(?:｜DSML｜)?parameter>(?=\s*(?:<(?:｜DSML｜)?parameter\s|</(?:｜DSML｜)?invoke>|$))"
)
_LINE_OPENS = re.compile(r"\n<parameter=\s{0,5}([^<>\n]{1,150}?)\s{0,5}>\n")
_FUNCTION_END = re.compile(r"\s*</function>")
_INVOKE_END = re.compile(r"\s*</(?:｜DSML｜)?invoke>")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]{1,200})</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|$))")
_SPACE = re.compile(r"\s*")
_LONGEST_VALUE = 1_000_000


def read_function(scan: Scan, start: int, at: int, wrapper: str = "") -> Step:
    """Read ``<function=NAME>…</function>`` at ``at``. :param wrapper: the closer that must follow, if any."""
    match = FUNCTION.match(scan.text, at)
    assert match is not None
    return _function(scan, start, match, wrapper)


def function(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``<function=NAME>…`` that stands by itself."""
    if scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    opened = FUNCTION.match(scan.text, match.start())
    if opened is None:
        return Step(match.end(), plain=True)
    return _function(scan, match.start(), opened, "")


def _function(scan: Scan, start: int, match: re.Match[str], wrapper: str) -> Step:
    text, name = scan.text, match[1]
    body = behind(_SPACE, text, match.end())
    form = "qwen3-coder" if wrapper else "llama"
    if text[body : body + 1] == "{":
        parsed = scan.parse(body, _FUNCTION_END)
        if parsed is not None:
            at, defects = after(text, parsed)
            value = parsed.value
            if not match[2]:
                defects.append(Defect("wrapper_mismatch", match.start(), "the tag <function= is not closed by '>'"))
            end = _ends(text, at, _FUNCTION_END, "</function>", wrapper, defects)
            scan.call(name, value, (start, end), "llama", defects=defects)
            return Step(end)
    arguments, at, defects = _parameters(scan, name, body, _FUNCTION_PARAMETER, _FUNCTION_VALUE_END)
    end = _ends(text, at, _FUNCTION_END, "</function>", wrapper, defects)
    scan.call(name, arguments, (start, end), "qwen3-coder" if arguments else form, defects=defects)
    return Step(end)


def invoke(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``."""
    opened = INVOKE.match(scan.text, match.start())
    if opened is None or scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    name = opened[1]
    arguments, at, defects = _parameters(scan, name, opened.end(), _INVOKE_PARAMETER, _INVOKE_VALUE_END)
    end = _ends(scan.text, at, _INVOKE_END, "</invoke>", "", defects)
    scan.call(name, arguments, (match.start(), end), "invoke", defects=defects)
    return Step(end)


def read_glm(scan: Scan, start: int, named: re.Match[str]) -> Step:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``, its name already matched."""
    arguments, at, defects = _parameters(scan, named[1], named.end(), _GLM_KEY, _GLM_VALUE_END)
    end = _ends(scan.text, at, _GLM_END, "</tool_call>", "", defects)
    scan.call(named[1], arguments, (start, end), "glm", defects=defects)
    return Step(end)


_GLM_END = re.compile(r"\s*</tool_call>")


def _parameters(
    scan: Scan, name: str, at: int, opener: re.Pattern[str], closer: re.Pattern[str]
) -> tuple[dict[str, Any], int, list[Defect]]:
    found: dict[str, Any] = {}
    defects: list[Defect] = []
    tool = scan.tools.get(name)
    properties = tool.parameters.get("properties") if tool is not None else None
    schemas = properties if isinstance(properties, Mapping) else {}
    ended: re.Match[str] | None = None
    while True:
        match = opener.match(scan.text, at)
        if match is None:
            return found, at, defects
        key = match[1].strip()
        if ended is None or ended.start() < match.end():
            ended = closer.search(scan.text, match.end())
        if ended is None:
            detail = f"the value of {printable(key)!r} is never closed"
            defects.append(Defect("unterminated_string", match.end(), detail))
            found[key] = scan.text[match.end() : match.end() + _LONGEST_VALUE]
            return found, len(scan.text), defects
        inside = _LINE_OPENS.finditer(scan.text, match.end(), ended.start()) if opener is _FUNCTION_PARAMETER else ()
        following = next((one for one in inside if one[1].strip() in schemas), None)
        if following is not None:
            # The value goes on with a parameter of the tool: its own closer is missing.
            if len(defects) < 100:
                detail = f"the value of {printable(key)!r} is not closed by </parameter> before the next parameter"
                defects.append(Defect("wrapper_mismatch", following.start(), detail))
            found[key] = typed(scan.text[match.end() : following.start()], schemas.get(key))
            at = following.start()
            continue
        if key in found and len(defects) < 100:
            defects.append(Defect("duplicate_key", match.start(), f"the key {printable(key)!r} stands twice"))
        value = scan.text[match.end() : ended.start()]
        is_text = match[2] == "true" if match.re is _INVOKE_PARAMETER and match[2] else None
        found[key] = typed(value, schemas.get(key), is_text=is_text)
        at = ended.end()


def typed(value: str, schema: Any, *, is_text: bool | None = None) -> Any:
    """The value that a tag's text is by its schema: text where text is wanted, else JSON where it is that."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    named = {TYPES.get(kind.lower(), "") for kind in ([kinds] if isinstance(kinds, str) else kinds or [])
             if isinstance(kind, str)}  # fmt: skip
    if is_text or (is_text is None and (not named or "" in named or named == {"string"})):
        return value
    bare = value.strip()
    if bare in ("True", "False", "None"):
        # Templates print Python's words here, and so do the models that were trained with them.
        bare = {"True": "true", "False": "false", "None": "null"}[bare]
    try:
        read = strict(bare)
    except ValueError:
        return value
    return value if isinstance(read, str) and "string" in named else read


def _ends(text: str, at: int, closer: re.Pattern[str], shown: str, wrapper: str, defects: list[Defect]) -> int:
    """Where a call ends: behind its closer and behind the closer of its wrapper."""
    match = closer.match(text, at)
    if match is None:
        stray = text[at : at + 40].strip()
        if stray and (late := closer.search(text, at, at + 4000)) is not None:
            defects.append(Defect("wrapper_mismatch", at, f"{stray!r} stands where {shown} or a parameter belongs"))
            at = late.end()
        else:
            defects.append(Defect("wrapper_mismatch", at, f"{shown} is missing"))
    else:
        at = match.end()
    if not wrapper:
        return at
    space = behind(_SPACE, text, at)
    if text.startswith(wrapper, space):
        return space + len(wrapper)
    if not any(defect.kind == "wrapper_mismatch" for defect in defects):
        defects.append(Defect("wrapper_mismatch", at, f"{wrapper} is missing"))
    return at

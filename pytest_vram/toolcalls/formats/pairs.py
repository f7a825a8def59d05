"""Wrappers with an opener, a body of JSON or Python, and a closer: Hermes and Qwen, Granite, Mistral, Llama …"""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.text import behind
from pytest_vram.toolcalls.formats import pythonic, xml
from pytest_vram.toolcalls.formats.envelope import TEMPLATES, shapes
from pytest_vram.toolcalls.formats.scan import Scan, Step, after
from pytest_vram.toolcalls.formats.tokens import AT_END
from pytest_vram.toolcalls.tolerant import Defect, double_encoded


class Pair(NamedTuple):
    """A wrapper.

    :ivar closers: tokens that end it. :ivar needed: whether a closer belongs there; where not, the end of the turn
        closes it. :ivar many: whether several values may follow one another inside.
    """

    form: str
    closers: tuple[str, ...]
    needed: bool = True
    many: bool = False


PAIRS = {
    "<tool_call>": Pair("hermes", ("</tool_call>",)),
    "<tool_calls>": Pair("tags", ("</tool_calls>",), many=True),
    "<TOOLCALL>": Pair("nemotron", ("</TOOLCALL>",)),
    "<functioncall>": Pair("tags", ("</functioncall>",), needed=False),
    "<function_call>": Pair("tags", ("</function_call>",), needed=False),
    "<|tool_call|>": Pair("granite", ("<|/tool_call|>", "</|tool_call|>"), needed=False),
    "<|tool_call_start|>": Pair("lfm2", ("<|tool_call_end|>",)),
    "<|START_ACTION|>": Pair("command", ("<|END_ACTION|>",)),
    "<|python_tag|>": Pair("llama", ("<|eom_id|>", "<|eot_id|>"), needed=False, many=True),
    "<|python_start|>": Pair("llama", ("<|python_end|>",), needed=False),
    "[TOOL_CALLS]": Pair("mistral", ("</s>",), needed=False),
    " functools": Pair("functools", (), needed=False),
}
#: What models write in place of ``<tool_call>``.
MISTAKEN = {"<tools>": "</tools>", "<tool>": "</tool>", "<|tool_call>": "<tool_call|>"}
#: Every closer, the longer first.
CLOSERS = sorted(
    {closer for pair in PAIRS.values() for closer in pair.closers if closer[:2] != "<|" or "tool" in closer} - {"</s>"}
    | {"</tools>", "<tool_call|>", "</function>", "<|python_end|>", "<|END_ACTION|>"},
    key=len,
    reverse=True,
)
_ANY_CLOSER = re.compile("|".join(map(re.escape, CLOSERS)))
_PATTERNS = {
    opener: re.compile("|".join(map(re.escape, pair.closers))) for opener, pair in PAIRS.items() if pair.closers
} | {opener: re.compile(re.escape(closer)) for opener, closer in MISTAKEN.items()}
_LONGEST_UNREADABLE = 100_000
_SEPARATOR = re.compile(r"[\s;,]*")
_SPACE = re.compile(r"\s*")
_NAMED = re.compile(r"\s*([\w.-]{1,150})\s*(?:\[CALL_ID\][^\[\s]{0,80})?\s*(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_ARGS = re.compile(r"\s*([\w.-]{1,150})\s*(?:\[CALL_ID\][^\[\s]{0,80})?\s*\[ARGS\]\s*", re.ASCII)
_GLM_NAME = re.compile(r"\s*([\w.-]{1,150})\s*(?=<arg_key>|</tool_call>)", re.ASCII)
_WORD = re.compile(r"[\w.-]{1,150}", re.ASCII)


def read(scan: Scan, match: re.Match[str]) -> Step:
    """Read what follows an opener of :data:`PAIRS`."""
    opener = match[0]
    if scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    if opener in MISTAKEN:
        return _mistaken(scan, match)
    pair = PAIRS[opener]
    body = behind(_SPACE, scan.text, match.end())
    if pair.form == "mistral" and (named := _NAMED.match(scan.text, body) or _ARGS.match(scan.text, body)):
        return _mistral(scan, match, named)
    if opener == "<tool_call>":
        if xml.FUNCTION.match(scan.text, body):
            return xml.read_function(scan, match.start(), body, "</tool_call>")
        glm = _GLM_NAME.match(scan.text, body)
        if glm is not None:
            return xml.read_glm(scan, match.start(), glm)
    return _body(scan, match.start(), body, opener, pair)


def _body(scan: Scan, start: int, body: int, opener: str, pair: Pair) -> Step:
    """JSON, or Python where it is that, up to the closer."""
    closer = _PATTERNS.get(opener)
    at = body
    read_any = False
    while True:
        character = scan.text[at : at + 1]
        if pythonic.CALL.match(scan.text, at):
            written = pythonic.read(scan.text, at, scan.tools)
            if written is None:
                break
            for name, arguments, defects in written.calls:
                scan.call(name, arguments, (start, written.end), "pythonic" if pair.form != "lfm2" else "lfm2",
                          defects=defects)  # fmt: skip
            at = written.end
        elif character in ("{", "[", '"'):
            parsed = scan.parse(at, closer)
            if parsed is None:
                break
            at, defects = after(scan.text, parsed)
            value = parsed.value
            if isinstance(value, str):
                value = double_encoded(value)
                if not isinstance(value, dict | list):
                    at = body
                    break
                defects.append(
                    Defect("double_encoded", body, "the call is a string that holds JSON, not the JSON itself")
                )
            found = shapes(value, scan.tools, template=TEMPLATES.get(pair.form, frozenset()))
            if not found:
                defects.insert(0, Defect("wrapper_mismatch", body, f"what stands after {opener.strip()} is no call"))
                scan.call(_meant(scan, body, at), None, (start, at), pair.form, defects=defects)
            else:
                for index, shape in enumerate(found):
                    mine = [*(defects if index == 0 else ()), *shape.defects]
                    scan.call(shape.name, shape.arguments, (start, at), pair.form, defects=mine)
        else:
            break
        read_any = True
        following = behind(_SEPARATOR, scan.text, at)
        if scan.text[following : following + 1] not in ("{", "["):
            break
        if not pair.many:
            _blame(scan, following, f"a second value follows inside of one {opener.strip()}")
        at = following
    if not read_any:
        return _unreadable(scan, start, body, opener, pair)
    return Step(_close(scan, at, opener, pair, closer))


def _close(scan: Scan, at: int, opener: str, pair: Pair, closer: re.Pattern[str] | None) -> int:
    """Where the wrapper ends; notes a closer that is missing, wrong or late."""
    space = behind(_SPACE, scan.text, at)
    if closer is None:
        return at
    ended = closer.match(scan.text, space)
    if ended is not None:
        return ended.end()
    if not pair.needed:
        return at
    wanted = pair.closers[0]
    other = _ANY_CLOSER.match(scan.text, space)
    if other is not None:
        _blame(scan, space, f"{opener} is closed by {other[0]}, not by {wanted}")
        return other.end()
    late = _late(scan, space, closer)
    if late is not None:
        between = scan.text[space : late.start()].strip()
        if AT_END.fullmatch(between):
            shown = f"the special token {between[:40]} stands between the call and its {wanted}"
            _blame(scan, space, shown, "leaked_token")
        else:
            _blame(scan, space, f"text stands between the call and its {wanted}")
        return late.end()
    _blame(scan, space, f"{opener} is never closed by {wanted}")
    return at


def _late(scan: Scan, at: int, closer: re.Pattern[str]) -> re.Match[str] | None:
    """A closer that comes before anything else opens, and soon."""
    ended = closer.search(scan.text, at, at + 2000)
    if ended is None or any(scan.text.find(opener, at, ended.start()) >= 0 for opener in PAIRS):
        return None
    return ended


def _blame(scan: Scan, at: int, detail: str, kind: str = "wrapper_mismatch") -> None:
    """Add what is wrong with its wrapper to the call that was read last."""
    defect = Defect(kind, at, detail)
    if scan.calls:
        scan.calls[-1] = scan.calls[-1]._replace(defects=(*scan.calls[-1].defects, defect))
    else:
        scan.loose(*defect)


def _unreadable(scan: Scan, start: int, body: int, opener: str, pair: Pair) -> Step:
    """A wrapper with something else inside: the tool that was meant may be told, its arguments may not."""
    closer = _PATTERNS.get(opener)
    ended = closer.search(scan.text, body, body + _LONGEST_UNREADABLE) if closer is not None else None
    end = ended.end() if ended is not None else min(len(scan.text), body + 4000)
    inside = scan.text[body : ended.start() if ended is not None else end]
    if not inside.strip() and ended is None and body >= len(scan.text):
        detail = f"nothing follows {opener.strip()}"
    elif not inside.strip():
        detail = f"nothing stands between {opener.strip()} and its closer"
    else:
        detail = f"{inside.strip()[:40]!r} after {opener.strip()} is not the format that belongs there"
    scan.call(_meant(scan, body, end), None, (start, end), pair.form,
              defects=[Defect("wrapper_mismatch", body, detail)])  # fmt: skip
    return Step(end)


def _meant(scan: Scan, start: int, end: int) -> str | None:
    """The first word that is a tool's name."""
    words = (match[0] for match in _WORD.finditer(scan.text, start, min(end, start + 2000)))
    return next((word for word in words if word in scan.tools), None)


def _mistral(scan: Scan, match: re.Match[str], named: re.Match[str]) -> Step:
    """``[TOOL_CALLS]name[ARGS]{…}``, each call with an opener of its own or not."""
    parsed = scan.parse(named.end(), _MISTRAL_NEXT)
    if parsed is None:
        defect = Defect("wrapper_mismatch", named.end(), "no arguments follow the name")
        scan.call(named[1], None, (match.start(), named.end()), "mistral", defects=[defect])
        return Step(named.end())
    at, defects = after(scan.text, parsed)
    if "[ARGS]" not in named[0]:
        defects.append(Defect("wrapper_mismatch", named.end(), "[ARGS] is missing between name and arguments"))
    scan.call(named[1], parsed.value, (match.start(), at), "mistral", defects=defects)
    ended = re.compile(r"\s*</s>").match(scan.text, at)
    return Step(ended.end() if ended is not None else at)


_MISTRAL_NEXT = re.compile(r"\[TOOL_CALLS\]|</s>")


def _mistaken(scan: Scan, match: re.Match[str]) -> Step:
    """A call in a wrapper that is not the one for calls."""
    body = behind(_SPACE, scan.text, match.end())
    if scan.text[body : body + 1] not in ("{", "["):
        return Step(match.end(), plain=True)
    parsed = scan.parse(body, _PATTERNS[match[0]])
    found = shapes(parsed.value, scan.tools) if parsed is not None else None
    if parsed is None or not found:
        return Step(match.end(), plain=True)
    at, defects = after(scan.text, parsed)
    defects.append(Defect("wrapper_mismatch", match.start(), f"{match[0]} is not what opens a call"))
    for index, shape in enumerate(found):
        mine = [*(defects if index == 0 else defects[-1:]), *shape.defects]
        scan.call(shape.name, shape.arguments, (match.start(), at), "tags", defects=mine)
    ended = _ANY_CLOSER.match(scan.text, behind(_SPACE, scan.text, at))
    return Step(ended.end() if ended is not None else at)

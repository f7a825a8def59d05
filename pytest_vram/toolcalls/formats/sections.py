"""Calls between tokens, the tool named apart from its arguments: DeepSeek, Kimi K2, gpt-oss, Functionary, Gemma 4."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.text import behind
from pytest_vram.toolcalls.formats import gemma
from pytest_vram.toolcalls.formats.scan import SPACE, Scan, Step, after
from pytest_vram.toolcalls.tolerant import Defect


class Tokens(NamedTuple):
    """The tokens of a section of calls. :ivar call: opener, name and what stands before the arguments."""

    form: str
    call: re.Pattern[str]
    call_end: re.Pattern[str]
    section_end: re.Pattern[str]
    shown: tuple[str, str]


_BAR, _BLANK = r"[｜|]", r"[▁_ ]"
DEEPSEEK_OPENER = re.compile(rf"<{_BAR}tool{_BLANK}calls{_BLANK}begin{_BAR}>")
_DEEPSEEK = Tokens(
    "deepseek",
    re.compile(
        rf"\s*<{_BAR}tool{_BLANK}call{_BLANK}begin{_BAR}>\s*"
        rf"(?:function\s{{0,5}}<{_BAR}tool{_BLANK}sep{_BAR}>\s{{0,5}}([\w.-]{{1,150}})\s{{0,20}}```(?:json)?\s*"
        rf"|([\w.-]{{1,150}})\s{{0,5}}<{_BAR}tool{_BLANK}sep{_BAR}>\s*)"
    ),
    re.compile(rf"\s*(?:```)?\s*<{_BAR}tool{_BLANK}call{_BLANK}end{_BAR}>"),
    re.compile(rf"\s*<{_BAR}tool{_BLANK}calls{_BLANK}end{_BAR}>"),
    ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI_OPENER = re.compile(r"<\|tool_calls_section_begin\|>")
_KIMI = Tokens(
    "kimi",
    re.compile(
        r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]{1,150})(?::\d{1,9})?\s*<\|tool_call_argument_begin\|>\s*"
    ),
    re.compile(r"\s*<\|tool_call_end\|>"),
    re.compile(r"\s*<\|tool_calls_section_end\|>"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
HARMONY_OPENER = re.compile(
    r"(?:<\|start\|>\s{0,5}assistant\s{0,5}(?:to=([\w.-]{1,150})\s{0,5})?)?<\|channel\|>\s{0,5}"
    r"(commentary|analysis|final)?([^<]{0,200})(?:<\|constrain\|>\s{0,5}\w{0,20}\s{0,5})?<\|message\|>"
)
_RECIPIENT = re.compile(r"to=([\w.-]{1,150})")
# The prompt ends in <|start|>assistant, so that a text may begin with the recipient.
_RECIPIENT_BEFORE = re.compile(r"to=([\w.-]{1,150})\s*\Z")
_HARMONY_END = re.compile(r"<\|(?:call|end|return)\|>|(?=<\|start\|>)|(?=<\|channel\|>)")
_HARMONY_CLOSER = re.compile(r"\s*(?:<\|(?:call|end|return)\|>|(?=<\|start\|>)|(?=<\|channel\|>)|$)")
FUNCTIONARY_OPENER = re.compile(r">>>([\w.-]{1,150})\n", re.ASCII)
_FUNCTIONARY_NEXT = re.compile(r">>>|<\|eot_id\|>")
_END_OF_TURN = re.compile(r"\s*(?:<\|eot_id\|>|<\|eom_id\|>)")


def deepseek(scan: Scan, match: re.Match[str]) -> Step:
    """Read a section of DeepSeek V3, V3.1 or R1."""
    return _section(scan, match, _DEEPSEEK)


def kimi(scan: Scan, match: re.Match[str]) -> Step:
    """Read a section of Kimi K2."""
    return _section(scan, match, _KIMI)


def _section(scan: Scan, match: re.Match[str], tokens: Tokens) -> Step:
    if scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    at = match.end()
    count = len(scan.calls)
    while (opened := tokens.call.match(scan.text, at)) is not None:
        name = next(group for group in opened.groups() if group is not None)
        parsed = scan.parse(opened.end(), tokens.call_end)
        if parsed is None:
            defect = Defect("wrapper_mismatch", opened.end(), "no arguments follow the name")
            scan.call(name, None, (opened.start(), opened.end()), tokens.form, defects=[defect])
            at = opened.end()
            continue
        at, defects = after(scan.text, parsed)
        ended = tokens.call_end.match(scan.text, at)
        if ended is None:
            defects.append(Defect("wrapper_mismatch", at, f"{tokens.shown[0]} is missing"))
        scan.call(name, parsed.value, (opened.start(), at), tokens.form, defects=defects)
        at = ended.end() if ended is not None else at
    ended = tokens.section_end.match(scan.text, at)
    if ended is None or len(scan.calls) == count:
        scan.loose("wrapper_mismatch", at, f"a call or {tokens.shown[1]} is expected here")
    return Step(ended.end() if ended is not None else at)


def harmony(scan: Scan, match: re.Match[str]) -> Step:
    """Read a message of gpt-oss: a call, thinking, or text."""
    before = scan.text[max(0, match.start() - 160) : match.start()]
    recipient = _RECIPIENT.search(match[3] or "") or _RECIPIENT_BEFORE.search(before)
    name = match[1] or (recipient[1] if recipient is not None else None)
    if name is None or name == "assistant":
        ended = _HARMONY_END.search(scan.text, match.end())
        end = ended.start() if ended is not None else len(scan.text)
        if match[2] == "analysis":
            scan.thinking.append((match.end(), end))
        else:
            scan.plain.append((match.end(), end))
        return Step(max(end, ended.end()) if ended is not None else end)
    name = name.removeprefix("functions.")
    parsed = scan.parse(match.end(), _HARMONY_END)
    if parsed is None:
        ended = _HARMONY_END.search(scan.text, match.end())
        end = ended.end() if ended is not None else len(scan.text)
        defect = Defect("wrapper_mismatch", match.end(), "no JSON follows <|message|>")
        scan.call(name, None, (match.start(), end), "harmony", defects=[defect])
        return Step(max(end, match.end()))
    at, defects = after(scan.text, parsed)
    closed = _HARMONY_CLOSER.match(scan.text, at)
    if closed is None:
        defects.append(Defect("wrapper_mismatch", at, "text follows the arguments before <|call|>"))
        ended = _HARMONY_END.search(scan.text, at)
        at = ended.end() if ended is not None else len(scan.text)
    scan.call(name, parsed.value, (match.start(), at), "harmony", defects=defects)
    return Step(closed.end() if closed is not None else at)


def functionary(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``>>>NAME`` and the JSON of the next line; ``>>>all`` is text."""
    at_line = match.start() == 0 or scan.text[match.start() - 1] == "\n" or scan.before_is_blank
    named = FUNCTIONARY_OPENER.match(scan.text, match.start())
    if named is None or not at_line:
        return Step(match.end(), plain=True)
    if named[1] == "all":
        ended = _FUNCTIONARY_NEXT.search(scan.text, named.end())
        end = ended.start() if ended is not None else len(scan.text)
        scan.plain.append((named.end(), end))
        return Step(end)
    parsed = scan.parse(named.end(), _FUNCTIONARY_NEXT) if named[1] in scan.tools else None
    if parsed is None:
        return Step(match.end(), plain=True)
    at, defects = after(scan.text, parsed)
    scan.call(named[1], parsed.value, (match.start(), at), "functionary", defects=defects)
    ended = _END_OF_TURN.match(scan.text, at)
    return Step(ended.end() if ended is not None else at)


def gemma4(scan: Scan, match: re.Match[str]) -> Step:
    """Read a call in Gemma 4's notation."""
    opened = gemma.OPENER.match(scan.text, match.start())
    named = gemma.NAME.match(scan.text, opened.end()) if opened is not None else None
    if opened is None or named is None or scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    limit = _gemma_limit(scan.text, named.end())
    arguments, at, defects = gemma.arguments(scan.text, named.end(), limit)
    if opened[0].replace(" ", "") != "<|tool_call>call:":
        detail = f"{opened[0]!r} opens the call, where '<|tool_call>call:' belongs"
        defects.append(Defect("wrapper_mismatch", match.start(), detail))
    ended = gemma.CLOSER.search(scan.text, at)
    between = scan.text[at : ended.start()] if ended is not None and ended.start() - at < 200 else None
    if between is None or "<" in between:
        if not scan.blank(at, len(scan.text)) or not any(d.kind == "unterminated_string" for d in defects):
            defects.append(Defect("wrapper_mismatch", at, "<tool_call|> is missing"))
        end = at
    else:
        assert ended is not None
        if between.strip("} \n"):
            defects.append(Defect("wrapper_mismatch", at, f"{between.strip()[:40]!r} stands before <tool_call|>"))
        elif between.strip():
            defects.append(Defect("extra_bracket", at, "a bracket closes nothing: the arguments ended before it"))
        end = ended.end()
    scan.call(named[0], arguments, (match.start(), end), "gemma", defects=defects)
    return Step(end)


def function_gemma(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``<start_function_call>call:NAME{KEY:<escape>text<escape>}<end_function_call>``."""
    opened = gemma.FUNCTION_OPENER.match(scan.text, match.start())
    named = gemma.NAME.match(scan.text, opened.end()) if opened is not None else None
    if opened is None or named is None or scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    limit = _gemma_limit(scan.text, named.end(), gemma.ESCAPE, gemma.FUNCTION_CLOSER)
    arguments, at, defects = gemma.arguments(scan.text, named.end(), limit, mark=gemma.ESCAPE)
    if not opened[0].endswith("call:"):
        defects.append(Defect("wrapper_mismatch", match.start(), "'call:' is missing before the name"))
    space = behind(SPACE, scan.text, at)
    ended = gemma.FUNCTION_CLOSER.match(scan.text, space)
    if ended is None and not any(defect.kind == "unterminated_string" for defect in defects):
        defects.append(Defect("wrapper_mismatch", at, "<end_function_call> is missing"))
    end = ended.end() if ended is not None else at
    # The engine is told to stop where a result would begin.
    stopped = _FUNCTION_STOP.match(scan.text, end)
    scan.call(named[0], arguments, (match.start(), end), "gemma", defects=defects)
    return Step(stopped.end() if stopped is not None else end)


_FUNCTION_STOP = re.compile(r"\s*<start_function_response>")


def qwen_agent(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``✿FUNCTION✿: NAME`` and ``✿ARGS✿: JSON`` of Qwen-Agent's own prompt."""
    return _two_lines(scan, match, QWEN_AGENT_OPENER, "qwen-agent")


def react(scan: Scan, match: re.Match[str]) -> Step:
    """Read ``Action: NAME`` and ``Action Input: JSON`` of ReAct, for an offered tool."""
    opened = REACT_OPENER.match(scan.text, match.start())
    if opened is None or opened[1] not in scan.tools:
        return Step(match.end(), plain=True)
    return _two_lines(scan, match, REACT_OPENER, "react")


def _two_lines(scan: Scan, match: re.Match[str], opener: re.Pattern[str], form: str) -> Step:
    opened = opener.match(scan.text, match.start())
    if opened is None or scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    parsed = scan.parse(opened.end(), _AFTER_ARGUMENTS)
    if parsed is None:
        detail = f"no JSON follows {opened[0].splitlines()[-1].strip()[:40]!r}"
        defect = Defect("wrapper_mismatch", opened.end(), detail)
        scan.call(opened[1], None, (match.start(), opened.end()), form, native=False, defects=[defect])
        return Step(opened.end())
    at, defects = after(scan.text, parsed)
    scan.call(opened[1], parsed.value, (match.start(), at), form, native=False, defects=defects)
    stopped = _RESULT.match(scan.text, at)
    return Step(stopped.end() if stopped is not None else at)


QWEN_AGENT_OPENER = re.compile(r"✿FUNCTION✿:\s{0,20}([\w.-]{1,150})\s{0,20}\n\s{0,20}✿ARGS✿:\s{0,20}")
REACT_OPENER = re.compile(r"Action:[ \t]{0,20}([\w.-]{1,150})[ \t]{0,20}\n\s{0,20}Action Input:\s{0,20}")
_AFTER_ARGUMENTS = re.compile(r"✿RESULT✿|✿FUNCTION✿|\nObservation:|\nAction:")
#: An engine stops before the result, or with its heading.
_RESULT = re.compile(r"\s*(?:✿RESULT✿:?|Observation:)\s*\Z")


def _gemma_limit(text: str, start: int, mark: str = gemma.QUOTE, closer: re.Pattern[str] = gemma.CLOSER) -> int:
    """Where arguments end at the latest: at the closer that is not inside of a string, if that can be told."""
    word = "tool_call" if mark == gemma.QUOTE else "<start_function_call>"
    at = counted = start
    marks, following, opener = 0, start, start
    while (ended := closer.search(text, at)) is not None:
        # Inside of a string, an odd number of delimiters stands before it and its own closing one comes first.
        marks += text.count(mark, counted, ended.start())
        counted = ended.start()
        if marks % 2 == 0:
            return ended.start()
        # What was found once is not looked for again until it is passed.
        following = text.find(mark, ended.end()) if 0 <= following < ended.end() else following
        opener = text.find(word, ended.end()) if 0 <= opener < ended.end() else opener
        if following < 0 or 0 <= opener < following:
            return ended.start()
        at = ended.end()
    return len(text)

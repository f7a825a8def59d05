"""Formats in which models write tool calls, told apart from what is wrong with them.

:func:`read` goes through a text once. Openers of chat templates and of JSON are looked for outside of what was read
already, so that a tag inside of a string is a part of the string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.formats import fences, gemma, pairs, pythonic, sections, xml
from pytest_vram.toolcalls.formats.envelope import encoded_object
from pytest_vram.toolcalls.formats.scan import MOST_CALLS, FoundCall, Reader, Scan, Step

__all__ = ["MOST_CALLS", "FoundCall", "Scan", "encoded_object", "read"]

_THINKING = {"<think>": "</think>", "<|channel>": "<channel|>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}


def _thinking(scan: Scan, match: re.Match[str]) -> Step:
    closer = _THINKING[match[0]]
    if scan.quoted(match.start()):
        return Step(match.end(), plain=True)
    ended = scan.text.find(closer, match.end())
    if ended < 0:
        scan.loose("wrapper_mismatch", match.start(), f"{match[0]} is never closed by {closer}")
        ended = len(scan.text)
    scan.thinking.append((match.end(), ended))
    return Step(min(len(scan.text), ended + len(closer)))


def _gemma_arguments(scan: Scan, match: re.Match[str]) -> Step:
    """Arguments in Gemma's notation with no call around them."""
    start = match.start()
    opened = scan.text[start] == "{"
    found, end, defects = gemma.arguments(scan.text, start, len(scan.text), bare=not opened)
    name = next(iter(scan.tools)) if len(scan.tools) == 1 else None
    scan.call(name, found, (start, end), "gemma", native=True, defects=defects)
    return Step(end)


#: What opens → who reads it. The order matters where one is the beginning of another.
_OPENERS: list[tuple[str, Reader]] = [
    (r'(?<![^\n])\{?[\w.-]{1,100}:(?=<\|"\|>)', _gemma_arguments),
    (gemma.OPENER.pattern, sections.gemma4),
    (gemma.FUNCTION_OPENER.pattern, sections.function_gemma),
    (r"✿FUNCTION✿:", sections.qwen_agent),
    (r"(?:\A|(?<=\n))Action:", sections.react),
    ("|".join(map(re.escape, sorted([*pairs.PAIRS, *pairs.MISTAKEN], key=len, reverse=True))), pairs.read),
    (r"<function=", xml.function),
    (r"<(?:｜DSML｜)?invoke\s", xml.invoke),
    (sections.DEEPSEEK_OPENER.pattern, sections.deepseek),
    (sections.KIMI_OPENER.pattern, sections.kimi),
    (sections.HARMONY_OPENER.pattern, sections.harmony),
    ("|".join(map(re.escape, _THINKING)), _thinking),
    (r">>>(?=[\w.-]{1,150}\n)", sections.functionary),
    (r"```|~~~", fences.fence),
    (r'(?:\A\s*)"\s*(?:\\?["{\[])', fences.encoded),
    (r"(?:\A|(?<=\n))[A-Za-z_][\w.]{0,100}\(", fences.python),
    (rf"(?:{fences.JSON_OPENER.pattern})|\[(?={pythonic.CALL.pattern})", fences.bare),
]
_READERS = {f"r{index}": (re.compile(pattern), reader) for index, (pattern, reader) in enumerate(_OPENERS)}


def _any_of(readers: Mapping[str, tuple[re.Pattern[str], Reader]]) -> re.Pattern[str]:
    each = "|".join(f"(?P<{name}>{pattern.pattern})" for name, (pattern, _) in readers.items())
    # The first character is looked at before all the others: most characters of a text open nothing.
    return re.compile(rf"(?=<[A-Za-z|｜]|[\[{{>`~✿]|\A| f|(?<=\n))(?:{each})")


_ANY = _any_of(_READERS)
#: Once too many brackets turned out to be prose, only wrappers are looked for.
_WRAPPERS = _any_of({name: one for name, one in _READERS.items() if one[1] not in (fences.bare, fences.python)})


def read(text: str, tools: Sequence[Tool], asked: str = "") -> Scan:
    """Find the calls in a text of a model, in all formats, with what is wrong with each.

    Linear in time and memory; at most :data:`MOST_CALLS` calls are read.

    :param asked: the protocol that asked for one object with ``calls``; "": none did.
    """
    scan = Scan(text, tools, asked)
    position = plain_from = 0
    while len(scan.calls) < MOST_CALLS and not scan.exhausted:
        match = (_ANY if scan.tries > 0 else _WRAPPERS).search(text, position)
        if match is None:
            break
        pattern, reader = _READERS[str(match.lastgroup)]
        own = pattern.match(text, match.start())
        scan.before_is_blank = scan.before_is_blank and scan.blank(plain_from, match.start())
        step = reader(scan, own if own is not None else match)
        if step.plain:
            position = max(step.end, match.start() + 1)
            continue
        scan.plain.append((plain_from, match.start()))
        position = plain_from = max(step.end, match.start() + 1)
    scan.plain.append((plain_from, len(text)))
    scan.plain.sort()
    _closed_without_opener(scan)
    return scan


def _closed_without_opener(scan: Scan) -> None:
    """A template may open the thinking itself: then all before ``</think>`` is thinking, calls as well."""
    for start, end in scan.plain:
        for closer in ("</think>", "[/THINK]"):
            at = scan.text.rfind(closer, start, end)
            if at < 0:
                continue
            scan.thinking.append((0, at))
            scan.calls = [call for call in scan.calls if call.start > at]
            cut = at + len(closer)
            scan.plain = [(max(left, cut), right) for left, right in scan.plain if right > cut]
            scan.defects = [defect for defect in scan.defects if defect.at < 0 or defect.at > at]
            return

"""No line of a boot log makes a reader work for long: the time of every pattern grows no faster than the line."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pytest_vram.bootlog
from pytest_vram.bootlog import Follower

#: Characters of which runs are made: a pattern is slow where two of its repeats can share a run.
_RUNS = (" ", "x", "7", ".", "=", "-", '"', "(", "{", ",", "/", "\\")
_SHORT, _LONG = 512, 2048
_SLOW = 8  # times as long as a plain search: what a pattern of a dozen alternatives may take
_GROWTH = 8.0  # the line is four times as long: 4 is linear, 16 quadratic
_SOURCES = {
    path.stem: path.read_text(encoding="utf-8") for path in Path(pytest_vram.bootlog.__file__).parent.glob("*.py")
}


def _inside(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from _inside(item)
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from _inside(item)


def _patterns() -> dict[str, re.Pattern[str]]:
    """Every compiled pattern of the package, by the module and name that it has."""
    found: dict[re.Pattern[Any], str] = {}
    for module in pkgutil.iter_modules(pytest_vram.bootlog.__path__, "pytest_vram.bootlog."):
        for name, value in vars(importlib.import_module(module.name)).items():
            for number, pattern in enumerate(_inside(value)):
                found.setdefault(pattern, f"{module.name.rpartition('.')[2]}.{name}[{number}]")
    return {name: pattern for pattern, name in found.items() if isinstance(pattern.pattern, str)}


PATTERNS = _patterns()


def _use(name: str, pattern: re.Pattern[str]) -> Callable[[str], object]:
    """The pattern as the package applies it: at the beginning of a line where it is only ever matched there."""
    module, variable = name.partition("[")[0].split(".")
    sources = _SOURCES[module] if variable.startswith("_") else "\n".join(_SOURCES.values())
    uses = set(re.findall(rf"\b{variable}\.(\w+)\(", sources))
    if re.search(rf"\bnoise\b.*= (?:\w+\.)?{variable}\b", "\n".join(_SOURCES.values())):
        uses = {"match"}  # of a grammar: what a line begins with
    if uses and uses <= {"match", "fullmatch"}:
        return pattern.fullmatch if uses == {"fullmatch"} else pattern.match
    return lambda text: pattern.sub("", text)


def _examples(parsed: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """(text that leads up to a repeat, text that the repeat takes once) for all repeats; the last is the whole."""
    text = before
    for code, argument in parsed:
        kind = str(code)
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, body = argument
            once = _text(body)
            if int(most) > 16:
                yield text, once
            yield from _examples(body, text)
            text += once * max(1, int(least))
        elif kind in ("SUBPATTERN", "ATOMIC_GROUP"):
            body = argument[3] if kind == "SUBPATTERN" else argument
            yield from _examples(body, text)
            text += _text(body)
        elif kind == "BRANCH":
            for body in argument[1]:
                yield from _examples(body, text)
            text += _text(argument[1][0])
        else:
            text += _text([(code, argument)])
    yield text, ""


def _text(parsed: Any) -> str:
    """A short text that a parsed pattern takes."""
    text = ""
    for code, argument in parsed:
        kind = str(code)
        if kind == "LITERAL":
            text += chr(argument)
        elif kind in ("IN", "CATEGORY", "ANY", "NOT_LITERAL"):
            single = re.compile(r"(?s).") if kind == "ANY" else None
            text += next((c for c in 'x7 A.=-"({,/:[_' if single or _takes(kind, argument, c)), "x")
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            text += _text(argument[2]) * max(1, int(argument[0]))
        elif kind == "SUBPATTERN":
            text += _text(argument[3])
        elif kind == "ATOMIC_GROUP":
            text += _text(argument)
        elif kind == "BRANCH":
            text += _text(argument[1][0])
    return text


def _takes(kind: str, argument: Any, character: str) -> bool:
    if kind == "NOT_LITERAL":
        return ord(character) != argument
    negated = False
    for code, value in argument if kind == "IN" else [("CATEGORY", argument)]:
        what = str(code)
        if what == "NEGATE":
            negated = True
        elif what == "LITERAL":
            if ord(character) == value:
                return not negated
        elif what == "RANGE":
            if value[0] <= ord(character) <= value[1]:
                return not negated
        elif what == "CATEGORY":
            short = str(value).removeprefix("CATEGORY_")
            letter = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[short.removeprefix("NOT_")]
            if re.match(letter.upper() if short.startswith("NOT_") else letter, character):
                return not negated
    return negated


def _lines(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(beginning, part to be repeated) of lines that come close to a match, again and again, and have none."""
    parser: Any = importlib.import_module("re._parser")
    seen: set[tuple[str, str]] = set()
    for before, once in _examples(parser.parse(pattern.pattern, pattern.flags)):
        for pair in (*((before, run) for run in _RUNS), (before, once), ("", before + once), ("", f"{before} ")):
            if pair[1] and pair not in seen:
                seen.add(pair)
                yield pair


def _seconds(work: Callable[[str], object], text: str) -> float:
    begun = time.process_time()
    work(text)
    return time.process_time() - begun


def _line(before: str, part: str, length: int) -> str:
    return f"{before}{part * (length // len(part))}"[:length] + "\x00"


_PLAIN = re.compile(r"[a-z]+ [0-9]+|no such words (?:here|there)")


def _plain() -> float:
    return min(_seconds(lambda text: _PLAIN.sub("", text), "x7 " * (_SHORT // 3)) for _ in range(9))


def _too_slow(work: Callable[[str], object], before: str, part: str, plain: float) -> str | None:
    """Why the time for such lines grows faster than they do; asked again before it is said, on a machine that is busy."""
    if _seconds(work, _line(before, part, _SHORT)) < _SLOW * plain:
        return None
    short, long = 0.0, 0.0
    for _ in range(4):
        short, long = (min(_seconds(work, _line(before, part, length)) for _ in range(3)) for length in (_SHORT, _LONG))
        if long < _GROWTH * max(short, _SLOW * plain):
            return None
    return f"{before[-60:]!r} + {part[:60]!r} * n: {short / plain:.0f} and {long / plain:.0f} plain searches"


@pytest.mark.parametrize("module", sorted({name.partition(".")[0] for name in PATTERNS}))
def test_time_grows_with_the_line(module: str) -> None:
    """A line of four times the length takes about four times as long, however close it comes to a match."""
    plain = _plain()
    slow = {}
    for name, pattern in PATTERNS.items():
        if name.partition(".")[0] == module:
            work = _use(name, pattern)
            found = (said for line in _lines(pattern) if (said := _too_slow(work, *line, plain)) is not None)
            if (said := next(found, None)) is not None:
                slow[name] = said
    assert slow == {}


@pytest.mark.parametrize("engine", ["llama-server", "ollama", "vllm", "sglang", "transformers"])
def test_work_of_a_reader_grows_with_the_line(engine: str) -> None:
    """What a reader does with a line besides searching it grows no faster than the line either."""
    plain = _plain()
    begins = sorted({before for pattern in PATTERNS.values() for before, _ in _lines(pattern) if before})
    feed = Follower(engine).feed
    slow = (_too_slow(feed, before, part, plain * 20) for before in begins[::3] for part in (" ", f"{before} "))
    assert next((said for said in slow if said is not None), None) is None

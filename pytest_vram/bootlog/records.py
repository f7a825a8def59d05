"""Records in JSON, one a line, as servers write that log to machines, and programs that carry another's output.

vLLM (``--logging-config.formatter json``), Python's and Go's loggers for JSON, Rust's ``tracing``, Node's ``pino``: the
names of their fields differ, what is in them does not. A record may hold several lines: a traceback is one record, and
a program that carries another's output puts whatever came at once into one. What else is in a record (fields of a
request among it) is nobody's word on memory, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pytest_vram.bootlog.lines import Line, split
from pytest_vram.bootlog.prefixes import LONGEST_JSON

#: :attr:`pytest_vram.bootlog.lines.Line.prefix` of what was in a record.
RECORD = "record"
_MESSAGES = ("message", "msg", "body")
_LEVELS = ("levelname", "level", "severity", "severity_text", "lvl", "log.level")
_TIMES = ("asctime", "timestamp", "time", "ts", "@timestamp")
_TRACES = ("exc_info", "exception", "exc_text", "stack_trace", "traceback")
_NAMES = ("vllm_process_name", "process_name", "processName")
_LETTERS = {"T": "D", "D": "D", "V": "D", "I": "I", "N": "I", "W": "W", "E": "E", "C": "F", "F": "F"}
_WORKER = re.compile(r"VllmWorker-(\d{1,5})", re.ASCII)
#: Characters of wrappers' prefixes before a record.
_BEFORE = 300
#: Lines of one record that are looked at.
_MOST = 2000


class Carried(NamedTuple):
    """A line in a line of a log. ``raw``: as whoever wrote it did, with its own prefixes."""

    raw: str
    line: Line


def lines_of(raw: str) -> list[Line]:
    """The lines in one line of a log, without prefixes: one, or those of the message of a record in JSON."""
    return [one.line for one in carried(raw)]


def carried(raw: str) -> list[Carried]:
    """The same, with what they were before the prefixes were taken off."""
    at = raw.find('{"', 0, _BEFORE)
    if at < 0 or len(raw) > LONGEST_JSON or not raw.rstrip().endswith("}"):
        return [Carried(raw, split(raw))]
    around = split(raw[:at]) if at else Line("")
    record = None if around.text.strip() else _record(raw[at:])
    if record is None:
        return [Carried(raw, split(raw))]
    return _unpacked(record, around)


def _record(text: str) -> Mapping[str, Any] | None:
    """The fields of a record; ``None`` for any other JSON, such as the body of a request."""
    try:
        found = msgspec.json.decode(text)
        if isinstance(found, dict) and isinstance(carried := found.get("log"), str) and carried.startswith('{"'):
            found = msgspec.json.decode(carried)  # in a file of Docker's
    except (msgspec.MsgspecError, UnicodeError, RecursionError):  # torn, or nested without an end
        return None
    if not isinstance(found, dict) or _first(found, _TIMES, (str, int, float)) is None:
        return None
    if isinstance(fields := found.get("fields"), dict) and isinstance(fields.get("message"), str):
        found = {**found, "message": fields["message"]}  # Rust
    if _first(found, _LEVELS, (str, int)) is None or _first(found, _MESSAGES, (str,)) is None:
        return None
    return found


def _unpacked(record: Mapping[str, Any], around: Line) -> list[Carried]:
    time, clock = _time(_first(record, _TIMES, (str, int, float)))
    level = _first(record, _LEVELS, (str,))  # numbers are those of a program that carries other's lines
    letter = None if level is None else _LETTERS.get(level[:1].upper())
    process = _process(record) or around.process
    traces = [record[name] for name in _TRACES if isinstance(record.get(name), str)]
    found: list[Carried] = []
    for text in "\n".join([_first(record, _MESSAGES, (str,)), *traces]).split("\n", _MOST)[:_MOST]:
        text = text.rstrip("\r")
        line = split(text)
        known = line.time is not None
        line = line._replace(
            time=line.time if known else time,
            clock=line.clock if known else clock,
            level=line.level or letter,
            process=line.process or process,
            prefix=line.prefix or RECORD,
        )
        found.append(Carried(text, line))
    return found


def _first(record: Mapping[str, Any], names: tuple[str, ...], kinds: tuple[type, ...]) -> Any:
    """The first of these fields that is there and of one of these kinds."""
    return next((record[name] for name in names if isinstance(record.get(name), kinds)), None)


def _time(value: str | int | float) -> tuple[float | None, Any]:
    """Seconds and their clock; numbers are seconds or milliseconds since 1970."""
    if isinstance(value, str):
        # A time with a date is a prefix by itself; vLLM's own has no year, and is one behind a level.
        found = next((line for line in (split(f"{value} x"), split(f"INFO {value} x")) if line.time is not None), None)
        return (None, None) if found is None else (found.time, found.clock)
    if not 0 < value < 1e15:
        return None, None
    return (value / 1e3 if value > 1e11 else float(value)), "epoch"


def _process(record: Mapping[str, Any]) -> str | None:
    """Who wrote it, as prefixes of text name it: ``EngineCore pid=7``, ``VllmWorker rank=0 pid=7``."""
    name = _first(record, _NAMES, (str,))
    if name is None or len(name) > 80:
        return None
    number = _first(record, ("process", "pid"), (int,))
    if match := _WORKER.fullmatch(name):
        name = f"VllmWorker rank={match[1]}"
    return name if number is None else f"{name} pid={number}"

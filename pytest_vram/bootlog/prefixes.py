"""What stands before an engine's own words in a line: its own prefix, and those of whatever carried the line here.

Each kind of prefix is one pattern that matches at the beginning of a line, and is tried only where the first character
allows it. Prefixes nest (``server-1  | 2026-01-02T03:04:05Z stderr F (EngineCore pid=7) INFO 01-02 …``), so they are
taken off one after another.

Times that say no year are of the latest year in which they are not in the future; times without a zone are read as
UTC. Which of several times of a line is the best one is :attr:`Taken.rank`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

Clock = Literal["start", "epoch"]

#: How much a time says: of the process's own start, without a year, without a zone, everything.
FROM_START, NO_YEAR, NO_ZONE, WHOLE = range(4)
#: Longest line of JSON that is unpacked; Docker splits longer messages at 16 KiB.
LONGEST_JSON = 1 << 17
#: Prefixes in one line; more is somebody's text.
DEEPEST = 6


class Taken(NamedTuple):
    """What one prefix said. ``text`` is the rest of the line, where it is not simply what follows."""

    time: float | None = None
    rank: int = -1
    level: str | None = None
    process: str | None = None
    text: str | None = None


class Kind(NamedTuple):
    """A kind of prefix.

    :ivar own: an engine writes it itself, so that a level in it is the engine's. :ivar needs: is in every such line,
        and looked for before the pattern, which begins like any word.
    """

    name: str
    first: str
    pattern: re.Pattern[str]
    take: Callable[[re.Match[str]], Taken | None]
    own: bool = False
    needs: str = ""


# ---------------------------------------------------------------- times

#: Not those of the locale.
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
_ZONE = r"(?:(?P<zone>Z|[+-]\d\d:?\d\d)| (?P<named>UTC|GMT|[+-]\d\d:?\d\d)(?![\w:]))?"
_ISO = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ]" + _CLOCK + _ZONE
_NAMED_DATE = r"(?P<monthname>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<day>\d\d?) " + _CLOCK


def now() -> datetime:
    """The present time, by which the year of a time without one is found."""
    return datetime.now(UTC)


def _year(month: int, day: int) -> int:
    latest = now() + timedelta(days=1)
    return latest.year if (month, day) <= (latest.month, latest.day) else latest.year - 1


def _time(match: re.Match[str]) -> tuple[float | None, int]:
    """Seconds since 1970 (UTC) of the groups of a time, and its rank; ``None`` where there is no such moment."""
    groups = match.groupdict()
    name = groups.get("monthname")
    month = int(groups["month"]) if name is None else _MONTHS[name]
    day, written = int(groups["day"]), groups.get("year")
    zone = groups.get("zone") or groups.get("named")
    rank = NO_YEAR if written is None else NO_ZONE if zone is None else WHOLE
    try:
        year = _year(month, day) if written is None else int(written)
        moment = datetime(
            year, month, day, int(groups["hour"]), int(groups["minute"]), int(groups["second"]), tzinfo=UTC
        )
    except ValueError:  # the 31st of February
        return None, -1
    seconds = moment.timestamp()
    if zone is not None and zone[0] in "+-":
        offset = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
        seconds -= offset if zone[0] == "+" else -offset
    fraction = groups.get("fraction")
    return (seconds if fraction is None else seconds + int(fraction) / 10 ** len(fraction)), rank


# ---------------------------------------------------------------- kinds

_LEVELS = {
    "TRACE": "D",
    "DEBUG": "D",
    "INFO": "I",
    "NOTICE": "I",
    "WARN": "W",
    "WARNING": "W",
    "ERROR": "E",
    "CRITICAL": "F",
    "FATAL": "F",
}
_NAMES = "|".join(sorted(_LEVELS, key=len, reverse=True))
_LEVEL = f"(?P<level>{_NAMES})"
_WHERE = r"(?:\[?[\w./-]{1,120}:\d{1,6}\] )?"


def _timed(match: re.Match[str]) -> Taken:
    """A time, with the level and the process where the pattern has them."""
    time, rank = _time(match)
    groups = match.groupdict()
    return Taken(time, rank, _LEVELS.get(groups.get("level") or ""), groups.get("process"))


def _named(match: re.Match[str]) -> Taken:
    """No time; a level or a process."""
    groups = match.groupdict()
    return Taken(level=_LEVELS.get(groups.get("level") or ""), process=groups.get("process"))


def _llama(match: re.Match[str]) -> Taken:
    minutes, seconds, milli, micro, level = match.groups()
    micros = ((int(minutes) * 60 + int(seconds)) * 1000 + int(milli)) * 1000 + int(micro)
    return Taken(micros / 1e6, FROM_START, level)


def _glog(match: re.Match[str]) -> Taken:
    time, rank = _time(match)
    return Taken(time, rank, match["letter"])


def _quoted(match: re.Match[str]) -> Taken:
    """LocalAI since the end of 2025 puts the line of its engine between quotation marks, as Go writes them."""
    time, rank = _time(match)
    text = match["line"]
    return Taken(time, rank, text=re.sub(r"\\(.)", _unescaped, text) if "\\" in text else text)


def _unescaped(match: re.Match[str]) -> str:
    return {"n": " ", "t": "\t", "r": ""}.get(match[1], match[1])


class _Docker(msgspec.Struct):
    log: str
    time: str = ""


class _Journal(msgspec.Struct, rename={"message": "MESSAGE", "at": "__REALTIME_TIMESTAMP", "pid": "_PID"}):
    message: str
    at: str = ""
    pid: str | None = None


def _json(match: re.Match[str]) -> Taken | None:
    """A line of Docker's own files, or of ``journalctl -o json``."""
    line = match.string
    if len(line) > LONGEST_JSON:
        return None
    try:
        if '"MESSAGE"' in line:
            entry = msgspec.json.decode(line, type=_Journal)
            micros = entry.at if entry.at.isascii() and entry.at.isdigit() and len(entry.at) < 18 else ""
            process = None if entry.pid is None else f"pid {entry.pid}"
            return Taken(int(micros) / 1e6 if micros else None, WHOLE if micros else -1, None, process, entry.message)
        carried = msgspec.json.decode(line, type=_Docker)
    except (msgspec.MsgspecError, UnicodeError):  # not one of these, torn, or with half of a surrogate pair
        return None
    found = _ISO_ONLY.match(carried.time)
    time, rank = _time(found) if found is not None else (None, -1)
    return Taken(time, rank, text=carried.log.rstrip("\r\n"))


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


_ISO_ONLY = _compiled(_ISO)
_DIGITS = "0123456789"
_WORDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_"
_END = r"(?: |$)"

KINDS: tuple[Kind, ...] = (
    # `0.00.026.362 I `: minutes, seconds, milliseconds, microseconds, and the level's letter
    Kind("llama.cpp", _DIGITS, _compiled(r"(\d{1,9})\.(\d\d)\.(\d{3})\.(\d{3}) ([A-Z])" + _END), _llama, own=True),
    # Kubernetes: `2026-01-02T03:04:05.678901Z stderr F `; GitLab's jobs: `2026-01-02T03:04:05.678901Z 00O `
    Kind(
        "container",
        _DIGITS,
        _compiled(_ISO + r" (?:std(?:err|out) [FP]" + _END + r"|[0-9a-f]{2}[OE](?:[+ ]|$))"),
        _timed,
    ),
    # `2026-01-02T03:04:05+0100 host ollama[123]: `, as journalctl's short-iso writes it
    Kind(
        "journal",
        _DIGITS,
        _compiled(_ISO + r" [\w.-]{1,80} (?P<process>[\w.@/-]{1,80}\[\d{1,10}\]|kernel):" + _END),
        _timed,
    ),
    # what loggers of Python and others put after the time: ` - root - INFO - `, ` INFO `; not vLLM's own
    Kind(
        "time",
        _DIGITS,
        _compiled(
            _ISO + rf"(?: - [\w.]{{1,80}} - (?:{_NAMES}) - | +\[?(?:{_NAMES})(?!:   )\]?:? (?!\d\d-\d\d \d\d:) *)"
        ),
        _timed,
    ),
    # a time alone: CI, `docker logs -t`
    Kind("time", _DIGITS, _compiled(_ISO + _END), _timed),
    # Go's own: `2023/12/01 12:00:00 llama.go:300: `
    Kind(
        "go",
        _DIGITS,
        _compiled(
            r"(?P<year>\d{4})/(?P<month>\d\d)/(?P<day>\d\d) " + _CLOCK + r"(?: [\w./-]{1,80}\.go:\d{1,6}:)?" + _END
        ),
        _timed,
        own=True,
    ),
    # LocalAI: `11:59PM DBG GRPC(model-127.0.0.1:41234): stderr `; the level is not that of the line inside
    Kind(
        "localai",
        _DIGITS,
        _compiled(r"\d\d?:\d\d[AP]M [A-Z]{3} (?:GRPC\((?P<process>[^()]{1,300})\): std(?:err|out)" + _END + ")?"),
        _named,
    ),
    # `[2026-06-08 12:00:00 TP0] ` (SGLang), `[2026-06-08T12:00:00Z] `, `[2026-06-08 12:00:00,123] `
    Kind(
        "brackets",
        "[",
        _compiled(r"\[" + _ISO + r"(?: (?P<process>[A-Z_]{2,8}\d{1,4}(?: [A-Z_]{2,8}\d{1,4}){0,4}))?\]" + _END),
        _timed,
        own=True,
    ),
    # the child of a router: `[41234] `; a process of torchrun: `[rank0]: `; kubectl --prefix: `[pod/name/server] `
    Kind("child", "[", _compiled(r"\[ *(?P<process>\d{1,10})\]" + _END), _named),
    Kind("rank", "[", _compiled(r"\[(?P<process>(?:rank|default)\d{1,5})\]:" + _END), _named),
    Kind("pod", "[", _compiled(r"\[(?P<process>pod/[\w./-]{1,300})\]" + _END), _named),
    # the kernel's ring: seconds since the machine started, which is no clock of the engine
    Kind("kernel", "[", _compiled(r"\[ *\d{1,12}\.\d{3,9}\]" + _END), lambda match: Taken(process="kernel")),
    Kind(
        "kernel",
        "[",
        _compiled(r"\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + _NAMED_DATE + r" (?P<year>\d{4})\]" + _END),
        lambda match: _timed(match)._replace(process="kernel"),
    ),
    Kind(
        "glog",
        "[IWEF",
        _compiled(
            r"\[?(?P<letter>[IWEF])(?P<month>\d\d)(?P<day>\d\d) "
            + _CLOCK
            + r" +(?:\d{1,10} +)?[\w./-]{1,200}:\d{1,6}\]"
            + _END
        ),
        _glog,
        own=True,
    ),
    # vLLM and Ray: `(EngineCore_DP0 pid=123) `, `(VllmWorker rank=0 pid=1) `, `(VllmWorker TP0 pid=1) `,
    # `(RayWorkerWrapper pid=9, ip=10.0.0.2) `
    Kind(
        "worker",
        "(",
        _compiled(
            r"\((?P<process>\w{1,80}(?: rank=\d{1,6}| [A-Z]{2}\d{1,5}(?:_[A-Z]{2}\d{1,5})?)? pid=\d{1,10}"
            r"(?:, ip=[\w.:]{1,60})?)\)" + _END
        ),
        _named,
    ),
    # Ollama, and whatever else uses Go's slog: what follows is `msg="…" …`
    Kind(
        "slog",
        "t",
        _compiled(r"time=\"?" + _ISO + r"\"? level=" + _LEVEL + r"(?:[+-]\d{1,3})?(?: source=\S{1,200})?" + _END),
        _timed,
        own=True,
    ),
    # vLLM: `INFO 12-21 10:00:00 [gpu_worker.py:123] `, once `INFO 12-21 10:00:00 gpu_worker.py:123] `
    Kind(
        "vllm",
        "DIWECNFT",
        _compiled(_LEVEL + r" (?P<month>\d\d)-(?P<day>\d\d) " + _CLOCK + _END + _WHERE),
        _timed,
        own=True,
    ),
    Kind("uvicorn", "DIWECNFT", _compiled(_LEVEL + r": {3,12}"), _named, own=True),
    # LocalAI since the end of 2025
    Kind(
        "localai",
        "JFMASOND",
        _compiled(
            _NAMED_DATE + r" [A-Z]{4,5} GRPC std(?:err|out) id=(?:\"[^\"]{0,300}\"|\S{1,300})"
            r" line=\"?(?P<line>(?:[^\"\\]|\\.)*)\"?.*"
        ),
        _quoted,
    ),
    # syslog and journalctl: `Oct 13 12:00:00 host ollama[123]: `, `Mon 2026-10-13 12:00:00 UTC host ollama[123]: `
    Kind(
        "journal",
        "JFMASOND",
        _compiled(_NAMED_DATE + r" [\w.-]{1,80} (?P<process>[\w.@/-]{1,80}(?:\[\d{1,10}\])?):" + _END),
        _timed,
    ),
    Kind(
        "journal",
        "MTWFS",
        _compiled(
            r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + _ISO + r"(?: [A-Z]{2,5})? [\w.-]{1,80}"
            r" (?P<process>[\w.@/-]{1,80}(?:\[\d{1,10}\])?):" + _END
        ),
        _timed,
    ),
    # a line of JSON around the line: what follows is inside
    Kind("json", "{", _compiled(r"\{(?=\"[A-Za-z_]{1,40}\":)"), _json),
    # Docker compose: `server-1  | `
    Kind("compose", _WORDS + _DIGITS, _compiled(r"(?P<process>[\w.-]{1,64}) +\|(?: |$)"), _named, needs=" |"),
    # `gh run view --log`: the job, the step and the line, with tabs between
    Kind(
        "job",
        _WORDS + _DIGITS,
        _compiled(r"[^\t]{1,100}\t[^\t]{1,100}\t(?=\ufeff?\d{4}-)\ufeff?"),
        _named,
        needs="\t",
    ),
)
#: First character → kinds that may begin with it.
BY_FIRST: dict[str, tuple[Kind, ...]] = {
    character: tuple(kind for kind in KINDS if character in kind.first)
    for character in {character for kind in KINDS for character in kind.first}
}

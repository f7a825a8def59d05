"""Lines of a soak while it runs: one for a person at each turn, and the structured log for a log shipper."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from pytest_vram.checks.idle_series import IdleVerdict
from pytest_vram.readings import Measured, Reading
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Limits
from pytest_vram.units import MIB

#: Group → what its lines say; the loggers are `pytest_vram.soak.GROUP`.
GROUPS = {
    "brain.model": "a server began to serve: engine, build, model, context, segment",
    "brain.ctx": "the context after a turn: tokens, size, share, events",
    "brain.mem": "memory of a turn: peak and idle of each device, layers, host, slope, budget left",
    "brain.step": "a turn: tokens, latency, rate, result",
    "agent.tool": "tool calls of a turn: asked for, right, repeated, kinds of defect",
}
LOGFMT, JSON = "log.logfmt", "log.jsonl"
#: What stands before the end of a server's log.
_ANNOUNCED = re.compile(r" Last lines of .*:$")
Value = str | int | float | bool | None


class StructuredLog:
    """Writes each line to Python's logging, and to both files in the folder of the soak.

    The files are for people and log shippers, and no part of the journal: what a full disk keeps from them is counted
    in :attr:`lost` and stops nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.lost = 0
        self._files: list[TextIO] = []
        for name in (LOGFMT, JSON):
            try:
                if (folder / name).exists() and not stat.S_ISREG((folder / name).stat().st_mode):
                    raise OSError(f"{name} is no file")  # a pipe would be waited for without end
                self._files.append((folder / name).open("a", encoding="utf-8", errors="backslashreplace"))
            except OSError:
                self.lost += 1

    def write(self, group: str, at: str, fields: Mapping[str, Value]) -> None:
        """One line of a group."""
        known: dict[str, Value] = {"t": at, "group": group}
        known |= {name: value for name, value in fields.items() if value is not None}
        line = logfmt(known)
        logging.getLogger(f"pytest_vram.soak.{group}").info("%s", line)
        texts = {LOGFMT: line, JSON: msgspec.json.encode(known).decode()}
        for file in self._files:
            try:
                file.write(texts[Path(file.name).name] + "\n")
                file.flush()
            except OSError:
                self.lost += 1

    def turn(self, turn: Turn, verdict: IdleVerdict | None, left: Mapping[str, int]) -> None:
        """The lines of one turn."""
        place: dict[str, Value] = {"turn": turn.number, "conversation": turn.conversation, "segment": turn.segment}
        full = turn.context / turn.context_size if turn.context is not None and turn.context_size else None
        self.write(
            "brain.step",
            turn.at,
            {
                **place,
                "cycle": turn.cycle,
                "phase": turn.phase,
                "tokens_in": turn.tokens_in,
                "tokens_out": turn.tokens_out,
                "output_cap": turn.output_cap,
                "latency": _rounded(turn.latency, 3),
                "time_to_first_token": _rounded(turn.time_to_first_token, 3),
                "tokens_per_second": _rounded(turn.tokens_per_second, 2),
                "result": "nothing" if turn.nothing else turn.result,
                "error": turn.unanswered,
            },
        )
        self.write(
            "brain.ctx",
            turn.at,
            {
                **place,
                "tokens": turn.context,
                "size": turn.context_size,
                "share": _rounded(full, 3),
                "events": "; ".join(turn.events) or None,
            },
        )
        memory = {f"peak_{label}": _bytes(figure) for label, figure in turn.peak.items()}
        memory |= {f"idle_{label}": _bytes(figure) for label, figure in turn.idle.items()}
        memory |= {f"layer_{name}": _bytes(figure) for name, figure in turn.layers.items()}
        memory |= {f"left_{label}": size for label, size in left.items()}
        slope = verdict.slope if verdict is not None else None
        self.write(
            "brain.mem",
            turn.at,
            {
                **place,
                **memory,
                "host": _bytes(turn.host) if turn.host is not None else None,
                "slope_per_turn": _rounded(slope, 0),
                "idle": verdict.kind if verdict is not None else None,
            },
        )
        if turn.calls is not None and turn.result == "ok":  # as the gate counts them
            self.write(
                "agent.tool",
                turn.at,
                {
                    **place,
                    "calls": turn.calls,
                    "right": turn.calls_right,
                    "repeated": turn.repeated,
                    "kinds": ",".join(turn.kinds) or None,
                },
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


def logfmt(fields: Mapping[str, Value]) -> str:
    """``name=value`` pairs; what has blanks, quotes or control characters is in quotes, as JSON has it."""
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items() if value is not None)


def live_line(
    name: str, turn: Turn, series: Series, verdict: IdleVerdict | None, left: Mapping[str, int], amount: str, eta: str
) -> str:
    """The line of one turn for a person: figures in MiB, slope with its interval, what is left of the budget."""
    fields: dict[str, Value] = {
        "soak": name,
        "turn": f"{turn.number}/{amount}",
        "conversation": turn.conversation,
        "in": turn.tokens_in,
        "out": turn.tokens_out,
        "latency": f"{turn.latency:.2f}s" if turn.latency is not None else None,
        "rate": f"{turn.tokens_per_second:.1f}tok/s" if turn.tokens_per_second is not None else None,
    }
    for label, figure in turn.peak.items():
        fields[f"peak_{label}"] = _mib(figure)
    for label, figure in turn.idle.items():
        fields[f"idle_{label}"] = _mib(figure)
    for label, size in left.items():
        fields[f"left_{label}"] = f"{size / MIB:.0f}MiB"
    if verdict is not None and verdict.slope is not None:
        low, high = verdict.low or 0.0, verdict.high or 0.0
        fields["slope"] = f"{verdict.slope / MIB:+.3f}[{low / MIB:+.3f},{high / MIB:+.3f}]MiB/turn"
    judged = sum(series.calls)
    if judged:
        fields["calls"] = f"{sum(series.right)}/{judged}"
    fields["events"] = "; ".join(turn.events) or None
    result = "nothing" if turn.nothing else turn.result
    fields["result"] = result if result != "ok" else None
    fields["eta"] = eta
    return logfmt(fields)


def left_of(turn: Turn, limit: Limits | None) -> dict[str, int]:
    """Device label → bytes between this turn's peak and the limit; nothing where one is not known."""
    if limit is None:
        return {}
    found = {}
    for label, figure in turn.peak.items():
        most = limit.of(label)
        if most is not None and isinstance(figure, Reading):
            found[label] = most - figure.upper
    return found


def duration(seconds: float | None) -> str:
    """``1h02m``, ``3m10s``, ``12s``; ``?`` where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"


def first_line(error: str) -> str:
    """The first line of a message, without what announces the others; the report has all of it."""
    return _ANNOUNCED.sub("", next(iter(error.splitlines()), ""))


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if text and all(character.isprintable() and character not in ' "=\\' for character in text):
        return text
    return msgspec.json.encode(text).decode()


def _rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def _bytes(figure: Measured) -> Value:
    return figure.upper if isinstance(figure, Reading) else "unknown"


def _mib(figure: Measured) -> str:
    return f"{figure.upper / MIB:.0f}MiB" if isinstance(figure, Reading) else "unknown"

"""Answers as results keep them: bounded, and writable as JSON whatever a model wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from pytest_vram.text import encodable
from pytest_vram.toolcalls.asking import Heard
from pytest_vram.toolcalls.diagnosis import Call, Diagnosis
from pytest_vram.toolcalls.results import Answer, Outcome

#: Characters of an answer, of one call's text and of its arguments, and calls, that are kept.
_RAW, _TEXT, _ARGUMENTS, _CALLS = 4000, 1000, 4000, 32
_DEEPEST = 32
_LARGEST = 1 << 63


def judged(heard: Heard, found: Diagnosis | None, own_seconds: float) -> Answer:
    """An answer with what was found in it; without a diagnosis it is the model's failure or nobody's."""
    if found is not None:
        outcome: Outcome = "right" if found.right else "wrong"
        kind, kinds, detail = found.kind, found.kinds, found.detail
    else:
        outcome = "wrong" if heard.kind else "infrastructure"
        kind, kinds, detail = heard.kind, (heard.kind,) if heard.kind else (), heard.detail
    raw = raw_of(heard)
    return Answer(
        outcome=outcome,
        kind=kind,
        kinds=kinds,
        detail=_text(detail, _RAW),
        calls=[kept(call) for call in found.calls[:_CALLS]] if found is not None else [],
        raw=_text(raw, _RAW),
        raw_length=len(raw),
        finish_reason=heard.finish_reason,
        status=heard.status,
        latency=heard.latency,
        tokens_in=heard.tokens_in,
        tokens_out=heard.tokens_out,
        own_seconds=own_seconds,
        unfit=heard.unfit,
    )


def raw_of(heard: Heard) -> str:
    """The answer as text: what was said, or the calls where there are any."""
    message = heard.message
    if message is None or not message.get("tool_calls"):
        return heard.text or (str(message.get("content") or "") if message is not None else "")
    said = {key: message[key] for key in ("content", "tool_calls") if message.get(key)}
    try:
        return json.dumps(said, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply to be shown)"


def kept(call: Call) -> Call:
    """A call without what would make a results file large, or impossible to write."""
    arguments = writable(call.arguments)
    if len(text := json.dumps(arguments)) > _ARGUMENTS:
        arguments = _text(text, _ARGUMENTS)
    name = None if call.name is None else _text(call.name, 200)
    identity = None if call.id is None else _text(call.id, 200)
    return msgspec.structs.replace(call, name=name, arguments=arguments, text=_text(call.text, _TEXT), id=identity)


def writable(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it: what JSON cannot say becomes text, and what is nested too deeply is left out."""
    if isinstance(value, Mapping | list | tuple) and depth >= _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return {str(encodable(str(key))): writable(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [writable(one, depth + 1) for one in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value < _LARGEST else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(encodable(str(value)))


def _text(text: str, longest: int) -> str:
    """A text cut in its middle, without what cannot be encoded."""
    if len(text) > longest:
        half = (longest - 3) // 2
        text = f"{text[:half]} … {text[len(text) - half :]}"
    return str(encodable(text))

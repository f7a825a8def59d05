"""Was the configuration really applied: asked, against what the boot log and the server say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_vram.backends.base import Properties
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import amount, block, provenance
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import OptionValue

#: llama.cpp rounds a context up to a multiple of this many tokens.
CONTEXT_STEP = 256
#: Counts that may be asked for as "all", or as more than there are.
_EVERYTHING = ("all", "max")
#: The setting, and the fact, that the model's memory is locked.
LOCKED = "mlock"
_UNLOCKED = (
    "the engine could not lock the model's memory, so the kernel may page it out when host memory is short, and"
    " requests then wait for the disk; raise the limit of the user (`ulimit -l`, RLIMIT_MEMLOCK) or remove the option"
)
_SWITCHES = {"on": True, "true": True, "enabled": True, "off": False, "false": False, "disabled": False}


def judge_applied(
    asked: Mapping[str, OptionValue],
    facts: Mapping[str, Any],
    *,
    properties: Properties | None = None,
    warnings: Iterable[str] = (),
    check: str = "applied",
) -> Finding | None:
    """Hold every setting of ``asked`` against the boot log's facts, and the context against the running server.

    :param asked: :meth:`pytest_vram.backends.base.Engine.asked`, in the words of the facts.
    :param facts: :attr:`pytest_vram.bootlog.Boot.facts`.
    :param warnings: the boot's warnings, which often name the cause.
    :returns: failed where a setting took another value, inconclusive where the log does not say.
    """
    wrong: list[tuple[str, str]] = []
    silent: list[str] = []
    for name, value in asked.items():
        if name == LOCKED and name not in facts:
            continue  # the engine says only when it could not
        if name not in facts:
            silent.append(name)
            continue
        problem = _difference(name, value, facts)
        if problem is not None:
            wrong.append((name, problem))
    if properties is not None:
        wrong.extend(_properties(asked, properties))
    told = [("warning", text) for text in warnings]
    if wrong:
        names = ", ".join(dict.fromkeys(name for name, _ in wrong))
        rows = [*wrong, *((name, "the boot log does not say") for name in silent), *told]
        return _finding(check, "failed", "setting not applied", f"Asked for, but not in effect: {names}.", rows)
    if silent:
        rows = [(name, f"asked for {asked[name]!r}, the boot log does not say") for name in silent] + told
        title = "What the boot log leaves open cannot be called applied; raise the engine's log verbosity."
        return _finding(check, "inconclusive", "settings not provable", title, rows)
    return None


def judge_locked(
    asked: Mapping[str, OptionValue], facts: Mapping[str, Any], *, warnings: Iterable[str] = (), check: str = LOCKED
) -> Finding | None:
    """Hold the wish that the model's memory is locked against the boot log; what other settings became is not asked."""
    if not asked.get(LOCKED):
        return None
    return judge_applied({LOCKED: True}, facts, warnings=[text for text in warnings if "lock" in text], check=check)


def judge_context(
    asked: int, facts: Mapping[str, Any], *, properties: Properties | None = None, check: str = "context"
) -> Finding | None:
    """Hold the context that is served against the context asked for, in tokens; a longer one by rounding is fine."""
    found: dict[str, int] = {}
    if isinstance(facts.get("context"), int):
        found["boot log"] = facts["context"]
    if properties is not None and properties.context is not None:
        found["running server"] = properties.context
    if not found:
        title = f"A context of {asked} tokens was asked for; neither the boot log nor the server says what is served."
        return _finding(check, "inconclusive", "context not provable", title, [])
    wrong = [(name, f"{context} tokens") for name, context in found.items() if not _context_holds(asked, context)]
    if not wrong:
        return None
    return _finding(check, "failed", "context not served", f"A context of {asked} tokens was asked for.", wrong)


def judge_layers(asked: int | str | None, facts: Mapping[str, Any], *, check: str = "layers") -> Finding | None:
    """Hold the layers on the device against the layers asked for.

    The engine's own line is not believed alone: without a single weight buffer on a device no layer is there.

    :param asked: number of layers, ``all``, or ``None`` for all of them.
    """
    for name in ("layers_offloaded", "layers_offloadable", "layers_on_device_real"):
        if facts.get(name) is None:
            title = f"The boot log does not say {name}: raise the engine's log verbosity."
            return _finding(check, "inconclusive", "layers not provable", title, [])
    total = int(facts["layers_offloadable"])
    real = int(facts["layers_on_device_real"])
    want = total if asked is None or asked in _EVERYTHING else min(int(asked), total)
    if real == want:
        return None
    rows = [("said by the engine", f"{facts['layers_offloaded']}/{total} layers")]
    if real == 0 and facts["layers_offloaded"]:
        rows.append(("but", "no buffer of the model is on a device"))
    title = f"{want} of {total} layers were asked to be on the device, {real} are."
    return _finding(check, "failed", "layers not on the device", title, rows)


def judge_loaded(at_start: Measured, at_ready: Measured, *, check: str = "loaded") -> Finding | None:
    """Hold the server's memory at ``ready`` against that at ``start``: a model that was loaded takes memory."""
    for when, figure in (("start", at_start), ("ready", at_ready)):
        if isinstance(figure, Unmeasurable):
            title = f"The server's memory at {when} could not be measured: {figure.reason}."
            return _finding(check, "inconclusive", "load not provable", title, [])
    assert isinstance(at_start, Reading)
    assert isinstance(at_ready, Reading)
    if at_ready.bytes > at_start.upper:
        return None
    rows = [
        ("at start", f"{amount(at_start)} ({provenance(at_start)})"),
        ("at ready", f"{amount(at_ready)} ({provenance(at_ready)})"),
    ]
    if at_ready.upper <= at_start.bytes:
        title = "The server holds no more memory when it is ready than when it started: nothing was loaded by it."
        return _finding(check, "failed", "nothing was loaded", title, rows)
    title = "The server's memory at start and at ready cannot be told apart."
    return _finding(check, "inconclusive", "load not provable", title, rows)


# ---------------------------------------------------------------- comparing


def _context_holds(asked: int, served: int) -> bool:
    return asked <= served < asked + CONTEXT_STEP


def _difference(name: str, value: OptionValue, facts: Mapping[str, Any]) -> str | None:
    real = facts[name]
    if name == "context" and isinstance(value, int) and isinstance(real, int):
        return None if _context_holds(value, real) else f"asked for {value}, got {real}"
    if name == LOCKED:
        return None if real == value else _UNLOCKED
    if name == "layers_offloaded":
        total = facts.get("layers_offloadable")
        want = total if value in _EVERYTHING else value
        if isinstance(want, int) and isinstance(total, int):
            want = min(want, total)
        if want != real:
            return f"asked for {value}, got {real} of {total}"
        if want and facts.get("layers_on_device_real") == 0:
            return f"the engine says {real} of {total}, but no buffer of the model is on a device"
        return None
    return None if _plain(value) == _plain(real) else f"asked for {value}, got {real}"


def _plain(value: object) -> object:
    """Values in one spelling: ``on``, ``true``, ``enabled`` and 1 say the same, as do ``F16`` and ``f16``."""
    if isinstance(value, str):
        word = value.strip().lower()
        return _SWITCHES.get(word, word)
    return value


def _properties(asked: Mapping[str, OptionValue], properties: Properties) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    context, slots = asked.get("context"), asked.get("slots")
    if isinstance(context, int) and properties.context is not None and not _context_holds(context, properties.context):
        wrong.append(("context", f"asked for {context}, the running server serves {properties.context}"))
    if isinstance(slots, int) and properties.slots is not None and properties.slots != slots:
        wrong.append(("slots", f"asked for {slots}, the running server has {properties.slots}"))
    return wrong


def _finding(check: str, verdict: str, section: str, title: str, rows: list[tuple[str, str]]) -> Finding:
    return Finding(
        check=check,
        verdict="failed" if verdict == "failed" else "inconclusive",
        section=section,
        text=block(title, rows),
    )

"""Was the configuration really applied: asked, against what the boot log and the server say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_vram.backends.base import Properties
from pytest_vram.bootlog import Boot
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.shown import EVERYTHING, Sources, context_holds, of_setting, sharing
from pytest_vram.checks.wording import block
from pytest_vram.spec import OptionValue
from pytest_vram.units import mib

#: The setting, and the fact, that the model's memory is locked.
LOCKED = "mlock"


def judge_applied(
    asked: Mapping[str, OptionValue],
    facts: Mapping[str, Any],
    *,
    properties: Properties | None = None,
    boot: Boot | None = None,
    locked: int | None = None,
    warnings: Iterable[str] = (),
    check: str = "applied",
) -> Finding | None:
    """Hold every setting of ``asked`` against the boot log's facts, the printed buffers and the running server.

    Every source that speaks of a setting must agree with what was asked for. A setting of which none speaks is named
    as not provable: it may have been applied, and nothing shows it.

    :param asked: :meth:`pytest_vram.backends.base.Engine.asked`, in the words of the facts.
    :param facts: :attr:`pytest_vram.bootlog.Boot.facts`.
    :param properties: what the running server says of itself.
    :param boot: the whole boot, by whose buffers settings of placement are judged.
    :param locked: bytes that the server's processes have locked; ``None`` where that is not known, and then a lock of
        which the log does not complain counts as one.
    :param warnings: the boot's warnings, which often name the cause; those of ``boot`` count besides.
    :returns: failed where a setting took another value, inconclusive where no source says.
    """
    told = list(dict.fromkeys([*warnings, *(boot.warnings if boot is not None else ())]))
    sources = Sources(
        facts=facts,
        properties=properties or Properties(),
        entries=boot.entries if boot is not None else (),
        complete=boot is not None and boot.evidence == "complete",
        devices=boot.devices if boot is not None else {},
        warnings=told,
        locked=locked,
    )
    wrong: list[tuple[str, str]] = []
    silent: list[str] = []
    for name, value in asked.items():
        found = of_setting(name, value, sources)
        if not found:
            silent.append(name)
        wrong.extend((name, shown.problem) for shown in found if shown.problem)
    warned = [("warning", text) for text in told]
    if wrong:
        names = ", ".join(dict.fromkeys(name for name, _ in wrong))
        rows = [*wrong, *((name, "not provable: neither the boot log nor the server says") for name in silent), *warned]
        return _finding(check, "failed", "setting not applied", f"Asked for, but not in effect: {names}.", rows)
    if silent:
        rows = [(name, f"asked for {asked[name]!r}, and no source says what became of it") for name in silent] + warned
        title = (
            f"Asked for, and not provable: {', '.join(silent)}. What neither the boot log nor the server shows cannot"
            " be called applied; a higher verbosity of the engine's log may show it."
        )
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
    shared = sharing(facts, properties)
    wrong = [
        (name, f"{context} tokens") for name, context in found.items() if not context_holds(asked, context, *shared)
    ]
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
    offloaded = int(facts["layers_offloaded"])
    real = offloaded if facts["layers_on_device_real"] else 0
    want = total if asked is None or asked in EVERYTHING else min(int(asked), total)
    if real == want:
        return None
    rows = [("said by the engine", f"{facts['layers_offloaded']}/{total} layers")]
    if real == 0 and facts["layers_offloaded"]:
        rows.append(("but", "no buffer of the model is on a device"))
    title = f"{want} of {total} layers were asked to be on the device, {real} are."
    return _finding(check, "failed", "layers not on the device", title, rows)


def judge_experts(
    printed: int, *, moved: int, unmoved: int, asked: object = "", check: str = "experts"
) -> Finding | None:
    """Hold the weights that the log shows on the host against estimates of them, with experts kept there and without.

    A log says nothing of ``n-cpu-moe`` itself below its highest verbosity; where the weights lie shows it.

    :param printed: bytes of weights on the host by the boot log. :param moved: bytes there by the estimate of what was
        asked for. :param unmoved: the same without the option.
    """
    rows = [("printed", mib(printed)), ("with it, about", mib(moved)), ("without it, about", mib(unmoved))]
    if moved <= unmoved:
        title = "By the estimate the option moves nothing of this model to the host."
        return _finding(check, "failed", "setting without effect", title, rows)
    if abs(printed - moved) <= max(0.1 * (moved - unmoved), 0.02 * moved):
        return None
    if abs(printed - unmoved) <= max(0.1 * (moved - unmoved), 0.02 * unmoved):
        title = f"Experts of {asked or 'some'} layers were to stay on the host; by the weights there, none did."
        return _finding(check, "failed", "experts not on the host", title, rows)
    title = "The weights on the host are those of neither estimate, so where the experts are cannot be told."
    return _finding(check, "inconclusive", "experts not provable", title, rows)


def judge_counted(
    sent: int, counted: int | None, *, context: int | None = None, check: str = "counted"
) -> Finding | None:
    """Hold the tokens that a server says it read of a prompt against those that were sent.

    A server that cuts a prompt to its own context answers with status 200 and fewer tokens. Tokens of a chat template
    must be in ``sent``.

    :param counted: ``usage.prompt_tokens``; ``None`` where the server does not count.
    :param context: the context asked for in tokens, which a message names.
    """
    if counted is None:
        return _finding(check, "inconclusive", "tokens not counted", "The server counts no tokens of prompts.", [])
    if counted >= sent:
        return None
    rows = [("sent", f"{sent:,} tokens"), ("read by the server", f"{counted:,} tokens")]
    if context is not None:
        rows.append(("asked for", f"a context of {context:,} tokens"))
    return _finding(check, "failed", "prompt cut", "A prompt was cut in silence.", rows)


def _finding(check: str, verdict: str, section: str, title: str, rows: list[tuple[str, str]]) -> Finding:
    return Finding(
        check=check,
        verdict="failed" if verdict == "failed" else "inconclusive",
        section=section,
        text=block(title, rows),
    )

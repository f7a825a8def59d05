"""The configuration really applied: a changed setting without a real restart is the usual mistake.

Three proofs: what was asked for against the log of this boot and what the server says of itself; a fresh boot, whose
own process answers; and memory that rose on each device while it loaded. An option that was swallowed, an old server on
the port or a model that was never loaded fails one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram import inconclusive
from pytest_vram.backends.base import Properties
from pytest_vram.checks import (
    judge_answered,
    judge_applied,
    judge_context,
    judge_experts,
    judge_fresh,
    judge_layers,
    judge_moved,
)
from pytest_vram.errors import VramError

from .requirements import asked, context_per_slot, hold, need, need_measurements, on_host_only

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend
    from pytest_vram.meter import Meter
    from pytest_vram.spec import OptionValue

#: Settings of which a log of usual verbosity shows no more than where the weights lie.
EXPERTS = ("n_cpu_moe", "cpu_moe")


def test_boot_log_shows_what_was_asked(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """Every setting that was asked for has its value, by this boot's log, its buffers and what the server says."""
    asked = dict(vram_backend.asked)
    if on_host_only(vram_backends):
        asked.pop("layers_offloaded", None)  # no device takes layers; the log's line about them means nothing
    if not asked:
        pytest.skip(f"the options of backend {vram_backend.name!r} set nothing that a log or a server can show")
    boot = vram_backend.boot
    if "tensor_overrides" not in boot.facts:
        _experts(vram_backend, asked)
    properties = vram_backend.properties() if not vram_backend.missing("properties") else None
    hold(judge_applied(asked, boot.facts, properties=properties, boot=boot, locked=vram_backend.locked()))


def _experts(backend: RunningBackend, asked: dict[str, OptionValue]) -> None:
    """Judge by estimates where the experts are, and take the setting out of ``asked`` where that could be done."""
    given = [name for name in EXPERTS if name in asked]
    printed = backend.boot.ledger().buckets()
    labels = {label for bucket in ("weights", "experts") for label in printed.get(bucket, {})}
    if not given or labels <= {"host"} or backend.boot.evidence != "complete":
        return
    hosts = [printed.get("weights", {}).get("host", 0), printed.get("experts", {}).get("host", 0)]
    try:
        moved, unmoved = (_on_host(backend, without) for without in ((), ("n-cpu-moe", "cpu-moe")))
    except VramError:
        return  # no estimate for this engine or model: the setting stays not provable
    for name in given:
        finding = judge_experts(sum(hosts), moved=moved, unmoved=unmoved, asked=asked[name], check=name)
        if finding is None or finding.verdict == "failed":
            hold(finding)
            del asked[name]


def _on_host(backend: RunningBackend, without: tuple[str, ...]) -> int:
    """Bytes of the weights on the host by the estimate of the backend's spec without these options."""
    import msgspec

    from pytest_vram.predicting import estimate_of

    options = {name: value for name, value in backend.spec.options.items() if name not in without}
    buckets = estimate_of(msgspec.structs.replace(backend.spec, options=options)).buckets()
    return sum(buckets.get(bucket, {}).get("host", 0) for bucket in ("weights", "experts"))


def test_server_of_this_run_reports_it(vram_backend: RunningBackend) -> None:
    """The process that this run started says itself that it serves the model, slots and context asked for."""
    need(vram_backend, "properties")
    properties = vram_backend.properties()
    if properties.model is not None and vram_backend.command:
        # The engine of a command may name its model by another path.
        names = [word.rpartition("/")[2] for word in vram_backend.command]
        known = properties.model in vram_backend.command or (
            vram_backend.engine == "command" and properties.model.rpartition("/")[2] in names
        )
        if vram_backend.engine != "command" or vram_backend.spec.model is not None:
            assert known, f"the server at {vram_backend.url} serves {properties.model}, which it was not started with"
    served = vram_backend.spec.served_model
    if served is not None and properties.models and vram_backend.engine != "llama-server":
        known = any(name in (served, f"{served}:latest") for name in properties.models)
        assert known, f"the server at {vram_backend.url} serves {', '.join(properties.models)}, and not {served}"
    slots = vram_backend.asked.get("slots")
    if isinstance(slots, int) and properties.slots is not None:
        assert properties.slots == slots, f"{slots} slots were asked for, the server has {properties.slots}"
    wanted, whole = context_per_slot(vram_backend), asked(vram_backend, "context")
    parts = slots if isinstance(slots, int) and wanted < whole else 1
    for context in (*properties.slot_contexts, properties.context_per_slot):
        if context is not None and parts > 1:
            # the share of each slot is rounded up as well
            together = Properties(context=context * parts, slots=parts)
            if judge_context(whole, {}, properties=together) is None:
                continue
        hold(judge_context(wanted, {}, properties=Properties(context=context)))


def test_it_was_booted_by_this_run(vram_backend: RunningBackend) -> None:
    """The process that holds the port was started in this boot, and so was the log that is read."""
    need(vram_backend, "process", "restart")
    hold(judge_fresh(vram_backend.listening(), vram_backend.boot))


def test_memory_rose_while_it_loaded(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """On each device the server holds what its log says that it put there, since it started."""
    need_measurements(vram_backends, "whether memory rose")
    need(vram_backend, "process", "restart")
    running = vram_backend.running
    if not running.at_start.keys() & running.at_ready.keys():
        inconclusive("the server's memory at its start and when it was ready could not be measured")
    devices = {device.label for device in vram_backends.context.devices}
    start = {label: figure for label, figure in running.at_start.items() if label in devices}
    ready = {label: figure for label, figure in running.at_ready.items() if label in devices}
    for finding in judge_moved(start, ready, vram_backend.boot):
        hold(finding)


def test_memory_stays_while_it_answers(vram: Meter, vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """A tiny request does not make the memory fall: who answers is who holds the model."""
    need_measurements(vram_backends, "whether memory stays")
    need(vram_backend, "process", "chat")
    before = vram.now()
    vram_backend.client.chat("Hi", max_tokens=1, temperature=0)
    hold(judge_answered(before, vram.now()))


def test_layers_are_on_the_device(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """As many layers are on the device as were asked for, by the buffers that hold them and not by one line."""
    if on_host_only(vram_backends):
        pytest.skip("host memory stands in for VRAM in this run (--vram-device=cpu): no device takes layers")
    need(vram_backend, "layers")
    layers = vram_backend.asked.get("layers_offloaded")
    if not isinstance(layers, (int, str)):
        pytest.skip(f"the options of backend {vram_backend.name!r} do not say how many layers go to the device")
    hold(judge_layers(layers, vram_backend.boot.facts))

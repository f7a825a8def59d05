"""The configuration really applied: a changed setting without a real restart is the usual mistake.

Three proofs: the log of this boot, what the server that this run started says of itself, and memory that rose while it
loaded. An option that was swallowed, a server of somebody else on the port or a model that was never loaded fails one
of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram import inconclusive
from pytest_vram.backends.base import Properties
from pytest_vram.checks import judge_applied, judge_context, judge_layers, judge_loaded

from .requirements import context_per_slot, hold, need, need_measurements, on_host_only

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend


def test_boot_log_shows_what_was_asked(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """Every setting whose effect this boot's log states has the value that was asked for."""
    need(vram_backend, "boot-log")
    asked = dict(vram_backend.asked)
    if on_host_only(vram_backends):
        asked.pop("layers_offloaded", None)  # no device takes layers; the log's line about them means nothing
    if not asked:
        pytest.skip(f"the options of backend {vram_backend.name!r} set nothing that its boot log states")
    hold(judge_applied(asked, vram_backend.boot.facts, warnings=vram_backend.boot.warnings))


def test_server_of_this_run_reports_it(vram_backend: RunningBackend) -> None:
    """The process that this run started says itself that it serves the model, slots and context asked for."""
    need(vram_backend, "properties")
    properties = vram_backend.properties()
    if properties.model is not None and vram_backend.command:
        assert properties.model in vram_backend.command, (
            f"the server at {vram_backend.url} serves {properties.model}, which it was not started with"
        )
    slots = vram_backend.asked.get("slots")
    if isinstance(slots, int) and properties.slots is not None:
        assert properties.slots == slots, f"{slots} slots were asked for, the server has {properties.slots}"
    served = Properties(context=properties.context_per_slot)
    hold(judge_context(context_per_slot(vram_backend), {}, properties=served))


def test_memory_rose_while_it_loaded(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """The server holds more memory when it is ready than when it started: this boot loaded the model."""
    need_measurements(vram_backends, "whether memory rose")
    need(vram_backend, "process", "restart")
    running = vram_backend.running
    labels = sorted(running.at_start.keys() & running.at_ready.keys())
    if not labels:
        inconclusive("the server's memory at its start and when it was ready could not be measured")
    findings = [judge_loaded(running.at_start[label], running.at_ready[label]) for label in labels]
    if None not in findings:
        hold(findings[0])


def test_layers_are_on_the_device(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """As many layers are on the device as were asked for, by the buffers that hold them and not by one line."""
    if on_host_only(vram_backends):
        pytest.skip("host memory stands in for VRAM in this run (--vram-device=cpu): no device takes layers")
    need(vram_backend, "layers")
    layers = vram_backend.asked.get("layers_offloaded")
    if not isinstance(layers, (int, str)):
        pytest.skip(f"the options of backend {vram_backend.name!r} do not say how many layers go to the device")
    hold(judge_layers(layers, vram_backend.boot.facts))

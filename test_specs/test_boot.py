"""The deployment starts, and stays under its budget while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_vram import inconclusive
from pytest_vram.readings import Reading

from .requirements import need

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend
    from pytest_vram.meter import Meter


def test_deployment_boots_under_its_budget(vram: Meter, vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """The server gets ready within its boot timeout, and its boot peak counts against the budget."""
    need(vram_backend, "process")
    if vram_backends.context.predicted:
        return  # it is ready, and its estimate is held against the budget
    peak = vram.peak
    if not isinstance(peak, Reading):
        inconclusive(f"the boot peak could not be measured: {peak.reason}")
    for label, figure in vram_backend.running.boot_peak.items():
        assert isinstance(figure, Reading), f"the boot peak on {label} could not be measured: {figure.reason}"
        assert figure.bytes > 0, f"the server became ready without holding a byte on {label}"


def test_boot_log_explains_the_memory(vram_backend: RunningBackend) -> None:
    """The boot log prints every buffer, so that a grown peak can be blamed on a part."""
    need(vram_backend, "boot-log")
    boot = vram_backend.boot
    assert boot.ready, f"the boot log {vram_backend.log} never says that the server is ready"
    assert boot.evidence == "complete", f"the buffers in {vram_backend.log} are {boot.evidence}: {boot.warnings}"
    buckets = boot.ledger().buckets()
    assert "weights" in buckets, f"no weights among the printed buffers: {buckets}"

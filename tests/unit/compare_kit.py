"""Ledgers and run reports with chosen figures, for tests of what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_vram.keeper.messages import BootPhase, DeviceInfo
from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.readings import Measured, Reading
from pytest_vram.report import BackendRecord, RunInfo, RunReport, TestRecord
from pytest_vram.units import MIB

#: Half of the last digit of a figure that llama.cpp prints.
DIGIT = 5243


def printed(bucket: Bucket, size: int, device: str = "gpu0", detail: str = "") -> Entry:
    """A buffer as an engine's log has it."""
    return Entry(bucket=bucket, device=device, bytes=size, source="engine-log", detail=detail, resolution=DIGIT)


def predicted(bucket: Bucket, size: int, device: str = "gpu0", *, at_most: int | None = None) -> Entry:
    """A part of an estimate."""
    return Entry(bucket=bucket, device=device, bytes=size, source="estimate", at_most=at_most)


def reading(size: int, device: str = "gpu0", source: str = "nvml-process", **more: Any) -> Reading:
    """A measured figure of a backend."""
    return Reading(bytes=size, source=source, scope="backend", device=device, exact=True, **more)


def measured(entries: tuple[Entry, ...], *readings: Reading) -> Ledger:
    """Printed buffers against measured totals."""
    return Ledger(entries=entries).against({one.device: one for one in readings})


def backend(
    *,
    name: str = "agent",
    weights: int = 4000 * MIB,
    kv: int = 512 * MIB,
    compute: int = 300 * MIB,
    rest: int = 200 * MIB,
    context: int = 4096,
    facts: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    source: str = "nvml-process",
    engine: str = "llama-server",
    base: int | None = None,
    ready: int | None = None,
    boot: int | None = None,
) -> BackendRecord:
    """One generation of a backend on one card, whose peak is its buffers and ``rest``."""
    entries = (printed("weights", weights), printed("kv", kv), printed("compute", compute))
    total = weights + kv + compute + rest
    phases = [BootPhase(name="start", start=0, end=1, peak={"gpu0": reading(base, source=source)})] if base else []
    said = {
        "architecture": "llama",
        "layers": 32,
        "parameters": 8030000000,
        "experts": 0,
        "quantization": "Q4_K - Medium",
        "context": context,
        "slots": 1,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
        "build": "10434 (1234567)",
    }
    return BackendRecord(
        name=name,
        engine=engine,
        generation=1,
        key="k",
        pid=1,
        command=[],
        spec={"name": name, "engine": engine, "origin": "test", "base": ".", "options": dict(options or {})},
        log="agent.1.log",
        ledger=Ledger(entries=entries, devices={"gpu0": "CUDA0"}).against({"gpu0": reading(total, source=source)}),
        facts={**said, **(facts or {})},
        phases=phases,
        boot_peak={} if boot is None else {"gpu0": reading(boot, source=source)},
        at_ready={} if ready is None else {"gpu0": reading(ready, source=source)},
        peak={"gpu0": reading(total, source=source)},
    )


def card(name: str = "NVIDIA GeForce RTX 3060", kind: str = "nvml", label: str = "gpu0") -> DeviceInfo:
    """A device of a run."""
    return DeviceInfo(label=label, kind=kind, name=name, capacity=reading(12 << 30, label), source="NVML")


def attempt_at(nodeid: str, peak: Measured, outcome: Any = "passed") -> TestRecord:
    """A test with its peak."""
    return TestRecord(nodeid=nodeid, outcome=outcome, seconds=1.0, peak={"gpu0": peak}, own={"gpu0": peak})


def run_of(
    *backends: BackendRecord,
    tests: tuple[TestRecord, ...] = (),
    devices: tuple[DeviceInfo, ...] = (),
    versions: Mapping[str, str] | None = None,
) -> RunReport:
    """A finished run."""
    info = RunInfo(
        id="20260101T000000Z-abcdef",
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        verdict="passed",
        device="auto",
        devices=list(devices or (card(),)),
        settings={},
        versions=dict(versions or {"python": "3.11.7"}),
        counts={},
        command=[],
    )
    return RunReport(run=info, tests=list(tests), backends=list(backends))

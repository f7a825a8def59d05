"""What the summary says of cards, waiting, host use and what tests left behind."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_vram.keeper.messages import DeviceInfo, HostUse, Residue
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.report import RunReport, TestRecord, summary
from pytest_vram.summary import Collector
from tests.unit.test_report_terminal import reading, run_report

GIB, MIB = 1 << 30, 1 << 20


def text(report: RunReport, verbosity: int = 0) -> str:
    return " ".join(" ".join(summary(report, verbosity=verbosity, width=80)).split())


def gpu(**more: Any) -> DeviceInfo:
    given: dict[str, Any] = {
        "label": "gpu0",
        "kind": "nvml",
        "name": "NVIDIA H200",
        "capacity": reading(8 * GIB, "gpu0"),
        "source": "NVML",
        "limit_from": "MIG slice",
    }
    return DeviceInfo(**{**given, **more})


def record(name: str = "t.py::test_it", **more: Any) -> TestRecord:
    return TestRecord(nodeid=name, outcome="passed", seconds=1.0, peak={"gpu0": reading(GIB, "gpu0")}, **more)


def report(*tests: TestRecord, device: DeviceInfo | None = None, **info: Any) -> RunReport:
    found = run_report("gpu0", devices=[device or gpu()], **info)
    return msgspec.structs.replace(found, tests=list(tests) or found.tests)


def test_the_size_of_a_card_says_what_sets_it() -> None:
    """A MIG slice is not the card, and a size that could not be read says why."""
    assert "gpu0: NVIDIA H200, 8,192 MiB (MIG slice), measured by NVML" in text(report())
    unknown: Measured = Unmeasurable(reason="Insufficient Permissions")
    assert "capacity unknown (Insufficient Permissions)" in text(report(device=gpu(capacity=unknown)))


def test_a_device_delta_is_labelled() -> None:
    """Where nobody says who holds what, the reader is told what stands for the run."""
    assert "gpu0: device-delta" in text(report(device=gpu(per_process=False)))
    assert "device-delta" not in text(report())


def test_the_reserve_stands_beside_the_budget() -> None:
    """In MiB, with the place that it came from."""
    settings = {"reserve": {"value": 500 * MIB, "from": "--vram-reserve"}}
    assert "reserve 500.0 MiB from --vram-reserve" in text(report(settings=settings))


def test_long_waits_are_told_with_their_reason() -> None:
    """The sum, the longest and who held what; short ones are not worth a line."""
    waits = [record(f"t.py::test_{n}", waited=float(n), waited_for=[f"test_{n - 1} holds 3 GiB"]) for n in (1, 2, 3)]
    assert "3 tests waited 6.0 s in all for room, t.py::test_3 3.0 s: test_2 holds 3 GiB" in text(report(*waits))
    assert "waited" not in text(report(record(waited=0.2)))


def test_faults_and_swap_are_details() -> None:
    """Pages from disk and memory that went to swap explain erratic latency; nothing is said where there was none."""
    some = HostUse(major_faults=reading(12 * MIB), swap_grew=reading(300 * MIB))
    none = HostUse(major_faults=reading(0), swap_grew=Unmeasurable(reason="no swap"))
    found = text(report(record(host_use=some)), 1)
    assert "12.00 MiB read from disk by page faults, 300.0 MiB went to swap" in found
    assert "page faults" not in text(report(record(host_use=none)), 1)


def collector(*tests: TestRecord) -> Collector:
    found = Collector.__new__(Collector)
    found.tests = list(tests)
    found._state = None
    return found


def test_tests_that_left_memory_behind_are_named_once_with_the_most() -> None:
    """However many later tests found it."""
    small = Residue(test="test_a", device="gpu0", bytes=GIB, pids=[(7, "python")])
    large = Residue(test="test_a", device="gpu0", bytes=2 * GIB, pids=[(7, "python")])
    lines = collector(record(residues=[small]), record(residues=[large]), record(residues=[small]))._left_behind()
    assert lines == [
        "memory was left behind for the tests that followed: 2,048 MiB of gpu0 by test_a, still held by python (PID 7)"
    ]


def test_a_context_is_no_leak() -> None:
    """What the first use of a card leaves in pytest's process is warned of only where it is more than a context."""
    context = Residue(
        test="test_a", device="gpu0", bytes=1105 * MIB, pids=[(7, "python")], first_use=True, context=1105 * MIB
    )
    assert collector(record(residues=[context]))._left_behind() == []
    more = msgspec.structs.replace(context, bytes=1281 * MIB, context=1280 * MIB)
    (line,) = collector(record(residues=[more]))._left_behind()
    assert line.endswith(
        "still held by python (PID 7), the driver's context included, which stays until the process ends"
    )
    assert (
        collector(record(residues=[msgspec.structs.replace(context, first_use=False, context=0)]))._left_behind() != []
    )


def test_a_page_or_two_are_worth_no_warning() -> None:
    """20 KiB by which a child of another test grew warn of nobody."""
    little = Residue(test="test_quiet", device="gpu0", bytes=20 << 10, pids=[(7, "python")])
    assert collector(record(residues=[little]))._left_behind() == []


def test_spill_without_a_limit_is_a_warning() -> None:
    """For a test with a limit it is a failure; for others it must not be silent."""
    spilled = Reading(bytes=GIB, source="drm-fdinfo", scope="run", device="gpu0", exact=False)
    (line,) = collector(record(), record("t.py::test_slow", spill={"gpu0": spilled}))._spilled()
    assert "1,024 MiB" in line
    assert "t.py::test_slow" in line
    assert collector(record())._spilled() == []

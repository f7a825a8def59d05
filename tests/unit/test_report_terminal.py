"""The summary and the ledger table for a terminal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.backends.record import RequestRecord
from pytest_vram.bootlog import read
from pytest_vram.checks import judge_peak
from pytest_vram.keeper.messages import Closed, DeviceInfo, Sampling
from pytest_vram.ledger import BUCKETS, Entry, Ledger
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.report import BackendRecord, RunInfo, RunReport, TestRecord, ledger_table, summary
from pytest_vram.spec import Limits

MIB = 1 << 20
LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs" / "llama-server" / "2026-b10068"


def reading(size: int, device: str = "host", high: int | None = None) -> Reading:
    return Reading(bytes=size, at_most=high, source=f"{device}-hwm", scope="run", device=device, exact=high is None)


def run_report(device: str = "host", *, outcome: str = "passed", **info: object) -> RunReport:
    peak: dict[str, Measured] = {device: reading(250 * MIB, device)}
    boot = read(LOGS / ("cpu.log" if device == "host" else "rpc.log"))
    run = RunInfo(
        **{  # type: ignore[arg-type]
            "id": "r1",
            "started": "2026-01-01T00:00:00+00:00",
            "seconds": 3.0,
            "verdict": "passed",
            "device": device,
            "devices": [
                DeviceInfo(label=device, kind="x", name="A device", capacity=reading(8 << 30, device), source="hwm")
            ],
            "settings": {"budget": {"value": "4GB", "from": "--vram-budget on the command line"}},
            "versions": {},
            "counts": {outcome: 1},
            "command": ["pytest"],
        }
        | info
    )
    test = TestRecord(
        nodeid="pytest_vram_specs.test_requests::test_chat",
        outcome=outcome,  # type: ignore[arg-type]
        seconds=1.0,
        peak=peak,
        baseline={device: reading(200 * MIB, device)},
        limit={device: 4 * 10**9},
        requests=[
            RequestRecord(id="1", backend="d", path="/", result="ok", t=0, latency=1.0, tokens_per_second=rate)
            for rate in (90.0, 110.0)
        ],
    )
    backend = BackendRecord(
        name="demo",
        engine="llama-server",
        generation=1,
        key="k",
        pid=1,
        command=[],
        spec={},
        log="demo.1.log",
        ledger=boot.ledger().against({device: reading(250 * MIB, device)}),
        facts=boot.facts,
        boot_peak=dict(peak),
        boot_seconds=0.4,
    )
    return RunReport(run=run, tests=[test], backends=[backend])


def test_table_adds_up() -> None:
    """The table shows printed buckets, the signed rest and the measured total, which is their sum."""
    ledger = read(LOGS / "rpc.log").ledger().against({"gpu0": reading(190 * MIB, "gpu0")})
    lines = ledger_table(ledger)
    rows = {line.split("  ")[1]: line.split()[-2:] for line in lines if line.startswith("  ")}
    assert lines[0].startswith("memory breakdown (ledger), MiB")
    assert rows["kv"] == ["90.00", "-"]
    assert rows["weights"] == ["92.10", "28.69"]
    assert rows["printed by the engine"] == ["198.48", "35.14"]
    assert rows["unattributed"] == ["-8.48", "-"]
    assert rows["total measured"] == ["190.00", "-"]
    assert any("host: not measured" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_table_of_many_devices() -> None:
    """More devices than fit side by side continue in another block, within 80 columns."""
    entries = tuple(Entry(bucket="kv", device=f"gpu{i}", bytes=i * MIB, source="engine-log") for i in range(11))
    lines = ledger_table(Ledger(entries=entries))
    heads = [line.split()[4:] for line in lines if line.startswith("memory breakdown")]
    assert [label for head in heads for label in head] == [f"gpu{i}" for i in range(11)]
    assert max(map(len, lines)) <= 80


def test_a_wide_table_has_a_short_title() -> None:
    """Where figures need the room, columns stay in line and within 80 columns."""
    entries = (Entry(bucket="kv", device="host", bytes=0, source="engine-log"),)
    measured = {"gpu0": reading(0, "gpu0"), "gpu1": reading(0, "gpu1"), "gpu12": reading(1_048_575_994_758, "gpu12")}
    lines = ledger_table(Ledger(entries=entries).against(measured))
    assert lines[0].startswith("ledger, MiB")
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines[:4]}) == 1


def test_empty_table() -> None:
    """An empty ledger says so instead of showing zeros."""
    assert ledger_table(Ledger()) == ["memory breakdown (ledger): nothing was printed and nothing was measured"]


def test_nothing_to_say() -> None:
    """A run in which nothing was judged has no summary."""
    full = run_report()
    quiet = msgspec.structs.replace(full, tests=[TestRecord(nodeid="t", outcome="passed", seconds=0.1)], backends=[])
    for verbosity in (-1, 0, 1):
        assert summary(quiet, verbosity=verbosity) == []


def test_quiet_is_one_line() -> None:
    """`-q` is one line with verdict, peak, limit and the stand-in."""
    (line,) = summary(run_report(), verbosity=-1)
    for words in ("passed", "250.0 MiB of 4GB (3,815 MiB)", "test_chat", "host memory stands in for VRAM"):
        assert words in line


def test_normal_lines() -> None:
    """The summary names device, verdict, budget and its place, peak, backend and ledger."""
    text = "\n".join(summary(run_report("gpu0")))
    for words in (
        "gpu0: A device, 8,192 MiB, measured by hwm",
        "passed: 1 passed; 1 measured",
        "4GB from --vram-budget on the command line",
        "gpu0: 250.0 MiB, 3,565 MiB under its limit",
        "demo#1 (llama-server), ready after 0.4 s",
        "30/30 layers on a device",
        "90.00",
        "total measured",
    ):
        assert words in text.replace("\n            ", " "), words
    assert "stands in" not in text


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_host_says_so(verbosity: int) -> None:
    """On `cpu` every part with a figure says that host memory stands in for VRAM."""
    rows: list[str] = []
    for line in summary(run_report(), verbosity=verbosity):
        if line.startswith(" " * 12):
            rows[-1] += " " + line.strip()
        else:
            rows.append(line)
    starts = ("vram:", "device", "verdict", "budget", "peak", "backend", "tests", "  host:")
    said = [row for row in rows if row.startswith(starts)]
    assert len(said) == {-1: 1, 0: 6, 1: 7}[verbosity]
    for row in said:
        assert "host memory stands in for VRAM" in row or "host memory standing in for VRAM" in row, row


def test_verbose_table() -> None:
    """`-v` adds a row per test with peak, limit, margin, rate and idle memory."""
    lines = summary(run_report(), verbosity=1)
    row = next(line for line in lines if line.rstrip().endswith("200.0") and "test_chat" in line)
    assert row.split()[-5:] == ["250.0", "3,814.7", "+3,564.7", "100.0", "200.0"]


def test_undecided_and_warnings() -> None:
    """Undecided tests and warnings are in the summary, whatever the verbosity."""
    report = run_report("gpu0", outcome="inconclusive", warnings=["3 tests were SKIPPED, not judged"])
    figure = reading(90 * MIB, "gpu0", high=200 * MIB)
    found = judge_peak(
        Closed(t0=0, t1=1, run={"gpu0": figure}), check="c", limits=Limits(text="x", each=100 * MIB), limit_from="h"
    )
    assert found is not None
    report.tests[0] = msgspec.structs.replace(
        report.tests[0], findings=[found], peak={"gpu0": figure}, limit={"gpu0": 100 * MIB}
    )
    text = " ".join(" ".join(summary(report)).split())
    assert "1 inconclusive" in text
    assert "undecided ...specs.test_requests" in text or "undecided pytest_vram_specs" in text
    assert "lies in between" in text
    assert "WARNING 3 tests were SKIPPED" in text
    assert "WARNING: 3 tests were SKIPPED" in summary(report, verbosity=-1)[0]


@pytest.mark.parametrize(("gap", "exact", "shown"), [(29.9, False, False), (30.1, False, True), (30.1, True, False)])
def test_poor_sampling(gap: float, exact: bool, shown: bool) -> None:
    """Gaps of over three intervals between samples are said where a peak rests on samples."""
    report = run_report(sampling=Sampling(samples=100, interval_ms=10.0, longest_gap_ms=gap))
    peak = msgspec.structs.replace(reading(MIB), exact=exact)
    report.tests[0] = msgspec.structs.replace(report.tests[0], peak={"host": peak})
    assert any(line.startswith("sampling") for line in summary(report)) is shown


def test_ascii_terminal() -> None:
    """A terminal without UTF-8 gets ASCII only."""
    report = run_report()
    report.tests[0] = msgspec.structs.replace(report.tests[0], nodeid="test_größe.py::test_é")
    for verbosity in (-1, 0, 1):
        lines = summary(report, verbosity=verbosity, unicode=False)
        assert all(line.isascii() for line in lines)
        assert any("gr\\xf6\\xdfe" in line for line in lines)


@pytest.mark.parametrize("verbosity", [0, 1])
def test_columns(verbosity: int) -> None:
    """Nothing but words that cannot be broken goes past the width."""
    for device in ("host", "gpu0"):
        report = run_report(device, warnings=["many words " * 30])
        report.tests[0] = msgspec.structs.replace(report.tests[0], nodeid="tests/" + "x" * 300)
        assert max(map(len, summary(report, verbosity=verbosity, width=80))) <= 80


labels = st.sampled_from(["host", "gpu0", "gpu1", "gpu12"])
sizes = st.integers(0, 1 << 45)
readings = st.builds(
    Reading,
    bytes=sizes,
    at_most=st.none() | sizes,
    source=st.just("x-hwm"),
    scope=st.just("run"),
    device=labels,
    exact=st.booleans(),
    note=st.none() | st.text(max_size=20),
)
figures = st.dictionaries(labels, readings | st.builds(Unmeasurable, reason=st.text(max_size=30)), max_size=4)
entries = st.builds(
    Entry, bucket=st.sampled_from(BUCKETS[:-1]), device=labels, bytes=sizes, source=st.just("engine-log")
)
ledgers = st.builds(
    lambda found, measured: Ledger(entries=tuple(found)).against(measured),
    st.lists(entries, max_size=8),
    st.dictionaries(labels, readings, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(ledger=ledgers)
def test_any_ledger_adds_up(ledger: Ledger) -> None:
    """Whatever was printed and measured, each device's printed sum and signed rest are its measured total."""
    lines = ledger_table(ledger, width=80)
    assert max(map(len, lines)) <= 80 or any(entry.bytes > 1 << 40 for entry in ledger.entries)
    for label, reading_ in ledger.measured.items():
        assert ledger.total()[label] == reading_.bytes


@settings(max_examples=60, deadline=None)
@given(
    peak=figures,
    baseline=figures,
    limit=st.dictionaries(labels, st.integers(1, 1 << 45), max_size=3),
    ledger=ledgers,
    name=st.text(max_size=90),
    warning=st.text(max_size=90),
    width=st.integers(0, 300),
)
def test_any_report_can_be_shown(
    peak: dict[str, Measured],
    baseline: dict[str, Measured],
    limit: dict[str, int],
    ledger: Ledger,
    name: str,
    warning: str,
    width: int,
) -> None:
    """Whatever a run holds, its summary is made: one line with `-q`, and ASCII where only that is possible."""
    full = run_report("gpu0", warnings=[warning])
    test = msgspec.structs.replace(full.tests[0], nodeid=name, peak=peak, baseline=baseline, limit=limit)
    backend = msgspec.structs.replace(full.backends[0], ledger=ledger, boot_peak=peak, facts={})
    report = msgspec.structs.replace(full, tests=[test], backends=[backend])
    for verbosity in (-1, 0, 1):
        lines = summary(report, verbosity=verbosity, width=width, unicode=False)
        assert lines
        assert all(line.isascii() for line in lines)
    assert len(summary(report, verbosity=-1, width=width)) == 1
    assert len(summary(report, verbosity=-1, width=width)[0].splitlines()) == 1


def test_a_lower_end_is_not_under_its_limit() -> None:
    """A peak that may have missed something has no room left under its limit, and over it is over it."""
    for size, words in ((1 << 30, "a lower end only"), (5 << 30, "over its limit")):
        full = run_report("gpu0")
        peak = msgspec.structs.replace(reading(size, "gpu0"), exact=False, missed="nobody looked")
        (test,) = full.tests
        report = msgspec.structs.replace(full, tests=[msgspec.structs.replace(test, peak={"gpu0": peak})])
        text = " ".join(" ".join(summary(report)).split())
        assert words in text
        assert "under its limit" not in text

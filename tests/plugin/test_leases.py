"""Parallel tests share a device: workers of one run, and two runs at the same time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pytest_vram.leases import MOST_PASSED
from tests.conftest import Inner, plain
from tests.faults.keeper_kit import Run, controller, kill, until, wait_up
from tests.plugin import lease_suites as suites

pytest.importorskip("xdist")

BUDGET = f"--vram-budget={suites.CAPACITY // 10**6}MB"


def test_needs_serial_tests_and_others_on_several_workers(pytester: pytest.Pytester, inner: Inner) -> None:
    """Nothing beyond capacity, nobody beside a serial test, nobody passed too often, and everything runs."""
    path = pytester.path / "test_needs.py"
    log = suites.write(path, 1, "serial", tests=16, seconds=(0.02, 0.05))
    inner("-n3", "--vram-device=cpu", BUDGET).assert_outcomes(passed=16)
    found = suites.leases(suites.journal(pytester.path))
    assert len(found) == 12
    assert 0 < suites.most_held(found) <= suites.CAPACITY
    assert max(lease.passed for lease in found) <= MOST_PASSED
    assert len(suites.serial(path)) == 4
    assert suites.overlaps(log, suites.serial(path)) == []
    assert suites.widest(log) > 1


def test_unmarked_tests_run_as_wide_as_there_are_workers(pytester: pytest.Pytester, inner: Inner) -> None:
    """Tests without needs do not wait for each other."""
    log = suites.write(pytester.path / "test_plain.py", 1, "plain", tests=6, seconds=(0.2, 0.2))
    inner("-n2", "--vram-device=cpu", BUDGET).assert_outcomes(passed=6)
    assert suites.widest(log) == 2
    assert suites.leases(suites.journal(pytester.path)) == []


def test_two_runs_at_once(pytester: pytest.Pytester) -> None:
    """What holds for the workers of one run holds for two runs on the same device."""
    log = pytester.path / "ran.txt"
    folders = [pytester.path / name for name in ("one", "two")]
    names: set[str] = set()
    processes = []
    for seed, (folder, workers) in enumerate(zip(folders, ([], ["-n2"]), strict=True)):
        folder.mkdir()
        path = folder / "test_needs.py"
        suites.write(path, seed, "serial", tests=8, seconds=(0.02, 0.05))
        text = path.read_text().replace(str(folder / "ran.txt"), str(log))
        text = text.replace("def test_", f"def test_{folder.name}_").replace('("test_', f'("test_{folder.name}_')
        path.write_text(text)
        names |= suites.serial(path)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--vram-device=cpu",
            BUDGET,
            *workers,
        ]
        processes.append(subprocess.Popen([*command, "."], cwd=folder, stdout=subprocess.PIPE, text=True))
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert "8 passed" in output
    found = [lease for folder in folders for lease in suites.leases(suites.journal(folder))]
    assert 0 < suites.most_held(found) <= suites.CAPACITY
    assert max(lease.passed for lease in found) <= MOST_PASSED
    assert len(names) == 4
    assert suites.overlaps(log, names) == []


HELD = """
import time
import pytest
from pytest_vram import max_vram, serial_only

def note(kind, start):
    with open({log!r}, "a") as stream:
        stream.write(f"{{kind}} {{start}} {{time.monotonic_ns()}} 0\\n")

@pytest.fixture
def model(request):
    start = time.monotonic_ns()
    kind = request.node.get_closest_marker("serial_only") and "alone" or "model"
    yield
    time.sleep(0.15)
    note(kind, start)

@pytest.fixture
def broken(model):
    raise OSError("no set-up")

@pytest.fixture
def skipped(model):
    pytest.skip("not here")

@pytest.fixture
def torn(model):
    yield
    raise OSError("no teardown")

@max_vram("900MB")
@pytest.mark.parametrize("how", ["model", "broken", "skipped", "torn", "model", "model"])
def test_model(how, request):
    request.getfixturevalue(how)

@max_vram("900MB")
def test_fixture(model):
    pass

@serial_only
@pytest.mark.parametrize("number", range(2))
def test_alone(number, model):
    pass

@pytest.mark.parametrize("number", range(8))
def test_plain(number):
    start = time.monotonic_ns()
    time.sleep(0.05)
    note("plain", start)
"""


def test_what_a_test_was_admitted_for_is_its_own_until_its_teardown_is_over(
    pytester: pytest.Pytester, inner: Inner
) -> None:
    """No test runs beside the teardown of one that needs what it needs, or the device alone, however that one ends."""
    log = pytester.path / "held.txt"
    (pytester.path / "test_held.py").write_text(HELD.format(log=str(log)))
    inner("-n2", "--vram-device=cpu", BUDGET).assert_outcomes(passed=15, failed=1, skipped=1, errors=1)
    rows = [row.split()[0] for row in log.read_text().splitlines()]
    assert (rows.count("model"), rows.count("alone"), rows.count("plain")) == (7, 2, 8)
    assert [pair for pair in suites.overlaps(log) if pair == ("model", "model") or "alone" in pair] == []


@pytest.mark.parametrize("device", ["rpc:0", "predicted"])
def test_serial_tests_where_nothing_is_measured(
    pytester: pytest.Pytester, inner: Inner, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Without a device a serial test still runs beside no test of its run, marked or not, expected to fail or not."""
    monkeypatch.delenv("PYTEST_VRAM_RPC", raising=False)
    log = pytester.path / "held.txt"
    text = HELD.format(log=str(log))
    (pytester.path / "test_held.py").write_text(
        text[: text.index("@max_vram")]
        + text[text.index("@serial_only") :]
        + """
@pytest.mark.xfail
@pytest.mark.parametrize("number", range(4))
def test_expected(number):
    test_plain(number)
    raise OSError

@pytest.mark.requires_vram("1MB")
@pytest.mark.parametrize("number", range(4))
def test_marked(number):
    test_plain(number)
"""
    )
    inner("-n3", f"--vram-device={device}").assert_outcomes(passed=14, xfailed=4)
    assert len(log.read_text().splitlines()) == 18
    assert suites.overlaps(log, {"alone"}) == []
    assert suites.widest(log) > 1


def test_a_worker_that_is_killed_holds_nothing(pytester: pytest.Pytester, inner: Inner) -> None:
    """The test whose worker dies is reported, its lease is free, and the others go on."""
    pytester.makepyfile(
        """
        import os, pytest, signal, time
        from pytest_vram import max_vram

        @max_vram("900MB")
        def test_dies():
            os.kill(os.getpid(), signal.SIGKILL)

        @max_vram("900MB")
        @pytest.mark.parametrize("number", range(4))
        def test_next(number):
            time.sleep(0.01)
        """
    )
    result = inner("-n2", "--vram-device=cpu", BUDGET)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*worker 'gw*' crashed while running 'test_*::test_dies'*"])
    found = suites.leases(suites.journal(pytester.path))
    assert [lease.name.rpartition("::")[2] for lease in found if lease.name.endswith("test_dies")] == ["test_dies"]
    assert len(found) == 5
    assert suites.most_held(found) <= suites.CAPACITY


def test_a_folder_that_cannot_be_used_is_told(
    pytester: pytest.Pytester, inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That tests do not wait for other runs is said once in the summary, and stands in the report."""
    monkeypatch.setenv("PYTEST_VRAM_LEASE_FOLDER", str(pytester.makefile(".txt", "not a folder")))
    pytester.makepyfile("def test(): pass")
    result = inner("--vram-device=cpu", BUDGET, "--vram-report=r.json")
    result.assert_outcomes(passed=1)
    text = " ".join(plain(result.stdout.str()).split())
    assert text.count("WARNING tests wait for each other within this run only") == 1
    assert text.count("is not a folder") == 1
    warnings = json.loads((pytester.path / "r.json").read_text())["run"]["warnings"]
    assert len([text for text in warnings if "is not a folder" in text]) == 1


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "workers"])
def test_who_waits_is_told(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """A test that waits for another run says in the terminal for what, and who holds it."""
    pytester.makepyfile(
        """
        from pytest_vram import max_vram

        @max_vram("900MB")
        def test_waits():
            pass
        """
    )
    (pytester.path / "other").mkdir()
    run = Run(pytester.path / "other")
    holder = controller(run, "opened(client, 'holds', need={'host': 600_000_000}); print(client.welcome.pid)")
    (keeper,) = wait_up(holder)
    output = pytester.path / "output.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--vram-device=cpu", BUDGET, *workers]
    with (
        output.open("w") as stream,
        subprocess.Popen(command, cwd=pytester.path, stdout=stream, stderr=subprocess.STDOUT) as process,
    ):
        told = until(lambda: "waits for" in output.read_text(), 30.0)
        kill(holder)
        assert process.wait(30) == 0
    run.close()
    assert told, output.read_text()
    text = plain(output.read_text())
    (line,) = [line for line in text.splitlines() if "waits for" in line]
    assert line.startswith("vram: test_who_waits_is_told.py::test_waits")
    assert "waits for 858.3 MiB of host" in line
    assert f"keeper {keeper}) holds 572.2 MiB of host" in line

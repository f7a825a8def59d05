"""Short tests on one card of the fake driver: who answers for what was held, and when nobody does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_vram.testing import Card, FakeDriver, FakeDriverUnavailable, Fault, fake_nvml
from pytest_vram.units import GIB
from tests.conftest import Inner

#: Whoever runs this command holds 5 GiB of the card.
HOG = "sleep 0.31"
LEAK = "sleep 7.7"
#: Milliseconds that the driver takes for a query.
BOTH = pytest.mark.parametrize("driver", [0, 20], ids=["driver", "slow"], indirect=True)
OPTIONS = ("--vram-device=cuda:0", "--vram-budget=3GiB", "--vram-report=out.json")


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    """A card of 8 GiB, whose driver takes some milliseconds for each query, or none."""
    wait: int = getattr(request, "param", 0)
    faults = (Fault(on="memory", hang=wait),) if wait else ()
    try:
        with fake_nvml([Card(name="NVIDIA GeForce RTX 3050", total=8 * GIB, faults=faults)]) as made:
            made.process(command=HOG, held=5 * GIB)
            made.process(command=LEAK, held=5 * GIB)
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


def report(pytester: pytest.Pytester) -> dict[str, Any]:
    """The report of the run."""
    found: dict[str, Any] = json.loads((pytester.path / "out.json").read_text())
    return found


def by_outcome(pytester: pytest.Pytester) -> dict[str, list[str]]:
    """Outcome → names of tests."""
    found: dict[str, list[str]] = {}
    for test in report(pytester)["tests"]:
        found.setdefault(test["outcome"], []).append(test["nodeid"].partition("::")[2])
    return found


@BOTH
@pytest.mark.usefixtures("driver")
def test_only_the_hog_fails(pytester: pytest.Pytester, inner: Inner) -> None:
    """Forty short tests, one of which holds 5 GiB for 0.3 s: it fails alone, however late the keeper looks; terminal
    and report count the same."""
    pytester.makepyfile(
        f"""
        import subprocess, time, pytest

        @pytest.mark.parametrize("number", range(40))
        def test_it(number):
            subprocess.run({HOG.split()!r}, check=True) if number == 25 else time.sleep(0.004)
        """
    )
    result = inner(*OPTIONS)
    result.assert_outcomes(passed=39, failed=1)
    assert by_outcome(pytester)["failed"] == ["test_it[25]"]
    assert report(pytester)["run"]["counts"] == {"passed": 39, "failed": 1}
    assert report(pytester)["run"]["outside"] == []


@BOTH
@pytest.mark.usefixtures("driver")
def test_a_leak_is_its_tests_own(pytester: pytest.Pytester, inner: Inner) -> None:
    """What a short test leaves behind fails it, or it and those around it; tests long after it are victims."""
    pytester.makepyfile(
        f"""
        import atexit, subprocess, time, pytest

        @pytest.mark.parametrize("number", range(40))
        def test_it(number):
            if number == 10:
                left = subprocess.Popen({LEAK.split()!r})
                atexit.register(left.wait)
                atexit.register(left.kill)
            time.sleep(0.1 if number == 39 else 0.004)
        """
    )
    result = inner(*OPTIONS)
    assert result.ret == 1
    found = by_outcome(pytester)
    assert "test_it[10]" in found["failed"]
    assert "test_it[39]" in found["error"]
    assert "test_it[0]" in found["passed"]
    counts = result.parseoutcomes()
    assert {"passed": counts["passed"], "failed": counts["failed"], "error": counts["errors"]} == {
        outcome: len(names) for outcome, names in found.items()
    }


TEARDOWNS = f"""
import subprocess, time, pytest

def hog():
    subprocess.run({HOG.split()!r}, check=True)

@pytest.fixture
def own():
    yield
    hog()

@pytest.fixture(scope="session")
def last():
    yield
    hog()

def test_before(): pass

@pytest.mark.max_vram("1GiB")
def test_marked(own): pass

@pytest.mark.max_vram("1GiB")
def test_after(): pass

@pytest.mark.max_vram("1GiB")
def test_last(last): pass
"""


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_teardown_fails_the_run_and_no_test(
    pytester: pytest.Pytester, inner: Inner, workers: tuple[str, ...]
) -> None:
    """What breaks the budget in teardowns, also of a fixture of the whole session, is told at the end with the tests
    around it: exit status, verdict, terminal and report."""
    pytester.makepyfile(TEARDOWNS)
    result = inner(*OPTIONS, *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4)
    run = report(pytester)["run"]
    assert run["verdict"] == "failed"
    places = [(one["after"].partition("::")[2], one["before"].partition("::")[2]) for one in run["outside"]]
    assert places == [("test_marked", "test_after"), ("test_last", "")]
    assert all(one["peak"] == 5 * GIB and one["limit"] == 3 * GIB for one in run["outside"])
    text = " ".join(result.stdout.str().split())
    assert "the budget 3GiB was broken outside of any test: 5,120 MiB of gpu0, 2,048 MiB over the limit" in text
    assert "(the teardown of test_a_teardown_fails_the_run_and_no_test.py::test_marked?)" in text
    assert inner(*OPTIONS, "-q", *workers).ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.usefixtures("driver")
def test_the_teardown_of_a_short_test_is_not_charged_to_it(pytester: pytest.Pytester, inner: Inner) -> None:
    """Short tests whose teardown breaks the budget do not fail; the run does, and says between which tests."""
    pytester.makepyfile(
        f"""
        import subprocess, pytest

        @pytest.fixture
        def own():
            yield
            subprocess.run({HOG.split()!r}, check=True)

        def test_first(own): pass
        def test_second(): pass
        """
    )
    result = inner(*OPTIONS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "failed" not in result.parseoutcomes()
    (one,) = report(pytester)["run"]["outside"]
    assert one["after"].endswith("::test_first")
    assert one["before"].endswith("::test_second")


@pytest.mark.usefixtures("driver")
def test_what_the_last_test_leaves_is_told(pytester: pytest.Pytester, inner: Inner) -> None:
    """No test follows that could find it; the end of the run does."""
    pytester.makepyfile(
        f"""
        import atexit, subprocess

        def test_first(): pass
        def test_last():
            left = subprocess.Popen({LEAK.split()!r})
            atexit.register(left.wait)
            atexit.register(left.kill)
        """
    )
    result = inner("--vram-device=cuda:0", "--vram-budget=6GiB")
    assert result.ret == 0
    text = " ".join(result.stdout.str().split())
    assert "memory was left behind until the end of the run: 5,120 MiB of gpu0 by" in text


TORCH = """
import sys, types
import pytest

class Cuda:
    peak = 0
    def is_initialized(self): return True
    def device_count(self): return 1
    def memory_stats(self, index): return {"reserved_bytes.all.peak": self.peak, "allocated_bytes.all.peak": self.peak}
    def reset_peak_memory_stats(self, index): self.peak = 0
    def get_device_properties(self, index):
        return types.SimpleNamespace(name="NVIDIA GeForce RTX 3050", total_memory=8 << 30, uuid="")

sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = Cuda()

def test_before(): pass
def test_large(): sys.modules["torch"].cuda.peak = 5 << 30
def test_after(): pass
"""


@pytest.mark.usefixtures("driver")
def test_a_peak_that_only_torch_knows_is_its_tests_own(pytester: pytest.Pytester, inner: Inner) -> None:
    """Torch's allocator knows a peak that no read saw, and not when it was: tests of its process share no window."""
    pytester.makepyfile(TORCH)
    result = inner(*OPTIONS, "--vram-interval=200")
    result.assert_outcomes(passed=2, failed=1)
    assert by_outcome(pytester)["failed"] == ["test_large"]

"""Limits of tests that run beside each other, each with memory of its own."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Inner

SUITE = """
import pathlib, subprocess, sys, time
from pytest_vram import max_vram

CODE = (
    "import sys\\n"
    "b = bytearray(int(sys.argv[1])); b[::4096] = b'x' * len(b[::4096])\\n"
    "print(flush=True)\\n"
    "input()"
)

def together(me, other):
    # A child holds 100 MB until those of both tests do.
    here = pathlib.Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-S", "-c", CODE, "100000000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        (here / me).touch()
        deadline = time.monotonic() + 20
        while not (here / other).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (here / other).exists()
        time.sleep(0.2)
        child.stdin.write(b"\\n")

@max_vram("150MB")
def test_within(vram):
    together("within", "over")
    assert vram.peak.bytes < 150_000_000

@max_vram("90MB")
def test_over():
    together("over", "within")
"""


@pytest.mark.parametrize("budget", [None, "300MB", "180MB"])
def test_each_is_held_against_its_own(pytester: pytest.Pytester, inner: Inner, budget: str | None) -> None:
    """A marker is about the test's own memory, whatever runs beside it; a budget is about all of it together."""
    pytester.makepyfile(test_it=SUITE)
    more = [f"--vram-budget={budget}"] if budget else []
    # The needs of both would not fit the smallest budget together: here they are to meet all the same.
    result = inner("--vram-device=cpu", "--vram-report=out.json", "-n2", "--vram-leases=off", *more)
    found = {
        test["nodeid"].split("::")[1]: test for test in json.loads((pytester.path / "out.json").read_text())["tests"]
    }
    within, over = found["test_within"], found["test_over"]
    for test in (within, over):
        assert 95_000_000 < test["own"]["host"]["bytes"] < 150_000_000
    (first, *others) = [finding for finding in over["findings"] if finding["check"] == "max_vram"]
    assert not others
    assert first["verdict"] == "failed"
    assert "The peak of this test (its own processes and backends) is" in first["text"]
    assert "what other tests held at the same time" in first["text"]
    assert "peak of the whole run is" in first["text"]
    assert first["text"].count("(PID ") == 1
    assert sorted(share["others"] for share in over["shares"]) == [False, True]
    broken = [finding for test in (within, over) for finding in test["findings"] if finding["check"] == "vram_budget"]
    if budget == "180MB":
        result.assert_outcomes(failed=2)
        assert [finding["verdict"] for finding in broken] == ["failed", "failed"]
        assert all("The peak of this run is" in finding["text"] for finding in broken)
        # The run is further over the budget than the test over its marker.
        assert all(test["peak"]["host"]["bytes"] > 190_000_000 for test in (within, over))
    else:
        result.assert_outcomes(passed=1, failed=1)
        assert broken == []
        assert within["outcome"] == "passed"
        assert within["limit"]["host"] == 150_000_000
        assert within["limit_from"] == "@max_vram"
        assert [test["peak"] for test in (within, over)] == [test["own"] for test in (within, over)]

"""``@vram_soak`` in a user's tests, against backends that answer by a script and hold memory for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.sessions import soak_journal
from pytest_vram.testing.scripted import Fault, Script, backend_table
from tests.conftest import Inner

CPU = "--vram-device=cpu"


def project(folder: Path, **scripts: Script) -> None:
    """A config file with a scripted backend for each of the scripts, the first the default."""
    tables = [backend_table(script, folder, name=name) for name, script in scripts.items()]
    (folder / "vram.toml").write_text(f'default = "{next(iter(scripts))}"\n' + "".join(tables), encoding="utf-8")


def journals(folder: Path) -> list[Path]:
    """Folders of all soaks."""
    return sorted(path.parent for path in folder.glob(".vram/soaks/*/*/soak.jsonl"))


def records(folder: Path) -> dict[str, Any]:
    """Test function → its record."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {test["nodeid"].partition("::")[2]: test for test in report["tests"]}


def test_a_soak_runs_before_its_test_and_decides_over_it(pytester: pytest.Pytester, inner: Inner) -> None:
    """Few turns are open, a peak over the limit fails at its turn, and each test has a journal of its own."""
    project(pytester.path, quiet=Script(), big=Script(hold=8 << 20))
    pytester.makepyfile(
        """
        from pytest_vram import max_vram, vram_backend, vram_soak

        @vram_soak(turns=4)
        def test_few(vram_soak):
            assert vram_soak.turns == 4
            assert vram_soak.verdict.outcome == "inconclusive"
            assert (vram_soak.folder / "report.txt").is_file()

        @vram_soak(turns=50)
        @vram_backend("big")
        @max_vram("90MB")
        def test_grows(): pass
        """
    )
    result = inner(CPU, "--vram-report=report.json")
    result.stdout.fnmatch_lines(["*1 failed*1 inconclusive*"])
    found = records(pytester.path)
    assert found["test_few"]["outcome"] == "inconclusive"
    assert found["test_few"]["soak"]["turn_count"] == 4
    grown = found["test_grows"]["soak"]
    assert grown["reason"] == "budget"
    assert 2 < grown["turn_count"] < 12
    assert any(finding["check"] == "vram_soak" for finding in found["test_grows"]["findings"])
    result.stdout.fnmatch_lines(["*over 90MB*", "*turns were answered*"])
    result.stdout.fnmatch_lines(["soak *4 turns of 4turns: inconclusive*"])
    assert len(journals(pytester.path)) == 2


def test_the_option_replaces_the_amount_and_a_soak_that_ended_is_followed_by_a_new_one(
    pytester: pytest.Pytester, inner: Inner
) -> None:
    """One that was cut short goes on; one of another configuration is refused by what differs."""
    project(pytester.path, quiet=Script())
    pytester.makepyfile(
        """
        from pytest_vram import vram_soak

        @vram_soak(turns=100_000)
        def test_night(vram_soak):
            assert vram_soak.document.amount == "3turns"
        """
    )
    for expected in (1, 2):
        inner(CPU, "--vram-soak=3turns").stdout.fnmatch_lines(["*1 inconclusive*"])
        assert len(journals(pytester.path)) == expected
    last = journals(pytester.path)[-1]
    path = last / soak_journal.FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + b'{"crc":"torn')
    result = inner(CPU, "--vram-soak=3turns")  # what is beside the journal has three turns
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*soak.jsonl ends after turn 1*has turn 3*move it away and begin anew*"])
    for name in ("report.json", "report.txt", "log.jsonl", "log.logfmt"):
        (last / name).unlink()  # killed in its second turn
    inner(CPU, "--vram-soak=3turns").stdout.fnmatch_lines(["*1 inconclusive*"])
    found = soak_journal.read(last)
    assert (found.turns, len(found.segments), found.sessions[-1].dropped) == (3, 2, 12)
    assert len(journals(pytester.path)) == 2
    path.write_bytes(b"".join(lines[:3]))
    result = inner(CPU, "--vram-soak=3turns", "--vram-budget=7GB")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*has a soak of something else*gates.limit*"])
    result = inner(CPU, "--vram-soak=3")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*'3' is not the amount of a soak: write 300turns, 8h or 20m*(from --vram-soak)"])


def test_a_rerun_is_the_same_soak_and_a_test_without_one_is_told(pytester: pytest.Pytester, inner: Inner) -> None:
    """A second attempt asks nothing anew, so that no outcome is drawn twice; the fixture needs the marker."""
    project(pytester.path, big=Script(hold=8 << 20))
    pytester.makepyfile(
        """
        import unittest
        from pytest_vram import max_vram, vram_soak

        @vram_soak(turns=50)
        @max_vram("60MB")
        def test_grows(): pass

        def test_without(vram_soak): pass

        class TestOld(unittest.TestCase):
            @vram_soak(turns=3)
            def test_method(self): pass
        """
    )
    result = inner(CPU, "--reruns=1", "-p", "rerunfailures")
    result.stdout.fnmatch_lines(["*this test has none: mark it with @vram_soak(turns=300)*"])
    grown = [folder for folder in journals(pytester.path) if "test_grows" in str(folder)]
    assert len(grown) == 1
    found = soak_journal.read(grown[0])
    assert found.end is not None
    assert found.end.reason == "budget"
    assert len(found.segments) == 1


def test_calls_of_a_soak_are_held_against_the_tests_target(pytester: pytest.Pytester, inner: Inner) -> None:
    """Beside its cases: a server that answers cases and none of the conversations' calls fails by the soak."""
    project(pytester.path, wrong=Script(accuracy=0.0))
    pytester.makepyfile(
        """
        from pytest_vram import toolcall_accuracy, vram_soak

        @vram_soak(turns=12)
        @toolcall_accuracy(0.9, cases="cases.jsonl", mode="point")
        def test_night(vram_soak):
            assert vram_soak.verdict.outcome == "failed"
        """
    )
    case = '{"id": "a", "family": "a", "category": "irrelevance", "messages": [{"role": "user", "content": "Hi"}], "tools": [], "expect": []}'
    (pytester.path / "cases.jsonl").write_text(case + "\n", encoding="utf-8")
    inner(CPU, "--vram-report=report.json")
    soak = records(pytester.path)["test_night"]["soak"]
    assert soak["fingerprint"]["gates"]["accuracy"] == 0.9
    gate = next(one for one in soak["verdict"]["gates"] if one["name"] == "tool calls")
    assert gate["outcome"] == "failed"
    assert "0 of" in gate["text"]


def test_a_server_that_the_soak_lost_is_in_its_verdict_alone(pytester: pytest.Pytester, inner: Inner) -> None:
    """The test is undecided, as its soak is, and no error besides; a server that its body loses is an error."""
    project(pytester.path, dying=Script(faults=[Fault(kind="dies", requests=[4])]))
    pytester.makepyfile(
        """
        import pytest
        from pytest_vram import vram_soak

        @vram_soak(turns=3)
        def test_soaked(vram_soak):
            assert vram_soak.document.loss_count >= 1

        def test_own(vram_client):
            for _ in range(4):
                try:
                    vram_client.chat("hello", max_tokens=4)
                except Exception:
                    pass
        """
    )
    inner(CPU, "--vram-report=report.json")
    found = records(pytester.path)
    assert found["test_soaked"]["outcome"] == "inconclusive"
    assert [one["check"] for one in found["test_soaked"]["findings"]] == ["vram_soak"]
    assert found["test_own"]["outcome"] in ("error", "failed")


def test_where_nothing_is_measured_no_soak_passes(pytester: pytest.Pytester, inner: Inner) -> None:
    """The test is skipped with the reason, or fails with ``--vram-missing=fail``; nothing is asked."""
    project(pytester.path, quiet=Script())
    pytester.makepyfile("from pytest_vram import vram_soak\n\n@vram_soak()\ndef test_night(): pass\n")
    inner("--vram-device=predicted").assert_outcomes(skipped=1)
    inner("--vram-device=vulkan:0", "--vram-missing=fail").assert_outcomes(failed=1)
    assert journals(pytester.path) == []

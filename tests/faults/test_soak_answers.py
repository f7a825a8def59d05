"""Every fault that a scripted server knows, at every request of a soak: which of them leave an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_vram.cli import main
from pytest_vram.testing.scripted import Fault, Script, backend_table
from pytest_vram.testing.scripted.script import FAULTS, FaultKind

#: A new server is asked again, and has as many requests before it dies.
DYING: tuple[FaultKind, ...] = ("dies", "dies_midway")
#: More text than was asked for, and text under a wrong header: it was generated, and it came.
ANSWERED: tuple[FaultKind, ...] = ("huge", "wrong_content_type")


@pytest.mark.parametrize("kind", FAULTS)
def test_no_turn_is_called_answered_that_was_not(
    kind: FaultKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first request on nothing is asked for long; from the ninth, what was answered before is counted."""
    monkeypatch.chdir(tmp_path)
    for first in (0, 9):
        folder = tmp_path / str(first)
        folder.mkdir()
        # What a busy server has wanted to wait for is no matter here.
        fault = Fault(kind=kind, requests=list(range(first, 200)), retry_after=0.0, size=200_000)
        table = backend_table(Script(faults=[fault]), folder, name="agent")
        Path("vram.toml").write_text(f"{table}request_timeout = 1\n", encoding="utf-8")
        code = main(["soak", "12turns", "--vram-device=cpu", "--quiet", "--json", "--dir", str(folder / "soak")])
        out, err = capsys.readouterr()
        assert code == 3
        assert "Traceback" not in err
        found = json.loads(out)
        gate = next(one for one in found["verdict"]["gates"] if one["name"] == "answers")
        if kind in ANSWERED:
            assert (gate["outcome"], found["turn_count"]) == ("passed", 12)
            continue
        assert gate["outcome"] == "inconclusive"
        assert "because: " in gate["text"] or "first in " in gate["text"]
        if kind in DYING and first:
            assert found["loss_count"] > 1
            continue
        unanswered = [turn for turn in found["turns"] if turn.get("nothing") or turn.get("result", "ok") != "ok"]
        assert found["turn_count"] - len(unanswered) == (0 if first == 0 else 4)
        assert found["turn_count"] < 12

"""A soak on a real llama-server whose prompt cache is on: host memory that it fills up to its cap is no leak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.backends import store
from pytest_vram.cli import main
from pytest_vram.report.soaks import TEXT
from pytest_vram.sessions import load, shipped
from pytest_vram.sessions.soak_journal import REPORT
from pytest_vram.testing.scripted import Script, backend_table
from pytest_vram.units import MIB

pytestmark = pytest.mark.engine
VRAM = [sys.executable, "-c", "import sys; from pytest_vram.cli import main; sys.exit(main())"]
#: Of the shipped conversations, where a call is followed by a request with its result.
REQUESTS_A_TURN = sum(1 + bool(turn.expect) for name in shipped() for turn in load(name).turns) / sum(
    len(load(name).turns) for name in shipped()
)
WORDS = ("alpha", "bravo", "delta", "metal", "river", "stone", "cloud", "amber")
CAP, PROMPTS, TURNS = 4, 6, 60


def test_a_server_that_leaks_is_caught_and_its_twin_is_not(tmp_path: Path) -> None:
    """Memory that a scripted server holds for real, 1 MiB a turn; over 150 turns one fails and the other passes.

    What the rate of a script does on a busy machine is no matter here.
    """
    began = {}
    for name, more in (("leak", {"hold": round(MIB / REQUESTS_A_TURN)}), ("twin", {})):
        script = Script(tokens_per_second=1000.0, **more)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vram.toml").write_text(backend_table(script, folder, name="agent"), encoding="utf-8")
        command = [*VRAM, "soak", "150turns", "--vram-device=cpu", "--dir=soak", "--quiet", "--retention=0.5"]
        began[name] = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for name, code, kind in (("leak", 1, "leak"), ("twin", 0, "flat")):
        out = began[name].communicate(timeout=300)[0].decode()
        assert began[name].returncode == code, out
        found = json.loads((tmp_path / name / "soak" / REPORT).read_text(encoding="utf-8"))
        idle = found["verdict"]["idle"]["host"]
        assert idle["kind"] == kind, out
        if kind == "leak":
            assert found["reason"] == "leak"
            assert 0.9 * MIB < idle["low"] < idle["high"] < 1.1 * MIB
        else:
            assert found["turn_count"] == 150


def test_a_peak_over_the_budget_names_the_setting_to_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has what would have kept it within the budget, best first, with the bytes that it saves."""
    monkeypatch.chdir(tmp_path)
    model = store.find_model()
    assert model is not None, "run `vram demo` once: it fetches the model"
    options = "ctx-size = 2048, parallel = 1, device = 'none', threads = 1, cache-ram = 0, ctx-checkpoints = 0"
    Path("vram.toml").write_text(
        f"default = 'agent'\n[backend.agent]\nengine = 'llama-server'\nmodel = '{model}'\noptions = {{ {options} }}\n",
        encoding="utf-8",
    )
    turn = {"user": "Is all well?", "output_cap": 1, "answer": "Yes."}
    Path("short.json").write_text(json.dumps({"name": "short", "turns": [turn]}), encoding="utf-8")
    run = ("soak", "3turns", "--vram-device=cpu", "--dir", "soak", "--conversation", "short.json", "--budget=100MB")
    assert main([*run]) == 1
    out = " ".join(capsys.readouterr().out.split())
    found = json.loads(Path("soak", REPORT).read_text(encoding="utf-8"))
    assert found["verdict"]["breach"]["turn"] == 1
    assert found["verdict"]["breach"]["limit"] == 100_000_000
    saving = [one["saves_bytes"] for one in found["advice"] if one["effect"] == "saves"]
    assert len(saving) >= 2, found["advice"]
    assert all(max(one["bytes"], one.get("at_most") or 0) > 0 for one in saving)
    assert "first: --" in out
    assert "MiB on host" in out
    assert out == " ".join(Path("soak", TEXT).read_text(encoding="utf-8").split())


def test_a_prompt_cache_that_fills_is_named_and_is_no_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn asks another prompt, so that the server keeps the one before: its memory rises to the cap and stays."""
    monkeypatch.chdir(tmp_path)
    model = store.find_model()
    assert model is not None, "run `vram demo` once: it fetches the model"
    options = f"ctx-size = 256, parallel = 1, device = 'none', cache-ram = {CAP}, ctx-checkpoints = 0"
    Path("vram.toml").write_text(
        f"default = 'agent'\n[backend.agent]\nengine = 'llama-server'\nmodel = '{model}'\noptions = {{ {options} }}\n",
        encoding="utf-8",
    )
    chosen = []
    for number in range(PROMPTS):
        name = f"c{number}.json"
        words = " ".join(WORDS[(number * 7 + place * place) % 8] for place in range(16))
        turn = {"user": f"{WORDS[number % 8]} {number} {words}", "output_cap": 1, "answer": "Yes."}
        Path(name).write_text(json.dumps({"name": f"c{number}", "turns": [turn]}), encoding="utf-8")
        chosen += ["--conversation", name]
    main(["soak", f"{TURNS}turns", "--vram-device=cpu", "--dir", "soak", "--quiet", *chosen])
    found = json.loads(Path("soak", REPORT).read_text(encoding="utf-8"))
    assert (found["reason"], found["turn_count"], found["loss_count"]) == ("amount", TURNS, 0)
    idle = found["verdict"]["idle"]["host"]
    assert idle["kind"] in ("flat", "warming", "step"), idle
    assert found["verdict"]["outcome"] != "failed", found["verdict"]["text"]
    assert found["fingerprint"]["gates"]["caps"] == {"prompt-cache": CAP << 20}
    said = " ".join(Path("soak", TEXT).read_text(encoding="utf-8").split())
    assert "llama.cpp's prompt cache (--cache-ram) may fill 4MiB of memory here" in said

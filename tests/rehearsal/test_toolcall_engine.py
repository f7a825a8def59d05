"""Tool calls of a real model through a real llama-server: honest low rates, in each protocol, with their kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.backends import store
from pytest_vram.cli import main
from pytest_vram.toolcalls import KINDS, load
from pytest_vram.toolcalls.results import read

pytestmark = pytest.mark.engine
#: Of the shipped cases those whose tools and messages are short: a prompt costs a core seconds.
SHORT = 900
CASES = ("--cases", "short.jsonl", "--retries", "0")
Ask = Callable[..., tuple[int, dict[str, Any]]]
TABLE = """
[backend.{name}]
engine = "llama-server"
model = "{model}"
options = {{ ctx-size = 4096, parallel = 1, device = "none", threads = 1{more} }}
sampling = {{ max_tokens = 32 }}
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run the command in a project with two deployments of the demo's model: exit code and JSON document."""
    model = store.find_model()
    assert model is not None, "run `vram demo` once: it fetches the model"
    quantised = ', cache-type-k = "q4_0", cache-type-v = "q4_0", flash-attn = "on"'
    tables = TABLE.format(name="f16", model=model, more="") + TABLE.format(name="q4", model=model, more=quantised)
    (tmp_path / "vram.toml").write_text(f'default = "f16"\n{tables}', encoding="utf-8")
    short = [case for case in load().cases if len(msgspec.json.encode([case.tools, case.messages])) < SHORT]
    tables = [msgspec.to_builtins(case) for case in short]
    lines = [msgspec.json.encode({key: table[key] for key in table if key != "origin"}) for table in tables]
    (tmp_path / "short.jsonl").write_bytes(b"\n".join(lines))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["toolcalls", "run", *CASES, *arguments, "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out)

    return run


@pytest.mark.parametrize("protocol", ["tools", "json_schema", "few_shot"])
def test_a_small_model_is_asked_in_each_protocol_streamed_and_not(ask: Ask, tmp_path: Path, protocol: str) -> None:
    """Every case has an answer, the rate is low and no answer that is wrong is without a kind."""
    for stream, count in (("--no-stream", 12), ("--stream", 2)):
        place = tmp_path / f"{protocol}{stream}.json"
        how = ("--protocol", protocol, stream, "--limit", str(count), "--output", str(place))
        code, document = ask(*how, *(("--target", "0.94") if count == 12 else ()))
        asked = document["asked"]
        assert (asked["n"], asked["infrastructure"], asked["protocol"]) == (count, 0, protocol)
        assert asked["stream"] is (stream == "--stream")
        assert sum(row["first"] for row in asked["kinds"]) == count - asked["right"]
        for result in read(place).results:
            assert result.first.kind in KINDS
            assert result.first.outcome == "right" or result.first.kinds
        if count == 12:
            assert asked["right"] <= 8
            assert (code, document["verdict"]["outcome"]) == (1, "failed")
            assert len(asked["categories"]) >= 8


def test_two_types_of_kv_cache_are_compared_case_by_case(ask: Ask) -> None:
    """f16 first, then q4_0, on the same cases: pairs, changes and the settings that differ."""
    code, document = ask("--backend", "q4", "--baseline", "f16", "--limit", "3", "--protocol", "tools", "--aa")
    paired = document["paired"]
    assert paired["pairs"] == 3
    assert paired["baseline"] == "f16"
    assert code == {"passed": 0, "failed": 1, "inconclusive": 3}[paired["outcome"]]
    assert any("asked twice" in note for note in paired["notes"])
    columns = {column["backend"]: column["settings"] for column in document["defects"][0]["columns"]}
    assert columns["q4"]["cache-type-k"] == "q4_0"
    assert columns["f16"]["cache-type-k"] == ""

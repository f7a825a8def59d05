"""The page on tool calls says what is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pytest_vram.cli import main
from pytest_vram.markers import MARKERS
from pytest_vram.testing.scripted import Answerer, Script, serving
from pytest_vram.toolcalls import KINDS, load
from tests.plugin.toolcall_kit import write_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "toolcalls.md"
TEXT = PAGE.read_text(encoding="utf-8")
SHOWN = re.search(r"^```\n\$ (vram [^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SCRIPT = Script(accuracy=0.75, recovery=0.8, defects={"missing_bracket": 3, "wrong_value": 2, "no_call": 1}, seed=7)


def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What the command of the page prints of a scripted backend; where its file lies is left out."""
    assert SHOWN is not None
    monkeypatch.chdir(tmp_path)
    with serving(Answerer(SCRIPT, load(str(write_cases(tmp_path, 60))))) as server:
        words = shlex.split(SHOWN[1].replace("http://127.0.0.1:8080", server.url))[1:]
        code = main([*words, "--output", str(tmp_path / "results.json")])
    out = capsys.readouterr().out
    return code, out.replace(str(tmp_path), "")


def test_the_example_of_the_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a backend that is right three times of four, line by line."""
    assert SHOWN is not None
    code, out = shown(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert out == SHOWN[2]


def test_every_kind_of_defect_stands_on_the_page() -> None:
    """The table has each of them, in the order in which they explain, and no other."""
    assert re.findall(r"^\| `([a-z_]+)` \| ", TEXT.partition("## Kinds of defect")[2], re.MULTILINE) == list(KINDS[1:])


def test_every_argument_and_option_stands_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the marker, and those of the command line."""
    signature = MARKERS["toolcall_accuracy"].signature
    for argument in re.findall(r"(\w+)(?:=|, \*)", signature):
        assert f"| `{argument}` |" in TEXT, argument
    assert main(["toolcalls", "run", "--help"]) == 0
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--no-stream", "--config"}
    assert [option for option in sorted(options) if option not in TEXT] == []

"""The page on cases of tool calls says what is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_vram.cli import entry
from pytest_vram.errors import BadCases
from pytest_vram.toolcalls import CATEGORIES, bfcl, case_schema, load

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "toolcall-cases.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files as it shows them."""
    (tmp_path / "cases.jsonl").write_text(blocks("jsonl")[0], encoding="utf-8")
    (tmp_path / "tools.json").write_text(blocks("json")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_lint_of_the_page_prints_what_it_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of the page are clean, and the summary is the one that stands there."""
    assert entry.main(["toolcalls", "lint", "cases.jsonl"]) == 0
    assert capsys.readouterr().out == blocks("text")[1]


def test_the_finding_of_the_page_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The value that the page calls wrong is found with the words that it shows."""
    path = folder / "cases.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('["staging"]', '["prod"]'), encoding="utf-8")
    assert entry.main(["toolcalls", "lint", "cases.jsonl"]) == 1
    assert blocks("text")[2] in capsys.readouterr().out


def test_the_refusal_of_the_page_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message that the page quotes is the reader's, with the line that it names."""
    good = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "tools": [], "expect": [], "category": "single", "family": "f"}
    )
    lines = [good.replace("{", f'{{"id": "{number}", ', 1) for number in range(11)]
    lines.append(
        good.replace("{", '{"id": "x", ', 1).replace(
            '"expect": []', '"expect": [{"name": "n", "arguments": {"job": "backup"}}]'
        )
    )
    (tmp_path / "cases.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCases) as refused:
        load("cases.jsonl")
    assert f"{refused.value}\n" == blocks("text")[0]
    assert entry.main(["toolcalls", "lint", "cases.jsonl"]) == 1
    assert blocks("text")[0].replace(":12: ", ":12: error: ").rstrip() in capsys.readouterr().out


def test_names_of_the_page_are_all_there_are() -> None:
    """Every category, key, shipped file and subject of the leaderboard stands on the page."""
    for name in (
        *CATEGORIES,
        *case_schema.schemas()["case.json"]["properties"],
        *bfcl.SUBJECTS,
    ):
        assert f"`{name}`" in TEXT, name
    for name in case_schema.schemas():
        assert f"{name}`" in TEXT, name
    shipped = sorted(path.stem for path in (ROOT / "fixtures" / "toolcalls").glob("*.jsonl"))
    assert ", ".join(f"`{name}`" for name in shipped) in TEXT
    for name in shipped:
        assert load(f"shipped:{name}").cases

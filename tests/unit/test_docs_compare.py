"""The page on what grew says what is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from pytest_vram import tolerance
from pytest_vram.cli import main
from pytest_vram.differences import MEANINGS, Beside, Change, Difference
from pytest_vram.ledger import BUCKETS
from pytest_vram.report import comparison
from pytest_vram.testing import real_shapes
from tests.unit.sizing_models import F16, Q4

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compare.md"
TEXT = PAGE.read_text(encoding="utf-8")
SHOWN = re.search(r"^```\n((?:\$ vram [^\n]*\n)+)(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_example_of_the_page_is_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two estimates of a real shape, saved and compared, line by line."""
    monkeypatch.chdir(tmp_path)
    real_shapes.real("Qwen3-4B", types=F16).write(tmp_path / "my-f16.gguf")
    real_shapes.real("Qwen3-4B", types=Q4).write(tmp_path / "my-q4.gguf")
    assert SHOWN is not None
    commands = [line[2:] for line in SHOWN[1].splitlines()]
    assert len(commands) == 3
    out = ""
    for command in commands:
        words, _, file = command.partition(" > ")
        assert main(shlex.split(words)[1:]) == 0
        out = capsys.readouterr().out
        if file:
            Path(file).write_text(out, encoding="utf-8")
    assert out == SHOWN[2]


def test_every_meaning_stands_on_the_page() -> None:
    """The table has each of them and no other."""
    assert set(re.findall(r"^\| `([a-z]+)` \|", TEXT, re.MULTILINE)) == set(MEANINGS)


def test_expressions_of_the_page_can_be_used() -> None:
    """Each --fail-on that is shown is accepted."""
    found = re.findall(r"--fail-on ([a-z]+[:][\w:%+,]+)", TEXT)
    assert len(found) >= 3
    for expression in found:
        assert tolerance.parse(expression, ("host", *BUCKETS), origin="docs")


def test_the_page_on_formats_lists_every_field() -> None:
    """No field of the document is without a word."""
    formats = (PAGE.parent / "formats.md").read_text(encoding="utf-8")
    section = formats.split("## `vram compare --json`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    for document in (
        comparison.CompareDocument,
        comparison.SideRecord,
        comparison.Pair,
        comparison.TestPair,
        comparison.Total,
        comparison.Judged,
        Difference,
        Change,
    ):
        missing = {field.encode_name for field in msgspec.structs.fields(document)} - named
        assert not missing, (document.__name__, missing)
    report = set(re.findall(r"`([a-z_]+)`", formats.split("## Report")[1].split("\n## ")[0]))
    assert {field.encode_name for field in msgspec.structs.fields(Beside)} <= report

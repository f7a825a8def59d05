"""The JSON report, its published schema, and writing files whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from pytest_vram import journal, report
from pytest_vram.errors import BadInput, BadSetting
from pytest_vram.readings import Unmeasurable
from pytest_vram.report import RunReport
from pytest_vram.report.json import SCHEMA_FOLDER

from .test_report_terminal import run_report


def full_report() -> RunReport:
    found = run_report(outcome="failed", warnings=["w"])
    found.tests[0] = msgspec.structs.replace(found.tests[0], host=Unmeasurable(reason="no"))
    return found


@pytest.mark.parametrize("name", sorted(report.schemas()))
def test_published_schema_is_current(name: str) -> None:
    """The schema files are those of the data model; `pytest_vram.report.write_schemas()` brings them up to date."""
    assert json.loads((SCHEMA_FOLDER / name).read_text(encoding="utf-8")) == report.schemas()[name]


def test_schemas_are_schemas() -> None:
    """The published schemas are valid JSON schemas, and there is one file for each."""
    for schema in report.schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {path.name for path in SCHEMA_FOLDER.iterdir()} == set(report.schemas())


def test_report_validates() -> None:
    """A report validates against the published schema."""
    schema = json.loads((SCHEMA_FOLDER / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(report.encode(full_report())), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(report.encode(full_report())) | {"tests": [{"nodeid": 1}]}, schema)


def test_round_trip() -> None:
    """A report reads back to itself."""
    assert report.decode(report.encode(full_report())) == full_report()


@pytest.mark.parametrize(
    ("data", "words"),
    [(part, "is not a run report") for part in (b"{}", b"nope", b"", b'{"x":' + b"[" * 100_000, b'{"run": "\xff"}')],
    ids=["no fields", "no JSON", "empty", "deep", "no text"],
)
def test_not_a_report(data: bytes, words: str) -> None:
    """What is not a report is refused with its origin."""
    with pytest.raises(BadInput, match=words) as caught:
        report.decode(data, origin="out.json")
    assert "out.json" in str(caught.value)


def test_other_version() -> None:
    """A report of another version is refused with both versions."""
    data = report.encode(msgspec.structs.replace(full_report(), format="pytest-vram/report/99"))
    with pytest.raises(BadInput, match="pytest-vram/report/99.*pytest-vram/report/1"):
        report.decode(data)


def test_journal_lines_validate(tmp_path: Path) -> None:
    """Lines that the journal's writer makes validate against the published schema."""
    schema = json.loads((SCHEMA_FOLDER / "journal.json").read_text(encoding="utf-8"))
    writer = journal.Writer(tmp_path / "journal.jsonl")
    for number, kind in enumerate(journal.KINDS):
        writer.write(number, kind, {"text": "x"})
    writer.close()
    lines = list(journal.Journal(tmp_path / "journal.jsonl"))
    assert len(lines) == len(journal.KINDS)
    for line in lines:
        jsonschema.validate(line, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"v": 1, "t": 0, "kind": "gossip"}, schema)


def test_write(tmp_path: Path) -> None:
    """A report is written with its folders, replaces an older one, and leaves nothing else behind."""
    path = tmp_path / "new" / "folder" / "out.JSON"
    report.write(full_report(), path)
    report.write(full_report(), path)
    assert report.decode(path.read_bytes()) == full_report()
    assert [entry.name for entry in path.parent.iterdir()] == ["out.JSON"]


def test_unwritable(tmp_path: Path) -> None:
    """A path that cannot be written names itself and the reason, and the older report stays."""
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(BadSetting, match="could not be written") as caught:
        report.write(full_report(), blocker / "out.json")
    assert str(blocker / "out.json") in str(caught.value)
    (tmp_path / "dir.json").mkdir()
    with pytest.raises(BadSetting, match="could not be written"):
        report.write(full_report(), tmp_path / "dir.json")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dir.json", "file"]


@pytest.mark.parametrize("name", ["out.html", "out.md", "out.prom", "out.trace.json", "out.xml", "out"])
def test_formats_that_are_not_there(name: str, tmp_path: Path) -> None:
    """A suffix without a format is refused with those that there are, before anything is written."""
    with pytest.raises(BadSetting, match=r"this version writes \.json"):
        report.write(full_report(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert report.suffix_of("a/b.json") == ".json"
    assert set(report.formats()) == {".json"}


def test_a_journal_with_a_line_that_never_ends_nesting(tmp_path: Path) -> None:
    """A line that is nested without end is a torn one, and one without a time is told for what it lacks."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"v":1,"t":1,"kind":"run"}\n{"v":1,"t":2,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")
    read = journal.Journal(path)
    assert [line["kind"] for line in read] == ["run"]
    assert read.torn == 1
    path.write_bytes(b'{"v":1,"t":true,"kind":"run"}\n')
    with pytest.raises(BadInput, match="lacks `t` or `kind`"):
        list(journal.Journal(path))

"""The run report as a JSON document, and the schemas of what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pytest_vram import journal
from pytest_vram.errors import BadInput
from pytest_vram.report.records import FORMAT, RunReport
from pytest_vram.report.watched import Watched
from pytest_vram.text import encoded

SCHEMA_FOLDER = Path(__file__).with_name("schema")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def encode(report: RunReport) -> bytes:
    """The report as indented JSON with a line feed at the end."""
    return msgspec.json.format(encoded(report), indent=1) + b"\n"


def decode(data: bytes, *, origin: str = "the report") -> RunReport:
    """Read a report back.

    :raises BadInput: not a report, or one of another version.
    """
    try:
        found = msgspec.json.decode(data, type=RunReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{origin} is not a run report: {error}") from None
    if found.format != FORMAT:
        raise BadInput(f"{origin} has format {found.format!r}; this version reads {FORMAT!r}")
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """File name in ``report/schema/`` → JSON schema, generated from the data model."""
    from pytest_vram.report.booted import BootDocument  # these every run would pay for
    from pytest_vram.report.comparison import CompareDocument
    from pytest_vram.report.predictions import DOCUMENTS
    from pytest_vram.report.soaks import SoakDocument
    from pytest_vram.report.toolcalls import ToolcallDocument
    from pytest_vram.toolcalls.results import Results

    # Defaults of the data model are tuples in places: through JSON, so that the result equals what a file holds.
    report = _schema(RunReport)
    line = {
        "title": "One line of journal.jsonl",
        "type": "object",
        "required": ["v", "t", "kind"],
        "properties": {
            "v": {"const": journal.VERSION, "description": "version of the format"},
            "t": {"type": "integer", "minimum": 0, "description": "CLOCK_MONOTONIC in nanoseconds"},
            "kind": {"oneOf": [{"const": kind, "description": text} for kind, text in journal.KINDS.items()]},
        },
        "additionalProperties": True,
    }
    return {
        "report.json": {"$schema": _DIALECT, "title": f"Run report, format {FORMAT}", **report},
        "watch.json": {"$schema": _DIALECT, "title": "What vram watch --json prints", **_schema(Watched)},
        "journal.json": {"$schema": _DIALECT, **line},
        "boot.json": {"$schema": _DIALECT, "title": "What vram boot --json prints", **_schema(BootDocument)},
        "compare.json": {"$schema": _DIALECT, "title": "What vram compare --json prints", **_schema(CompareDocument)},
        "toolcalls.json": {
            "$schema": _DIALECT,
            "title": "What vram toolcalls run --json prints",
            **_schema(ToolcallDocument),
        },
        "toolcalls-results.json": {
            "$schema": _DIALECT,
            "title": "A results file of tool calls",
            **_schema(Results),
        },
        "soak.json": {"$schema": _DIALECT, "title": "What vram soak --json prints", **_schema(SoakDocument)},
        **{name: {"$schema": _DIALECT, **_schema(document)} for name, document in DOCUMENTS.items()},
    }


def _schema(document: type) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.json.schema(document)))
    return found


def write_schemas(folder: Path = SCHEMA_FOLDER) -> None:
    """Bring the published schemas up to date; a test proves that they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        text = msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1)
        (folder / name).write_bytes(text + b"\n")

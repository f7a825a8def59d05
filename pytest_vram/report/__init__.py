"""What a run found, for people and programs: every format is a view of one :class:`RunReport`."""

from pytest_vram.report.formats import formats, suffix_of, write
from pytest_vram.report.json import decode, encode, schemas, write_schemas
from pytest_vram.report.records import FORMAT, BackendRecord, RunInfo, RunReport, TestRecord
from pytest_vram.report.terminal import ledger_table, summary

__all__ = [
    "FORMAT",
    "BackendRecord",
    "RunInfo",
    "RunReport",
    "TestRecord",
    "decode",
    "encode",
    "formats",
    "ledger_table",
    "schemas",
    "suffix_of",
    "summary",
    "write",
    "write_schemas",
]

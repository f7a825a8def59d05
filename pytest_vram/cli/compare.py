"""``vram compare``: two runs, boot logs or estimates, bucket by bucket: what grew, and which setting it is."""

from __future__ import annotations

import argparse
import io
import stat
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram import bootlog, tolerance
from pytest_vram.bootlog import files
from pytest_vram.cli import project
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer
from pytest_vram.cli.watch import Runs
from pytest_vram.errors import BadInput
from pytest_vram.ledger import BUCKETS
from pytest_vram.report import decode, deployments
from pytest_vram.report.booted import BOOT_FORMAT, BootDocument
from pytest_vram.report.comparison import compare, loud
from pytest_vram.report.comparison_lines import compare_lines
from pytest_vram.report.deployments import Side
from pytest_vram.report.predictions import ESTIMATE_FORMAT, EstimateDocument
from pytest_vram.report.records import FORMAT
from pytest_vram.units import mib

STANDARD_INPUT = "-"
REPORT_FILE = "report.json"
#: Bytes by which a document is told from a log.
_START = 256
#: Where a shell has what ``<(…)`` stands for.
_OPEN_FILES = Path("/dev/fd")
#: Bytes of a document that are read: a report of a hundred thousand tests is smaller.
MOST = 256 << 20
_CODES = {None: HOLDS, "held": HOLDS, "grew": FAILS, "undecided": INCONCLUSIVE}
_ACCEPTED = (
    "a run (its folder, its id or its report.json), a boot log, or what `vram estimate --json` or `vram boot --json`"
    " printed"
)


class _Format(msgspec.Struct):
    format: str = ""


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Compare; with ``--fail-on`` exit code 1 where something grew more than it allows, 3 where that cannot be told.

    :raises BadInput: something that cannot be compared, or, where it is to be judged, other models or devices.
    """
    if rest:
        raise BadInput(f"vram compare takes two sides and its own options, not {rest[0]!r}")
    if options.before == options.after == STANDARD_INPUT:
        raise BadInput("standard input can be one of the two sides: name a file for the other one")
    if options.engine is not None and options.engine not in bootlog.engines():
        raise BadInput(
            f"--engine {options.engine!r} has no logs that are read: write one of {', '.join(bootlog.engines())}"
        )
    tolerances: tuple[tolerance.Tolerance, ...] = ()
    if options.fail_on is not None:
        tolerances = tolerance.parse(options.fail_on, ("host", *BUCKETS), origin="--fail-on")
    before, after = (_chosen(side(where, options.engine), options.backend) for where in (options.before, options.after))
    for one, other in ((before, after), (after, before)):
        if len(one.deployments) > 1 and other.kind != "run":
            names = ", ".join(sorted({part.name for part in one.deployments}))
            raise BadInput(
                f"{one.origin} has several backends ({names}) and {other.origin} one deployment: add --backend NAME"
            )
    if not before.deployments or not after.deployments:
        empty = before if not before.deployments else after
        if before.kind != "run" or after.kind != "run":
            raise BadInput(f"{empty.origin} has no backend, so that there is no memory breakdown to compare")
    document = compare(before, after, tolerances=tolerances, fail_on=options.fail_on)
    strange = loud(document)
    if strange and tolerances:
        name, changes = next(iter(strange.items()))
        said = "; ".join(f"{change.setting} {change.before} → {change.after}" for change in changes)
        raise BadInput(
            f"{f'backend {name}' if name else 'the two'}: {said}: other models or devices, so that --fail-on cannot"
            " judge one by the other: compare them without it"
        )
    return Answer(code=_CODES[document.verdict], document=document, lines=tuple(compare_lines(document)))


def _chosen(found: Side, name: str | None) -> Side:
    """The side with the backend that was named."""
    if name is None or found.kind != "run":
        return found
    chosen = tuple(one for one in found.deployments if one.name == name)
    if not chosen:
        known = ", ".join(sorted({one.name for one in found.deployments})) or "none"
        raise BadInput(f"{found.origin} has no backend {name!r} (its backends: {known})")
    return msgspec.structs.replace(found, deployments=chosen)


def side(where: str, engine: str | None = None) -> Side:
    """One of the two, whatever it is.

    :param engine: whose log it is, if it is one, where its lines do not tell.
    :raises BadInput: it is nothing that can be compared.
    """
    if where == STANDARD_INPUT:
        if sys.stdin is None:
            raise BadInput("standard input is closed: name a file")
        return _of_stream(sys.stdin.buffer, "standard input", engine)
    path = Path(where)
    try:
        if path.is_dir():
            path = path / REPORT_FILE
            if not path.is_file():
                raise BadInput(f"{where} holds no {REPORT_FILE}: name the folder of a run that has ended")
        elif not path.exists():
            path = _run(where)
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode) and path.parent.resolve() == _OPEN_FILES.resolve():  # the shell's <(…)
            with path.open("rb") as pipe:
                return _of_stream(pipe, where, engine)
        if not stat.S_ISREG(mode):
            raise BadInput(f"{where} is a device or a pipe and not a file: {STANDARD_INPUT!r} reads standard input")
    except (OSError, ValueError) as error:
        raise BadInput(f"{where} cannot be read: {files.reason(error)}; name {_ACCEPTED}") from None
    with files.opened(path) as log:
        data = log.whole(MOST) if _is_document(log.beginning()) else None
    if data is None:
        return _side_of_log(bootlog.read(path, engine=engine), where)
    return _decoded(data, where, lambda: bootlog.read(path, engine=engine))


def _of_stream(stream: Any, where: str, engine: str | None) -> Side:
    """What can be read once only."""
    if not _is_document(_unpacked(stream.peek(_START))):
        return _side_of_log(bootlog.read_stream(stream, where, engine=engine), where)
    raw = stream.read(MOST + 1)
    data = files.log_of(io.BytesIO(raw), where).whole(MOST)
    return _decoded(data, where, lambda: bootlog.read_stream(io.BytesIO(raw), where, engine=engine))


def _unpacked(start: bytes) -> bytes:
    """The beginning of what may be packed by gzip."""
    if files.packed_by(start) != "gzip":
        return start
    try:
        return zlib.decompressobj(wbits=31).decompress(start, _START)
    except zlib.error:
        return start


def _run(where: str) -> Path:
    """The report of a run that is named by its id.

    :raises BadInput: there is none.
    """
    try:
        folder = Runs(project.find(Path.cwd()).root).named(where)
    except BadInput:
        raise BadInput(f"there is neither a file nor a run {where!r}: name {_ACCEPTED}") from None
    path = folder / REPORT_FILE
    if not path.is_file():
        raise BadInput(f"run {where} has no {REPORT_FILE}: it has not ended, or was killed")
    return path


def _is_document(start: bytes) -> bool:
    """Whether what begins so is a JSON object, in any encoding in which a shell writes one."""
    text = start.decode(files.encoding_of(start), "replace")
    return text[:_START].lstrip("\ufeff \t\r\n").startswith("{")


def _side_of_log(boot: bootlog.Boot, origin: str) -> Side:
    if boot.evidence == "none":
        raise BadInput(
            f"{origin} has no memory lines, so that there is nothing to compare: start the engine with more of its log"
            " (llama-server: -lv 4)"
        )
    return deployments.of_boot(boot, origin, log=True)


def _decoded(data: bytes, where: str, as_log: Callable[[], bootlog.Boot]) -> Side:
    """A JSON document, by its own format.

    :param as_log: reads the same as a log, whose lines may be in JSON as well.
    :raises BadInput: not one that can be compared.
    """
    form, wrong = "", f"is larger than {mib(MOST)}"
    if len(data) <= MOST:
        try:
            form = msgspec.json.decode(data, type=_Format).format
            wrong = "is a document without a format"
        except (msgspec.DecodeError, RecursionError) as error:
            wrong = f"begins like JSON and is no document: {error}"
    if not form:
        try:
            return _side_of_log(as_log(), where)
        except BadInput:
            raise BadInput(f"{where} {wrong}; name {_ACCEPTED}") from None
    if form == FORMAT:
        return deployments.of_run(decode(data, origin=where), where)
    if form == ESTIMATE_FORMAT:
        return deployments.of_estimate(_as(EstimateDocument, data, where), where)
    if form == BOOT_FORMAT:
        boot = _as(BootDocument, data, where)
        if boot.evidence == "none":
            raise BadInput(f"{where} is of a log without memory lines, so that there is nothing to compare")
        return deployments.of_boot(boot, where, log=False)
    known = ", ".join((FORMAT, ESTIMATE_FORMAT, BOOT_FORMAT))
    raise BadInput(f"{where} is a document of format {form[:80]!r}, and these are compared: {known}")


def _as(document: type[Any], data: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(data, type=document)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{where} is damaged, or of another version: {error}") from None

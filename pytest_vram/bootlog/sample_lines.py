"""Lines of ``nvidia-smi`` and ``rocm-smi`` as people keep them: CSV with or without a header, tables, lists, dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Literal, NamedTuple

from pytest_vram.errors import BadInput
from pytest_vram.units import MIB

RowClock = Literal["epoch", "local", "relative"]


class Row(NamedTuple):
    """One figure.

    :ivar used: bytes, ``None`` where they were not told. :ivar stamp: number of the ``date`` line that gave the time.
    :ivar gpu: number or label of the device, as written.
    """

    used: int | None
    time: float | None = None
    clock: RowClock | None = None
    stamp: int | None = None
    gpu: str | None = None
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    total: int | None = None
    pid: str | None = None
    process: str | None = None


class _Torn(ValueError):
    """A line that is no row."""


#: Name of a column, without its unit → what is in it.
_COLUMNS = {
    "timestamp": "time",
    "time": "time",
    "date": "time",
    "datetime": "time",
    "epoch": "time",
    "index": "index",
    "gpu": "index",
    "gpu_index": "index",
    "idx": "index",
    "device": "index",
    "name": "name",
    "gpu_name": "name",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "pci.bus_id": "bus",
    "gpu_bus_id": "bus",
    "memory.used": "used",
    "memory_used": "used",
    "memory used": "used",
    "used_memory": "used",
    "used_gpu_memory": "used",
    "vram total used memory": "used",
    "memory.total": "total",
    "memory_total": "total",
    "vram total memory": "total",
    "pid": "pid",
    "process_name": "process",
}
#: Columns that say whose figure it is.
_NAMING = ("index", "name", "uuid", "bus", "pid", "process")
_UNIT = re.compile(r" ?[\[(](MiB|MB|B|%|W|C|MHz|KiB|GiB)[\])]$", re.ASCII)
_FACTORS = {"MiB": MIB, "MB": MIB, "B": 1, "KiB": 1 << 10, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d{1,15})(?: ?(MiB|MB|B|KiB|GiB))?", re.ASCII)
_NO_FIGURE = re.compile(r"\[[A-Za-z/ .]{1,60}\]|N/A|-|", re.ASCII)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_HOURS = r"(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
_ZONE = r"(?: ?(?P<zone>Z|[+-]\d\d:?\d\d|[A-Z]{2,5}))?"
_NUMERIC = re.compile(r"(?P<year>\d{4})[-/](?P<month>\d{1,2})[-/](?P<day>\d{1,2})[T_ ] ?" + _HOURS + _ZONE, re.ASCII)
_WRITTEN = re.compile(
    r"(?:[A-Z][a-z]{2},? )?(?:(?P<monthname>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2})"
    r"|(?P<day2>\d{1,2}) (?P<monthname2>[A-Z][a-z]{2})"
    r"(?: (?P<year2>\d{4}))?),? " + _HOURS + r"(?: (?P<half>AM|PM))?" + _ZONE + r"(?: (?P<year>\d{4}))?",
    re.ASCII,
)
_EPOCH = re.compile(r"(?P<whole>1\d{9}|2[0-4]\d{8})(?P<milli>\d{3})?(?:[.,](?P<fraction>\d{1,9}))?", re.ASCII)
_OF_DAY = re.compile(_HOURS, re.ASCII)
#: Zones whose names say one thing only.
_UTC = ("Z", "UTC", "GMT")
_CARD = re.compile(r"\|\s+(\d{1,3})\s+(\S.{0,60}?)\s+(?:On|Off|N/A)\s*\|", re.ASCII)
_IN_TABLE = re.compile(r"\|[^|]{1,60}\|\s{0,20}(\d{1,9})MiB\s{0,3}/\s{0,9}(\d{1,9})MiB\s{0,9}\|", re.ASCII)


class Moment(NamedTuple):
    """Seconds since 1970 (UTC), or since midnight where the clock is ``relative``."""

    time: float
    clock: RowClock


def moment(text: str) -> Moment | None:
    """The moment that a text is, in any of the forms of ``date``; ``None`` where it is none."""
    text = text.strip()
    if len(text) > 60:
        return None
    if found := _EPOCH.fullmatch(text):
        fraction = float(f"0.{found['fraction'] or 0}")
        return Moment(int(found["whole"]) + int(found["milli"] or 0) / 1000 + fraction, "epoch")
    if found := _NUMERIC.fullmatch(text):
        return _dated(found, int(found["year"]), int(found["month"]), int(found["day"]), None)
    if found := _WRITTEN.fullmatch(text):
        name, year = found["monthname"] or found["monthname2"], found["year"] or found["year2"]
        if name.lower() not in _MONTHS or year is None:
            return None
        month = _MONTHS.index(name.lower()) + 1
        return _dated(found, int(year), month, int(found["day"] or found["day2"]), found["half"])
    if found := _OF_DAY.fullmatch(text):
        of_day = int(found["hour"]) * 3600 + int(found["minute"]) * 60 + int(found["second"])
        return Moment(of_day + float(f"0.{found['fraction'] or 0}"), "relative")
    return None


def _dated(found: re.Match[str], year: int, month: int, day: int, half: str | None) -> Moment | None:
    hour = int(found["hour"])
    if half is not None:
        hour = hour % 12 + (12 if half == "PM" else 0)
    zone = found["zone"]
    offset, clock = timedelta(), "local"
    if zone in _UTC:
        clock = "epoch"
    elif zone is not None and zone[0] in "+-":
        clock, offset = "epoch", timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        offset = offset if zone[0] == "+" else -offset
    try:
        at = datetime(
            year,
            month,
            day,
            hour,
            int(found["minute"]),
            int(found["second"]),
            tzinfo=timezone(offset) if clock == "epoch" else UTC,
        )
        seconds = at.timestamp()
    except (ValueError, OverflowError):
        return None
    return Moment(seconds + float(f"0.{found['fraction'] or 0}"), "epoch" if clock == "epoch" else "local")


class Rows:
    """Takes lines, and keeps the figures in them.

    :ivar found: the figures, in their order. :ivar strange: lines that are neither samples nor belong to them.
    :ivar source: the program whose words these are.
    """

    def __init__(self, origin: str, command: str) -> None:
        self._origin, self._command = origin, command
        self.found: list[Row] = []
        self.strange = 0
        self.source = "nvidia-smi"
        self._columns: tuple[str | None, ...] | None = None
        self._factors: tuple[int | None, ...] = ()
        self._list = False
        self._now: Moment | None = None
        self._stamp = 0
        self._card: tuple[str, str] | None = None
        self._without: list[str] = []
        self._plain = False

    def feed(self, raw: str) -> None:
        """Take the next line.

        :raises BadInput: a header without the figure that is wanted.
        """
        line = raw.strip().strip("\ufeff\0")
        if not line or line.startswith(("+-", "|-", "|=", "==", "Every ")):
            return
        if line.startswith("|"):
            self._table(line)
        elif line.startswith("#"):
            self._list_header(line)
        elif not self._header(line):
            at = moment(line)
            if at is not None:
                self._now = at
                self._stamp += 1
            else:
                self._row(line)

    def finish(self) -> None:
        """No more lines come: what had no header is understood, where that is certain.

        :raises BadInput: it cannot be told which column is which.
        """
        if self._without:
            self._headerless()

    def notes(self) -> list[str]:
        """What a reader must know."""
        notes = []
        if self._plain:
            notes.append("numbers without a unit were taken for MiB, the unit of nvidia-smi")
        holes = sum(row.used is None for row in self.found)
        if holes:
            notes.append(f"{holes} of {len(self.found)} samples have no figure, only a word such as [N/A]")
        if self.strange:
            notes.append(f"{self.strange} lines of the samples could not be read and were passed over")
        return notes

    # -------------------------------------------------------- parts

    def _table(self, line: str) -> None:
        card = _CARD.match(line)
        if card is not None:
            self._card = (card[1], card[2])
        memory = _IN_TABLE.search(line)
        if memory is not None and self._card is not None:
            self._add(Row(int(memory[1]) * MIB, gpu=self._card[0], name=self._card[1], total=int(memory[2]) * MIB))
            self._card = None

    def _list_header(self, line: str) -> None:
        """``nvidia-smi dmon`` and ``pmon`` write two lines of headers, again and again: names, then units."""
        words = line.lstrip("# ").split()
        lowered = [word.lower() for word in words]
        if "gpu" in lowered:
            if "fb" not in lowered:
                raise BadInput(
                    f"{self._origin} has no column fb, which `nvidia-smi dmon -s m -o DT` writes; better is"
                    f" `{self._command}`"
                )
            names = {"gpu": "index", "fb": "used", "pid": "pid", "date": "day", "time": "time", "command": "process"}
            self._columns = tuple(names.get(word) for word in lowered)
            self._factors = (MIB,) * len(words)
            self._list = True

    def _header(self, line: str) -> bool:
        fields = [field.strip().strip('"') for field in line.split(",")]
        names = [_UNIT.sub("", field).lower() for field in fields]
        kinds = tuple(_COLUMNS.get(name) for name in names)
        if not any(kinds) or any(name.replace(".", "").isdigit() for name in names):
            return False
        if len(names) == 1 and kinds[0] != "used":
            return False
        if "used" not in kinds:
            raise BadInput(
                f"{self._origin} has no column memory.used (found {', '.join(fields[:8])}): take the samples with"
                f" `{self._command}`"
            )
        units = [_UNIT.search(field) for field in fields]
        self._columns = kinds
        self._factors = tuple(None if unit is None else _FACTORS.get(unit[1]) for unit in units)
        self._list = False
        if any(name.startswith("vram total") for name in names):
            self.source = "rocm-smi"
        return True

    def _row(self, line: str) -> None:
        if self._columns is None:
            if not self._without or line.count(",") == self._without[0].count(","):
                self._headerless_row(line)
            else:
                self.strange += 1
            return
        fields = line.split() if self._list else [field.strip().strip('"') for field in line.split(",")]
        try:
            self._add(self._read(fields))
        except _Torn:
            self.strange += 1

    def _headerless_row(self, line: str) -> None:
        if re.match(r"[\w\[.-]", line, re.ASCII) is None:
            self.strange += 1
            return
        self._without.append(line)
        time, clock = self._now or (None, None)
        self.found.append(Row(None, time, clock, self._stamp or None))

    def _read(self, fields: list[str]) -> Row:
        assert self._columns is not None
        more = len(fields) - len(self._columns)
        if more > 0 and "process" in self._columns:  # a name with commas
            place = self._columns.index("process")
            fields[place : place + more + 1] = [", ".join(fields[place : place + more + 1])]
        if len(fields) != len(self._columns):
            raise _Torn
        told = enumerate(zip(self._columns, fields, strict=True))
        cells = {kind: (text, self._factors[place]) for place, (kind, text) in told if kind}
        at = None
        if "time" in cells:
            written = cells["time"][0]
            if "day" in cells:
                day = cells["day"][0]
                written = f"{day[:4]}-{day[4:6]}-{day[6:]} {written}"
            at = moment(written)
            if at is None:
                raise _Torn
        used = self._size(*cells["used"])
        total = self._size(*cells["total"]) if "total" in cells else None
        names: dict[str, str] = {kind: cells[kind][0] for kind in _NAMING if kind in cells}
        if not all(names.values()) or names.get("pid") == "-":
            raise _Torn
        get = names.get
        row = Row(
            used,
            gpu=get("index"),
            name=get("name"),
            uuid=get("uuid"),
            bus=get("bus"),
            total=total,
            pid=get("pid"),
            process=get("process"),
        )
        return row if at is None else row._replace(time=at.time, clock=at.clock)

    def _size(self, text: str, factor: int | None) -> int | None:
        found = _SIZE.fullmatch(text)
        if found is None:
            if _NO_FIGURE.fullmatch(text) and text:
                return None
            raise _Torn
        if found[2] is None and factor is None:
            self._plain = True
        return int(found[1]) * (_FACTORS[found[2]] if found[2] else factor or MIB)

    def _add(self, row: Row) -> None:
        if row.time is None and self._now is not None:
            row = row._replace(time=self._now.time, clock=self._now.clock, stamp=self._stamp)
        self.found.append(row)

    # -------------------------------------------------------- without a header

    def _headerless(self) -> None:
        table = [[field.strip() for field in _cut(line)] for line in self._without]
        width = max(set(map(len, table)), key=[len(row) for row in table].count)
        kinds = [_kind([row[n] for row in table if len(row) == width]) for n in range(width)]
        numbers = [n for n, kind in enumerate(kinds) if kind in ("number", "size")]
        sizes = [n for n in numbers if kinds[n] == "size"]
        used, index = None, None
        if not numbers:
            self.strange += len(self._without)
            self.found = self.found[len(self._without) :]
            return
        if len(numbers) == 1:
            used = numbers[0]
        elif len(numbers) == 2 and len(sizes) == 1:
            used = sizes[0]
            index = next(n for n in numbers if n not in sizes)
            if not _counts([row[index] for row in table if len(row) == width]):
                used = None
        if used is None:
            raise BadInput(
                f"{self._origin} has no header, and which of its {width} columns is memory.used cannot be told: keep"
                f" the header, as in `{self._command}`"
            )
        names: list[str | None] = [None if kind in ("number", "size", "text") else kind for kind in kinds]
        names[used] = "used"
        if index is not None:
            names[index] = "index"
        texts = [n for n, kind in enumerate(kinds) if kind == "text"]
        if len(texts) == 1:
            names[texts[0]] = "name"
        self._columns, self._factors = tuple(names), (None,) * width
        # With a header further down, what follows it is understood already.
        stamps, understood = self.found[: len(table)], self.found[len(table) :]
        self.found = []
        for fields, stamp in zip(table, stamps, strict=True):
            try:
                row = self._read(fields)
            except _Torn:
                self.strange += 1
                continue
            self.found.append(
                row if row.time is not None else row._replace(time=stamp.time, clock=stamp.clock, stamp=stamp.stamp)
            )
        self.found += understood


def _cut(line: str) -> Sequence[str]:
    """The columns of a line without a header: by commas, or an epoch and a number with a space between."""
    if "," not in line:
        first, _, rest = line.partition(" ")
        if rest and _EPOCH.fullmatch(first) and _SIZE.fullmatch(rest.strip()):
            return first, rest
    return line.split(",")


def _kind(cells: list[str]) -> str:
    """What a column without a name is: ``time``, ``uuid``, ``bus``, ``number``, ``size`` (with a unit) or ``text``."""
    told = [cell for cell in cells if not _NO_FIGURE.fullmatch(cell)]
    most = len(told) * 9 // 10 or 1
    tests = (
        ("time", lambda cell: moment(cell) is not None),
        ("uuid", lambda cell: cell.startswith("GPU-")),
        ("bus", lambda cell: re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", cell) is not None),
        ("size", lambda cell: re.fullmatch(r"\d{1,15} ?MiB", cell) is not None),
        ("number", lambda cell: re.fullmatch(r"\d{1,15}", cell) is not None),
    )
    for kind, test in tests:
        if sum(map(test, told)) >= most:
            return kind
    return "text"


def _counts(cells: list[str]) -> bool:
    """Whether a column counts the GPUs of each round: 0, 1, … and again."""
    highest = max((int(cell) for cell in cells if cell.isascii() and cell.isdigit() and len(cell) < 7), default=0)
    return all(cell == str(place % (highest + 1)) for place, cell in enumerate(cells))

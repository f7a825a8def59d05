"""Reading the dry run that llama.cpp's server does before it loads: the trial of ``--fit``.

The trial loads the model without allocating and prints one table of whole MiB for the parameters as they were given
(``memory breakdown [MiB]``), cut off, not rounded. Lines before the table give some figures with two decimals. Tables
of other parameters, which follow where fit looks for smaller ones, are not read; one for a draft model is kept apart.

Source: llama.cpp ``common/fit.cpp`` (``common_params_fit_impl``, ``common_memory_breakdown_print``), and logs of b10068
and b10434.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from pytest_vram.bootlog import llama_facts, llama_failures
from pytest_vram.bootlog.devices import Labels
from pytest_vram.bootlog.lines import count, shown, size, split
from pytest_vram.bootlog.llama_breakdown import GPU, HEADER, LIKE_ROW, MOST_ROWS, ROW
from pytest_vram.bootlog.numbering import numbers

MIB = 1 << 20
#: Of a table's columns, the ones that say what is where.
Column = Literal["model", "context", "compute"]
COLUMNS: tuple[Column, ...] = ("model", "context", "compute")

_BUFFER = re.compile(
    r"(?<![^\s:])(?P<device>[^\s:]\S{0,200})\s++(?P<kind>compute|KV|RS) buffer size\s*+=\s*+"
    r"(?P<number>\d+\.\d+) (?P<unit>MiB)",
    re.ASCII,
)
_CACHE = re.compile(r"\bsize =\s*(?P<number>\d+\.\d+) (?P<unit>MiB) \(\s*\d+ cells", re.ASCII)
_RECURRENT = re.compile(r"\brecurrent\S*: size =\s*(?P<number>\d+\.\d+) (?P<unit>MiB)", re.ASCII)
_EXTRA = re.compile(
    r"\[(?P<what>mtmd|spec)\] adding (?P<number>\d+\.\d+) (?P<unit>MiB) to fit_params_target for device (?P<device>\S+)"
)
_USING = re.compile(r"\busing device (\S{1,200}) \((.{0,200}?)\)", re.ASCII)
#: The trial has decided: what follows is another trial or the real load.
_DECIDED = re.compile(r"no changes needed|cannot meet free memory target|fitting params to free memory took")
_GAVE_UP = re.compile(
    r"failed to fit params to free device memory: (.*)|error while trying to fit params.{0,200}?: (.*)"
)
_MOST_ERRORS = 20


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes as an engine printed them.

    :ivar bytes: the printed value. :ivar resolution: half of its last digit where it is rounded: known to ± this.
    :ivar at_most: upper end in bytes where the printed value is cut off; then ``bytes`` is the lower end.
    """

    bytes: int
    resolution: int = 0
    at_most: int | None = None

    @property
    def low(self) -> int:
        """The smallest number of bytes that prints so."""
        return self.bytes if self.at_most is not None else max(0, self.bytes - self.resolution)

    @property
    def high(self) -> int:
        """The largest number of bytes that prints so."""
        return self.bytes + self.resolution if self.at_most is None else self.at_most

    def holds(self, number: int) -> bool:
        """Whether ``number`` bytes would print so."""
        return self.low <= number <= self.high


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    :ivar name: the engine's own, such as ``CUDA0``, ``Host`` or ``CPU_REPACK``. :ivar label: ``gpu0`` … or ``host``.
    :ivar total: of the device, in bytes cut off to MiB, where the table gives it. :ivar free: the same.
    """

    name: str
    label: str
    model: Amount
    context: Amount
    compute: Amount
    total: int | None = None
    free: int | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run printed.

    :ivar rows: of the model for the parameters as given; empty where no table was printed.
    :ivar draft: the rows of a draft model, or of a context for multi-token prediction.
    :ivar extras: (``projector`` or ``draft``, label, amount) that the server sets aside on a device for a vision or
        audio encoder, or (older builds) for speculative decoding.
    :ivar caches: totals of each KV cache over all devices, to two decimals. :ivar recurrent: of the recurrent state.
    :ivar facts: named as in :class:`~pytest_vram.bootlog.boot.Boot`.
    :ivar projected: ``projected to use``: the engine's own sum over devices (host, where there is no device), cut off
        to MiB. :ivar fits: whether the engine would leave the parameters alone; ``None`` where it did not say.
    :ivar unread: a line of a table that could not be read: what it says is missing from the rows.
    :ivar refusal: the engine's own words where it printed no table. :ivar decided: nothing more is to be read.
    """

    rows: tuple[Row, ...] = ()
    draft: tuple[Row, ...] = ()
    extras: tuple[tuple[str, str, Amount], ...] = ()
    caches: tuple[Amount, ...] = ()
    recurrent: tuple[Amount, ...] = ()
    devices: dict[str, str] = {}
    facts: dict[str, Any] = {}
    projected: int | None = None
    fits: bool | None = None
    unread: str = ""
    refusal: str | None = None
    decided: bool = False


class DryRunLog:
    """Reads the log of a server that is doing its dry run, line by line."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._section: Literal["before", "main", "draft"] = "before"
        self._fitting = False
        self._in_table = False
        # The server of some builds tries a draft model before fit begins.
        self._rows: dict[str, list[Row]] = {"before": [], "main": [], "draft": []}
        self._no_alloc = False
        self._compute: dict[str, Amount] = {}
        self._holders: set[str] = set()  # labels with a KV or state buffer, whose size a trial prints as 0
        self._caches: list[Amount] = []
        self._recurrent: list[Amount] = []
        self._extras: list[tuple[str, str, Amount]] = []
        self._facts: dict[str, Any] = {}
        self._errors: list[str] = []
        self._given_up: str | None = None
        self._unread = ""
        self._projected: int | None = None
        self._fits: bool | None = None
        #: The trial of fit has opened the model's files, and does not need their names any more.
        self.opened = False
        #: It went on to load without having printed a table: it must be stopped.
        self.loading = False
        #: What was printed is all that will be.
        self.decided = False

    def feed(self, raw: str) -> None:
        """Take the next line. Never raises, whatever the line is; lines after the decision are ignored."""
        if self.decided or self.loading or "create_tensor:" in raw:  # most of a log, and of no use
            return
        line = split(raw)
        text = line.text
        self._note_errors(text, line.level)
        self._milestones(text)
        if self._row(text) or self.decided:
            return
        if match := _USING.search(text):
            self._labels.announced(match[1], match[2])
        if match := _EXTRA.search(text):
            self._extra(match)
        if self._section == "main":
            self._figures(text)

    def _note_errors(self, text: str, level: str | None) -> None:
        if level is not None and level not in "EF":
            return
        sign = llama_failures.sign(text)
        if sign is not None and len(self._errors) < _MOST_ERRORS and shown(sign.text) not in self._errors:
            self._errors.append(shown(sign.text))

    def _milestones(self, text: str) -> None:
        if "loaded meta data with" in text:
            self.opened = self.opened or self._fitting
        elif "no_alloc" in text:
            self._no_alloc = text.split()[-2:] == ["=", "1"]
        elif "fitting params to device memory" in text:
            self._fitting = True
        elif "loading model tensors" in text:
            self.loading = not self._fitting and not self._no_alloc
        elif "getting device memory data for initial parameters" in text:
            self._enter("main")
        elif "getting device memory data for the extra model" in text:
            self._enter("draft")
        elif "context size unset and KV cache not unified" in text:
            self._enter("main")  # the same again, with the context it resolved to
        elif match := _GAVE_UP.search(text):
            self._given_up = shown(match[1] or match[2])
            self.decided = True
        elif _DECIDED.search(text):
            self._fits = "no changes needed" in text if "took" not in text else self._fits
            self.decided = True
        facts = llama_facts.of_server(text)
        if "projected_device_bytes" in facts or "projected_host_bytes" in facts:
            self._projected = facts.get("projected_device_bytes", facts.get("projected_host_bytes"))
        self._facts.update(facts)

    def _enter(self, section: Literal["main", "draft"]) -> None:
        self._section = section
        self._in_table = False
        self._rows[section] = []
        if section == "main":
            self._compute, self._holders, self._caches, self._recurrent = {}, set(), [], []
            self._facts = {name: fact for name, fact in self._facts.items() if not name.startswith("kv_")}

    def _row(self, text: str) -> bool:
        """Read a line of a table; false where it is none."""
        if HEADER.search(text):
            self._in_table = True
            self._rows[self._section] = []
            return True
        if not self._in_table:
            return False
        match = ROW.search(text)
        if match is None:  # another thread's line may stand in the middle
            if LIKE_ROW.search(text) is None:
                return False
            self._unread = self._unread or shown(text)
            return True
        if len(self._rows[self._section]) >= MOST_ROWS:
            self._unread = self._unread or f"line {MOST_ROWS + 1} of one table"
            return True
        name, description = match["name"], match["description"]
        if name == "Host":
            label = self._labels.of("CPU")
        elif description is not None:
            label = self._labels.announced(name, description)
        else:
            label = self._labels.of(name)
        sizes = GPU.search(text)
        self._rows[self._section].append(
            Row(
                name=name,
                label=label,
                model=_cut(match["model"]),
                context=_cut(match["context"]),
                compute=_cut(match["compute"]),
                total=None if sizes is None else int(sizes["total"]) * MIB,
                free=None if sizes is None else int(sizes["free"]) * MIB,
            )
        )
        return True

    def _figures(self, text: str) -> None:
        if match := _BUFFER.search(text):
            if match["kind"] != "compute":
                self._holders.add(self._labels.of(match["device"]))
            elif (amount := _rounded(match["number"], match["unit"])) is not None:
                self._compute[match["device"]] = amount  # one that is reserved anew replaces the earlier one
            return
        if match := _RECURRENT.search(text):
            if (amount := _rounded(match["number"], match["unit"])) is not None:
                self._recurrent.append(amount)
        elif (match := _CACHE.search(text)) and (amount := _rounded(match["number"], match["unit"])) is not None:
            self._caches.append(amount)
        found = llama_facts.of_load(text)
        if "kv_cells" in found and "kv_cells" in self._facts:
            # Two caches of one context (sliding window): the larger one is the context's.
            cells = (self._facts["kv_cells"], found["kv_cells"])
            self._facts["kv_cells_sliding"], self._facts["kv_cells"] = min(cells), max(cells)
            self._facts["kv_layers"] += found["kv_layers"]
            return
        self._facts.update(found)

    def _extra(self, match: re.Match[str]) -> None:
        amount = _rounded(match["number"], match["unit"])
        if amount is not None:
            bucket = "projector" if match["what"] == "mtmd" else "draft"
            self._extras.append((bucket, match["device"], amount))

    def _named(self, device: str) -> str:
        """The label of a device that is named as in the table, which may come later."""
        rows = (row for section in self._rows.values() for row in section)
        return next((row.label for row in rows if row.name == device), None) or self._labels.of(device)

    def trial(self) -> Trial:
        """What the lines so far said."""
        refusal = None
        rows = tuple(self._refined(self._rows["main"]))
        if not rows:
            named = [text for text in self._errors if "failed to load model" not in text]
            refusal = next(iter([*named, *self._errors]), self._given_up)
        draft = self._rows["draft"] or self._rows["before"]
        extras = [(bucket, self._named(device), amount) for bucket, device, amount in self._extras]
        new = numbers(self._labels.names)
        return Trial(
            rows=tuple(msgspec.structs.replace(row, label=new.get(row.label, row.label)) for row in rows),
            draft=tuple(msgspec.structs.replace(row, label=new.get(row.label, row.label)) for row in draft),
            extras=tuple((bucket, new.get(label, label), amount) for bucket, label, amount in extras),
            caches=tuple(self._caches),
            recurrent=tuple(self._recurrent),
            devices={new.get(label, label): name for label, name in self._labels.names.items()},
            facts=dict(self._facts),
            projected=self._projected,
            fits=self._fits,
            unread=self._unread,
            refusal=refusal,
            decided=self.decided,
        )

    def _refined(self, rows: list[Row]) -> list[Row]:
        """The rows with two decimals where lines before the table have them and agree with it."""
        for label in {row.label for row in rows}:
            printed = [amount for device, amount in self._compute.items() if self._labels.of(device) == label]
            rows = _settled(rows, label, "compute", printed)
        for label in {row.label for row in rows} if self._holders else ():
            if label not in self._holders:
                rows = _settled(rows, label, "context", [Amount(bytes=0)])
            elif len(self._holders) == 1:
                rows = _settled(rows, label, "context", [*self._caches, *self._recurrent])
        return rows


def _settled(rows: list[Row], label: str, column: Column, printed: list[Amount]) -> list[Row]:
    """The rows with the sum of ``printed`` in the one row of ``label`` that it suits; its other rows then have none."""
    summed = total(printed)
    mine = [index for index, row in enumerate(rows) if row.label == label]
    largest = max(mine, key=lambda index: getattr(rows[index], column).bytes, default=None)
    others = sum(getattr(rows[index], column).bytes for index in mine if index != largest)
    if not printed or largest is None or others or not _agrees(getattr(rows[largest], column), summed):
        return rows
    return [
        msgspec.structs.replace(row, **{column: summed if index == largest else Amount(bytes=0)})
        if index in mine
        else row
        for index, row in enumerate(rows)
    ]


def total(amounts: list[Amount] | tuple[Amount, ...]) -> Amount:
    """The sum of several amounts: ends and resolutions add up."""
    low = sum(amount.bytes for amount in amounts)
    if all(amount.at_most is None for amount in amounts):
        return Amount(bytes=low, resolution=sum(amount.resolution for amount in amounts))
    lower = sum(amount.low for amount in amounts)
    return Amount(bytes=lower, at_most=sum(amount.high for amount in amounts))


def _cut(number: str) -> Amount:
    """A column of the table: whole MiB, cut off by an integer division."""
    value = (count(number) or 0) * MIB
    return Amount(bytes=value, at_most=value + MIB - 1)


def _rounded(number: str, unit: str) -> Amount | None:
    figure = size(number, unit)
    return None if figure is None else Amount(bytes=figure[0], resolution=figure[1])


def _agrees(cut: Amount, rounded: Amount) -> bool:
    return rounded.low <= cut.high and cut.low <= rounded.high

"""llama-server's own dry run on a model file: exact figures of its buffers, and nothing loaded.

The server starts as if to serve, does the trial of ``--fit``, which allocates nothing, and is killed as soon as that
trial has printed its table. Four things keep it from loading, each without the others:

- it is killed, with all that it started, when the table is complete, when it begins to load without one, and at the end
  of its time;
- it is given the model under names of its own, links in a folder that become pipes without a writer once the trial has
  opened the files: when it comes back to load, it waits at one for ever, whatever device it would load to. (If the
  names were gone, it would exit, and lose lines of its log that were still queued.) Where the engine may try more than
  once (:func:`_tries_once`), the links stay, and the kill is what stops it; the engine runs at most some hundred lines
  ahead of what was read of its log, which are fewer than the load of a large model has;
- where no driver of a graphics card is in use, its data is limited to :data:`MOST_DATA`: enough for headers and graphs,
  too little for a large model in host memory. Drivers reserve more than that for themselves, so it cannot be kept then;
- it dies with this process, and so does all that it started, however either of them is ended: a guard sees to that
  (:mod:`~pytest_vram.backends.confined`), which then also removes the links.

What the engine's figures leave out: the driver's own memory, output buffers (the trial makes them without size), the
mapped file beside weights that the CPU reorders (:func:`left_out`), LoRA adapters. Source: llama.cpp
``common/fit.cpp``, ``src/llama-context.cpp`` (``output_reserve``), and runs of b10068 and b10434 on CPU and RPC
devices; no run on a real card confirmed it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.backends import binary as binaries
from pytest_vram.backends import flags, gguf_file
from pytest_vram.backends.confined import Confined
from pytest_vram.backends.llama_server import REFUSED
from pytest_vram.backends.smoke import in_words
from pytest_vram.backends.words import said
from pytest_vram.bootlog.devices import HOST
from pytest_vram.bootlog.dry_run import COLUMNS, Amount, DryRunLog, Row, Trial, total
from pytest_vram.errors import BackendError, BadModel, EngineNotFound, EngineRefused, ModelNotFound
from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.sizing.weights import MAPPED
from pytest_vram.spec import OptionValue

TIMEOUT = 60.0
#: Bytes of data that the process may have where no driver is in use (``RLIMIT_DATA``).
MOST_DATA = 2 << 30
#: Bytes of its log that are read: a server that writes more before its table is no llama-server.
MOST_LOG = 256 << 20
SOURCE = "dry-run"
_PREFIX = "vram-dry-run-"
_STALE = 600.0  # seconds; younger folders may belong to a run that has not marked them yet
#: llama-server queues its log, and what is queued when it exits is lost, sometimes all of its reason.
_ATTEMPTS = 5
_VERBOSITY = 5  # the buffers of a trial are printed as debug lines
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")
#: Options that this decides; whatever the deployment sets is left out.
_OWN = ("fit", "verbosity", "log-verbosity", "verbose", "port", "host", "model", "log-file", "log-disable")
#: Where a driver shows itself; a process that uses one needs more data than :data:`MOST_DATA`.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri")
_COLUMN_BUCKETS: dict[str, Bucket] = {"model": "weights", "context": "kv", "compute": "compute"}


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says that a deployment takes.

    :ivar binary: the engine. :ivar argv: its command line, as a deployment would write it.
    :ivar trial: the table and the lines around it. :ivar seconds: that it took.
    """

    binary: str
    model: str
    argv: tuple[str, ...]
    trial: Trial
    seconds: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """The table's lines, devices first."""
        return self.trial.rows

    @property
    def facts(self) -> dict[str, Any]:
        """``context``, ``slots``, ``kv_cells``, ``flash_attention``, ``layers_offloaded`` … as printed."""
        return self.trial.facts

    @property
    def fits(self) -> bool | None:
        """Whether the engine would leave the parameters as they are on the devices of this machine."""
        return self.trial.fits

    def of(self, label: str, column: str) -> Amount:
        """The sum of ``model``, ``context`` or ``compute`` over the rows of one device label."""
        return total([getattr(row, column) for row in self.rows if row.label == label])


def dry_run(
    binary: Path,
    model: Path,
    options: Mapping[str, OptionValue | Sequence[OptionValue]],
    *,
    endpoints: Sequence[str] = (),
    device_none: bool = False,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    origin: str = "the options of the estimate",
    timeout: float = TIMEOUT,
) -> DryRun:
    """Let ``binary`` do its dry run on ``model`` and read its figures; it never loads the model.

    :param options: the engine's long option names (dashes) → values. What decides the run itself is replaced.
    :param endpoints: ``host:port`` of RPC devices to use. :param device_none: everything on the host.
    :param environment: variables of the deployment. :param folder: where it runs; relative paths of options start here.
    :raises EngineRefused: it refuses the model or the settings, with its own sentence.
    :raises BackendError: the engine has no dry run, dies or does not answer in ``timeout`` seconds.
    :raises BadSpec: an option that the engine does not have.
    """
    if os.name != "posix":
        raise BackendError(f"a dry run needs Linux or macOS, and this is {sys.platform}: use the estimate without it")
    known = flags.help_of(binary)
    if not known.knows("fit"):
        raise BackendError(
            f"{binary} has no option --fit, so it does no dry run: use a build of llama.cpp from December 2025 or later"
        )
    used = {name: value for name, value in options.items() if not _is_own(known, name)}
    argv = flags.to_argv(used, known, origin=origin, refused=REFUSED)
    argv += _placement(known, endpoints, device_none, binary)
    began = time.monotonic()
    with _linked(model) as linked:
        command = [str(binary), "--model", str(linked), "--host", "127.0.0.1", "--port", "0", "--fit", "on"]
        command += ["--verbosity" if known.knows("verbosity") else "--log-verbosity", str(_VERBOSITY), *argv]
        attempts = _ATTEMPTS
        while True:
            _link(model, linked.parent)
            run = _Run(
                command, linked, folder, dict(environment or {}), limited=not _drivers_here(), once=_tries_once(used)
            )
            trial = run.trial(began + timeout)
            attempts -= 1
            if not attempts or not run.lost_its_words(trial):
                break
    if trial.unread:
        raise BackendError(
            f"{binary} printed a memory table for {model} with a line that cannot be read: {said(trial.unread, 200)}"
        )
    if not trial.rows:
        raise _no_table(run, trial, binary, model, timeout)
    if endpoints and all(row.label == HOST for row in trial.rows):
        raise BackendError(
            f"{binary} reached no device at {', '.join(endpoints)}, and put all of {model} on the host: start the RPC"
            " server there, of the same build; it serves one program at a time"
        )
    return DryRun(
        binary=str(binary),
        model=str(model),
        argv=(str(binary), "--model", str(model), *argv),
        trial=trial,
        seconds=time.monotonic() - began,
    )


def exact(
    model: Path,
    options: Mapping[str, object],
    *,
    binary: Path | None = None,
    endpoints: Sequence[str] = (),
    device_none: bool = False,
    timeout: float = TIMEOUT,
) -> DryRun:
    """:func:`dry_run` with the engine that is found here; option names may have underscores, ``None`` is left out.

    :raises EngineNotFound: no llama-server is here. :raises BackendError: as :func:`dry_run`.
    """
    values: dict[str, OptionValue | Sequence[OptionValue]] = {}
    for name, value in options.items():
        if isinstance(value, str | int | float | bool):
            values[name.replace("_", "-")] = value
        elif isinstance(value, list | tuple) and value:
            values[name.replace("_", "-")] = [item for item in value if isinstance(item, str | int | float | bool)]
    return dry_run(
        binary if binary is not None else find_binary(),
        model,
        values,
        endpoints=endpoints,
        device_none=device_none,
        timeout=timeout,
    )


def find_binary() -> Path:
    """A llama-server for dry runs: also one that dies on this CPU when it computes, for a dry run computes nothing.

    :raises EngineNotFound: with each place that was looked at.
    """
    looked = [place for place in binaries.places() if place.path is not None]
    for place in sorted(looked, key=lambda place: not place.usable):
        assert place.path is not None
        return place.path
    tried = "; ".join(f"{place.where}: {place.reason}" for place in binaries.places())
    raise EngineNotFound(
        f"no llama-server was found for a dry run (looked at {tried}): run `vram demo` once, which fetches one, or"
        " install llama.cpp so that `llama-server` is on PATH"
    )


def ledger_of(dry: DryRun) -> Ledger:
    """The table as a ledger with source ``dry-run``.

    ``weights`` holds experts too, ``kv`` recurrent state too: the engine does not tell them apart. A figure that the
    engine cut off to whole MiB is a range of one MiB; one with two decimals has its resolution. What the engine sets
    aside for an encoder or a draft model is in ``projector`` and ``draft``.
    """
    entries: list[Entry] = []
    for row in dry.rows:
        for column in COLUMNS:
            amount: Amount = getattr(row, column)
            # Only weights are repacked, so the 0 of the other columns is one.
            if amount.high > 0 and (amount.bytes or row.name != "CPU_REPACK"):
                entries.append(_entry(_COLUMN_BUCKETS[column], row.label, amount, f"{row.name} {column}"))
    for row in dry.trial.draft:
        for column in COLUMNS:
            amount = getattr(row, column)
            if amount.high > 0:
                entries.append(_entry("draft", row.label, amount, f"{row.name} {column} of the draft model"))
    for what, label, amount in dry.trial.extras:
        if what == "draft" and dry.trial.draft:
            continue  # the same again, from the table of the draft model
        bucket: Bucket = "projector" if what == "projector" else "draft"
        entries.append(_entry(bucket, label, amount, "set aside by the engine"))
    return Ledger(entries=tuple(entries), devices=dict(dry.trial.devices))


def _entry(bucket: Bucket, label: str, amount: Amount, detail: str) -> Entry:
    return Entry(
        bucket=bucket,
        device=label,
        bytes=amount.bytes,
        source=SOURCE,
        detail=detail,
        resolution=amount.resolution,
        at_most=amount.at_most,
    )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One group of buckets on one device, from both sides.

    :ivar group: ``weights``, ``kv`` or ``compute``. :ivar rule: bytes by rules, ``rule_at_most`` its upper end.
    :ivar engine: what the engine printed.
    """

    group: str
    device: str
    rule: int
    rule_at_most: int
    engine: Amount

    @property
    def agree(self) -> bool:
        """Whether both can be true: the two ranges meet."""
        return self.rule <= self.engine.high and self.engine.low <= self.rule_at_most

    @property
    def error(self) -> float:
        """How far the farther end of the rule is from the engine's figure, relative to it; 0 where both agree."""
        if self.agree and self.rule == self.rule_at_most:
            return 0.0
        middle = (self.engine.low + self.engine.high) / 2
        farthest = max(abs(self.rule - middle), abs(self.rule_at_most - middle))
        return farthest / middle if middle else float("inf")


#: Buckets that the engine does not tell apart.
GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("weights", "experts"),
    "kv": ("kv", "recurrent"),
    "compute": ("compute",),
}


def compare(estimate: Ledger, dry: DryRun) -> tuple[Comparison, ...]:
    """A rule-based ledger beside the engine's figures, for each group of buckets and device that either side has.

    What the engine's trial leaves out is left out of the estimate too (:func:`left_out`).
    """
    labels = sorted({entry.device for entry in estimate.entries} | {row.label for row in dry.rows})
    found: list[Comparison] = []
    for group, buckets in GROUPS.items():
        column = next(name for name, bucket in _COLUMN_BUCKETS.items() if bucket == group)
        for label in labels:
            mine = [
                entry
                for entry in estimate.entries
                if entry.device == label and entry.bucket in buckets and not left_out(entry)
            ]
            low = sum(entry.bytes for entry in mine)
            high = sum(entry.bytes if entry.at_most is None else entry.at_most for entry in mine)
            engine = dry.of(label, column)
            if mine or engine.high > 0:
                found.append(Comparison(group=group, device=label, rule=low, rule_at_most=high, engine=engine))
    return tuple(found)


def left_out(entry: Entry) -> bool:
    """Whether an entry of an estimate is of what a boot takes and the engine's trial does not count: output buffers,
    which it makes without size, and the mapped file beside weights that the CPU reorders, for it maps nothing."""
    return "output buffer" in entry.detail or entry.detail.startswith(MAPPED)


def contradicted(compared: Sequence[Comparison]) -> frozenset[str]:
    """Groups in which the engine printed less than half of what the rules count at least: one of both is wrong.

    Differences of less than 2 MiB are within what tables of whole MiB leave open.
    """
    return frozenset(
        one.group for one in compared if one.engine.high < one.rule / 2 and one.rule - one.engine.high > 2 << 20
    )


def _is_own(known: flags.Help, name: str) -> bool:
    flag = known.find(name)
    spelled = (name,) if flag is None else (*flag.names, *flag.negatives)
    return any(own in spelled for own in _OWN)


def _placement(known: flags.Help, endpoints: Sequence[str], device_none: bool, binary: Path) -> list[str]:
    if endpoints:
        if not known.knows("rpc"):
            raise BackendError(f"{binary} has no option --rpc: use a build with llama.cpp's RPC backend")
        return ["--rpc", ",".join(endpoints)]
    return ["--device", "none"] if device_none and known.knows("device") else []


def _drivers_here() -> bool:
    return any(os.path.exists(path) for path in _DRIVERS)


@contextlib.contextmanager
def _linked(model: Path) -> Iterator[Path]:
    """A name for the model, and one for each part of a split one, that can be taken away.

    :raises BackendError: no folder for it. :raises BadModel: the model is not a GGUF file.
    """
    try:
        gguf_file.check(model, "the model of the dry run")
    except ModelNotFound as error:
        raise BadModel(str(error)) from None
    with contextlib.ExitStack() as stack:
        try:
            _tidy_up()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
            stack.enter_context(_held(folder))
        except OSError as error:
            raise _no_links(error) from None
        yield folder / model.name


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Mark a folder as in use; the mark goes with this process."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _tidy_up() -> None:
    """Remove the links of runs that were killed together with their guard."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _STALE:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for entry in folder.iterdir():
                    entry.unlink()
                folder.rmdir()
            finally:
                os.close(handle)


def _link(model: Path, folder: Path) -> None:
    """Make the links, anew where there were some: one for each part of the model.

    :raises BackendError: they cannot be made.
    """
    real = Path(os.path.abspath(model))
    split = _SPLIT.fullmatch(real.name)
    names = [real.name]
    if split is not None:
        count = int(split["parts"])
        names = [f"{split['stem']}-{part:05d}-of-{split['parts']}.gguf" for part in range(1, count + 1)]
    try:
        for name in names:
            if (real.parent / name).exists():
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(real.parent / name)
    except OSError as error:
        raise _no_links(error) from None


def _no_links(error: OSError) -> BackendError:
    where = tempfile.gettempdir()
    return BackendError(f"the dry run needs temporary links to the model, in {where}: {error.strerror}")


class _Run:
    """One server, from its start to its end, which is always a kill."""

    def __init__(
        self,
        command: list[str],
        linked: Path,
        folder: Path | None,
        environment: dict[str, str],
        *,
        limited: bool,
        once: bool,
    ) -> None:
        self._command = command
        self.linked = linked
        self._folder = folder
        self._environment = environment
        self._limited = limited
        self._once = once
        self._log = DryRunLog()
        self.code: int | None = None
        self.timed_out = False
        self.loading = False
        self.last: list[str] = []

    def trial(self, deadline: float) -> Trial:
        """Run it until it has decided, or is of no more use.

        :raises BackendError: it cannot be started.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        environment |= self._environment
        # It listens on loopback while it tries; nobody else is to ask it for anything.
        environment["LLAMA_API_KEY"] = secrets.token_hex(16)
        try:
            process = Confined(
                self._command,
                environment=environment,
                folder=self._folder,
                most_data=MOST_DATA if self._limited else None,
                remove=self.linked.parent,
            )
        except OSError as error:
            raise BackendError(f"{self._command[0]} could not be started for a dry run: {error.strerror}") from None
        try:
            self._read(process.output, deadline)
        finally:
            process.end()
        self.code = process.code if not (self.timed_out or self._log.decided or self.loading) else None
        return self._log.trial()

    def lost_its_words(self, trial: Trial) -> bool:
        """Whether it exited by itself, with neither a table nor a reason."""
        return not trial.rows and trial.refusal is None and self.code is not None and self.code > 0

    def words(self, model: Path) -> str:
        """The last lines of its log, with the model's own path."""
        return said("\n".join(self.last).replace(str(self.linked), str(model)), 300) or "none"

    def _read(self, output: int, deadline: float) -> None:
        seen, rest = 0, b""
        # A large pipe holds up nobody, so that less is lost where it exits; a small one holds the engine up.
        _resize(output, 1 << 20 if self._once else 4096)
        with selectors.DefaultSelector() as ready:
            ready.register(output, selectors.EVENT_READ)
            while not self._log.decided and not self._log.loading:
                left = deadline - time.monotonic()
                if left <= 0 or not ready.select(left):
                    self.timed_out = True
                    return
                chunk = os.read(output, 1 << 16)
                seen += len(chunk)
                if not chunk or seen > MOST_LOG:
                    self._feed(rest)
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._feed(line)
                rest = rest[-(1 << 20) :]  # a line without an end
        self.loading = self._log.loading

    def _feed(self, raw: bytes) -> None:
        text = raw.decode("utf-8", "replace")
        opened = self._log.opened
        self._log.feed(text)
        if self._once and self._log.opened and not opened:
            _close(self.linked.parent)
        if text.strip():
            self.last = [*self.last[-4:], text.strip()]


def _tries_once(options: Mapping[str, object]) -> bool:
    """Whether the engine opens the model for one trial only.

    It comes back for a second one where it has to find the context of several separate caches (``common/fit.cpp``:
    ``n_ctx_auto`` and ``n_streams``), and for a draft that is a part of the model (``common_fit_extra_model``).
    """
    if any("draft" in name or "spec" in name or "mtp" in name for name in options):
        return False
    context = options.get("ctx-size", 0)
    return "parallel" not in options or str(context).strip() != "0"


def _resize(pipe: int, size: int) -> None:
    """Change what a pipe holds, where the system lets us."""
    import fcntl

    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


def _close(folder: Path) -> None:
    """Put a pipe that nobody writes to in the place of each link: whoever opens it waits."""
    for link in list(folder.iterdir()):
        pipe = folder / f"{link.name}.pipe"
        os.mkfifo(pipe, 0o600)
        pipe.replace(link)


def _no_table(run: _Run, trial: Trial, binary: Path, model: Path, timeout: float) -> BackendError:
    """The error for a run that printed no table, with the engine's own sentence where it has one."""
    own = said(trial.refusal.replace(str(run.linked), str(model)), 300) if trial.refusal else ""
    if run.loading:
        return BackendError(
            f"{binary} began to load {model} without the trial that prints its memory, and was stopped: use a build of"
            " llama.cpp from December 2025 or later"
        )
    if own:
        return EngineRefused(f"{binary} refused a dry run of {model}: {own}")
    if run.timed_out:
        return BackendError(
            f"{binary} printed no memory table for {model} within {timeout:g} s and was stopped; its last words:"
            f" {run.words(model)}"
        )
    ended = "went on without" if run.code is None else f"ended ({in_words(run.code)}) before"
    return BackendError(f"{binary} {ended} printing its memory table for {model}; its last words: {run.words(model)}")

"""A binary's own ``--help`` as data, and a spec's options as command-line flags checked against it."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_vram.backends import store
from pytest_vram.backends.words import said
from pytest_vram.errors import BadSpec, EngineNotFound
from pytest_vram.paths import expanded
from pytest_vram.spec import OptionValue

HELP_TIMEOUT = 10.0
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
#: What may stand between two spellings: an argument hint of the older layout, a comma, blanks.
_BETWEEN = re.compile(r"(?:\s\S+)?,\s+(?=-)")
#: Options that add to a list each time they are given, without saying so in words that :data:`_ADDS` knows.
_ADDING = frozenset({"logit-bias", "dry-sequence-breaker", "override-tensor", "override-kv", "lora", "control-vector"})
_ADDS = re.compile(r"multiple|repeated")
_DEFAULT_ON = re.compile(r"default:\s*(?:enabled|true|on\b|1\b|prefill enabled)")


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One option of a binary.

    :ivar names: long spellings, without dashes, that switch it on or take its value.
    :ivar negatives: long spellings that switch it off.
    :ivar short: short spellings, without the dash.
    :ivar hint: what the help writes in place of the value; empty for a switch.
    :ivar text: the help's description, on one line.
    """

    names: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    hint: str = ""
    text: str = ""

    @property
    def name(self) -> str:
        """The spelling to show people: the last one, which is llama.cpp's full name."""
        return self.names[-1] if self.names else (self.negatives or self.short)[-1]

    @property
    def removed(self) -> bool:
        """The binary still lists it but refuses it."""
        return "argument has been removed" in self.text

    @property
    def joined(self) -> bool:
        """Several values are one comma-separated argument."""
        return "comma-separated" in self.text or ",..." in self.hint

    @property
    def adds(self) -> bool:
        """It may be given several times, each time with one more value."""
        return _ADDS.search(self.text) is not None or not _ADDING.isdisjoint(self.names)

    @property
    def on_by_default(self) -> bool:
        """The help says that a switch is on unless it is switched off."""
        return _DEFAULT_ON.search(self.text) is not None


class Help(msgspec.Struct, frozen=True, kw_only=True):
    """Every option of one binary."""

    binary: str
    flags: tuple[Flag, ...]

    def find(self, name: str) -> Flag | None:
        """The option with this long spelling, negative ones included."""
        for flag in self.flags:
            if name in flag.names or name in flag.negatives:
                return flag
        return None

    def knows(self, name: str) -> bool:
        """Whether the binary takes this long option."""
        flag = self.find(name)
        return flag is not None and not flag.removed

    def long_names(self) -> list[str]:
        """Every long spelling."""
        return [name for flag in self.flags for name in (*flag.names, *flag.negatives)]


def parse(binary: str, text: str) -> Help:
    """Read what ``--help`` printed. Lines that are not options are skipped."""
    flags: list[Flag] = []
    head: str | None = None
    lines: list[str] = []

    def finish() -> None:
        if head is not None:
            flag = _flag(head, " ".join(" ".join(lines).split()))
            if flag is not None:
                flags.append(flag)

    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent <= 4 and _FLAG.match(line.strip()) is not None:
            finish()
            head, lines = line.strip(), []
        elif head is not None and (indent > 4 or not line.strip()):
            lines.append(line.strip())
        else:
            finish()
            head, lines = None, []
    finish()
    return Help(binary=binary, flags=tuple(flags))


def _flag(head: str, continued: str) -> Flag | None:
    spellings: list[str] = []
    position = 0
    while (match := _FLAG.match(head, position)) is not None:
        spellings.append(match[0])
        position = match.end()
        between = _BETWEEN.match(head, position)
        if between is None:
            break
        position = between.end()
    rest = head[position:]
    hint, text = "", rest
    if rest and not rest.startswith("  "):
        hint, _, text = rest.strip().partition("  ")
    long = [spelling[2:] for spelling in spellings if spelling.startswith("--")]
    positive = [name for name in long if not name.startswith("no-")]
    negative = [name for name in long if name.startswith("no-")]
    if not positive:  # an option whose own name begins so, such as --no-host
        positive, negative = negative, []
    if not positive:
        return None
    return Flag(
        names=tuple(positive),
        negatives=tuple(negative),
        short=tuple(spelling[1:] for spelling in spellings if not spelling.startswith("--")),
        hint=hint.strip(),
        text=f"{text.strip()} {continued}".strip(),
    )


class _Printed(msgspec.Struct, frozen=True, kw_only=True):
    """A help as it is kept: what was printed, which any version of this package can read."""

    binary: str
    text: str


_read: dict[str, Help] = {}


def help_of(binary: Path) -> Help:
    """What ``binary --help`` says, asked once per build on this machine and kept in the cache folder.

    A process that is started in every run would be a part of what the run's first test is measured by.

    :raises EngineNotFound: it cannot be run, does not answer within :data:`HELP_TIMEOUT` seconds, or lists no option.
    """
    try:
        identity = _identity(binary)
        with binary.open("rb") as stream:
            program = stream.read(4) == b"\x7fELF"
    except OSError as error:
        raise EngineNotFound(f"{binary} cannot be used: {error.strerror}") from None
    if identity in _read:
        return _read[identity]
    # A script stays the same when the program that it starts is another one.
    kept = store.cache_folder() / "help" / f"{identity}.json" if program else None
    found = _known(binary, kept)
    if found is None:
        text, code = _ask(binary)
        found = parse(str(binary), text)
        if not found.knows("model"):
            from pytest_vram.backends.smoke import in_words

            raise EngineNotFound(
                f"{binary} --help ({in_words(code)}) lists no option --model, so it is not a llama-server;"
                f" it said: {said(text, 200) or 'nothing'}"
            )
        _keep(kept, _Printed(binary=str(binary), text=text))
    _read[identity] = found
    return found


def _identity(binary: Path) -> str:
    """Path, size and time of the binary and of the libraries beside it, which hold most of today's builds.

    :raises OSError: it is not there.
    """
    real = binary.resolve(strict=True)
    parts = [str(real)]
    for path in (real, *sorted(real.parent.glob("*.so*"))):
        try:
            status = path.stat()
        except OSError:
            if path == real:
                raise
            continue  # a link that leads nowhere
        parts.append(f"{path.name}|{status.st_size}|{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _ask(binary: Path) -> tuple[str, int]:
    """What the binary prints for ``--help``, and its exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    try:
        done = _run([str(binary), "--help"], env=environment)
    except subprocess.TimeoutExpired:
        raise EngineNotFound(
            f"{binary} --help did not answer within {HELP_TIMEOUT:.0f} s: it is not a llama-server, or it hangs"
        ) from None
    except OSError as error:
        raise EngineNotFound(f"{binary} cannot be run: {error.strerror}") from None
    return (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace"), done.returncode


def _run(argv: list[str], *, env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run a program that may be a script: where it does not end in time, its children are ended as well.

    :raises subprocess.TimeoutExpired: it did not. :raises OSError: it cannot be started.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=HELP_TIMEOUT)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _known(binary: Path, kept: Path | None) -> Help | None:
    """The help that an earlier run kept; ``None`` where there is none that can be used."""
    if kept is None:
        return None
    try:
        printed = msgspec.json.decode(kept.read_bytes(), type=_Printed)
    except (OSError, msgspec.MsgspecError):
        return None
    found = parse(str(binary), printed.text)
    return found if found.knows("model") else None


def _keep(path: Path | None, printed: _Printed) -> None:
    """Keep a help for later runs; a folder that cannot be written costs them the question, no more."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.json.encode(printed))
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def to_argv(
    options: Mapping[str, OptionValue | Sequence[OptionValue]],
    known: Help,
    *,
    origin: str,
    refused: Mapping[str, str],
) -> list[str]:
    """The command-line flags of an ``options`` table.

    :param refused: long name → why the user may not set it.
    :raises BadSpec: an option that the binary does not have, one that is refused, given twice under two names, or
        with a value that does not suit it.
    """
    argv: list[str] = []
    given: dict[str, str] = {}
    for key, value in options.items():
        flag = _named(key, known, origin)
        reason = next((refused[name] for name in (*flag.names, *flag.negatives) if name in refused), None)
        if reason is not None:
            raise BadSpec(f"option {key!r} ({origin}) cannot be set here: {reason}")
        if flag.removed:
            raise BadSpec(f"option {key!r} ({origin}) no longer works in {known.binary}: {flag.text}")
        if flag.name in given:
            raise BadSpec(
                f"option {key!r} ({origin}) is the same as {given[flag.name]!r}, which is set too: keep one of them"
            )
        given[flag.name] = key
        argv.extend(_flags(key, value, flag, origin))
    return argv


def _named(key: str, known: Help, origin: str) -> Flag:
    flag = known.find(key)
    if flag is not None:
        return flag
    bare = key.lstrip("-")
    instead = known.find(bare) or known.find(bare.replace("_", "-"))
    if instead is None:
        instead = next((flag for flag in known.flags if bare in flag.short), None)
        right = instead.name if instead is not None else None
    else:
        right = bare if known.find(bare) else bare.replace("_", "-")
    if right is not None:
        raise BadSpec(f"option {key!r} ({origin}): write its long name without dashes in front, {right!r}")
    near = difflib.get_close_matches(bare.replace("_", "-"), known.long_names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see its --help for those it has"
    raise BadSpec(f"option {key!r} ({origin}) is unknown to {known.binary}: {hint}")


def _flags(key: str, value: OptionValue | Sequence[OptionValue], flag: Flag, origin: str) -> list[str]:
    spelled = f"--{key}"
    if not flag.hint:
        return _switch(key, value, flag, origin)
    if isinstance(value, bool):
        return [spelled, _word(key, value, flag, origin)]
    if isinstance(value, str | int | float):
        return [spelled, _text(value)]
    if not value:
        raise BadSpec(f"option {key!r} ({origin}) is an empty list: leave it out, or give it a value")
    texts = [_word(key, item, flag, origin) if isinstance(item, bool) else _text(item) for item in value]
    if flag.joined:
        return [spelled, ",".join(texts)]
    if len(texts) > 1 and not flag.adds:
        raise BadSpec(f"option {key!r} ({origin}) takes one value, not a list: of several only the last would count")
    return [part for text in texts for part in (spelled, text)]


def _switch(key: str, value: OptionValue | Sequence[OptionValue], flag: Flag, origin: str) -> list[str]:
    if not isinstance(value, bool):
        raise BadSpec(f"option {key!r} ({origin}) is a switch: write true or false, not {value!r}")
    negative = key in flag.negatives
    if value:
        return [f"--{key}"]
    if negative:
        return [f"--{flag.name}"]
    if flag.negatives:
        return [f"--{flag.negatives[0]}"]
    if flag.on_by_default:
        raise BadSpec(f"option {key!r} ({origin}) is on by default and this build has no way to switch it off")
    return []  # off is what it is without the flag


def _word(key: str, value: bool, flag: Flag, origin: str) -> str:
    """``true`` and ``false`` for an option with a value, where the help leaves no doubt what they mean."""
    words = re.split(r"[^\w]+", flag.hint)
    if "on" in words and "off" in words:
        return "on" if value else "off"
    if "0" in words and "1" in words:
        return "1" if value else "0"
    raise BadSpec(f"option {key!r} ({origin}) takes a value ({flag.hint}), not {str(value).lower()}")


def _text(value: OptionValue) -> str:
    if isinstance(value, str) and value.startswith("~/"):
        return str(expanded(value, "the value of an option"))
    return str(value)

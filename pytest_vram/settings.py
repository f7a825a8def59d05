"""Options, environment, ini keys and the config file, resolved once into one frozen :class:`Settings`.

Precedence: command line, environment, ini or ``[tool.pytest]``, config file, default. Every error names the value,
the place it came from and what is accepted. This module knows nothing of pytest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_vram.errors import BadInput, BadSetting, BadSize
from pytest_vram.paths import expanded
from pytest_vram.spec import Amount, DeviceSpec, Limits
from pytest_vram.units import parse_size

#: Settings whose names are reserved by the contract and that this version refuses, with what they will do.
NOT_BUILT: dict[str, str] = {
    "save": "saves a baseline",
    "compare": "compares with a baseline",
    "fail_on": "sets the tolerance of a comparison",
}
#: Settings of this version.
BUILT = (
    "budget", "reserve", "emulate", "backend", "config", "device", "interval", "missing", "report", "leases", "soak",
    "soak_dir",
)  # fmt: skip
NAMES = (*BUILT, *NOT_BUILT)

_LABEL = re.compile(r"(?:gpu\d+|host)")
#: A number of milliseconds as one writes it.
_PLAIN = re.compile(r"[+]?\d{1,9}(\.\d{0,9})?", re.ASCII)
_UUID = re.compile(r"(?:GPU|MIG|MIG-GPU)-[0-9A-Fa-f-]{8,}(?:/\d+/\d+)?")
_INDEXED = ("cuda", "vulkan", "rpc")
DEVICES = "auto, cpu, predicted, cuda:0, a GPU UUID, drm:card0, vulkan:0 or rpc:0 (several joined by commas)"
REPORTS = (".json",)
#: What a soak's amount is counted in, with seconds for each; turns have none.
_UNITS = {"turn": 0, "turns": 0, "h": 3600, "hour": 3600, "hours": 3600, "m": 60, "min": 60}
_UNITS |= {"minute": 60, "minutes": 60}
_AMOUNT = re.compile(rf"(\d{{1,7}}(?:\.\d{{1,3}})?)\s*({'|'.join(_UNITS)})", re.ASCII)
#: Largest soak: a month, or so many turns.
MOST_TURNS, MOST_HOURS = 1_000_000, 720
AMOUNTS = f"300turns, 8h or 20m (8hours and 20min are the same), at most {MOST_TURNS} turns or {MOST_HOURS} hours"

T = TypeVar("T")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A raw value and where it came from.

    :ivar rank: ``command line``, ``environment``, ``ini``, ``config file`` or ``default``.
    :ivar place: as a message says it, such as ``--vram-budget`` or ``vram_budget in pyproject.toml``.
    """

    value: object
    rank: str
    place: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was asked to do.

    :ivar interval_ms: sampling interval in milliseconds. :ivar missing: ``skip`` or ``fail``.
    :ivar reports: paths of reports to write. :ivar reserve: bytes of each card that must stay free.
    :ivar emulate: size of the card to play, in bytes. :ivar leases: whether tests wait for room and for each other.
    :ivar soak: how long the soaks of this run are, in place of what their markers say. :ivar soak_dir: folder of their
        journals.
    :ivar places: setting → the place its value came from.
    :ivar ranks: setting → rank of that place.
    """

    budget: Limits | None = None
    device: tuple[DeviceSpec, ...] = (DeviceSpec(kind="auto", text="auto"),)
    backend: str | None = None
    config: str | None = None
    interval_ms: float = 10.0
    missing: str = "skip"
    reports: tuple[str, ...] = ()
    reserve: int = 0
    emulate: int | None = None
    leases: bool = True
    soak: Amount | None = None
    soak_dir: str | None = None
    places: dict[str, str] = {}
    ranks: dict[str, str] = {}

    @property
    def device_text(self) -> str:
        """The device setting as the user wrote it."""
        return ",".join(device.text for device in self.device)

    def as_table(self) -> dict[str, dict[str, Any]]:
        """Name → value and place, for reports."""
        shown: dict[str, Any] = {
            "budget": self.budget.text if self.budget else None,
            "device": self.device_text,
            "backend": self.backend,
            "config": self.config,
            "interval": self.interval_ms,
            "missing": self.missing,
            "report": list(self.reports),
            "reserve": self.reserve,
            "emulate": self.emulate,
            "leases": "on" if self.leases else "off",
            "soak": self.soak.text if self.soak else None,
            "soak_dir": self.soak_dir,
        }
        return {name: {"value": value, "from": self.places.get(name, "default")} for name, value in shown.items()}


def flag(name: str) -> str:
    """The command-line option of a setting."""
    return "--vram-" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "PYTEST_VRAM_" + name.upper()


def gather(
    options: Mapping[str, object],
    environ: Mapping[str, str],
    ini: Mapping[str, tuple[object, str]],
    config: Mapping[str, object],
    config_path: str | None,
) -> dict[str, Origin]:
    """Pick, for each setting, the value of the highest rank that has one.

    :param options: setting → value of the command line, ``None`` where not given.
    :param ini: setting → (value, place). :param config: top-level keys of the config file.
    """
    found: dict[str, Origin] = {}
    for name in NAMES:
        text = environ.get(variable(name))
        if options.get(name) is not None:
            found[name] = Origin(value=options[name], rank="command line", place=flag(name))
        elif text:
            found[name] = Origin(value=text, rank="environment", place=variable(name))
        elif name in ini:
            value, place = ini[name]
            found[name] = Origin(value=value, rank="ini", place=place)
        elif name in config:
            found[name] = Origin(value=config[name], rank="config file", place=f"{name} in {config_path}")
    return found


def resolve(found: Mapping[str, Origin], *, config_path: Path | None = None) -> Settings:
    """Check every value and return the settings.

    :raises BadSetting: for the first value that cannot be used.
    """
    for name, what in NOT_BUILT.items():
        if name in found:
            raise BadSetting(
                f"{flag(name)} ({what}) is not built yet in this version of pytest-vram: remove it"
                f" (from {found[name].place})"
            )
    return Settings(
        budget=_each(found, "budget", parse_budget, None),
        device=_each(found, "device", parse_device, (DeviceSpec(kind="auto", text="auto"),)),
        backend=_each(found, "backend", _name, None),
        config=str(config_path) if config_path else None,
        interval_ms=_each(found, "interval", _interval, 10.0),
        missing=_each(found, "missing", _missing, "skip"),
        reports=_each(found, "report", _reports, ()),
        reserve=_each(found, "reserve", parse_size, 0),
        emulate=_each(found, "emulate", parse_size, None),
        leases=_each(found, "leases", _leases, True),
        soak=_each(found, "soak", parse_soak, None),
        soak_dir=_each(found, "soak_dir", _folder, None),
        places={name: origin.place for name, origin in found.items()},
        ranks={name: origin.rank for name, origin in found.items()},
    )


def _each(found: Mapping[str, Origin], name: str, parse: Callable[[object], T], default: T) -> T:
    origin = found.get(name)
    if origin is None:
        return default
    try:
        return parse(origin.value)
    except (BadSize, ValueError) as error:
        raise BadSetting(f"{error} (from {origin.place})") from None


def parse_budget(value: object) -> Limits:
    """``4GB``, ``gpu0=11GB,gpu1=3GB`` or ``sum=14GB``.

    :raises ValueError: with what is accepted (:class:`BadSize` for a size).
    """
    if not isinstance(value, str) or "=" not in value:
        return Limits(text=str(value), each=parse_size(value))
    by_label: dict[str, int] = {}
    total: int | None = None
    for part in value.split(","):
        label, _, size = (piece.strip() for piece in part.partition("="))
        if label == "sum":
            if total is not None:
                raise ValueError(f"{value!r} names sum twice")
            total = parse_size(size)
        elif _LABEL.fullmatch(label):
            if label in by_label:
                raise ValueError(f"{value!r} names {label} twice")
            by_label[label] = parse_size(size)
        else:
            raise ValueError(
                f"{value!r} is not a budget: {label!r} is not a device label; write 4GB, gpu0=11GB,gpu1=3GB or sum=14GB"
            )
    return Limits(text=value, by_label=by_label, total=total)


def parse_device(value: object) -> tuple[DeviceSpec, ...]:
    """``auto``, ``cpu``, ``cuda:0``, ``rpc:0,rpc:1`` … in the order written.

    :raises ValueError: with what is accepted.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a device: write {DEVICES}")
    devices = tuple(_one_device(part.strip(), value) for part in value.split(","))
    kinds = {device.kind for device in devices}
    if len(devices) > 1 and kinds & {"auto", "cpu", "predicted"}:
        raise ValueError(f"{value!r} mixes {', '.join(sorted(kinds))}: auto, cpu and predicted stand alone")
    if len(set(devices)) != len(devices):
        raise ValueError(f"{value!r} names one device twice")
    bare = {device.kind for device in devices if device.index is None and device.name is None}
    if any(device.kind in bare and (device.index is not None or device.name) for device in devices):
        raise ValueError(f"{value!r} names all of a kind and one of it: keep one of the two")
    return devices


def _one_device(text: str, whole: str) -> DeviceSpec:
    kind, colon, rest = text.partition(":")
    kind = kind.lower()
    if not colon and kind in ("auto", "cpu", "predicted", "cuda", "drm", "vulkan", "rpc"):
        return DeviceSpec(kind=kind, text=text)
    if colon and kind in _INDEXED and rest.isascii() and rest.isdigit() and len(rest) < 4:
        return DeviceSpec(kind=kind, index=int(rest), text=text)
    if colon and kind == "drm" and re.fullmatch(r"card\d{1,3}", rest):
        return DeviceSpec(kind=kind, name=rest, text=text)
    if _UUID.fullmatch(text):
        return DeviceSpec(kind="uuid", name=text, text=text)
    if text[:4].upper() in ("GPU-", "MIG-"):
        raise ValueError(
            f"{text!r} is not a UUID: write it in full or at least its first 8 digits, as in GPU-5ca1ab1e;"
            " `vram doctor` lists the cards"
        )
    raise ValueError(f"{text or whole!r} is not a device: write {DEVICES}")


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not the name of a backend")
    return value


def _interval(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not an interval: write milliseconds from 1 to 60000")
    # Python's own reading takes 1_0 and the digits of every script.
    plain = not isinstance(value, str) or _PLAIN.fullmatch(value.strip())
    number = float(value) if plain and (not isinstance(value, int) or abs(value) < 10**9) else math.nan
    if not 1 <= number <= 60_000:
        raise ValueError(f"{value!r} is not an interval: write milliseconds from 1 to 60000")
    return number


def _missing(value: object) -> str:
    if value not in ("skip", "fail"):
        raise ValueError(f"{value!r} is not accepted: write skip or fail")
    return str(value)


def _leases(value: object) -> bool:
    if value not in ("on", "off"):
        raise ValueError(f"{value!r} is not accepted: write on or off")
    return value == "on"


def parse_soak(value: object) -> Amount:
    """``300turns``, ``8h`` or ``20m``; units are ``turn``, ``turns``, ``h``, ``hour``, ``hours``, ``m``, ``min``,
    ``minute`` and ``minutes``, with or without spaces before them; hours and minutes may have up to three decimals.

    :raises ValueError: with what is accepted.
    """
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not the amount of a soak: write {AMOUNTS}")
    number, each = float(match[1]), _UNITS[match[2]]
    most = MOST_HOURS * 3600 / each if each else MOST_TURNS
    if not 0 < number <= most or (not each and not number.is_integer()):
        raise ValueError(f"{value!r} is not the amount of a soak: write {AMOUNTS}")
    text = f"{match[1]}{match[2]}"
    return Amount(text=text, seconds=number * each) if each else Amount(text=text, turns=int(number))


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"{value!r} is not a folder")
    try:
        return str(expanded(value, "a folder"))
    except BadInput as error:
        raise ValueError(str(error)) from None


def _reports(value: object) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, Sequence):
        raise ValueError(f"{value!r} is not a path or a list of paths")
    for path in paths:
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError(f"{path!r} is not a path")
        suffix = ".trace.json" if path.endswith(".trace.json") else os.path.splitext(path)[1].lower()
        if suffix not in REPORTS:
            raise ValueError(
                f"{path!r}: no report format has the suffix {suffix or '(none)'!r}: this version writes"
                f" {', '.join(REPORTS)}"
            )
    try:
        return tuple(str(expanded(path, "a path")) if path.startswith("~") else path for path in paths)
    except BadInput as error:
        raise ValueError(str(error)) from None

"""What can be compared: the deployments of a run, of a boot log or of an estimate, in the same terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pytest_vram import in_force
from pytest_vram.bootlog.boot import Boot
from pytest_vram.differences import Cause, Change
from pytest_vram.in_force import Value
from pytest_vram.ledger import BUCKETS, Bucket, Ledger
from pytest_vram.report import rests
from pytest_vram.report.booted import BootDocument
from pytest_vram.report.predictions import EstimateDocument
from pytest_vram.report.records import BackendRecord, RunReport, TestRecord

HOST = "host"
#: What stands for the devices of a side that has no card.
HOST_ONLY = "host only"
#: Among the versions of a run; what a card's driver holds itself depends on it.
_DRIVER = "nvidia-driver"
Kind = Literal["run", "log", "boot", "estimate"]
_ALL: tuple[Bucket, ...] = tuple(bucket for bucket in BUCKETS if bucket != "unattributed")
#: Facts that say which model it is; of one that differs in none of them only the numbers of its weights may.
_MODEL = ("architecture", "layers", "parameters", "experts")
#: Facts of which one that is the same on both sides tells that it is one model.
_TELLING = ("architecture", "layers", "parameters", "model_bytes", "file_bytes", "name")
#: Parameters are printed with three or four digits.
_PRINTED = 0.005
#: What a spec says of the model, the most telling first.
_ASKED = ("model", "argv", "url")
#: Beginning of an engine's name of a device → its kind.
_KINDS = {
    "cuda": "CUDA",
    "a cuda": "CUDA",
    "rocm": "ROCm",
    "hip": "ROCm",
    "vulkan": "Vulkan",
    "metal": "Metal",
    "mtl": "Metal",
    "sycl": "SYCL",
    "rpc": "RPC",
}
_INSIDE = re.compile(r"\[[^\]]*\]")
_SIZES = (("- medium", "_m"), ("- small", "_s"), ("- large", "_l"))


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment.

    :ivar settings: in force, under the engine's own options. :ivar given: names of those that its spec gives.
    :ivar model: facts of the model. :ivar asked: what a run's spec names: the model, a command or an address.
    :ivar devices: label → which device it is, in words that another run of it has too.
    :ivar causes: what is known of the rest of its measured totals. :ivar unknown: buckets that are lower bounds only.
    :ivar missed: label → why its total may be larger than it says.
    """

    name: str
    kind: Kind
    engine: str
    ledger: Ledger
    settings: dict[str, Value] = {}
    given: tuple[str, ...] = ()
    model: dict[str, Any] = {}
    devices: dict[str, str] = {}
    causes: dict[str, list[Cause]] = {}
    unknown: tuple[str, ...] = ()
    missed: dict[str, str] = {}
    build: str = ""
    asked: str = ""

    def basis(self, label: str) -> Literal["measured", "printed", "predicted"]:
        """What the total of a device is."""
        if label in self.ledger.measured:
            return "measured"
        return "predicted" if self.kind == "estimate" else "printed"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What stands on one side of a comparison. :ivar tests: of a run: the last attempt at each."""

    origin: str
    kind: Kind
    deployments: tuple[Deployment, ...]
    tests: dict[str, TestRecord] = {}
    versions: dict[str, Value] = {}
    run: str | None = None
    started: str | None = None


def of_run(report: RunReport, origin: str) -> Side:
    """A run: of several generations of one deployment the one with the highest peak."""
    cards = {device.label: _card(device.kind, device.name) for device in report.run.devices}
    best: dict[str, BackendRecord] = {}
    for record in report.backends:
        key = f"{record.name} {sorted(_options(record).items())}"
        if key not in best or _highest(record) > _highest(best[key]):
            best[key] = record
    return Side(
        origin=origin,
        kind="run",
        deployments=tuple(_of_backend(record, cards, report.run.versions.get(_DRIVER)) for record in best.values()),
        tests={test.nodeid: test for test in report.tests},
        versions={name: version for name, version in report.run.versions.items() if name != _DRIVER},
        run=report.run.id,
        started=report.run.started,
    )


def _options(record: BackendRecord) -> dict[str, Any]:
    options = record.spec.get("options")
    return {str(name): str(value) for name, value in options.items()} if isinstance(options, dict) else {}


def _highest(record: BackendRecord) -> int:
    return sum(figure.upper for figure in record.ledger.measured.values())


def _of_backend(record: BackendRecord, cards: Mapping[str, str], driver: str | None) -> Deployment:
    options = record.spec.get("options")
    given = in_force.of_options(options if isinstance(options, dict) else {})
    said = in_force.of_facts(record.engine, record.facts)
    if driver is not None:
        said[_DRIVER] = driver
    labels = {**record.ledger.devices, **record.ledger.total()}
    return Deployment(
        name=record.name,
        kind="run",
        engine=record.engine,
        ledger=record.ledger,
        settings=in_force.of_options(options if isinstance(options, dict) else {}, said),
        given=tuple(given),
        model=_facts(record.facts),
        devices={label: cards.get(label) or kind_of(record.ledger.devices.get(label, "")) for label in labels},
        causes=rests.of_backend(record),
        missed={label: one.missed for label, one in record.ledger.measured.items() if one.missed},
        asked=next((str(record.spec[name]) for name in _ASKED if record.spec.get(name)), ""),
        build=str(record.facts.get("build", "")),
    )


def of_boot(boot: Boot | BootDocument, origin: str, *, log: bool) -> Side:
    """A boot log, read now or before."""
    deployment = Deployment(
        name="",
        kind="log" if log else "boot",
        engine=boot.engine,
        ledger=Ledger(entries=tuple(boot.entries), devices=dict(boot.devices)),
        settings=in_force.of_facts(boot.engine, boot.facts),
        model=_facts(boot.facts),
        devices={label: kind_of(name) for label, name in boot.devices.items()},
        build=str(boot.facts.get("build", "")),
    )
    return Side(origin=origin, kind=deployment.kind, deployments=(deployment,))


def of_estimate(document: EstimateDocument, origin: str) -> Side:
    """An estimate that was printed as JSON."""
    model = msgspec.to_builtins(document.model)
    deployment = Deployment(
        name="",
        kind="estimate",
        engine=document.engine,
        ledger=Ledger(entries=tuple(document.entries), devices=dict(document.devices)),
        settings=in_force.of_estimate(document.settings),
        model={
            name: model[name]
            for name in (*_MODEL, "name", "quantization", "file_bytes")
            if model[name] or name == "experts"
        },
        devices={label: kind_of(name) for label, name in document.devices.items()},
        unknown=tuple(document.unknown),
    )
    return Side(origin=origin, kind="estimate", deployments=(deployment,))


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    names = {"model_name": "name", **{name: name for name in (*_MODEL, "quantization", "model_bytes")}}
    return {new: facts[old] for old, new in names.items() if old in facts}


def _card(kind: str, name: str) -> str:
    """A device of a run without what changes from run to run: ports, and the PID of a server."""
    return f"{kind} {_INSIDE.sub('', name).strip()}" if kind != "cpu" else "host memory"


def kind_of(name: str) -> str:
    """The kind of a device by an engine's name for it; empty where it cannot be told."""
    low = name.lower()
    return next((kind for start, kind in _KINDS.items() if low.startswith(start)), "")


def aligned(first: Deployment, second: Deployment) -> Deployment:
    """The first one with the labels of the second one for the same devices.

    Devices are the same where their engines call them by the same name: labels may come from the order of a log. A
    device that only one of the two names keeps its label, or takes the engine's name where the other one gives that
    label to another device; one card on each side is compared whatever it is called.
    """
    before, after = _named(first), _named(second)
    cards = [_labels(one) for one in (first, second)]
    if len(cards[0]) == len(cards[1]) == 1:
        new = {cards[0][0]: cards[1][0]}
    else:
        new = {label: after[name] for name, label in before.items() if name in after}
    if not new:
        return first
    taken = {*new.values(), *(label for name, label in after.items() if name not in before)}
    for label in cards[0]:
        if label not in new and label in taken:
            new[label] = next((name for name, known in before.items() if known == label), f"{label} before")
    if all(old == label for old, label in new.items()):
        return first

    def moved(table: Mapping[str, Any]) -> dict[str, Any]:
        return {new.get(label, label): value for label, value in table.items()}

    ledger = msgspec.structs.replace(
        first.ledger,
        entries=tuple(
            msgspec.structs.replace(entry, device=new.get(entry.device, entry.device)) for entry in first.ledger.entries
        ),
        measured=moved(first.ledger.measured),
        devices=moved(first.ledger.devices),
    )
    return msgspec.structs.replace(
        first, ledger=ledger, devices=moved(first.devices), causes=moved(first.causes), missed=moved(first.missed)
    )


def _labels(side: Deployment) -> list[str]:
    used = {**side.ledger.total(), **side.ledger.measured, **side.devices, **side.ledger.devices}
    return [label for label in used if label != HOST]


def _named(side: Deployment) -> dict[str, str]:
    """The engine's name of a device, without ports → its label; names that two devices have tell nothing."""
    names = [
        (_INSIDE.sub("", name).partition(" (")[0].strip(), label)
        for label, name in side.ledger.devices.items()
        if label != HOST
    ]
    return {name: label for name, label in names if name and [one for one, _ in names].count(name) == 1}


def changed(first: Deployment, second: Deployment) -> tuple[Change, ...]:
    """Every setting and fact that differs, what makes them other models or devices first."""
    found = [*_models(first, second), *_cards(first, second)]
    for name, one, other in (("engine", first.engine, second.engine), ("build", first.build, second.build)):
        if one and other and one != other:
            found.append(Change(setting=name, before=one, after=other, buckets=in_force.DECIDES[name]))
    alike = first.kind == second.kind and first.kind in ("run", "estimate")
    given = {*first.given, *second.given}
    for change in in_force.changes(first.settings, second.settings, everything=alike):
        missing = change.before is None or change.after is None
        # What a log does not say is not known; what a spec does not give is not given.
        if missing and first.kind == "run" and change.setting not in given:
            continue
        found.append(change)
    return tuple(found)


def untold(first: Deployment, second: Deployment) -> str:
    """Why it cannot be told that both are of one model; empty where a fact of it, or what was asked for, is the same,
    or where neither says anything of it and the weights are the same to the printed digit.

    Facts that contradict each other are among what :func:`changed` finds.
    """
    if first.asked and first.asked == second.asked:
        return ""
    both = [name for name in _TELLING if None not in (first.model.get(name), second.model.get(name))]
    if any(first.model[name] == second.model[name] for name in both):
        return ""
    silent = [when for when, side in (("first", first), ("second", second)) if not set(_TELLING) & set(side.model)]
    if both:
        why = "; ".join(f"{name} {first.model[name]} → {second.model[name]}" for name in both)
    elif len(silent) == 2 and _same_weights(first.ledger, second.ledger):
        return ""
    elif len(silent) == 1:
        why = f"the {silent[0]} one does not say which it is"
    else:
        why = "neither says which it is" if silent else "there is no fact of it that both say"
    return f"whether they are of one model cannot be told: {why}"


def _same_weights(first: Ledger, second: Ledger) -> bool:
    """Whether both print the same bytes of weights in all, to the digits."""
    sums, open_digits = [], 0
    for ledger in (first, second):
        weights = [entry for entry in ledger.entries if entry.bucket in ("weights", "experts")]
        sums.append(sum(entry.bytes for entry in weights))
        open_digits += sum(entry.resolution for entry in weights)
    return min(sums) > 0 and abs(sums[0] - sums[1]) <= open_digits


def _models(first: Deployment, second: Deployment) -> list[Change]:
    found = []
    for name in _MODEL:
        one, other = first.model.get(name), second.model.get(name)
        if one is None or other is None or one == other:
            continue
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        if name == "parameters" and numbers and abs(one - other) <= _PRINTED * max(one, other):
            continue
        found.append(Change(setting=name, before=one, after=other, buckets=_ALL, loud=True))
    weights: tuple[Bucket, ...] = ("weights", "experts")
    one, other = (_quantization(side.model.get("quantization")) for side in (first, second))
    if one and other and one != other:
        names = (first.model["quantization"], second.model["quantization"])
        buckets = in_force.DECIDES["quantization"]
        found.append(Change(setting="quantization", before=names[0], after=names[1], buckets=buckets))
    for name, buckets in (("model_bytes", weights), ("file_bytes", weights), ("name", ())):
        one, other = first.model.get(name), second.model.get(name)
        if one is not None and other is not None and one != other:
            found.append(
                Change(setting=f"model {name}" if name == "name" else name, before=one, after=other, buckets=buckets)
            )
    return found


def _quantization(name: object) -> str:
    """``Q4_K - Medium`` and ``Q4_K_M`` are the same."""
    low = str(name or "").lower()
    for word, short in _SIZES:
        low = low.replace(f" {word}", short)
    return low


def _cards(first: Deployment, second: Deployment) -> list[Change]:
    """Devices that are others, or of another kind where one side knows no more than that."""
    cards = [{label: name for label, name in side.devices.items() if label != HOST} for side in (first, second)]
    if set(cards[0]) != set(cards[1]) and all(side.devices for side in (first, second)):
        names = [", ".join(sorted(one)) or HOST_ONLY for one in cards]
        return [Change(setting="devices", before=names[0], after=names[1], buckets=_ALL, loud=True)]
    found = []
    for label in sorted(cards[0]):
        one, other = cards[0][label], cards[1].get(label, "")
        if (first.kind == "run") != (second.kind == "run"):
            one, other = (kind_of(side.ledger.devices.get(label, "")) for side in (first, second))
        if one and other and one != other:
            found.append(Change(setting=f"device {label}", before=one, after=other, buckets=_ALL, loud=True))
    return found

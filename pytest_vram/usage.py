"""Whether what a run was asked to hold can be held at all: said before any test."""

from __future__ import annotations

import pytest

from pytest_vram.errors import BadInput, KeeperError
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.run import Run, ways_on
from pytest_vram.units import mib, with_mib

_TYPED = ("command line", "environment")


def check_usage(run: Run) -> None:
    """Look whether budget, reserve and a played card are possible on the devices of this run.

    What a person typed and cannot be is a usage error; the same in a file is a warning, and the tests run unjudged.
    A smaller card that cannot be played is an error wherever it was asked for: everything after would be about another
    card.

    :raises pytest.UsageError: naming the place, what was tried and the ways on.
    """
    _check_emulation(run)
    _check_held(run, "budget", run.settings.budget.text if run.settings.budget else None)
    _check_held(run, "reserve", mib(run.settings.reserve) if run.settings.reserve else None)
    _check_labels(run)
    _check_reserve(run)


def _check_emulation(run: Run) -> None:
    """Refuse a card that cannot be played; the keeper plays it from now on, so its refusal comes before any test."""
    size = run.settings.emulate
    if size is None:
        return
    place = run.settings.places["emulate"]
    try:
        possible = bool(run.measurable)
    except BadInput as error:
        raise pytest.UsageError(f"pytest-vram: {error} (from {place})") from None
    if not possible:
        raise pytest.UsageError(f"pytest-vram: no smaller card can be played (from {place}): {run.why_unmeasurable()}.")
    try:
        run.keeper()
    except KeeperError as error:
        raise pytest.UsageError(f"pytest-vram: {str(error).rstrip('.')} (from {place})") from None


def _check_held(run: Run, name: str, text: str | None) -> None:
    """A limit with nothing measurable is a usage error where a person typed it, and a warning where a file has it."""
    if text is None or run.measurable:
        return
    place = run.settings.places[name]
    if run.predicted:
        if name == "reserve":
            run.warnings.append(
                f"the reserve {text} (from {place}) is not held: nothing is measured with --vram-device=predicted, and"
                " estimates are held against limits only"
            )
        return  # which devices there are is known when a backend's estimate is made
    reason = run.why_unmeasurable()
    if run.settings.ranks[name] in _TYPED:
        raise pytest.UsageError(
            f"pytest-vram: the {name} {text} (from {place}) cannot be held: {reason}. Ways on: {ways_on(run.settings)}."
        )
    run.warnings.append(f"the {name} {text} (from {place}) is not held: {reason}. Ways on: {ways_on(run.settings)}.")


def _check_labels(run: Run) -> None:
    budget = run.settings.budget
    if budget is None or run.predicted or not run.measurable:
        return
    labels = [device.label for device in run.measurable]
    for label in budget.by_label:
        if label not in labels:
            raise pytest.UsageError(
                f"pytest-vram: the budget {budget.text!r} names {label}, but this run measures {', '.join(labels)}"
                f" (from {run.settings.places['budget']})"
            )


def _check_reserve(run: Run) -> None:
    """A reserve that no peak could leave free is a mistake of whoever wrote it."""
    reserve = run.settings.reserve
    if not reserve or run.predicted:
        return
    for device in run.measurable:
        usable = usable_of(device)
        if isinstance(usable, Reading) and reserve >= usable.bytes:
            raise pytest.UsageError(
                f"pytest-vram: the reserve {with_mib(reserve)} (from {run.settings.places['reserve']}) leaves nothing"
                f" of {device.label}, of which programs can have {mib(usable.bytes)}: write less"
            )


def usable_of(device: DeviceInfo) -> Reading | Unmeasurable:
    """What programs can have of a device: the capacity, where the driver does not keep a part for itself."""
    return device.capacity if device.usable is None else device.usable

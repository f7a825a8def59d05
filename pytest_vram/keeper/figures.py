"""Merging the figures of windows: with those of boots, of phases, of reads before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pytest_vram.keeper.messages import Figures, PeakTime, Share
from pytest_vram.measure import PYTEST, TEST, UNKNOWN, Held, Span
from pytest_vram.measure.probes import Probe
from pytest_vram.readings import Measured, Reading
from pytest_vram.readings import larger as larger_figure

_MOST_SHARES = 20
_BOOT_OF = "boot of "


def joined(*notes: str | None) -> str | None:
    """Notes as one, each sentence of them once."""
    sentences = (sentence for note in notes if note for sentence in note.split("; "))
    return "; ".join(dict.fromkeys(sentences)) or None


def doubted(figures: dict[str, Measured], doubts: list[str]) -> dict[str, Measured]:
    """The figures with reasons why something may be missing in them."""
    return {
        label: msgspec.structs.replace(figure, exact=False, note=joined(figure.note, *doubts))
        if isinstance(figure, Reading)
        else figure
        for label, figure in figures.items()
    }


def larger_of(one: Measured, two: Measured) -> Measured:
    """The larger figure; where it is inexact because of the smaller one, with the reasons of that."""
    found = larger_figure([one, two])
    if isinstance(one, Reading) and isinstance(two, Reading) and isinstance(found, Reading) and not found.exact:
        notes = [
            figure.note for figure in (one, two) if figure.note and (not figure.exact or figure.note == found.note)
        ]
        sampled = [figure for figure in (one, two) if not figure.exact]
        found = msgspec.structs.replace(
            found,
            note=joined(*notes),
            interval_ms=found.interval_ms or sampled[0].interval_ms,
            samples=found.samples or sampled[0].samples,
        )
    return found


def with_boot(run: Measured | None, boot: Measured, label: str) -> tuple[bool, Measured]:
    """The peak of the run, or of a test's part of it, with a backend's boot peak, and whether the boot decided it.

    A peak is called a boot's only where that boot decided it.
    """
    if isinstance(boot, Reading):
        boot = msgspec.structs.replace(boot, scope=run.scope if isinstance(run, Reading) else "run")
    decided = run is None or (isinstance(run, Reading) and isinstance(boot, Reading) and boot.upper > run.upper)
    figure = boot if run is None else larger_of(run, boot)
    if decided and isinstance(figure, Reading):
        sentences = [one for one in (figure.note or "").split("; ") if not one.startswith(_BOOT_OF)]
        figure = msgspec.structs.replace(figure, note=joined(f"{_BOOT_OF}{label}", *sentences))
    return decided, figure


def boot_is_more(figure: Measured | None, boot: Measured) -> bool:
    """Whether the lower end of a peak comes from a backend's boot, when the boot is taken into it."""
    return isinstance(boot, Reading) and not (isinstance(figure, Reading) and figure.bytes >= boot.bytes)


def merge(phases: dict[str, dict[str, Measured]], name: str, peaks: dict[str, Measured]) -> None:
    """Take the peaks of a phase into a table of phases; those of one name are one."""
    table = phases.setdefault(name, {})
    for label, peak in peaks.items():
        table[label] = larger_of(table[label], peak) if label in table else peak


def shares(span: Span, is_own: Callable[[Span, Held], bool]) -> list[Share]:
    """Who held most within a span, the largest first. ``is_own`` says whether a share is of the span's own test."""
    found = sorted(span.shares.values(), key=lambda held: -held.bytes)[:_MOST_SHARES]
    return [
        Share(
            pid=held.pid,
            name=held.name,
            device=held.device,
            bytes=held.bytes,
            backend=held.owner if held.owner not in (TEST, PYTEST, UNKNOWN) else None,
            others=not is_own(span, held),
        )
        for held in found
    ]


def when(span: Span) -> dict[str, PeakTime]:
    """When the lower end of the run's peak was reached on each device, where anything was held."""
    return {label: PeakTime(since=peak.since, at=peak.at) for label, peak in span.run.items() if peak.at}


def spilled(span: Span, probes: Iterable[Probe]) -> dict[str, Measured]:
    """What the run was given on each device and lay in host memory, the most at one sample; only above 0."""
    return {
        probe.info.label: Reading(
            bytes=span.spill[probe.info.label],
            source=probe.sources.sampled,
            scope="run",
            device=probe.info.label,
            exact=False,
            note="memory that was given on the device and lay in host memory, the largest of some samples",
        )
        for probe in probes
        if span.spill.get(probe.info.label)
    }


def agree(one: Figures, two: Figures, tolerance: int) -> bool:
    """Whether two reads differ by no more than ``tolerance`` bytes in any figure.

    Where the test's own part is known, what other tests do beside it does not count.
    """
    whole, again = (one.own, two.own) if one.own else (one.run, two.run)
    pairs: Iterable[tuple[Measured, Measured | None]] = [
        *((figure, again.get(label)) for label, figure in whole.items()),
        *((figure, two.backend.get(label)) for label, figure in one.backend.items()),
    ]
    for before, after in pairs:
        if isinstance(before, Reading) and isinstance(after, Reading):
            if abs(before.bytes - after.bytes) > tolerance:
                return False
        elif type(before) is not type(after):
            return False
    return True

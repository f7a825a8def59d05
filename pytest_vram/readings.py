"""Measured figures with their provenance.

A figure that was measured is a :class:`Reading`; one that could not be is :class:`Unmeasurable` with the reason.
There is no third kind: an unread value is never 0 and never NaN.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Reading(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reading", omit_defaults=True):
    """A measured number of bytes.

    :ivar bytes: the figure; where it is an interval, its lower end.
    :ivar source: where it was read, such as ``host-hwm``, ``host-anon``, ``host-pss``, ``rpc-hwm``, ``engine-log``.
    :ivar scope: whose bytes: ``run``, ``backend``, ``process`` or ``device``.
    :ivar device: label of the device: ``host``, ``gpu0`` …
    :ivar at_most: upper end where the figure is an interval, else ``None``.
    :ivar exact: true when the source cannot miss a peak between its reads.
    :ivar interval_ms: median interval between samples, where sampled.
    :ivar samples: number of samples, where sampled.
    :ivar note: what a reader must know, such as "contains a process that ended between two samples".
    :ivar missed: why more may have been held than it says, such as a long time in which nobody looked: the figure is
        then a lower end only, over limits but never within one. ``None`` where that cannot be.
    """

    bytes: int
    source: str
    scope: str
    device: str
    exact: bool
    at_most: int | None = None
    interval_ms: float | None = None
    samples: int | None = None
    note: str | None = None
    missed: str | None = None

    @property
    def upper(self) -> int:
        """The upper end: ``at_most``, or ``bytes`` where the figure is a point."""
        return self.bytes if self.at_most is None else max(self.bytes, self.at_most)


class Unmeasurable(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="unmeasurable", omit_defaults=True):
    """A figure that could not be measured, and why. It passes no check.

    :ivar at_least: bytes that are known to have been held before or after what could not be measured; a limit below
        them is broken all the same. ``None`` where nothing is known.
    """

    reason: str
    source: str | None = None
    scope: str | None = None
    device: str | None = None
    at_least: int | None = None


Measured = Reading | Unmeasurable


def least(figure: Measured) -> int | None:
    """Bytes that were held for certain; ``None`` where nothing is known."""
    return figure.bytes if isinstance(figure, Reading) else figure.at_least


def floor(figure: Measured) -> Reading | None:
    """The figure, or the lower end that is known of one that could not be measured; ``None`` where nothing is."""
    if isinstance(figure, Reading) or figure.at_least is None:
        return figure if isinstance(figure, Reading) else None
    return Reading(
        bytes=figure.at_least,
        source=figure.source or "unknown",
        scope=figure.scope or "unknown",
        device=figure.device or "unknown",
        exact=False,
        missed=figure.reason,
    )


def larger(figures: Iterable[Measured]) -> Measured:
    """The figure whose upper end is largest, over figures of one device.

    One unmeasurable figure makes the result unmeasurable: a maximum with a hole in it is not known; what it was at
    least is. Ends combine separately, so the result's interval holds the true maximum.

    :raises ValueError: when there are no figures.
    """
    found = list(figures)
    if not found:
        raise ValueError("no figures to compare")
    hole = next((figure for figure in found if isinstance(figure, Unmeasurable)), None)
    if hole is not None:
        known = [size for size in map(least, found) if size]
        return msgspec.structs.replace(hole, at_least=max(known, default=None))
    best: Reading | None = None
    for figure in found:
        assert isinstance(figure, Reading)
        if best is None:
            best = figure
            continue
        low, high = max(best.bytes, figure.bytes), max(best.upper, figure.upper)
        winner = figure if figure.upper > best.upper else best
        best = msgspec.structs.replace(
            winner,
            bytes=low,
            at_most=high if high != low else None,
            exact=best.exact and figure.exact,
            missed=best.missed or figure.missed,
        )
    assert best is not None
    return best


def rise(peak: Measured, base: Measured) -> Measured:
    """A peak minus a baseline, never negative; as an interval its ends combine so that the true rise lies between."""
    if isinstance(peak, Unmeasurable):
        known = 0 if isinstance(base, Unmeasurable) else (peak.at_least or 0) - base.upper
        return msgspec.structs.replace(peak, at_least=max(0, known) or None)
    if isinstance(base, Unmeasurable):
        reason = f"the baseline could not be measured: {base.reason}"
        return Unmeasurable(reason=reason, scope=peak.scope, device=peak.device)
    low, high = max(0, peak.bytes - base.upper), max(0, peak.upper - base.bytes)
    return msgspec.structs.replace(
        peak, bytes=low, at_most=high if high != low else None, exact=peak.exact and base.exact
    )

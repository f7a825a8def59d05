"""Room that must stay free on a card."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_vram.checks.finding import Finding, Verdict
from pytest_vram.checks.wording import amount, block, provenance, surroundings
from pytest_vram.keeper.messages import Closed, DeviceInfo
from pytest_vram.readings import Measured, Reading, Unmeasurable, floor
from pytest_vram.units import mib, with_mib

CHECK = "vram_reserve"


def judge_reserve(
    closed: Closed, reserve: int, devices: Iterable[DeviceInfo], *, limit_from: str = "--vram-reserve"
) -> list[Finding]:
    """Hold the run's peak and ``reserve`` bytes together against what programs can have of each device.

    What others hold is not added: the reserve is the room for them. The interval rule is that of
    :func:`pytest_vram.checks.judge_peak`; a device whose size is not known is inconclusive.

    :returns: one finding for each device on which the two do not fit, or may not.
    """
    found = (_on(closed, reserve, device, limit_from) for device in devices if device.label in closed.run)
    return [finding for finding in found if finding is not None]


def _on(closed: Closed, reserve: int, device: DeviceInfo, limit_from: str) -> Finding | None:
    peak = closed.run[device.label]
    usable: Measured = device.capacity if device.usable is None else device.usable
    rows = [("reserve", f"{with_mib(reserve)}, from {limit_from}")]
    if isinstance(usable, Unmeasurable):
        rows.append(("reason", usable.reason))
        title = f"How much of {device.label} programs can have is not known, so the reserve is undecided."
        return _finding("inconclusive", title, rows, device, peak, None, limit_from)
    limit = max(0, usable.bytes - reserve)
    rows.append(("usable", f"{mib(usable.bytes)} of {device.label} = {device.name}, from {_origin(device, usable)}"))
    known = floor(peak)
    if known is not None and known.bytes > limit:
        peak = known
    if isinstance(peak, Unmeasurable):
        rows.append(("reason", peak.reason))
        title = "The peak of this run could not be measured, so the reserve is undecided."
        return _finding("inconclusive", title, rows, device, peak, limit, limit_from)
    if peak.upper <= limit and not peak.missed and not closed.trouble:
        return None
    rows.append(("reading", provenance(peak)))
    whole = closed.device.get(device.label)
    if isinstance(whole, Reading):
        rows.append(("whole device", f"{amount(whole)} at its peak, everyone included"))
    rows.extend(surroundings(closed, device.label))
    sum_text = f"The peak of this run, {amount(peak)}, and the reserve {with_mib(reserve)}"
    if peak.bytes > limit:
        title = f"{sum_text} are {mib(peak.bytes - limit)} more than {device.label} has for programs."
        return _finding("failed", title, rows, device, peak, limit, limit_from)
    if peak.upper > limit:
        title = f"{sum_text} may be more than {device.label} has for programs: undecided."
    else:
        why = f"undecided: {peak.missed}" if peak.missed else "the measurement had trouble"
        title = f"{sum_text} fit {device.label} as far as was read, but {why}."
    return _finding("inconclusive", title, rows, device, peak, limit, limit_from)


def _origin(device: DeviceInfo, usable: Reading) -> str:
    return f"{device.limit_from} ({usable.source})" if device.limit_from else usable.source


def _finding(
    verdict: Verdict,
    title: str,
    rows: list[tuple[str, str]],
    device: DeviceInfo,
    peak: Measured,
    limit: int | None,
    limit_from: str,
) -> Finding:
    return Finding(
        check=CHECK,
        verdict=verdict,
        section="no room left for others" if verdict == "failed" else "reserve undecided",
        text=block(title, rows),
        device=device.label,
        measured=peak,
        limit=limit,
        limit_from=limit_from,
    )

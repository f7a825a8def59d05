"""What is known of a measured total besides the buffers that an engine printed: from the readings of its boot and use.

These are the causes that :func:`pytest_vram.differences.between` weighs against the rest of a total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_vram.differences import Cause
from pytest_vram.readings import Measured, Reading, rise
from pytest_vram.report.records import BackendRecord, TestRecord
from pytest_vram.units import mib

HOST = "host"
_START = "start"
#: What a device-wide figure contains of others.
_DELTA = "device-delta"


def of_backend(backend: BackendRecord, peak: Mapping[str, Measured] | None = None) -> dict[str, list[Cause]]:
    """Device label → what one backend's total holds besides its buffers.

    :param peak: the total, where it is not the backend's own peak.
    """
    found: dict[str, list[Cause]] = {}
    for label, figure in (backend.peak if peak is None else peak).items():
        if not isinstance(figure, Reading):
            continue
        rows = [_base(backend, label), *_use(backend, label, figure)]
        found[label] = [row for row in rows if row is not None and (row.least or row.most)]
    return found


def of_test(test: TestRecord, backends: Sequence[BackendRecord]) -> dict[str, list[Cause]]:
    """Device label → what the total of a test holds besides the buffers of its backends."""
    found: dict[str, list[Cause]] = {}
    for label, figure in test.own.items():
        if not isinstance(figure, Reading):
            continue
        rows: list[Cause | None]
        if len(backends) == 1:
            rows = [_base(backends[0], label), *_use(backends[0], label, figure)]
        else:
            rows = [_base(one, label) for one in backends]
        rows += [_process(test, label), _strangers(test, label, figure)]
        found[label] = [row for row in rows if row is not None and (row.least or row.most)]
    if isinstance(test.host, Reading) and HOST not in found:
        found[HOST] = [row for row in (_base(one, HOST) for one in backends) if row is not None]
    return found


def _base(backend: BackendRecord, label: str) -> Cause | None:
    """What the engine held when it had loaded nothing yet: the driver's context, or its own program."""
    start = next((phase for phase in backend.phases if phase.name == _START), None)
    if start is None:
        return None
    figure = start.peak.get(label)
    if label == HOST and isinstance(start.pss, Reading):
        figure = start.pss  # its peak has the pages of a file that was looked into
    if not isinstance(figure, Reading):
        return None
    # In a host's figure there are pages of libraries, which the system may take back.
    least = 0 if label == HOST else figure.bytes
    text = f"{backend.name} held {mib(figure.upper)} before it loaded anything ({figure.source})"
    return Cause(meaning="context", least=least, most=figure.upper, text=text)


def _use(backend: BackendRecord, label: str, peak: Reading) -> list[Cause]:
    """What was held beyond the memory of a ready server: in its boot, or while it served."""
    ready, boot = backend.at_ready.get(label), backend.boot_peak.get(label)
    if not isinstance(ready, Reading) or not _alike(peak, ready):
        return []
    if isinstance(boot, Reading) and peak.bytes <= boot.upper:
        more = rise(boot, ready)
        text = f"held while {backend.name} started, and given back before it was ready"
        if not isinstance(more, Reading):
            return []
        return [Cause(meaning="boot", least=more.bytes, most=more.upper, text=text)]
    more = rise(peak, ready)
    if not isinstance(more, Reading):
        return []
    # What a probe found to stay has its own lines in the ledger.
    known = 0
    if backend.growth is not None:
        known = sum(entry.bytes for entry in backend.growth.entries if entry.device == label)
    text = f"held above the {mib(ready.bytes)} of {backend.name} when it was ready"
    low, high = max(0, more.bytes - known), max(0, more.upper - known)
    return [Cause(meaning="growth", least=low, most=high, text=text)]


def _alike(peak: Reading, ready: Reading) -> bool:
    """Whether two sources count the same bytes: a peak of all pages is no growth over anonymous ones."""
    first, second = (one.source.partition("-")[0] for one in (peak, ready))
    return first == second and (first != "host" or peak.source == ready.source)


def _process(test: TestRecord, label: str) -> Cause | None:
    own = test.process.get(label)
    if not isinstance(own, Reading) or not own.upper:
        return None
    text = f"the test's own process held {mib(own.upper)} at its peak"
    return Cause(meaning="foreign", least=0, most=own.upper, text=text)


def _strangers(test: TestRecord, label: str, figure: Reading) -> Cause | None:
    """Growth of others, which is in a figure of the whole device only."""
    if _DELTA not in figure.source and figure.scope != "device":
        return None
    found = [one for one in test.strangers if one.device == label and one.grew > 0]
    if not found:
        return None
    names = ", ".join(f"{one.name or 'unknown'} (PID {one.pid})" for one in found[:3])
    grew = sum(one.grew for one in found)
    return Cause(meaning="foreign", least=0, most=grew, text=f"others on the device grew by up to {mib(grew)}: {names}")

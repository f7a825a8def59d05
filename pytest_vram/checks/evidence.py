"""What makes the figures of a window unfit for a verdict, or shows what a figure alone would hide."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import block, stranger
from pytest_vram.keeper.messages import Closed, DeviceInfo
from pytest_vram.readings import Reading
from pytest_vram.units import mib


def judge_strangers(closed: Closed) -> Finding | None:
    """A process of others that grew and may be what the test is about makes a judgement on its memory an error."""
    decisive = [one for one in closed.strangers if one.decisive]
    if not decisive:
        return None
    largest = max(decisive, key=lambda one: one.grew)
    rows = [("stranger", f"{stranger(one)}: {one.why}") for one in decisive]
    process = largest.name or "NAME"
    if largest.pid:
        rows.append(
            (
                "count it",
                f'as a backend of your own in vram.toml: [backend.daemon], engine = "attach", url = "…",'
                f' process = "{process}" (or pid = {largest.pid}), and @vram_backend("daemon") on the test',
            )
        )
    rows.append(("or", "end it before the run, or keep it from growing while tests run"))
    who = f"{largest.name or 'A process'} (PID {largest.pid})" if largest.pid else largest.name or "Somebody"
    title = (
        f"{who}, which is not of this run, grew by {mib(largest.grew)} on {largest.device} during this test: the"
        " memory of this test cannot be judged."
    )
    return Finding(check="strangers", verdict="error", section="memory of others", text=block(title, rows))


def judge_lost(closed: Closed) -> list[Finding]:
    """A device that stopped answering ends the measurement with an error, not with its last value."""
    return [
        Finding(
            check="device",
            verdict="error",
            section="device lost",
            text=block(
                f"A device stopped answering during this test, so its memory cannot be judged: {sentence}",
                [("what next", "`vram doctor` says how the device is now; the kernel's log says why (dmesg: Xid)")],
            ),
        )
        for sentence in closed.lost
    ]


def judge_spill(closed: Closed, devices: Iterable[DeviceInfo]) -> list[Finding]:
    """Memory that was given on a device and lies in host memory fails a test whose memory is limited.

    The device's own figure stays within the card while it happens, so that a limit alone would hold.
    """
    known = {device.label: device for device in devices}
    found: list[Finding] = []
    for label, figure in closed.spill.items():
        if not isinstance(figure, Reading) or not figure.bytes:
            continue
        device = known.get(label)
        rows = [("device", label if device is None else f"{label} = {device.name}")]
        if device is not None and isinstance(device.capacity, Reading):
            rows.append(("capacity", mib(device.capacity.bytes)))
        rows.append(("reading", f"{figure.source}{f'; {figure.note}' if figure.note else ''}"))
        rows.append(
            (
                "what it means",
                "work that touches this memory runs several times slower; a reading of the device alone would pass,"
                " because it never goes over the card",
            )
        )
        found.append(
            Finding(
                check="spill",
                verdict="failed",
                section="memory spilled to the host",
                text=block(f"{mib(figure.bytes)} that were given on {label} lie in host memory.", rows),
                device=label,
                measured=figure,
            )
        )
    return found

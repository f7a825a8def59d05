"""What a deployment really costs: probes, the processes of a run, and the timeline that turns reads into peaks."""

from __future__ import annotations

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.emulated import emulated
from pytest_vram.measure.members import PYTEST, TEST, UNKNOWN, Member, Members
from pytest_vram.measure.spans import Held, Peak, Rate, Seen, Span, Sums
from pytest_vram.measure.survey import host_probe, open_probes, survey
from pytest_vram.measure.timeline import Timeline

__all__ = [
    "PYTEST",
    "TEST",
    "UNKNOWN",
    "DeviceInfo",
    "Held",
    "Member",
    "Members",
    "Peak",
    "Rate",
    "Seen",
    "Span",
    "Sums",
    "Timeline",
    "emulated",
    "host_probe",
    "open_probes",
    "survey",
]

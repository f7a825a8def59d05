"""Cards of the fake driver under the probes: what the tests of NVIDIA's driver share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from pytest_vram.measure import DeviceInfo
from pytest_vram.measure.probes import Probe
from pytest_vram.measure.probes.nvml import NvmlProbe
from pytest_vram.measure.survey import open_probes
from pytest_vram.readings import Unmeasurable
from pytest_vram.settings import parse_device

# The fake driver takes the place of the library in bindings that are imported already, and gives it back.
with suppress(ImportError):
    import pynvml  # noqa: F401

needs_fake = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the fake driver needs Linux and a C compiler",
)
#: Above the largest PID of this kernel's default: nobody has it.
NOBODY = 4_190_001


@contextmanager
def sleepers(count: int) -> Iterator[list[int]]:
    """PIDs of processes that do nothing."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def probing(text: str = "cuda:0") -> Iterator[Probe]:
    """The probe of a device."""
    (probe,) = open_probes(parse_device(text))
    assert not isinstance(probe, Unmeasurable), probe.reason
    try:
        yield probe
    finally:
        probe.close()


@contextmanager
def contained(text: str = "cuda:0", *, container: bool = True) -> Iterator[NvmlProbe]:
    """The probe of a card as in a container, or as outside of one."""
    with probing(text) as found:
        from pytest_vram.measure.probes.nvml_library import Library

        probe = NvmlProbe(found.info, Library(), container=container)
        try:
            yield probe
        finally:
            probe.close()


def info(found: DeviceInfo | Unmeasurable) -> DeviceInfo:
    """The device that was found."""
    assert isinstance(found, DeviceInfo), found.reason
    return found

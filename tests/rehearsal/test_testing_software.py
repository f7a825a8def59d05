"""The software GPU as users of the test kit see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pytest_vram.errors import BackendError
from pytest_vram.testing import software_gpu

pytestmark = pytest.mark.engine


def test_devices_live_as_long_as_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block each device listens, holds nothing and is in the environment; afterwards all is as before."""
    monkeypatch.setenv("PYTEST_VRAM_RPC", "before:1")
    with software_gpu(2) as gpus:
        assert os.environ["PYTEST_VRAM_RPC"] == ",".join(gpu.endpoint for gpu in gpus)
        assert len({gpu.endpoint for gpu in gpus}) == 2
        assert all(psutil.pid_exists(gpu.pid) for gpu in gpus)
        assert [gpu.used() for gpu in gpus] == [0, 0]
    assert os.environ["PYTEST_VRAM_RPC"] == "before:1"
    assert not any(psutil.pid_exists(gpu.pid) for gpu in gpus)
    with pytest.raises(BackendError, match="is gone"):
        gpus[0].used()


def test_devices_end_with_an_exception_too() -> None:
    """A failing test leaves no device behind."""
    with pytest.raises(RuntimeError, match="mine"), software_gpu() as gpus:
        raise RuntimeError("mine")
    assert not psutil.pid_exists(gpus[0].pid)


def test_memory_of_a_device_is_limited() -> None:
    """The size of a device is its process's data limit; one that is too small to start says so."""
    with software_gpu(memory="64MiB") as (gpu,):
        assert gpu.memory == 64 << 20
        assert psutil.Process(gpu.pid).rlimit(psutil.RLIMIT_DATA) == (64 << 20, 64 << 20)
    with pytest.raises(BackendError, match=r"did not start with .* of memory"), software_gpu(memory="64KiB"):
        pass


def test_devices_die_with_a_killed_process() -> None:
    """`kill -9` of the process that started a device takes the device with it."""
    code = (
        "import os, signal\n"
        "from pytest_vram.testing import software_gpu\n"
        "with software_gpu() as (gpu,):\n"
        "    print(gpu.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        pass
    assert not Path(f"/proc/{pid}/exe").exists()

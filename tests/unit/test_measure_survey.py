"""What can be measured on a machine, and why not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.measure import DeviceInfo, survey
from pytest_vram.measure.probes import RpcProbe
from pytest_vram.measure.survey import open_probes
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec


def device(kind: str, index: int | None = None) -> DeviceSpec:
    return DeviceSpec(kind=kind, index=index, text=kind if index is None else f"{kind}:{index}")


def test_host_memory() -> None:
    """`cpu` is the device `host`, as large as the machine or its control group."""
    (found,) = survey([device("cpu"), device("cpu")])
    assert isinstance(found, DeviceInfo)
    assert (found.label, found.kind) == ("host", "cpu")
    assert isinstance(found.capacity, Reading)
    assert found.capacity.bytes > 1 << 28


@pytest.mark.parametrize("kind", ["auto", "cuda", "uuid", "drm", "vulkan"])
def test_no_gpu_is_a_reason(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not here is refused with what was looked for, never measured as something else."""
    monkeypatch.setenv("PYTEST_VRAM_NVML", str(tmp_path / "none.so"))
    (found,) = survey([device(kind)], sysfs=str(tmp_path))
    assert isinstance(found, Unmeasurable)
    assert "libnvidia-ml.so.1 is " in found.reason
    assert "/dev/nvidia0" in found.reason


def test_predicted_measures_nothing() -> None:
    """`predicted` asks for no measurement, and says what stands in for it."""
    (found,) = survey([device("predicted")])
    assert isinstance(found, Unmeasurable)
    assert "estimates stand in" in found.reason


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux every device says so."""
    monkeypatch.setattr(sys, "platform", "win32")
    (found,) = survey([device("cpu")])
    assert isinstance(found, Unmeasurable)
    assert "Linux only" in found.reason


def test_rpc_endpoints() -> None:
    """Each endpoint is a device with the number of its place; one that nobody serves says so."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        endpoints = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, two)]
        found = survey([device("rpc")], endpoints)
        assert [info.label for info in found if isinstance(info, DeviceInfo)] == ["gpu0", "gpu1"]
        (second,) = survey([device("rpc", 1)], endpoints)
        assert isinstance(second, DeviceInfo)
        assert (second.label, second.name) == ("gpu1", f"RPC1[{endpoints[1]}]")
        assert str(os.getpid()) in second.source
    (gone,) = survey([device("rpc", 0)], endpoints)
    assert isinstance(gone, Unmeasurable)
    assert "nothing listens" in gone.reason


@pytest.mark.parametrize(
    ("index", "endpoints", "reason"),
    [
        (None, [], "no RPC endpoint is configured"),
        (2, ["127.0.0.1:1"], "there is no such RPC endpoint; there is rpc:0"),
        (0, ["192.0.2.1:50052"], "not an address of this machine's loopback"),
        (0, ["127.0.0.1"], "not an address of this machine's loopback"),
    ],
)
def test_rpc_refusals(index: int | None, endpoints: list[str], reason: str) -> None:
    """An endpoint that cannot be measured has a reason."""
    (found,) = survey([device("rpc", index)], endpoints)
    assert isinstance(found, Unmeasurable)
    assert reason in found.reason


SERVER = r"""
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
block = None
for line in sys.stdin:
    block = None
    block = bytearray(int(line))
    print(flush=True)
"""


def test_an_rpc_device_is_its_servers_memory() -> None:
    """Anonymous memory of the server is the device's; when it ends there is no figure but a reason."""
    import resource

    command = [sys.executable, "-S", "-c", SERVER]
    with subprocess.Popen([*command, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = f"127.0.0.1:{server.stdout.readline().strip()}"
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (2 << 30, 2 << 30))
        (probe,) = open_probes([device("rpc", 0)], [endpoint])
        assert isinstance(probe, RpcProbe)
        assert isinstance(probe.info.capacity, Reading)
        assert probe.info.capacity.bytes == 2 << 30
        probe.reset()
        for size in (60 << 20, 20 << 20):
            server.stdin.write(f"{size}\n")
            server.stdin.flush()
            server.stdout.readline()
        figure = probe.read(()).device
        assert figure is not None
        assert figure.mark is not None
        assert abs(figure.now - (20 << 20)) < 6 << 20  # the server of this test holds 4 MiB of its own
        assert abs(figure.mark - (60 << 20)) < 6 << 20  # the server of this test holds 4 MiB of its own
        server.kill()
        server.wait()
        snapshot = probe.read(())
        assert snapshot.device is None
        assert "has ended" in (snapshot.fault or "")
        probe.close()

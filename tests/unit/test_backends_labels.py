"""From an engine's device names to the run's labels."""

from __future__ import annotations

import pytest

from pytest_vram.backends import PlanContext
from pytest_vram.backends.labels import relabelled
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.ledger import Entry
from pytest_vram.measure import DeviceInfo
from pytest_vram.readings import Reading

SIZE = Reading(bytes=1, source="x", scope="device", device="x", exact=True)
RPC = "RPC0[127.0.0.1:50052]"


def card(label: str, *names: str, kind: str = "nvml", name: str = "NVIDIA L4") -> DeviceInfo:
    return DeviceInfo(label=label, kind=kind, name=name, capacity=SIZE, source="x", engine_names=names)


def log(*names: str) -> Boot:
    """A boot whose engine names these devices, with one buffer on each; the first is where it failed."""
    devices = {"host": "CPU"} | {f"gpu{index}": name for index, name in enumerate(names)}
    entries = tuple(
        Entry(bucket="weights", device=f"gpu{index}", bytes=index + 1, source="engine-log")
        for index in range(len(names))
    )
    failure = Failure(kind="out_of_memory", certainty="certain", text="x", device="gpu0")
    return Boot(engine="llama-server", era="x", evidence="complete", devices=devices, entries=entries, failure=failure)


def labels(boot: Boot, *devices: DeviceInfo, env: dict[str, str] | None = None, rpc: tuple[str, ...] = ()) -> list[str]:
    found = relabelled(boot, PlanContext(devices=devices, rpc=rpc), env)
    assert found.failure is not None
    assert found.failure.device == found.entries[0].device
    assert set(found.devices) == {"host", *(entry.device for entry in found.entries)}
    return [entry.device for entry in found.entries]


@pytest.mark.parametrize(
    ("names", "devices", "found"),
    [
        (("CUDA0",), [card("gpu0", "CUDA0", "Vulkan0")], ["gpu0"]),
        (("Vulkan0",), [card("gpu0", "CUDA0", "Vulkan0")], ["gpu0"]),
        (("CUDA1", "CUDA0"), [card("gpu0", "CUDA0"), card("gpu1", "CUDA1")], ["gpu1", "gpu0"]),
        (("CUDA0", "CUDA1"), [card("gpu0", "CUDA1")], ["CUDA0", "gpu0"]),
        (("CUDA0",), [card("gpu0")], ["CUDA0"]),
        (("ROCm1",), [card("gpu0", "ROCm1", kind="drm")], ["gpu0"]),
        (("CUDA0",), [card("gpu0", "CUDA0", kind="unified")], ["gpu0"]),
        (("GPU1", "GPU0"), [card("gpu0", "CUDA0", "Vulkan1"), card("gpu1", "CUDA1", "Vulkan0")], ["gpu1", "gpu0"]),
        (("GPU1",), [card("gpu0", "ROCm0")], ["GPU1"]),
    ],
)
def test_cards(names: tuple[str, ...], devices: list[DeviceInfo], found: list[str]) -> None:
    """A card is known by the names that engines give it; one that is not keeps the engine's own name."""
    assert labels(log(*names), *devices) == found


def test_a_server_that_counts_otherwise() -> None:
    """Where the spec's own environment chooses among cards, the engine's numbers say nothing of the run's."""
    one = card("gpu0", "CUDA0")
    assert labels(log("CUDA0"), one, env={"OMP_NUM_THREADS": "2"}) == ["gpu0"]
    assert labels(log("CUDA0"), one, env={"CUDA_VISIBLE_DEVICES": "1"}) == ["CUDA0"]


def test_the_software_gpu_of_a_rehearsal() -> None:
    """The only device, served on this machine, is the only card that is measured; the name says what stands for what."""
    boot = relabelled(log(RPC), PlanContext(devices=(card("gpu0", "CUDA0"),)))
    assert boot.devices["gpu0"] == f"{RPC} (stands for NVIDIA L4)"
    assert [entry.device for entry in boot.entries] == ["gpu0"]


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        (("RPC0[192.0.2.1:50052]",), [card("gpu0", "CUDA0")]),
        ((RPC, "RPC0[127.0.0.1:50053]"), [card("gpu0", "CUDA0")]),
        ((RPC, "CUDA0"), [card("gpu1", "CUDA0")]),
        ((RPC,), [card("gpu0", "CUDA0"), card("gpu1", "CUDA1")]),
    ],
)
def test_devices_that_stand_for_no_card(names: tuple[str, ...], devices: list[DeviceInfo]) -> None:
    """Remote devices, several devices and several cards leave it open which is which: names stay."""
    assert RPC not in names or labels(log(*names), *devices)[0] in (RPC, "gpu0")
    assert all(
        "stands for" not in name
        for name in relabelled(log(*names), PlanContext(devices=tuple(devices))).devices.values()
    )


def test_an_rpc_device_of_the_run() -> None:
    """An RPC device that the run measures is known by its endpoint, and nothing stands for it."""
    device = card("gpu3", kind="rpc", name=RPC)
    assert labels(log(RPC), device, rpc=("127.0.0.1:50052",)) == ["gpu3"]

"""torch's allocator as a lower bound of what the test's process holds, and figures of it that cannot be."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.torch_memory import Allocator, TorchMemory, bounded
from pytest_vram.readings import Measured, Reading, Unmeasurable

GIB = 1 << 30
UUID = "6f1c2d3e-aaaa-bbbb-cccc-0123456789ab"


class FakeCuda:
    """What torch.cuda says, with figures that a test sets."""

    def __init__(self, total: int = 8 * GIB, name: str = "NVIDIA L4") -> None:
        self.initialized = True
        self.stats: dict[str, int] = {}
        self.resets = 0
        self.properties = SimpleNamespace(total_memory=total, name=name, uuid=UUID)

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 1

    def memory_stats(self, index: int) -> dict[str, int]:
        return dict(self.stats)

    def reset_peak_memory_stats(self, index: int) -> None:
        self.resets += 1

    def get_device_properties(self, index: int) -> Any:
        return self.properties

    def hold(self, allocated: int, reserved: int, **more: int) -> None:
        self.stats = {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved, **more}


def card(capacity: int = 8 * GIB, *, oversubscribes: bool = False) -> DeviceInfo:
    size = Reading(bytes=capacity, source="nvml-device", scope="device", device="gpu0", exact=True)
    return DeviceInfo(
        label="gpu0",
        kind="nvml",
        name="NVIDIA L4",
        capacity=size,
        source="NVML",
        uuid=f"GPU-{UUID}",
        oversubscribes=oversubscribes,
    )


def memory(cuda: FakeCuda, platform: str = "linux") -> TorchMemory:
    return TorchMemory({"torch": SimpleNamespace(cuda=cuda)}, platform)


def one(cuda: FakeCuda, *devices: DeviceInfo, platform: str = "linux") -> Allocator:
    found = memory(cuda, platform)
    (allocator,) = found.end(devices or (card(),))
    return allocator


def test_torch_is_never_imported() -> None:
    """Without torch among the loaded modules nothing is asked, and asking loads nothing."""
    script = (
        "import sys; from pytest_vram.measure.torch_memory import TorchMemory; t = TorchMemory(); t.begin();"
        "assert t.end([]) == []; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_torch_that_has_not_used_cuda_is_left_alone() -> None:
    """Asking would initialise CUDA, which costs memory and spoils forks."""
    cuda = FakeCuda()
    cuda.initialized = False
    found = memory(cuda)
    found.begin()
    assert found.end([card()]) == []
    assert cuda.resets == 0
    assert TorchMemory({"torch": SimpleNamespace()}).end([card()]) == []


def test_peaks_and_counts_are_of_the_window() -> None:
    """Marks are set back at the opening; retries and failures count from there; the device is known by its UUID."""
    cuda = FakeCuda()
    cuda.hold(GIB, 2 * GIB, num_alloc_retries=3, num_ooms=1)
    found = memory(cuda)
    found.begin()
    assert cuda.resets == 1
    cuda.hold(3 * GIB, 4 * GIB, num_alloc_retries=5, num_ooms=1, **{"inactive_split_bytes.all.peak": 77})
    (allocator,) = found.end([card()])
    assert isinstance(allocator.allocated, Reading)
    assert isinstance(allocator.reserved, Reading)
    assert (allocator.device, allocator.allocated.bytes, allocator.reserved.bytes) == ("gpu0", 3 * GIB, 4 * GIB)
    assert allocator.allocated.exact
    assert allocator.allocated.scope == "process"
    assert (allocator.inactive_split, allocator.retries, allocator.ooms) == (77, 2, 0)


def test_more_than_the_card_is_impossible_where_nothing_can_be_allocated_beyond_it() -> None:
    """198.68 GB reserved on a 140 GB card of a Linux server is refused with a reason, and the device's own figure
    stands."""
    cuda = FakeCuda(total=140 * 10**9)
    cuda.hold(60 * 10**9, 198_680_000_000)
    allocator = one(cuda, card(140 * 10**9))
    assert isinstance(allocator.reserved, Unmeasurable)
    assert "refused" in allocator.reserved.reason
    assert isinstance(allocator.allocated, Reading)
    assert allocator.spill is None
    measured: dict[str, Measured] = {
        "gpu0": Reading(bytes=100 * 10**9, source="nvml-process", scope="process", device="gpu0", exact=False)
    }
    assert bounded(measured, [allocator], [card()], "process") == measured


@pytest.mark.parametrize("known_by", ["platform", "device"])
def test_more_than_the_card_is_spill_where_the_driver_oversubscribes(known_by: str) -> None:
    """13.641 GiB reserved on an 8 GiB laptop card under WDDM is valid, and 5.641 GiB of it are spill."""
    cuda = FakeCuda()
    cuda.hold(int(11.773 * GIB), int(13.641 * GIB))
    allocator = one(
        cuda, card(oversubscribes=known_by == "device"), platform="win32" if known_by == "platform" else "linux"
    )
    assert isinstance(allocator.reserved, Reading)
    assert isinstance(allocator.spill, Reading)
    assert abs(allocator.spill.bytes - 5.641 * GIB) < 2


def test_a_negative_count_is_refused() -> None:
    """2^64 less something is no size."""
    cuda = FakeCuda()
    cuda.hold((1 << 64) - 4096, GIB)
    assert isinstance(one(cuda).allocated, Unmeasurable)


def test_a_sampled_figure_is_no_less_than_the_allocators() -> None:
    """A peak between two reads that the allocator saw counts; one that is larger already stays as it is."""
    cuda = FakeCuda()
    cuda.hold(GIB, 2 * GIB)
    allocator = one(cuda)
    low = Reading(bytes=GIB, source="nvml-process", scope="process", device="gpu0", exact=False)
    high = Reading(bytes=3 * GIB, source="nvml-process", scope="process", device="gpu0", exact=False)
    raised = bounded({"gpu0": low}, [allocator], [card()], "process")["gpu0"]
    assert isinstance(raised, Reading)
    assert raised.bytes == 2 * GIB
    assert "torch-reserved" in str(raised.note)
    assert bounded({"gpu0": high}, [allocator], [card()], "process")["gpu0"] is high


def test_without_figures_by_process_the_truth_lies_between_allocator_and_card() -> None:
    """A limit below what torch reserved fails for sure; one above it is undecided, and never passes."""
    cuda = FakeCuda()
    cuda.hold(GIB, 2 * GIB)
    missing: dict[str, Measured] = {"gpu0": Unmeasurable(reason="N/A per process", device="gpu0")}
    found = bounded(missing, [one(cuda)], [card()], "process")["gpu0"]
    assert isinstance(found, Reading)
    assert (found.bytes, found.at_most) == (2 * GIB, 8 * GIB)
    assert "N/A per process" in str(found.note)
    assert bounded(missing, [one(cuda)], [card()], "run") == missing


def test_a_device_that_the_run_does_not_measure_keeps_torchs_name() -> None:
    """Its figures are shown, and bound nothing."""
    cuda = FakeCuda()
    cuda.hold(GIB, 2 * GIB)
    allocator = one(cuda, DeviceInfo(label="host", kind="cpu", name="host", capacity=card().capacity, source="x"))
    assert allocator.device == "cuda:0"
    assert bounded({}, [allocator], [card()], "process") == {}


def test_an_allocator_that_breaks_is_unmeasurable() -> None:
    """A driver that fails in the middle gives a reason, and no exception into somebody's test."""
    cuda = FakeCuda()

    def boom(index: int) -> dict[str, int]:
        raise RuntimeError("CUDA error: device lost")

    cuda.memory_stats = boom  # type: ignore[method-assign]
    found = memory(cuda)
    found.begin()
    (allocator,) = found.end([card()])
    assert isinstance(allocator.reserved, Unmeasurable)
    assert "device lost" in allocator.reserved.reason


def test_real_torch_without_a_gpu_is_left_alone() -> None:
    """The twin of the stand-in where torch has no CUDA: nothing is initialised, and nothing is said."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; the test with a GPU stands for it")
    found = TorchMemory()
    found.begin()
    assert found.end([card()]) == []
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_real_torch_on_a_gpu_says_what_it_holds() -> None:
    """The twin of the stand-in on a real card: 256 MiB of tensors are seen to the byte, and fit into what is reserved."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    torch.zeros(1, device="cuda")
    found = TorchMemory()
    found.begin()
    before = torch.cuda.memory_allocated(0)
    tensor = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del tensor
    (allocator,) = found.end([])
    assert isinstance(allocator.allocated, Reading)
    assert isinstance(allocator.reserved, Reading)
    assert allocator.allocated.bytes == before + (256 << 20)
    assert allocator.reserved.bytes >= allocator.allocated.bytes

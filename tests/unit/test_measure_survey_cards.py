"""Which cards are found, under which names, and why others are not: NVIDIA's on the fake driver."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_vram.measure import DeviceInfo, hanging, survey
from pytest_vram.measure.probes.base import Figure
from pytest_vram.measure.probes.nvml import NvmlProbe
from pytest_vram.measure.probes.nvml_library import DriverFault, Library
from pytest_vram.measure.survey import open_probes
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.settings import parse_device
from pytest_vram.testing import Card, FakeDriver, Fault, Slice, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.unit.nvml_kit import info, needs_fake, probing, sleepers

pynvml = pytest.importorskip("pynvml")
SLICE = "MIG-11111111-2222-4333-8444-555555555555"
DENIED = Fault(on="memory", error="NO_PERMISSION")

pytestmark = needs_fake


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "GGML_VK_VISIBLE_DEVICES",
        "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two() -> Iterator[FakeDriver]:
    """Two cards of one kind."""
    with fake_nvml([Card(total=8 * GIB), Card(total=12 * GIB)]) as driver:
        yield driver


def found(text: str, sysfs: Path | str = "/nowhere") -> list[DeviceInfo | Unmeasurable]:
    return survey(parse_device(text), sysfs=str(sysfs))


def refused(text: str, sysfs: Path | str = "/nowhere") -> str:
    (one,) = found(text, sysfs)
    assert isinstance(one, Unmeasurable)
    assert one.reason.startswith(text)
    return one.reason


def uuids(text: str) -> list[str | None]:
    return [info(one).uuid for one in found(text)]


# ------------------------------------------------------------------ which cards


@pytest.mark.parametrize("text", ["auto", "cuda"])
def test_all_visible_cards_in_the_order_of_cuda(two: FakeDriver, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare names are every card that CUDA programs see here, labelled in the order measured."""
    devices = [info(one) for one in found(text)]
    assert [(one.label, one.uuid, one.engine_names) for one in devices] == [
        ("gpu0", two.uuid(0), ("CUDA0",)),
        ("gpu1", two.uuid(1), ("CUDA1",)),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert uuids(text) == [two.uuid(1), two.uuid(0)]


def test_the_nth_visible_card(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda:N` counts visible cards; a UUID, or its beginning in any case, names one whether it is visible or not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", two.uuid(1))
    (one,) = found("cuda:0")
    assert (info(one).label, info(one).uuid, info(one).engine_names) == ("gpu0", two.uuid(1), ("CUDA0",))
    assert "there is cuda:0" in refused("cuda:1")
    (one,) = found(two.uuid(0))
    assert (info(one).uuid, info(one).engine_names) == (two.uuid(0), ())
    assert uuids(two.uuid(1)[:22].replace("5ca1ab1e", "5CA1AB1E")) == [two.uuid(1)]
    assert "no card, or several, have this UUID" in refused("GPU-5ca1ab1e")
    assert uuids(f"cuda:0,{two.uuid(1)}") == [two.uuid(1)], "named twice, measured once"


def test_hidden_cards(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment hides every card that is said, with the way on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all cards" in refused("cuda")
    assert "a UUID in --vram-device names a card" in refused("cuda:0")
    assert "hides all cards" in refused("auto")


def test_cards_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA may count in another order no engine name is certain, and the device says so."""
    with fake_nvml([Card(name="NVIDIA L4"), Card(name="NVIDIA H200")]):
        (one,) = found("cuda:1")
        assert info(one).engine_names == ()
        assert any("PCI_BUS_ID" in note for note in info(one).notes)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        (one,) = found("cuda:1")
        assert info(one).engine_names == ("CUDA1",)
        assert info(one).notes == ()


def test_labels_of_cards_and_rpc_devices_do_not_meet() -> None:
    """An RPC device that comes after a card gets the next free label."""
    with fake_nvml(), socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        devices = [info(one) for one in survey(parse_device("cuda:0,rpc:0"), [endpoint])]
        assert [(one.label, one.kind) for one in devices] == [("gpu0", "nvml"), ("gpu1", "rpc")]
        devices = [info(one) for one in survey(parse_device("rpc:0,cuda:0"), [endpoint])]
        assert [(one.label, one.kind) for one in devices] == [("gpu0", "rpc"), ("gpu1", "nvml")]


# ------------------------------------------------------------------ MIG


@pytest.mark.parametrize("text", ["cuda:0", "auto", "cuda", SLICE])
def test_a_slice_by_its_own_handle(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E05: the card refuses to tell its memory, the slice of the user does; never 0, and never a silent skip."""
    card = Card(
        name="NVIDIA H200", total=141 * GIB, faults=(DENIED,), slices=(Slice(uuid=SLICE, total=int(32.5 * GIB)),)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
    with fake_nvml([card]) as driver, sleepers(1) as pids:
        (one,) = found(text)
        device = info(one)
        assert (device.uuid, device.limit_from, device.label) == (SLICE, "MIG slice", "gpu0")
        assert isinstance(device.capacity, Reading)
        assert device.capacity.bytes == int(32.5 * GIB)
        reason = refused(driver.uuid())
        assert "Insufficient Permissions" in reason
        assert f"--vram-device={SLICE}" in reason
        with probing(text) as probe:
            driver.process(pids[0], 300 * MIB, slice=0)
            assert probe.read(pids).processes == {pids[0]: Figure(300 * MIB, 300 * MIB)}


def test_a_slice_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the slices of a card may not be listed, the one that the environment names is asked for by its UUID."""
    card = Card(faults=(DENIED, Fault(on="mig", error="NO_PERMISSION")), slices=(Slice(uuid=SLICE),))
    with fake_nvml([card]) as driver:
        assert "`nvidia-smi -L`" in refused("cuda:0")
        assert uuids(SLICE) == [SLICE]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
        assert uuids("cuda:0") == [SLICE]
        assert "Insufficient Permissions" in refused(driver.uuid())


# ------------------------------------------------------------------ shared memory


def test_a_gpu_without_memory_of_its_own() -> None:
    """ "Not supported" as the answer to memory is a GPU that uses the host's: the machine's rise stands for the run."""
    with fake_nvml([Card(name="NVIDIA GB10", unified=True)]), sleepers(1) as pids:
        (one,) = found("auto")
        device = info(one)
        assert (device.kind, device.per_process, device.source) == ("unified", False, "/proc/meminfo")
        assert isinstance(device.capacity, Reading)
        assert device.limit_from in ("machine", "cgroup")
        with probing() as probe:
            snapshot = probe.read(pids)
            assert snapshot.rise is not None
            assert 0 <= snapshot.rise.held < 4 * GIB
            assert snapshot.doubt
            assert probe.sources.sampled == "device-delta"


def test_managed_memory_outgrows_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's managed memory may lie beyond the card: a figure above the card is then spill, not impossible."""
    with fake_nvml():
        assert not info(found("cuda:0")[0]).oversubscribes
        monkeypatch.setenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1")
        assert info(found("cuda:0")[0]).oversubscribes


@pytest.mark.parametrize(("release", "spills"), [("6.6.87.2-microsoft-standard-WSL2", True), ("6.12.0-amd64", False)])
def test_windows_subsystem_for_linux(release: str, spills: bool, tmp_path: Path) -> None:
    """Under WSL allocations beyond the card succeed in host memory: that is known, and said."""
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/osrelease").write_text(f"{release}\n")
    with fake_nvml():
        (one,) = survey(parse_device("cuda:0"), proc=str(tmp_path), sysfs="/nowhere")
        assert info(one).oversubscribes is spills
        assert any("under WSL" in note for note in info(one).notes) is spills


# ------------------------------------------------------------------ Vulkan


def test_vulkan_where_only_one_gpu_could_be_meant(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vulkan:0` is the only GPU of a machine; with several the ways to name one are listed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    reason = refused("vulkan:0")
    assert "2 GPUs" in reason
    assert "cuda:0" in reason
    assert two.uuid(1) in reason
    with fake_nvml() as driver:
        assert uuids("vulkan:0") == uuids("vulkan") == [driver.uuid()]
        assert info(found("vulkan")[0]).engine_names == ("CUDA0", "Vulkan0")
        assert "1 GPUs" in refused("vulkan:1")


# ------------------------------------------------------------------ the driver itself


def test_nothing_stays_open(two: FakeDriver) -> None:
    """A look around gives the driver up again, and a closed probe too."""
    assert found("auto")
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    with probing():
        assert pynvml.nvmlDeviceGetCount() == 2
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("DRIVER_NOT_LOADED", "kernel driver is not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "needs a restart"),
        ("NO_PERMISSION", "does not answer: Insufficient Permissions"),
        ("UNKNOWN", "does not answer"),
    ],
)
def test_a_driver_that_does_not_answer(error: str, text: str) -> None:
    """A driver that cannot be used is a reason, for each kind of device that needs it."""
    with fake_nvml(faults=(Fault(on="init", error=error),)):
        for device in ("cuda:0", "auto", "GPU-00000000"):
            assert text in refused(device)


def test_a_library_that_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is no library, or not NVML, is named with its variable."""
    path = tmp_path / "not-a-library.so"
    path.write_text("text")
    monkeypatch.setenv("PYTEST_VRAM_NVML", str(path))
    assert f"PYTEST_VRAM_NVML={path}" in refused("cuda")


@pytest.mark.parametrize("words", ["raise RuntimeError('half installed')", "import sys; sys.exit(3)", "1 / 0", "x = ("])
def test_bindings_that_cannot_be_imported(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name that raises whatever it likes is a reason, not a crash."""
    (tmp_path / "pynvml.py").write_text(words)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    with fake_nvml():
        assert "pynvml that Python finds cannot be imported" in refused("cuda")


def test_a_library_of_another_name() -> None:
    """A library that is there and is another one is named, not the one that was not found."""
    text = (
        "from pytest_vram.measure import survey; from pytest_vram.settings import parse_device;"
        " print(survey(parse_device('cuda:0'))[0].reason)"
    )
    environment = {**os.environ, "PYTEST_VRAM_NVML": "libm.so.6"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    if "cannot be loaded" in done.stdout or "NVIDIA" not in done.stdout:
        pytest.skip(f"this machine has NVIDIA's driver, or no libm.so.6: {done.stdout}")
    assert "PYTEST_VRAM_NVML=libm.so.6 is not NVIDIA's libnvidia-ml.so.1" in done.stdout


def test_another_library_of_that_name(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that has not one function of NVML is a reason, not a crash."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL("libc.so.6"))
    pynvml._nvmlGetFunctionPointer_cache.clear()
    assert "cuda:0: NVIDIA's driver does not answer: Function Not Found" in refused("cuda:0")
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_bindings_that_are_missing_old_or_foreign(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bindings (as on macOS), a foreign module of that name, and bindings that raise their own kind of error."""

    def mismatch() -> None:
        raise pynvml.NVMLLibraryMismatchError("bindings and library do not match")

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    assert "do not match" in refused("cuda")
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert "is not NVIDIA's" in refused("cuda")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in refused("cuda")


def test_old_bindings(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings without newer functions, structures and errors give what they have."""
    for name in ("nvmlDeviceGetMigMode", "nvmlMemory_v2", "c_nvmlProcessInfo_v3_t", "NVMLLibraryMismatchError"):
        monkeypatch.delattr(pynvml, name)
    (one, _) = found("cuda")
    assert "memory query v1" in info(one).source
    for name in ("c_nvmlProcessInfo_v2_t", "c_nvmlProcessInfo_t"):
        monkeypatch.delattr(pynvml, name)
    (one, _) = found("cuda")
    assert "process lists v1" in info(one).source


def test_a_function_that_nobody_has(two: FakeDriver) -> None:
    """What bindings or driver do not have is the driver's "function not found"."""
    library = Library()
    with pytest.raises(DriverFault, match="have no nvmlNoSuchFunction"):
        library.ask("nvmlNoSuchFunction")
    library.close()
    library.close()


def test_one_card_that_does_not_answer() -> None:
    """A card that cannot be read is named, and the others are measured."""
    cards = [Card(faults=(Fault(on="all", error="GPU_IS_LOST"),)), Card(total=6 * GIB)]
    with fake_nvml(cards) as driver:
        assert uuids("cuda") == [driver.uuid(1)]
        assert "card 0: GPU is lost" in refused("cuda:1")


def test_a_card_that_goes_between_look_and_opening(two: FakeDriver) -> None:
    """A card whose memory cannot be read is unmeasurable with the reason, from either call."""
    two.fail("memory", "UNKNOWN")
    assert "its memory cannot be read" in refused("cuda:0")
    (probe,) = open_probes(parse_device("cuda:0"))
    assert isinstance(probe, Unmeasurable)
    assert "its memory cannot be read" in probe.reason


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not come back is waited for a while, once; what needs none is measured all the same."""
    monkeypatch.setattr(hanging, "LONGEST", 0.2)
    with fake_nvml(faults=(Fault(on="init", hang=3000),)):
        first, second, host = survey([*parse_device("cuda:0"), *parse_device("auto"), *parse_device("cpu")])
        late = [thread for thread in threading.enumerate() if thread.name == "vram-survey"]
        assert len(late) == 1, "it was not waited for, and not asked again"
        for one, name in ((first, "cuda:0"), (second, "auto")):
            assert isinstance(one, Unmeasurable)
            assert one.reason.startswith(f"{name}: the driver did not answer within 0.2 s and hangs")
        assert info(host).kind == "cpu"
        late[0].join(20)


def test_a_driver_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes long for all of its answers, and not too long for one, is waited for."""
    monkeypatch.setattr(hanging, "LONGEST", 0.3)
    with fake_nvml([Card(faults=(Fault(on="all", hang=100),))]):
        assert info(survey(parse_device("cuda:0"))[0]).label == "gpu0"
        (probe,) = open_probes(parse_device("cuda:0"))
        assert not isinstance(probe, Unmeasurable)
        probe.close()


def test_a_driver_that_hangs_when_a_probe_is_made(two: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look around went well and then the driver hangs: no probe, and the reason."""
    monkeypatch.setattr(hanging, "LONGEST", 0.3)
    make = NvmlProbe.__init__

    def late(*arguments: Any, **more: Any) -> None:
        two.fail("all", "OK", hang=2000)
        make(*arguments, **more)

    monkeypatch.setattr(NvmlProbe, "__init__", late)
    (probe,) = open_probes(parse_device("cuda:0"))
    assert isinstance(probe, Unmeasurable)
    assert "did not answer within 0.3 s and hangs" in probe.reason
    two.heal()
    for thread in threading.enumerate():
        if thread.name == "vram-survey":
            thread.join(20)


def test_no_driver_costs_nothing() -> None:
    """Where there is no NVIDIA driver its bindings are not even imported."""
    text = (
        "import sys; from pytest_vram.measure import survey; from pytest_vram.settings import parse_device;"
        " print([one.reason for one in survey([*parse_device('cuda:0'), *parse_device('auto')])]); print('pynvml' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_VRAM_NVML"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    if "not present" not in done.stdout:
        pytest.skip(f"this machine has NVIDIA's driver: {done.stdout} {done.stderr}")
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
    assert done.stdout.count("libnvidia-ml.so.1 is not present (or cannot be loaded)") == 2
    assert done.stdout.count("libnvidia-ml.so.1 is") == 2, "once for each"

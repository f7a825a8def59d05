"""AMD and Intel cards: on trees laid out like /proc and /sys, as the kernel's drivers print them."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_vram.measure import DeviceInfo, survey
from pytest_vram.measure.drm_cards import cards, rocm_nodes
from pytest_vram.measure.probes import Figure, Probe
from pytest_vram.measure.probes.drm import Client, parse
from pytest_vram.measure.survey import open_probes
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.settings import parse_device
from pytest_vram.units import GIB, MIB

CARD, OTHER, ON_CHIP = "0000:03:00.0", "0000:43:00.0", "0000:00:02.0"
#: Printed by Linux 6.16 for a program on an RX 7900.
AMDGPU = b"""pos:\t0
flags:\t02100002
drm-driver:\tamdgpu
drm-client-id:\t550
drm-pdev:\t0000:03:00.0
pasid:\t32771
drm-total-cpu:\t0
drm-total-gtt:\t80128 KiB
drm-resident-gtt:\t80128 KiB
drm-total-vram:\t82696 KiB
drm-shared-vram:\t8 KiB
drm-resident-vram:\t23048 KiB
drm-memory-vram:\t23048 KiB
drm-memory-gtt: \t80128 KiB
drm-memory-cpu: \t0 KiB
amd-evicted-vram:\t59648 KiB
amd-requested-vram:\t82696 KiB
drm-engine-gfx:\t301893603834 ns
drm-total-cycles-rcs:\t7655183225
"""
XE = b"""drm-driver:\txe
drm-client-id:\t3
drm-pdev:\t0000:03:00.0
drm-total-system:\t0
drm-total-gtt:\t192 KiB
drm-resident-gtt:\t192 KiB
drm-total-vram0:\t48 MiB
drm-shared-vram0:\t16 MiB
drm-resident-vram0:\t24 MiB
drm-total-stolen:\t0
drm-total-cycles-rcs:\t7655183225
"""


@pytest.mark.parametrize(
    ("text", "client"),
    [
        (AMDGPU, Client(CARD, "550", 23048 << 10, 80128 << 10, 59648 << 10)),
        (AMDGPU.replace(b"amd-evicted", b"amd-other"), Client(CARD, "550", 23048 << 10, 80128 << 10, 59648 << 10)),
        (AMDGPU.replace(b"amd-", b"xyz-"), Client(CARD, "550", 23048 << 10, 80128 << 10, 59648 << 10)),
        (XE, Client(CARD, "3", 24 * MIB, 192 << 10, None)),
        (b"drm-pdev: 0000:03:00.0\ndrm-client-id: 1\ndrm-total-local0: 4096\n", Client(CARD, "1", 4096, 0, None)),
        (b"drm-pdev: 0000:03:00.0\ndrm-client-id: 1\ndrm-total-system0: 5 MiB\n", Client(CARD, "1", 0, 5 * MIB, None)),
        (b"drm-pdev: 0000:03:00.0\ndrm-client-id: 1\ndrm-memory-vram: 7 pages\n", Client(CARD, "1", 0, 0, None)),
        (b"drm-client-id: 1\ndrm-memory-vram: 7 KiB\n", None),
        (b"drm-pdev: 0000:03:00.0\ndrm-memory-vram: 7 KiB\n", None),
        (b"pos: 0\nflags: 02\n", None),
        (b"", None),
    ],
)
def test_what_drivers_print(text: bytes, client: Client | None) -> None:
    """Memory on the card, in host memory and evicted are told apart, whichever of their names the driver uses."""
    assert parse(text) == client


@given(st.binary(max_size=200) | st.text("drm-memoryvtalgcinpd:0123456789 KiB\n.", max_size=200).map(str.encode))
def test_any_text(text: bytes) -> None:
    """Whatever a descriptor prints, no figure is below nothing."""
    client = parse(text)
    assert client is None or min(client.local, client.host, client.evicted or 0) >= 0


# ------------------------------------------------------------------ laid out machines


class Machine:
    """Folders that stand for /proc and /sys."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        for path in (self.proc, self.sys / "class/drm"):
            path.mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")

    def card(self, number: int, address: str, vendor: int = 0x1002, driver: str = "amdgpu", **files: int | str) -> Path:
        """Put in a card; ``files`` are those of its folder in /sys."""
        device = self.sys / "devices" / address
        (self.sys / f"bus/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        device.mkdir(parents=True)
        (device / "driver").symlink_to(self.sys / f"bus/drivers/{driver}")
        (device / "uevent").write_text(f"DRIVER={driver}\nPCI_SLOT_NAME={address}\n")
        (device / "vendor").write_text(f"{vendor:#x}\n")
        (device / "device").write_text("0x744c\n")
        for name, value in files.items():
            (device / name).write_text(f"{value}\n")
        node = self.sys / f"class/drm/card{number}"
        node.mkdir()
        (node / "device").symlink_to(device)
        return device

    def process(self, pid: int, *descriptors: str, state: str = "S") -> Path:
        """A process with these DRM descriptors, and one that is a plain file."""
        folder = self.proc / str(pid)
        for name in ("fd", "fdinfo"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.descriptor(pid, 0, "pos: 0\n", "/dev/null")
        for number, text in enumerate(descriptors, 5):
            self.descriptor(pid, number, text)
        (folder / "stat").write_text(f"{pid} (p) {state} 1 {pid} {pid} 0 -1 0 " + "0 " * 12 + "77 " + "0 " * 30)
        return folder

    def descriptor(self, pid: int, number: int, text: str, target: str = "/dev/dri/renderD128") -> None:
        link = self.proc / str(pid) / "fd" / str(number)
        if not link.is_symlink():
            link.symlink_to(target)
        (self.proc / str(pid) / "fdinfo" / str(number)).write_text(text)

    def close(self, pid: int, number: int) -> None:
        (self.proc / str(pid) / "fd" / str(number)).unlink()
        (self.proc / str(pid) / "fdinfo" / str(number)).unlink()

    def survey(self, text: str) -> list[DeviceInfo | Unmeasurable]:
        return survey(parse_device(text), proc=str(self.proc), sysfs=str(self.sys))

    def probe(self, text: str = "drm") -> Probe:
        (probe,) = open_probes(parse_device(text), proc=str(self.proc), sysfs=str(self.sys))
        assert not isinstance(probe, Unmeasurable), probe.reason
        return probe


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without cards and without NVIDIA's driver."""
    monkeypatch.setenv("PYTEST_VRAM_NVML", str(tmp_path / "none.so"))
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return Machine(tmp_path)


def client(identity: int, vram: int, *, gtt: int = 0, evicted: int = 0, device: str = CARD) -> str:
    """What amdgpu prints; sizes in MiB."""
    return (
        f"drm-driver: amdgpu\ndrm-client-id: {identity}\ndrm-pdev: {device}\ndrm-memory-vram: {vram << 10} KiB\n"
        f"drm-memory-gtt: {gtt << 10} KiB\namd-evicted-vram: {evicted << 10} KiB\n"
    )


def held(size: int) -> Figure:
    return Figure(size * MIB, size * MIB)


@pytest.fixture
def amd(machine: Machine) -> Machine:
    """An AMD card of 8 GiB of which 900 MiB are in use."""
    machine.card(1, CARD, mem_info_vram_total=8 * GIB, mem_info_vram_used=900 * MIB, mem_info_gtt_used=5 * MIB)
    return machine


def test_a_client_counts_once(amd: Machine) -> None:
    """A client at several descriptors, or in several processes, counts once; other cards and files do not."""
    amd.process(100, client(1, 300), client(1, 300), client(2, 50), client(9, 7, device=OTHER))
    amd.process(101, client(1, 300), client(3, 20))
    amd.process(102)
    amd.process(103, client(4, 400))
    probe = amd.probe()
    snapshot = probe.read([100, 101, 102])
    assert snapshot.processes == {100: held(350), 101: held(20), 102: held(0)}
    assert snapshot.device == held(900)
    assert snapshot.others == {103: 400 * MIB}
    assert snapshot.unlisted == 130 * MIB
    assert (snapshot.faults, snapshot.fault, snapshot.spill, snapshot.gone) == ({}, None, {}, ())
    assert probe.sources.sampled == "drm-fdinfo"
    probe.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    opened=st.lists(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([CARD, OTHER])), max_size=4), max_size=4),
    asked=st.integers(0, 4),
)
def test_drawn_clients(
    tmp_path_factory: pytest.TempPathFactory, opened: list[list[tuple[int, str]]], asked: int
) -> None:
    """Whoever has which client open how often, each counts once for its card, and nothing is left over."""
    machine = Machine(tmp_path_factory.mktemp("drawn"))
    total = sum({number for client in opened for number, card in client if card == CARD})
    machine.card(1, CARD, mem_info_vram_total=8 * GIB, mem_info_vram_used=total * MIB)
    for pid, clients in enumerate(opened, 100):
        machine.process(pid, *[client(number, number, device=card) for number, card in clients])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_VRAM_NVML", str(machine.proc / "none.so"))
        probe = machine.probe()
    pids = list(range(100, 100 + len(opened)))[:asked]
    snapshot = probe.read(pids)
    probe.close()
    assert snapshot.processes.keys() == set(pids)
    held = sum(figure.held for figure in snapshot.processes.values())
    assert held + sum(snapshot.others.values()) == total * MIB
    assert snapshot.unlisted == 0


def test_spill_is_what_was_evicted(amd: Machine) -> None:
    """What belongs on the card and lies in host memory is spill; other memory in the GTT is not."""
    amd.process(100, client(1, 300, gtt=500, evicted=200))
    amd.process(101, client(2, 300, gtt=500))
    probe = amd.probe()
    snapshot = probe.read([100, 101])
    assert snapshot.processes == {100: held(300), 101: held(300)}
    assert snapshot.spill == {100: 200 * MIB}
    probe.close()


def test_figures_follow(amd: Machine) -> None:
    """New descriptors are found, closed ones count no more, and figures are read anew each time."""
    amd.process(100, client(1, 300))
    probe = amd.probe()
    assert probe.read([100]).processes == {100: held(300)}
    amd.descriptor(100, 5, client(1, 310))
    assert probe.read([100]).processes == {100: held(310)}
    amd.descriptor(100, 6, client(2, 40))
    amd.close(100, 5)
    for _ in range(20):
        snapshot = probe.read([100])
    assert snapshot.processes == {100: held(40)}
    probe.close()


def test_processes_that_end_or_may_not_be_read(amd: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended is gone; one that may not be read is a fault of its own, and nobody is said to hold that."""
    amd.process(100, client(1, 300))
    amd.process(101, client(2, 100))
    amd.process(102, client(3, 100), state="Z")
    listing = os.listdir

    def denied(path: str) -> list[str]:
        if path.endswith(("/101/fd", "/102/fd")):
            raise PermissionError(13, "Permission denied")
        return listing(path)

    monkeypatch.setattr(os, "listdir", denied)
    probe = amd.probe()
    snapshot = probe.read([100, 101, 102, 103])
    assert snapshot.processes == {100: held(300)}
    assert set(snapshot.gone) == {102, 103}
    assert "process 101 cannot be read: Permission denied" in snapshot.faults[101]
    assert snapshot.unlisted is None
    assert probe.read([100]).others == {}
    probe.close()


def test_strangers_are_looked_up_when_the_card_moves(amd: Machine) -> None:
    """What strangers hold is read again when the card's figure moves without ours, or at a new baseline."""
    amd.process(100, client(1, 300))
    amd.process(103, client(4, 400))
    probe = amd.probe()
    assert probe.read([100]).others == {103: 400 * MIB}
    amd.descriptor(103, 5, client(4, 410))
    assert probe.read([100]).others == {103: 400 * MIB}
    probe.settle()
    assert probe.read([100]).others == {103: 410 * MIB}
    amd.descriptor(103, 5, client(4, 500))
    (amd.sys / "devices" / CARD / "mem_info_vram_used").write_text(f"{1000 * MIB}\n")
    assert probe.read([100]).others == {103: 500 * MIB}
    probe.close()


def test_rocm_knows_more(amd: Machine) -> None:
    """What ROCm's kernel driver says of a process counts where it is more; its order of cards names them."""
    for node, (gpu, place) in enumerate([(0, 0), (4711, 0x4300), (1234, 0x0300), (99, 0xC50A)]):
        folder = amd.sys / f"class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\nlocation_id {place}\ndomain 0\n")
    amd.process(100, client(1, 10))
    accounts = amd.sys / "class/kfd/kfd/proc/100"
    accounts.mkdir(parents=True)
    (accounts / "vram_1234").write_text(str(600 * MIB))
    (accounts / "vram_4711").write_text(str(9 * GIB))
    probe = amd.probe()
    assert probe.read([100]).processes == {100: held(600)}
    assert probe.info.engine_names == ("ROCm1", "Vulkan0")
    assert rocm_nodes(str(amd.sys))["0000:c5:01.2"] == (2, 99)
    probe.close()


def test_a_card_that_goes_away(amd: Machine) -> None:
    """A card that is removed ends the measurement with its reason."""
    probe = amd.probe()
    (amd.sys / "devices" / CARD / "mem_info_vram_used").write_text("")
    snapshot = probe.read([])
    assert (snapshot.lost, snapshot.device) == (True, None)
    assert "cannot be read any more" in (snapshot.fault or "")
    probe.close()


# ------------------------------------------------------------------ which cards


def one(found: list[DeviceInfo | Unmeasurable]) -> DeviceInfo:
    (device,) = found
    assert isinstance(device, DeviceInfo), device.reason
    return device


def why(found: list[DeviceInfo | Unmeasurable]) -> str:
    (device,) = found
    assert isinstance(device, Unmeasurable)
    return device.reason


def test_an_amd_card(amd: Machine) -> None:
    """A card is named by its place on the bus; it may oversubscribe."""
    device = one(amd.survey("drm:card1"))
    assert (device.label, device.kind, device.uuid, device.limit_from) == ("gpu0", "drm", f"pci-{CARD}", "card")
    assert device.name == "AMD graphics card 1002:744c"
    assert isinstance(device.capacity, Reading)
    assert device.capacity.bytes == 8 * GIB
    assert device.oversubscribes
    assert device.key == f"pci-{CARD}"
    assert [one(amd.survey(text)).uuid for text in ("auto", "drm", "vulkan:0")] == [f"pci-{CARD}"] * 3
    assert "drm:card1 (AMD graphics card 1002:744c)" in why(amd.survey("drm:card0"))


def test_an_intel_card(machine: Machine) -> None:
    """A card without a figure of the whole device is measured by process, and says what is missing."""
    machine.card(0, CARD, 0x8086, "xe")
    device = one(machine.survey("auto"))
    assert isinstance(device.capacity, Unmeasurable)
    assert "does not tell how much memory" in device.capacity.reason
    assert any("spill" in note for note in device.notes)
    machine.process(100, XE.decode())
    probe = machine.probe()
    snapshot = probe.read([100])
    assert snapshot.processes == {100: held(24)}
    assert (snapshot.device, snapshot.unlisted, snapshot.spill) == (None, None, {})
    probe.close()


@pytest.mark.parametrize(
    ("address", "vendor", "files"),
    [
        (ON_CHIP, 0x8086, {}),
        (CARD, 0x1002, {"mem_info_vram_total": GIB // 2, "mem_info_gtt_total": 8 * GIB}),
        (CARD, 0x1002, {"mem_info_vram_total": 4 * GIB, "mem_info_gtt_total": 8 * GIB, "gpu_metrics": "\x58\0\2\4"}),
    ],
)
def test_graphics_without_memory_of_their_own(
    machine: Machine, address: str, vendor: int, files: dict[str, int | str]
) -> None:
    """Integrated graphics use the host's memory: both kinds count, and `auto` does not take them for a card."""
    machine.card(0, address, vendor, "i915" if vendor == 0x8086 else "amdgpu", **files)
    device = one(machine.survey("drm:card0"))
    assert device.kind == "unified"
    assert not device.oversubscribes
    reason = why(machine.survey("auto"))
    assert "only where they are named: drm:card0" in reason
    machine.process(100, client(1, 300, gtt=200, evicted=50, device=address))
    probe = machine.probe("drm:card0")
    snapshot = probe.read([100])
    assert snapshot.processes == {100: held(500)}
    assert snapshot.spill == {}
    if vendor == 0x1002:
        assert isinstance(device.capacity, Reading)
        assert device.capacity.bytes == int(files["mem_info_vram_total"]) + 8 * GIB
    probe.close()


def test_several_makers(amd: Machine) -> None:
    """With several GPUs `vulkan:0` is not certain, and a card of NVIDIA's is `cuda`'s business."""
    amd.card(0, OTHER, 0x10DE, "nvidia")
    amd.card(2, ON_CHIP, 0x8086, "i915")
    amd.card(3, "0000:09:00.0", 0x1A03, "ast")
    assert [card.name for card in cards(str(amd.sys))] == ["card0", "card1", "card2"]
    reason = why(amd.survey("vulkan:0"))
    assert "3 GPUs" in reason
    assert "drm:card1, drm:card2" in reason
    assert "--vram-device=cuda" in why(amd.survey("drm:card0"))
    assert one(amd.survey("auto")).uuid == f"pci-{CARD}"
    both = [device.label for device in amd.survey("drm") if isinstance(device, DeviceInfo)]
    assert both == ["gpu0", "gpu1"]
    assert one(amd.survey("auto")).engine_names == ()


def test_a_machine_without_cards(machine: Machine) -> None:
    """Nothing is found where nothing is, and that says what was looked for."""
    assert "there is no AMD or Intel card" in why(machine.survey("drm"))
    assert "there is no GPU" in why(machine.survey("vulkan:0"))


@pytest.mark.gpu
def test_a_real_card() -> None:
    """On a real card the device's figure is at least what this user's processes hold."""
    real = [card for card in cards() if card.measurable]
    if not real:
        pytest.skip("needs an AMD or Intel card")
    if not glob.glob("/dev/dri/renderD*"):
        pytest.skip("needs /dev/dri")
    (probe,) = open_probes(parse_device(f"drm:{real[0].name}"))
    assert not isinstance(probe, Unmeasurable)
    with subprocess.Popen(["sleep", "10"]) as process:
        snapshot = probe.read([process.pid, os.getpid()])
        process.kill()
    assert snapshot.fault is None
    assert snapshot.processes[process.pid].held == 0
    if snapshot.device is not None:
        assert sum(figure.held for figure in snapshot.processes.values()) <= snapshot.device.held
    probe.close()

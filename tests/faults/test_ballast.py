"""The rest of a card is occupied by a process of our own, through CUDA's driver; a fake one stands for it here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_vram.errors import BadSetting, KeeperError
from pytest_vram.keeper.ballast import Ballast
from pytest_vram.measure import DeviceInfo, procfs
from pytest_vram.measure.emulated import PlayedProbe
from pytest_vram.measure.probes import Figure, Snapshot
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.testing.building import FakeDriverUnavailable
from pytest_vram.testing.fake_nvml import Card, FakeDriver, Process, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.faults.keeper_kit import gone, until
from tests.unit.measure_kit import PaperProbe

CARD = 1 << 30
CONTEXT = 100 * MIB


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """One card of 4 GiB, of which a desktop holds 300 MiB."""
    desktop = Process(pid=99_999_999, held=300 * MIB)
    try:
        with fake_nvml([Card(total=4 * GIB, context=CONTEXT, processes=(desktop,))]) as made:
            yield made
    except FakeDriverUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def ballast(tmp_path: Path) -> Iterator[Ballast]:
    made = Ballast(str(tmp_path / "run.sock"))
    yield made
    made.end()


def card(driver: FakeDriver, **changes: object) -> PaperProbe:
    """A probe that stands for that of the card."""
    probe = PaperProbe("gpu0")
    size = Reading(bytes=4 * GIB, source="nvml-device", scope="device", device="gpu0", exact=True)
    info = DeviceInfo(
        label="gpu0", kind="nvml", name="a card", capacity=size, source="paper", uuid=driver.uuid(), usable=size
    )
    probe.info = msgspec.structs.replace(info, **changes)
    return probe


def free(uuid: str) -> int:
    """Bytes that a new program with a context would find free, asked by a process of its own."""
    code = """
import ctypes, json, os, sys
from pytest_vram.keeper import occupy
driver = occupy.Driver(os.environ["PYTEST_VRAM_CUDA"])
driver.call("cuInit", 0)
context = ctypes.c_void_p()
driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
driver.call("cuCtxSetCurrent", context)
print(occupy._free(driver))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_the_rest_is_occupied_and_given_back(driver: FakeDriver, ballast: Ballast) -> None:
    """While it plays, all but the size is taken, whatever others hold; afterwards it is there again."""
    before = free(driver.uuid())
    (probe,) = ballast.play([card(driver)], CARD)
    assert CARD <= free(driver.uuid()) + CONTEXT < CARD + 2 * MIB
    (pid,) = ballast.pids
    stat = procfs.read_stat(pid)
    assert stat is not None
    assert stat.name == "vram-ballast"
    assert probe.info.limit_from == "emulated"
    assert "called vram-ballast, which is not counted" in probe.info.notes[-1]
    ballast.end()
    assert gone(pid)
    assert free(driver.uuid()) == before


def test_figures_of_the_card_are_without_the_ballast(driver: FakeDriver) -> None:
    """The device's own figures, its marks and the processes of others know nothing of it."""
    inner = card(driver)
    device = Figure(now=900, held=1000, mark=1200, most=1300)
    inner.read = lambda pids: Snapshot({}, device, others={7: 600, 8: 50}, unlisted=3)  # type: ignore[method-assign]
    found = PlayedProbe(inner, inner.info, (7, 550)).read([])
    assert found.device == Figure(now=300, held=400, mark=600, most=700)
    assert found.others == {8: 50}
    assert found.unlisted == 3


def test_a_card_that_does_not_list_the_ballast(driver: FakeDriver) -> None:
    """Where the driver does not say what a process holds, what the ballast allocated is taken off."""
    inner = card(driver)
    inner.read = lambda pids: Snapshot({}, Figure(1000, 1000), rise=Figure(5, 5))  # type: ignore[method-assign]
    found = PlayedProbe(inner, inner.info, (7, 550)).read([])
    assert found.device == Figure(450, 450)
    assert found.rise == Figure(5, 5)


def test_others_hold_more(driver: FakeDriver, ballast: Ballast) -> None:
    """Where others leave less than the size, it is refused with what is free; nothing stays behind."""
    driver.process(99_999_998, 3500 * MIB)
    with pytest.raises(
        KeeperError, match=r"--vram-emulate=1GiB .*a card\): others hold so much of it that only 2\d\d,\d+,\d+ bytes"
    ):
        ballast.play([card(driver)], CARD)
    assert ballast.pids == []


def test_the_driver_fails(driver: FakeDriver, ballast: Ballast) -> None:
    """An error of CUDA is named."""
    driver.fail("cuda")
    with pytest.raises(KeeperError, match="cuDevicePrimaryCtxRetain failed: CUDA_ERROR_UNKNOWN"):
        ballast.play([card(driver)], CARD)


def test_no_library(driver: FakeDriver, ballast: Ballast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA's driver library it is refused, with the loader's reason."""
    monkeypatch.setenv("PYTEST_VRAM_CUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(KeeperError, match="CUDA's driver library cannot be loaded .*nowhere"):
        ballast.play([card(driver)], CARD)


def test_another_card_is_not_occupied(driver: FakeDriver, ballast: Ballast) -> None:
    """A UUID that CUDA does not know leaves every card alone."""
    uuid = "GPU-00000000-1111-2222-3333-444444444444"
    with pytest.raises(KeeperError, match="CUDA_ERROR_NO_DEVICE"):
        ballast.play([card(driver, uuid=uuid)], CARD)


def test_it_dies_with_its_parent(driver: FakeDriver) -> None:
    """The ballast does not outlive whoever started it, however that ends."""
    code = f"""
import os, subprocess, sys
process = subprocess.Popen(
    [sys.executable, "-m", "pytest_vram.keeper.occupy", {driver.uuid()!r}, "{CARD}"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ, CUDA_VISIBLE_DEVICES={driver.uuid()!r}))
os.dup(process.stdin.fileno())
sys.stdout.write(f"{{process.pid}} {{process.stdout.readline().decode()}}")
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid, _, said = done.stdout.partition(" ")
    assert json.loads(said)["held"] > 2 * GIB
    assert until(lambda: gone(int(pid)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "cpu"}, "host memory has no rest that could be occupied"),
        ({"kind": "unified"}, "its memory is the host's"),
        ({"kind": "drm"}, "NVIDIA cards and of llama.cpp's RPC devices only"),
        ({"oversubscribes": True}, "allocations beyond the card succeed in host memory"),
        ({"usable": None, "capacity": Unmeasurable(reason="it hides")}, "its own size is not known: it hides"),
        ({"kind": "new"}, "no means for devices of kind 'new'"),
    ],
)
def test_what_cannot_be_played_is_refused(
    driver: FakeDriver, ballast: Ballast, changes: dict[str, object], reason: str
) -> None:
    """A device whose rest cannot be occupied is refused in one sentence, before anything is done."""
    with pytest.raises(BadSetting, match=rf"--vram-emulate=1GiB cannot be played on gpu0 \(a card\): .*{reason}"):
        ballast.play([card(driver, **changes)], CARD)
    assert ballast.pids == []


def test_a_card_that_is_smaller(driver: FakeDriver, ballast: Ballast) -> None:
    """A card cannot play one that is larger than what programs can have of it."""
    with pytest.raises(BadSetting, match="it has only 4,096 MiB; name a size that is smaller"):
        ballast.play([card(driver)], 4 * GIB + 1)


def test_a_server_that_was_started_anew_is_a_fault(driver: FakeDriver) -> None:
    """A device whose server was replaced has no limit any more: its figures are refused, not shown as the card's."""
    inner = card(driver, kind="rpc")
    inner.pid = 5  # type: ignore[attr-defined]
    probe = PlayedProbe(inner, inner.info, None)
    assert probe.read([]).fault is None
    inner.pid = 6  # type: ignore[attr-defined]
    fault = probe.read([]).fault
    assert fault is not None
    assert "started anew, and this one has no limit for --vram-emulate" in fault


@pytest.mark.gpu
def test_on_a_real_card(ballast: Ballast, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real card: what CUDA says is free afterwards is the size, within a piece; and it comes back."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA card can be asked here: {error}")
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    monkeypatch.setenv("PYTEST_VRAM_CUDA", "libcuda.so.1")
    before = free(uuid)
    size = Reading(bytes=total, source="nvml-device", scope="device", device="gpu0", exact=True)
    probe = PaperProbe("gpu0")
    probe.info = DeviceInfo(label="gpu0", kind="nvml", name="the card", capacity=size, source="paper", uuid=uuid)
    ballast.play([probe], 2 * GIB)
    # The asking process has a context of its own, of some hundred MiB.
    assert 1 * GIB < free(uuid) < 2 * GIB + 2 * MIB
    ballast.end()
    assert until(lambda: abs(free(uuid) - before) < 64 * MIB)

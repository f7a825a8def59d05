"""The fake driver: the real bindings read from it what was described."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml as nvml
import pytest

from pytest_vram.testing import (
    Card,
    FakeDriver,
    FakeDriverUnavailable,
    Fault,
    Memory,
    Process,
    Script,
    Slice,
    building,
    fake_nvml,
)
from pytest_vram.units import GIB, MIB

NOBODY = 4_190_001  # above the largest PID of this kernel's default


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skip where the fake driver cannot be built."""
    if not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("the fake driver needs Linux and a C compiler")


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """One card of 4 GiB."""
    with fake_nvml() as made:
        nvml.nvmlInit()
        yield made
        nvml.nvmlShutdown()


def card(index: int = 0) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(index)


def listed(handle: Any, what: str = "Compute", version: str = "") -> dict[int, int | None]:
    found = getattr(nvml, f"nvmlDeviceGet{what}RunningProcesses{version}")(handle)
    return {one.pid: one.usedGpuMemory for one in found}


def fails(call: Any, *arguments: Any) -> int:
    with pytest.raises(nvml.NVMLError) as caught:
        call(*arguments)
    return int(caught.value.value)


def test_names_and_places(driver: FakeDriver) -> None:
    """A card is found by index, UUID and PCI address, and says its name, size and the driver's versions."""
    driver.update(name="NVIDIA Fake 1", total=6 * GIB, pci="00000000:0A:00.0", minor=3)
    handle = card()
    assert nvml.nvmlDeviceGetCount() == 1
    assert nvml.nvmlDeviceGetName(handle) == "NVIDIA Fake 1"
    assert nvml.nvmlDeviceGetUUID(handle) == driver.uuid()
    assert nvml.nvmlDeviceGetMinorNumber(handle) == 3
    info = nvml.nvmlDeviceGetPciInfo(handle)
    assert (info.bus, info.device, info.busId) == (10, 0, "00000000:0a:00.0")
    for other in (
        nvml.nvmlDeviceGetHandleByUUID(driver.uuid()),
        nvml.nvmlDeviceGetHandleByPciBusId("0000:0A:00.0"),
    ):
        assert nvml.nvmlDeviceGetIndex(other) == 0
    assert nvml.nvmlSystemGetDriverVersion() == "550.54.15"
    assert nvml.nvmlSystemGetCudaDriverVersion() == 12040
    assert fails(nvml.nvmlDeviceGetHandleByIndex, 1) == nvml.NVML_ERROR_INVALID_ARGUMENT
    assert fails(nvml.nvmlDeviceGetHandleByUUID, "GPU-none") == nvml.NVML_ERROR_NOT_FOUND


def test_reserved_memory_is_within_the_old_figure_and_apart_in_the_new(driver: FakeDriver) -> None:
    """The first version of the memory query counts what the driver keeps as used, the second lists it apart."""
    driver.update(reserved=512 * MIB, hidden=8 * MIB, processes=(Process(pid=NOBODY, held=100 * MIB),))
    old = nvml.nvmlDeviceGetMemoryInfo(card())
    new = nvml.nvmlDeviceGetMemoryInfo(card(), nvml.nvmlMemory_v2)
    assert (old.total, old.used, old.free) == (4 * GIB, 620 * MIB, 4 * GIB - 620 * MIB)
    assert (new.total, new.used, new.reserved, new.free) == (4 * GIB, 108 * MIB, 512 * MIB, 4 * GIB - 620 * MIB)


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_processes_are_listed_by_kind(driver: FakeDriver, version: str) -> None:
    """Compute and graphics processes are in lists of their own, and one that does both is in both."""
    driver.process(NOBODY, 1 * MIB)
    driver.process(NOBODY + 1, 2 * MIB, kind="graphics")
    driver.process(NOBODY + 2, 3 * MIB, kind="both")
    driver.process(NOBODY + 3, 4 * MIB, kind="mps")
    assert listed(card(), "Compute", version) == {NOBODY: MIB, NOBODY + 2: 3 * MIB}
    assert listed(card(), "Graphics", version) == {NOBODY + 1: 2 * MIB, NOBODY + 2: 3 * MIB}
    assert listed(card(), "MPSCompute", version) == {NOBODY + 3: 4 * MIB}
    assert nvml.nvmlDeviceGetMemoryInfo(card()).used == 10 * MIB
    one = nvml.nvmlDeviceGetComputeRunningProcesses(card())[0]
    assert one.gpuInstanceId == one.computeInstanceId == 0xFFFFFFFF
    details = nvml.nvmlDeviceGetRunningProcessDetailList(
        card(), nvml.nvmlProcessDetailList_v1, nvml.NVML_PROCESS_MODE_ALL
    )
    assert sum(one.usedGpuMemory for one in details) == 10 * MIB


def test_a_driver_of_old_has_no_new_entry_points() -> None:
    """Entry points that came later are absent, and the oldest process list has its own layout."""
    with fake_nvml([Card(processes=(Process(pid=NOBODY, held=5), Process(pid=NOBODY + 1, held=6)))], driver="440.33"):
        nvml.nvmlInit()
        absent = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert fails(nvml.nvmlDeviceGetMemoryInfo, card(), nvml.nvmlMemory_v2) == absent
        assert fails(nvml.nvmlDeviceGetComputeRunningProcesses_v3, card()) == absent
        assert fails(nvml.nvmlDeviceGetComputeRunningProcesses_v2, card()) == absent
        assert fails(nvml.nvmlDeviceGetMigMode, card()) == absent
        call = nvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses
        count = nvml.c_uint(8)
        entries = (OldProcess * 8)()
        assert call(card(), nvml.byref(count), entries) == 0
        assert [(one.pid, one.used) for one in entries[: count.value]] == [(NOBODY, 5), (NOBODY + 1, 6)]
        nvml.nvmlShutdown()


class OldProcess(nvml.Structure):  # type: ignore[misc]
    """``nvmlProcessInfo_v1_t``."""

    _fields_ = [("pid", nvml.c_uint), ("used", nvml.c_ulonglong)]


def test_figures_that_are_not_available(driver: FakeDriver) -> None:
    """A process may be listed without a figure, while its memory counts for the card; nonsense is passed on."""
    driver.process(NOBODY, 64 * MIB, available=False)
    driver.process(NOBODY + 1, 2**64 - 4096)
    driver.update(accounting=True)
    assert listed(card()) == {NOBODY: None, NOBODY + 1: 2**64 - 4096}
    driver.end(NOBODY + 1)
    assert nvml.nvmlDeviceGetMemoryInfo(card()).used == 64 * MIB
    # The bindings' own function fails with a TypeError on the figure that is not there.
    stats = nvml.c_nvmlAccountingStats_t()
    assert nvml.nvmlLib.nvmlDeviceGetAccountingStats(card(), NOBODY, nvml.byref(stats)) == 0
    assert stats.maxMemoryUsage == 2**64 - 1


def test_the_memory_of_a_real_process(driver: FakeDriver) -> None:
    """What a process holds on the card is what it holds of the host, and it leaves the card when it ends."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; b = bytearray(64 << 20); print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        driver.process(child.pid, Memory(child.pid))
        status = Path(f"/proc/{child.pid}/status").read_text()
        held = int(status.split("RssAnon:")[1].split()[0]) * 1024
        assert listed(card()) == {child.pid: pytest.approx(held, abs=MIB)}
        assert held >= 64 * MIB
        driver.process(child.pid, Memory(child.pid, base=held - 10 * MIB))
        assert nvml.nvmlDeviceGetMemoryInfo(card()).used == pytest.approx(10 * MIB, abs=MIB)
        child.stdin.close()
        child.wait()
        assert listed(card()) == {}
        assert nvml.nvmlDeviceGetMemoryInfo(card()).used == 0
        # Any other change leaves it dead, whoever has its PID now.
        driver.update(hidden=1)
        assert listed(card()) == {}


def test_memory_of_one_process_under_another_found_by_its_command(driver: FakeDriver) -> None:
    """Memory is attributed to whichever process has given words in its command line, and to its successor later."""
    words = f"--rpc 127.0.0.1:{os.getpid()}"
    driver.update(accounting=True)
    driver.process(command=words, held=Memory(os.getpid()))
    assert listed(card()) == {}
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; print(1, flush=True); sys.stdin.read()", *words.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 10
            while not (found := listed(card())) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert list(found) == [child.pid]
            assert (found[child.pid] or 0) > 4 * MIB
            child.stdin.close()
        assert listed(card()) == {}
        # Accounting remembers it.
        assert nvml.nvmlDeviceGetAccountingStats(card(), child.pid).maxMemoryUsage >= (found[child.pid] or 0)


def test_a_script_of_memory_over_time(driver: FakeDriver) -> None:
    """A script holds the bytes of its last step, begins anew after its period, and tells accounting its peak."""
    now = time.monotonic_ns()
    hour = 3_600_000.0
    steps = ((0.0, 10), (1 * hour, 99), (1.5 * hour, 20))

    def since(hours: float, repeat: float | None = None) -> int | None:
        script = Script(steps, start=now - int(hours * hour * 1e6), repeat=repeat)
        driver.process(NOBODY, script)
        return listed(card())[NOBODY]

    assert [since(-1), since(0.5), since(1.2), since(30)] == [0, 10, 99, 20]
    assert [since(2.5, 2 * hour), since(3.2, 2 * hour)] == [10, 99]
    driver.update(accounting=True)
    driver.end(NOBODY)
    for hours, peak in ((0.5, 10), (1.2, 99), (30, 99), (0.5, 99)):
        since(hours)
        assert nvml.nvmlDeviceGetAccountingStats(card(), NOBODY).maxMemoryUsage == peak


def test_accounting_keeps_the_peak_of_the_dead(driver: FakeDriver) -> None:
    """With accounting on, the exact peak of a process is kept after it has ended; off, there is none."""
    assert nvml.nvmlDeviceGetAccountingMode(card()) == 0
    driver.process(NOBODY, Script(((0, 7), (1e7, 1))))
    assert fails(nvml.nvmlDeviceGetAccountingStats, card(), NOBODY) == nvml.NVML_ERROR_NOT_SUPPORTED
    driver.update(accounting=True)
    assert nvml.nvmlDeviceGetAccountingMode(card()) == 1
    assert nvml.nvmlDeviceGetAccountingPids(card()) == [NOBODY]
    assert nvml.nvmlDeviceGetAccountingStats(card(), NOBODY).isRunning == 1
    began = nvml.nvmlDeviceGetAccountingStats(card(), NOBODY).startTime
    assert time.time() - 600 < began / 1e6 <= time.time()
    driver.end(NOBODY)
    stats = nvml.nvmlDeviceGetAccountingStats(card(), NOBODY)
    assert (stats.isRunning, stats.maxMemoryUsage, stats.startTime) == (0, 7, began)
    assert listed(card()) == {}
    assert fails(nvml.nvmlDeviceGetAccountingStats, card(), NOBODY + 1) == nvml.NVML_ERROR_NOT_FOUND


def test_slices() -> None:
    """A MIG slice has its own UUID, size and processes, and needs no permission that its card refuses."""
    slices = (Slice(total=5 * GIB, hidden=MIB), Slice(total=10 * GIB))
    refused = (Fault(on="memory", error="NO_PERMISSION"),)
    processes = (Process(pid=NOBODY, held=9, slice=1), Process(pid=NOBODY + 1, held=8, slice=0))
    with fake_nvml([Card(slices=slices, faults=refused, processes=processes)]) as made:
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetMigMode(card()) == [1, 1]
        assert fails(nvml.nvmlDeviceGetMemoryInfo, card()) == nvml.NVML_ERROR_NO_PERMISSION
        assert nvml.nvmlDeviceGetMaxMigDeviceCount(card()) > 2
        first, second = (nvml.nvmlDeviceGetMigDeviceHandleByIndex(card(), index) for index in (0, 1))
        assert fails(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card(), 2) == nvml.NVML_ERROR_NOT_FOUND
        assert nvml.nvmlDeviceIsMigDeviceHandle(first).value == 1
        assert nvml.nvmlDeviceGetMemoryInfo(first).used == MIB + 8
        assert nvml.nvmlDeviceGetMemoryInfo(second).total == 10 * GIB
        assert listed(second) == {NOBODY: 9}
        assert len(listed(card())) == 2
        assert nvml.nvmlDeviceGetComputeRunningProcesses(second)[0].gpuInstanceId == 2
        assert nvml.nvmlDeviceGetGpuInstanceId(second) == 2
        assert nvml.nvmlDeviceGetAttributes(second).memorySizeMB == 10 * 1024
        assert nvml.nvmlDeviceGetUUID(second).startswith("MIG-")
        by_uuid = nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(second))
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(by_uuid)
        assert nvml.nvmlDeviceGetUUID(parent) == made.uuid()
        made.lose()
        assert fails(nvml.nvmlDeviceGetMemoryInfo, second) == nvml.NVML_ERROR_GPU_IS_LOST
        nvml.nvmlShutdown()


def test_faults_come_and_go(driver: FakeDriver) -> None:
    """Calls fail with the error that was described, for one card, from the moment on that was named."""
    handle = card()
    driver.fail("processes", "NO_PERMISSION")
    assert fails(nvml.nvmlDeviceGetComputeRunningProcesses, handle) == nvml.NVML_ERROR_NO_PERMISSION
    assert nvml.nvmlDeviceGetMemoryInfo(handle).total == 4 * GIB
    driver.heal()
    assert listed(handle) == {}
    driver.lose(after=3600)
    assert nvml.nvmlDeviceGetMemoryInfo(handle).total == 4 * GIB
    driver.lose()
    assert fails(nvml.nvmlDeviceGetMemoryInfo, handle) == nvml.NVML_ERROR_GPU_IS_LOST
    assert fails(nvml.nvmlDeviceGetHandleByIndex, 0) == nvml.NVML_ERROR_GPU_IS_LOST
    driver.heal()
    driver.update(unified=True)
    assert fails(nvml.nvmlDeviceGetMemoryInfo, handle) == nvml.NVML_ERROR_NOT_SUPPORTED
    driver.fail("init", "DRIVER_NOT_LOADED", card=None)
    assert fails(nvml.nvmlInit) == nvml.NVML_ERROR_DRIVER_NOT_LOADED
    driver.fail("memory", hang=30)
    before = time.monotonic_ns()
    assert fails(nvml.nvmlDeviceGetMemoryInfo, handle) == nvml.NVML_ERROR_UNKNOWN
    assert time.monotonic_ns() - before >= 30_000_000


def test_a_list_that_grows_between_two_calls(driver: FakeDriver) -> None:
    """A call with enough room may still be told that it is too small, as often as was described."""
    driver.process(NOBODY, 1)
    driver.update(insufficient=2)
    small = nvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert [fails(nvml.nvmlDeviceGetComputeRunningProcesses, card()) for _ in range(2)] == [small, small]
    assert listed(card()) == {NOBODY: 1}


def test_pids_of_another_namespace_and_frozen_figures(driver: FakeDriver) -> None:
    """PIDs may be those of the host, and figures of processes may stand still while the card's goes on."""
    now = time.monotonic_ns()
    driver.process(NOBODY, Script(((0, 5), (1000, 9)), start=now - 5_000_000_000))
    driver.update(pid_offset=100, frozen=now - 4_500_000_000)
    assert listed(card()) == {NOBODY + 100: 5}
    assert nvml.nvmlDeviceGetMemoryInfo(card()).used == 9


def test_oversubscribed_cards_are_full_and_no_fuller(driver: FakeDriver) -> None:
    """Where allocations beyond the card succeed, its figure ends at its size and the process's does not."""
    driver.update(oversubscribes=True, reserved=MIB)
    driver.process(NOBODY, 9 * GIB)
    memory = nvml.nvmlDeviceGetMemoryInfo(card())
    assert (memory.used, memory.free) == (4 * GIB, 0)
    assert listed(card()) == {NOBODY: 9 * GIB}


def test_children_see_the_same_cards(driver: FakeDriver) -> None:
    """A program started here finds the card through the environment, and sees a change at once."""
    code = (
        "import ctypes, os, sys; ctypes.CDLL(os.environ['PYTEST_VRAM_NVML']); import pynvml as n; n.nvmlInit();"
        "h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "for line in sys.stdin: print(n.nvmlDeviceGetMemoryInfo(h).used, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for held in (5, 77, 3):
            driver.process(NOBODY, held)
            child.stdin.write("\n")
            child.stdin.flush()
            assert int(child.stdout.readline()) == held
        child.stdin.close()


OCCUPY = """
import ctypes, os, sys
cuda = ctypes.CDLL(os.environ["PYTEST_VRAM_CUDA"])
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        print(name, status, flush=True)
        sys.exit()
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1])))
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
print(free.value, flush=True)
sys.stdin.read()
call("cuMemFree_v2", pointer)
print("freed", flush=True)
sys.stdin.close()
"""


def occupying(size: int, visible: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", OCCUPY, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )


def test_what_cuda_gives_is_listed() -> None:
    """An allocation and a context of CUDA are on the card that CUDA_VISIBLE_DEVICES names, until their process ends."""
    with fake_nvml([Card(), Card(context=107 * MIB, reserved=16 * MIB)]) as made:
        nvml.nvmlInit()
        with occupying(500 * MIB + 1, made.uuid(1)) as child:
            assert child.stdout is not None
            free = int(child.stdout.readline())
            used = 502 * MIB + 107 * MIB
            assert free == 4 * GIB - 16 * MIB - used
            assert listed(card(1)) == {child.pid: used}
            assert nvml.nvmlDeviceGetMemoryInfo(card(1)).used == used + 16 * MIB
            assert listed(card(0)) == {}
            with occupying(4 * GIB - 600 * MIB, "1") as other:
                assert other.communicate("")[0] == "cuMemAlloc_v2 2\n"
            child.kill()
        assert listed(card(1)) == {}
        nvml.nvmlShutdown()


def test_the_program_nvidia_smi(driver: FakeDriver, tmp_path: Path) -> None:
    """A fake nvidia-smi prints the same figures, for tools that start one."""
    program = driver.write_nvidia_smi(tmp_path)
    driver.process(os.getpid(), 99 * MIB)

    def said(*arguments: str) -> str:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True).stdout

    assert said("--query-compute-apps=pid,used_memory", "--format=csv,noheader") == f"{os.getpid()}, 99 MiB\n"
    assert said("--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits") == "4096, 99\n"
    assert driver.uuid() in said("-L")


def test_nothing_is_left_of_it() -> None:
    """After the block the environment is what it was, and a bound library finds no driver any more."""
    before = dict(os.environ)
    with fake_nvml() as made:
        library = nvml.CDLL(str(made.library))
        assert library.nvmlInit_v2() == 0
        assert library.nvmlShutdown() == 0  # it is this process's, and later tests ask whether anybody has it open
    assert dict(os.environ) == before
    assert not made.state.exists()
    assert library.nvmlInit_v2() == nvml.NVML_ERROR_DRIVER_NOT_LOADED


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Card(name="a\tb"), "tabs"),
        (Card(total=2**64), "64 bits"),
        (Card(processes=(Process(),)), "pid or a command"),
        (Card(processes=(Process(pid=1, slice=0),)), "no slice 0"),
        (Card(processes=(Process(pid=1, held=Script(((5, 1), (2, 1)))),)), "order of time"),
        (Card(faults=(Fault(on="memory", error="BAD"),)), "no such NVML error"),
        (Card(faults=(Fault(on="compute"),)), "no such call: 'compute'; there are all"),  # type: ignore[arg-type]
        (Card(slices=(Slice(),) * 9), "room for 8 slices"),
    ],
)
def test_descriptions_that_make_no_sense(made: Card, words: str) -> None:
    """A description that makes no sense is refused with the reason."""
    with pytest.raises(ValueError, match=words), fake_nvml([made]):
        pass


def test_a_change_that_makes_no_sense_changes_nothing() -> None:
    """A fault of a call that there is not is refused, and the cards are as before."""
    with fake_nvml() as made:
        with pytest.raises(ValueError, match="no such call"):
            made.fail("compute")  # type: ignore[arg-type]
        assert made.cards[0].faults == ()
        made.update(hidden=MIB)


def test_two_builds_at_once_end_with_one_file(tmp_path: Path) -> None:
    """Processes that build it at the same time all get a whole library, and leave nothing else."""
    code = "from pytest_vram.testing.fake_nvml import library; print(library('551.1'))"
    environment = {**os.environ, "PYTEST_VRAM_CACHE": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(paths) == 1
    library = Path(paths.pop())
    assert [one.name for one in library.parent.iterdir()] == ["libnvidia-ml.so.1"]


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler, or with one that fails, the exception says what is missing."""
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(FakeDriverUnavailable, match="false cannot build"), fake_nvml():
        pass
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(FakeDriverUnavailable, match="install gcc or clang"), fake_nvml():
        pass
    assert building.FakeDriverUnavailable is FakeDriverUnavailable


@pytest.mark.gpu
def test_a_real_driver_answers_in_the_same_forms() -> None:
    """On a real card the same calls give figures of the same forms, this process absent until it takes memory."""
    code = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
old = n.nvmlDeviceGetMemoryInfo(h)
new = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
lists = [n.nvmlDeviceGetComputeRunningProcesses(h), n.nvmlDeviceGetGraphicsRunningProcesses(h)]
print(json.dumps({
    "uuid": n.nvmlDeviceGetUUID(h), "old": [old.total, old.used, old.free],
    "new": [new.total, new.used, new.reserved, new.free],
    "processes": [[one.pid, one.usedGpuMemory] for found in lists for one in found],
}))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_VRAM_NVML"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    if done.returncode != 0:
        pytest.skip("no NVIDIA driver answers on this machine")
    said = json.loads(done.stdout)
    assert said["uuid"].startswith(("GPU-", "MIG-"))
    total, used, free = said["old"]
    assert total == said["new"][0]
    assert used + free == pytest.approx(total, abs=MIB)
    assert sum(said["new"][1:]) == pytest.approx(total, abs=MIB)
    assert used >= said["new"][1]
    assert os.getpid() not in [pid for pid, _ in said["processes"]]

"""What the probe of NVIDIA cards says, on the fake driver under the real bindings."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_vram.measure import survey
from pytest_vram.measure.probes import Figure
from pytest_vram.measure.probes.ends import Ends
from pytest_vram.measure.probes.nvml import NvmlProbe
from pytest_vram.measure.probes.nvml_library import Library
from pytest_vram.measure.probes.trust import Trust, exists, in_container
from pytest_vram.settings import parse_device
from pytest_vram.testing import Card, FakeDriver, Process, Script, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.unit.nvml_kit import NOBODY, contained, info, needs_fake, probing, sleepers

pytestmark = needs_fake


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """One card of 4 GiB, of which the driver keeps 300 MiB."""
    with fake_nvml([Card(total=4 * GIB, reserved=300 * MIB)]) as made:
        yield made


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    """Three processes."""
    with sleepers(3) as found:
        yield found


# ------------------------------------------------------------------ by process


@pytest.mark.parametrize("kind", ["compute", "graphics", "both", "mps"])
def test_a_process_counts_once(driver: FakeDriver, pids: list[int], kind: str) -> None:
    """A process has one memory, in whichever of the driver's lists it is, also in two of them."""
    driver.process(pids[0], 700 * MIB, kind=kind)  # type: ignore[arg-type]
    with probing() as probe:
        snapshot = probe.read(pids)
    assert snapshot.processes == {pids[0]: Figure(700 * MIB, 700 * MIB), pids[1]: Figure(0, 0), pids[2]: Figure(0, 0)}
    assert snapshot.device == Figure(700 * MIB, 700 * MIB)
    assert (snapshot.rise, snapshot.fault, snapshot.others, snapshot.unlisted) == (None, None, {}, 0)
    assert probe.per_process
    assert probe.counts_pytest
    assert probe.sources.sampled == "nvml-process"


def test_strangers_and_what_nobody_holds(driver: FakeDriver, pids: list[int]) -> None:
    """Processes that were not asked for are apart, and so is what no listed process holds."""
    driver.update(hidden=90 * MIB)
    driver.process(pids[0], 100 * MIB)
    driver.process(pids[1], 200 * MIB)
    with probing() as probe:
        snapshot = probe.read(pids[:1])
    assert snapshot.processes == {pids[0]: Figure(100 * MIB, 100 * MIB)}
    assert snapshot.others == {pids[1]: 200 * MIB}
    assert snapshot.unlisted == 90 * MIB


def test_more_processes_than_room(driver: FakeDriver, pids: list[int]) -> None:
    """The driver's "insufficient size" is answered with more room; nothing is lost."""
    processes = tuple(Process(pid=NOBODY + index, held=MIB) for index in range(150))
    driver.update(processes=(*processes, Process(pid=pids[0], held=5 * MIB)), insufficient=2)
    with contained(container=False) as probe:
        snapshot = probe.read(pids)
    assert snapshot.processes[pids[0]].held == 5 * MIB
    assert len(snapshot.others) == 150


def test_a_process_that_ended_is_gone(driver: FakeDriver) -> None:
    """A process that has ended is said to be gone, not to hold nothing, also while nobody waits for it."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        driver.process(process.pid, 10 * MIB)
        with probing() as probe:
            assert probe.read([process.pid]).processes[process.pid].held == 10 * MIB
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            snapshot = probe.read([process.pid])
            assert snapshot.gone == (process.pid,)
            assert snapshot.processes == {}
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("plain", [False, True])
def test_ends_are_seen_with_and_without_process_descriptors(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process is seen through its descriptor, or through /proc where there are none."""
    if plain:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["sleep", "600"])
    ends = Ends()
    ends.follow([process.pid, os.getpid()])
    assert ends.ended() == set()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ends.ended() == {process.pid}
    process.wait()
    ends.follow([process.pid])
    assert ends.ended() == {process.pid}
    ends.follow([os.getpid()])
    assert ends.ended() == set()
    ends.follow([NOBODY])
    assert ends.ended() == {NOBODY}
    ends.close()


# ------------------------------------------------------------------ sizes and versions


def test_what_a_card_is(driver: FakeDriver) -> None:
    """Its size is the nominal one; what programs can have of it lacks what the driver keeps."""
    (found,) = survey(parse_device("cuda:0"))
    device = info(found)
    assert (device.label, device.kind, device.limit_from) == ("gpu0", "nvml", "card")
    assert device.uuid == device.key == driver.uuid()
    assert getattr(device.capacity, "bytes", None) == 4 * GIB
    assert getattr(device.usable, "bytes", None) == 4 * GIB - 300 * MIB
    assert (device.accounting, device.exact, device.per_process, device.notes) == (False, False, True, ())
    assert "CUDA0" in device.engine_names


@pytest.mark.parametrize(
    ("version", "memory", "lists"), [("440.33", 1, 1), ("470.57", 1, 2), ("510.10", 2, 3), ("550.54.15", 2, 3)]
)
def test_drivers_of_any_age(version: str, memory: int, lists: int, pids: list[int]) -> None:
    """The newest entry points that the driver has are used; where it counts its own memory as used, that is said."""
    card = Card(reserved=300 * MIB, processes=(Process(pid=pids[0], held=100 * MIB),))
    with fake_nvml([card], driver=version), probing() as probe:
        snapshot = probe.read(pids)
    assert snapshot.processes[pids[0]].held == 100 * MIB
    assert snapshot.device is not None
    assert snapshot.device.held == (400 if memory == 1 else 100) * MIB
    assert f"memory query v{memory}, process lists v{lists}" in probe.info.source
    assert (probe.info.usable is None) == (memory == 1)
    assert any("reserves for itself" in note for note in probe.info.notes) == (memory == 1)


# ------------------------------------------------------------------ figures by process that are none


def test_processes_without_figures(driver: FakeDriver, pids: list[int]) -> None:
    """N/A is not 0: the rise of the device stands for the run from then on, and every figure says so."""
    driver.update(hidden=200 * MIB)
    with probing() as probe:
        assert probe.per_process
        driver.process(pids[0], 500 * MIB, available=False)
        snapshot = probe.read(pids)
        assert not probe.per_process
        assert (snapshot.processes, snapshot.rise) == ({}, Figure(500 * MIB, 500 * MIB))
        assert "N/A" in (snapshot.doubt or "")
        assert probe.sources.sampled == "device-delta"
        assert "200.0 MiB" in (probe.note or "")
        driver.process(pids[0], 500 * MIB)
        assert probe.read(pids).rise == Figure(500 * MIB, 500 * MIB), "once in doubt, for good"


def test_a_stranger_without_a_figure(driver: FakeDriver, pids: list[int]) -> None:
    """N/A of a stranger leaves ours alone; what nobody holds is then not known."""
    driver.process(pids[0], 100 * MIB)
    driver.process(pids[1], 200 * MIB, available=False)
    with probing() as probe:
        snapshot = probe.read(pids[:1])
    assert snapshot.processes == {pids[0]: Figure(100 * MIB, 100 * MIB)}
    assert (snapshot.others, snapshot.unlisted) == ({}, None)


def test_nobody_has_a_figure(driver: FakeDriver, pids: list[int]) -> None:
    """Where every listed process is N/A ours will be, too: that is known before it runs."""
    driver.process(pids[1], 200 * MIB, available=False)
    (found,) = survey(parse_device("cuda:0"))
    assert not info(found).per_process
    with probing() as probe:
        assert probe.read(pids[:1]).rise == Figure(0, 0)


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION"])
def test_no_process_list(driver: FakeDriver, pids: list[int], error: str) -> None:
    """A driver that lists no processes is asked for the device alone."""
    driver.fail("processes", error)
    driver.update(hidden=100 * MIB)
    (found,) = survey(parse_device("cuda:0"))
    assert not info(found).per_process
    with probing() as probe:
        driver.process(pids[0], 300 * MIB)
        snapshot = probe.read(pids)
    assert snapshot.rise == Figure(300 * MIB, 300 * MIB)
    assert snapshot.fault is None


def test_the_baseline_settles_and_falls(driver: FakeDriver, pids: list[int]) -> None:
    """The rise counts from the settled baseline; when others give memory back, it counts from what is left."""
    driver.fail("processes", "NOT_SUPPORTED")
    with probing() as probe:
        driver.update(hidden=800 * MIB)
        probe.settle()
        driver.process(pids[0], 300 * MIB)
        assert probe.read(pids).rise == Figure(300 * MIB, 300 * MIB)
        driver.update(hidden=100 * MIB)
        snapshot = probe.read(pids)
        assert snapshot.rise == Figure(0, 0)
        assert "shrunk by 400.0 MiB" in (probe.note or "")
        driver.process(pids[0], 500 * MIB)
        assert probe.read(pids).rise == Figure(200 * MIB, 200 * MIB)


@pytest.mark.parametrize("listed", [True, False])
def test_a_baseline_with_a_process_of_the_run(
    driver: FakeDriver, pids: list[int], listed: bool, tmp_path: Path
) -> None:
    """Where this run was on the card before the baseline, the figure is at least the rise, at most all that is in use."""
    if listed:
        driver.process(pids[0], 2 * GIB, available=False)
    else:
        driver.fail("processes", "NOT_SUPPORTED")
        driver.update(hidden=2 * GIB)
        folder = tmp_path / str(pids[0]) / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to("/dev/nvidia-uvm")
    with probing() as found:
        probe = NvmlProbe(found.info, Library(), container=False, proc="/proc" if listed else str(tmp_path))
        probe.read(pids)
        probe.settle()
        snapshot = probe.read(pids)
        assert snapshot.rise == Figure(0, 0, most=2 * GIB)
        assert f"process {pids[0]} of this run was on the device already" in (probe.note or "")
        assert "others held" not in (probe.note or "")
        driver.update(hidden=3 * GIB if not listed else GIB)
        assert probe.read(pids).rise == Figure(GIB, GIB, most=3 * GIB)
        probe.close()


def test_a_baseline_without_a_process_of_the_run(driver: FakeDriver, pids: list[int]) -> None:
    """A stranger on the card, and processes of the run that are elsewhere, leave the rise a figure."""
    driver.process(pids[1], 2 * GIB, available=False)
    with probing() as probe:
        probe.read(pids[:1])
        probe.settle()
        driver.process(pids[0], GIB, available=False)
        assert probe.read(pids[:1]).rise == Figure(GIB, GIB)
        assert "2,048 MiB that others held before" in (probe.note or "")


# ------------------------------------------------------------------ containers


def test_pids_of_the_host(driver: FakeDriver, pids: list[int]) -> None:
    """In a container a PID that nobody here has ends figures by process at once: ours would seem to hold nothing."""
    driver.update(pid_offset=NOBODY)
    with contained() as probe:
        driver.process(pids[0], 300 * MIB)
        snapshot = probe.read(pids)
    assert snapshot.rise == Figure(300 * MIB, 300 * MIB)
    assert snapshot.others == {}
    assert "those of the host" in (snapshot.doubt or "")


def test_hidden_from_the_driver(driver: FakeDriver, pids: list[int]) -> None:
    """In a container growth that no listed process of ours shows for ends figures by process."""
    with contained() as probe:
        assert "not been seen yet" in (probe.read(pids).doubt or "")
        driver.update(hidden=65 * MIB)
        snapshot = probe.read(pids)
        assert snapshot.rise == Figure(65 * MIB, 65 * MIB)
        assert "lists no process of this run" in (snapshot.doubt or "")


def test_a_container_that_shows_our_processes(driver: FakeDriver, pids: list[int]) -> None:
    """Once a process of ours was listed, growth by others and PIDs that end a moment ago change nothing."""
    driver.process(pids[0], 10 * MIB)
    with contained() as probe:
        assert probe.read(pids).doubt is None
        driver.update(hidden=900 * MIB)
        driver.process(NOBODY, MIB)
        snapshot = probe.read(pids)
        assert probe.per_process
        assert (snapshot.processes[pids[0]].held, snapshot.doubt) == (10 * MIB, None)


def test_outside_of_containers_patience(pids: list[int]) -> None:
    """Outside of containers a listed PID that is not here has probably just ended: only one that stays is evidence."""
    now = [0]
    trust = Trust(container=False, exists=lambda pid: pid != NOBODY, clock=lambda: now[0])
    assert trust.doubt({NOBODY: MIB}, pids, 0) is None
    now[0] = 900_000_000
    assert trust.doubt({NOBODY: MIB}, pids, 0) is None
    assert trust.doubt({}, pids, 0) is None
    now[0] = 1_800_000_000
    assert trust.doubt({NOBODY: MIB}, pids, 0) is None
    now[0] = 2_900_000_000
    assert "those of the host" in (trust.doubt({NOBODY: MIB}, pids, 0) or "")


def test_pids_that_may_be_ours_under_another_number(driver: FakeDriver, pids: list[int]) -> None:
    """Until it is known whose a listed PID is that nobody here has, it is no stranger's, and may be this run's."""
    with contained(container=False) as probe:
        probe.read(pids)
        driver.update(pid_offset=NOBODY)
        driver.process(pids[0], 300 * MIB)
        snapshot = probe.read(pids)
        assert probe.per_process
        assert (snapshot.others, snapshot.unlisted) == ({}, None)
        assert [figure.held for figure in snapshot.processes.values()] == [0, 0, 0]
        assert [figure.most for figure in snapshot.processes.values()] == [300 * MIB, None, None]
        assert "not known yet" in (snapshot.doubt or "")
        driver.update(pid_offset=0)
        snapshot = probe.read(pids)
        assert (snapshot.processes[pids[0]], snapshot.doubt) == (Figure(300 * MIB, 300 * MIB), None)
        driver.process(NOBODY, MIB)
        snapshot = probe.read(pids)
        assert snapshot.others == {NOBODY: MIB}, "once one of ours was seen, it has just ended"


def test_who_exists() -> None:
    """A process of another user exists, one that nobody has does not."""
    assert exists(os.getpid())
    assert exists(1)
    assert not exists(NOBODY)
    assert isinstance(in_container(), bool)


# ------------------------------------------------------------------ faults


def test_a_lost_card(driver: FakeDriver, pids: list[int]) -> None:
    """ "GPU is lost" is the end of the measurement: no last value, and no figure when it seems to come back."""
    driver.process(pids[0], 300 * MIB)
    with probing() as probe:
        assert probe.read(pids).fault is None
        driver.lose()
        for _ in range(2):
            snapshot = probe.read(pids)
            assert (snapshot.processes, snapshot.device, snapshot.rise, snapshot.lost) == ({}, None, None, True)
            assert "GPU is lost" in (snapshot.fault or "")
            driver.heal()
        probe.reset()
        probe.settle()


@pytest.mark.parametrize("where", ["memory", "processes"])
def test_one_read_that_fails(driver: FakeDriver, pids: list[int], where: str) -> None:
    """An error of one read is a fault of that read, not a figure and not the end."""
    driver.process(pids[0], 300 * MIB)
    with probing() as probe:
        driver.fail(where, "UNKNOWN")  # type: ignore[arg-type]
        snapshot = probe.read(pids)
        assert (snapshot.processes, snapshot.device, snapshot.lost) == ({}, None, False)
        assert "NVIDIA GeForce RTX 3050 could not be read" in (snapshot.fault or "")
        driver.heal()
        assert probe.read(pids).processes[pids[0]].held == 300 * MIB
        assert probe.per_process


def test_more_in_use_than_there_is(driver: FakeDriver, pids: list[int]) -> None:
    """A device in which more is in use than it has is refused."""
    with probing() as probe:
        driver.update(hidden=2**62)
        snapshot = probe.read(pids)
        assert snapshot.device is None
        assert "impossible" in (snapshot.fault or "")


# ------------------------------------------------------------------ accounting


def spike(top: int, low: int) -> Script:
    """A spike of 2 ms that began 100 ms ago."""
    return Script(steps=((0, low), (1, top), (3, low)), start=time.monotonic_ns() - 100_000_000)


def test_accounting_keeps_what_samples_miss(driver: FakeDriver) -> None:
    """A spike between two reads is the exact peak of a process that came after the reset."""
    driver.update(accounting=True)
    with probing() as probe, sleepers(1) as (pid,):
        assert probe.info.exact
        assert probe.sources.mark == "nvml-accounting"
        probe.read([pid])
        driver.process(pid, spike(900 * MIB, 100 * MIB))
        assert probe.read([pid]).processes == {pid: Figure(100 * MIB, 100 * MIB, mark=900 * MIB)}
        probe.reset()
        figure = probe.read([pid]).processes[pid]
        assert figure == Figure(100 * MIB, 100 * MIB, most=900 * MIB), "since the reset there is an upper end"
        driver.process(pid, spike(950 * MIB, 100 * MIB))
        assert probe.read([pid]).processes[pid].mark == 950 * MIB, "it rose: exact again"


def test_accounting_of_one_that_was_there_before(driver: FakeDriver, pids: list[int]) -> None:
    """What a process held before it was first asked for is an upper end, not its peak."""
    driver.update(accounting=True)
    driver.process(pids[0], spike(900 * MIB, 100 * MIB))
    with probing() as probe:
        assert probe.read(pids).processes[pids[0]] == Figure(100 * MIB, 100 * MIB, most=900 * MIB)


def test_accounting_of_one_that_stands_still(driver: FakeDriver, pids: list[int]) -> None:
    """A process that holds as much as ever in its life has its exact peak, until it gave some back before a reset."""
    driver.update(accounting=True)
    driver.process(pids[0], 400 * MIB)
    exact = Figure(400 * MIB, 400 * MIB, mark=400 * MIB)
    with probing() as probe:
        assert probe.read(pids).processes[pids[0]] == exact, "it was there before, and never held more"
        probe.reset()
        assert probe.read(pids).processes[pids[0]] == exact
        driver.process(pids[0], 100 * MIB)
        assert probe.read(pids).processes[pids[0]] == Figure(100 * MIB, 100 * MIB, mark=400 * MIB)
        probe.reset()
        assert probe.read(pids).processes[pids[0]] == Figure(100 * MIB, 100 * MIB, most=400 * MIB)


def test_accounting_of_a_pid_that_is_used_again(driver: FakeDriver, pids: list[int]) -> None:
    """What the driver remembers of the process that had this PID before is no base of the one that has it now."""
    driver.update(accounting=True)
    driver.process(pids[0], spike(900 * MIB, 900 * MIB))
    with probing() as probe:
        probe.read(pids)
        probe.reset()
        driver.update(
            processes=(Process(pid=pids[0], held=100 * MIB, began=time.time_ns() // 1000 + 1, peaked=300 * MIB),)
        )
        assert probe.read(pids).processes[pids[0]] == Figure(100 * MIB, 100 * MIB, mark=300 * MIB)


def test_accounting_of_one_that_came_late(driver: FakeDriver, pids: list[int]) -> None:
    """A process that was asked for while the driver knew nothing of it has its whole peak within the time."""
    driver.update(accounting=True)
    with probing() as probe:
        assert probe.read(pids).processes[pids[0]] == Figure(0, 0)
        # The clock of the driver may be behind, and the process older than the reset: that it was absent decides.
        driver.update(processes=(Process(pid=pids[0], held=100 * MIB, began=1, peaked=700 * MIB),))
        assert probe.read(pids).processes[pids[0]] == Figure(100 * MIB, 100 * MIB, mark=700 * MIB)


@pytest.mark.parametrize("asked", [True, False])
def test_accounting_of_one_that_ended(driver: FakeDriver, asked: bool) -> None:
    """The peak of a process that has ended comes once more, whether it is asked for or not; then it is gone."""
    driver.update(accounting=True)
    with probing() as probe:
        with sleepers(1) as (pid,):
            probe.read([pid])
            driver.process(pid, 100 * MIB)
            assert probe.read([pid]).processes[pid].mark == 100 * MIB
            driver.process(pid, spike(700 * MIB, 100 * MIB))
            driver.end(pid)
        pids = [pid] if asked else []
        snapshot = probe.read(pids)
        assert snapshot.processes == {pid: Figure(0, 0, mark=700 * MIB)}
        assert snapshot.gone == tuple(pids)
        assert probe.read(pids).processes == {}


# ------------------------------------------------------------------ drawn cards


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_never_a_wrong_figure(driver: FakeDriver, pids: list[int], data: st.DataObject) -> None:
    """Whatever the driver shows, a figure is either right or missing with a reason."""
    draw = data.draw
    sizes = st.integers(0, 300).map(lambda size: size * MIB)
    kinds = st.sampled_from(["compute", "graphics", "both", "mps"])
    held = {pid: draw(sizes) for pid in pids}
    processes = tuple(
        Process(pid=pid, held=size, kind=draw(kinds), available=draw(st.integers(0, 4)) > 0)
        for pid, size in held.items()
        if size
    )
    hidden, offset = draw(sizes), draw(st.sampled_from([0, 0, NOBODY]))
    asked = pids[: draw(st.integers(0, len(pids)))]
    accounting = draw(st.booleans())
    driver.update(hidden=0, pid_offset=0, accounting=accounting, processes=())
    with contained(container=draw(st.booleans())) as probe:
        driver.update(hidden=hidden, pid_offset=offset, processes=processes)
        snapshot = probe.read(asked)
    total = hidden + sum(held.values())
    assert snapshot.fault is None
    assert snapshot.device == Figure(total, total)
    if not probe.per_process:
        assert snapshot.doubt
        assert snapshot.rise == Figure(total, total)
        return
    known = [figure.held for figure in snapshot.processes.values()]
    assert sum(known) + sum(snapshot.others.values()) + (snapshot.unlisted or 0) <= total
    if not offset:
        assert {pid: figure.held for pid, figure in snapshot.processes.items()} == {pid: held[pid] for pid in asked}
    elif snapshot.doubt is None:
        # Host's PIDs outside of a container are not a thing; they are evidence once they stay.
        assert not probe._trust.proven


@pytest.mark.gpu
def test_a_real_card() -> None:
    """On a real card a process of ours is seen, with the memory that it takes."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA card and torch with CUDA")
    with probing() as probe:
        block = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
        snapshot = probe.read([os.getpid()])
        held = snapshot.processes[os.getpid()] if probe.per_process else snapshot.rise
        assert held is not None
        assert held.held >= 256 * MIB
        assert snapshot.device is not None
        assert held.held <= snapshot.device.held
        del block

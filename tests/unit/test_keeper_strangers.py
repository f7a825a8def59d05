"""Processes that are not of the run and grow on its devices."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.keeper.messages import Stranger
from pytest_vram.keeper.strangers import DECISIVE, Strangers
from pytest_vram.measure import PYTEST, Seen, Span, procfs
from pytest_vram.measure.probes import Probe
from pytest_vram.measure.spans import Held
from tests.unit.measure_kit import PaperMembers, PaperProbe

MIB = 1 << 20
SECOND = 1_000_000_000


class Scene:
    """A card on which PID 500 grows; ``talks`` says how the test is connected with it."""

    def __init__(self, tmp_path: Path, *, per_process: bool = True) -> None:
        self.members = PaperMembers()
        self.members.join(1, PYTEST)
        self.talks: str | None = None
        self.asked: list[tuple[list[int], int]] = []
        self.ignored: set[int] = set()
        self.proc = tmp_path
        self.strangers = Strangers(self.members, lambda: self.ignored, self.connection, str(tmp_path))
        probe = PaperProbe("gpu0")
        probe.per_process = per_process
        self.probes: list[Probe] = [probe]
        self.span = Span(0, 0)

    def connection(self, ours: list[int], pid: int) -> str | None:
        self.asked.append((ours, pid))
        return self.talks

    def grow(self, size: int, *, opening: int = 0, pid: int = 500) -> None:
        seen = Seen(opening, opening)
        seen.most = seen.held = opening + size
        self.span.strangers[("gpu0", pid)] = seen

    def of(self, now: int = SECOND) -> list[Stranger]:
        return self.strangers.of(self.span, self.probes, now)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def lives(
    root: Path, pid: int, *, age: float = 0.5, parent: int = 1, group: str = "/run", environment: bytes = b""
) -> None:
    """A process of this user that began so many seconds ago."""
    began = round((procfs.boot_clock() - age) * os.sysconf("SC_CLK_TCK"))
    folder = root / str(pid)
    folder.mkdir(exist_ok=True)
    fields = ["S", str(parent), str(pid), str(pid), *["0"] * 15, str(began), *["0"] * 30]
    (folder / "stat").write_text(f"{pid} (p{pid}) {' '.join(fields)}")
    (folder / "cgroup").write_text(f"0::{group}\n")
    (folder / "environ").write_bytes(environment)
    task = folder / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    (task / "children").write_text("")


def named(root: Path, pid: int, *arguments: str) -> None:
    (root / str(pid)).mkdir()
    (root / str(pid) / "cmdline").write_bytes("\0".join(arguments).encode() + b"\0")


@pytest.mark.parametrize(("grew", "decisive"), [(DECISIVE, False), (DECISIVE + 1, True)])
def test_one_that_the_test_talks_to(scene: Scene, grew: int, decisive: bool) -> None:
    """A stranger that grew by more than 64 MiB and that the test talks to spoils the verdict, and the reason says so."""
    scene.talks = "7 has a connection to its port 11434"
    scene.grow(grew, opening=300 * MIB)
    (found,) = scene.of()
    assert (found.pid, found.device, found.grew, found.held) == (500, "gpu0", grew, grew + 300 * MIB)
    assert (found.decisive, found.talked_to, bool(found.why)) == (decisive, decisive, decisive)
    if decisive:
        assert found.why.startswith("it grew by 64.00 MiB, and process 7 has a connection to its port 11434")


def test_one_that_nobody_talks_to(scene: Scene) -> None:
    """Where figures are by process, a stranger on its own is named and spoils nothing."""
    scene.grow(2 << 30)
    (found,) = scene.of()
    assert (found.decisive, found.talked_to, found.why) == (False, False, "")
    assert scene.asked == [([1], 500)]
    scene.strangers.of(scene.span, scene.probes, SECOND, look=False)
    assert len(scene.asked) == 1


class Nursery:
    """A window that was opened two seconds ago, in which PID 500 grows to a GiB."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        scene.span = Span(time.monotonic_ns() - 2 * SECOND, 0)
        lives(scene.proc, 1, age=100)

    def stranger(self, *, grew: int = 1 << 30) -> Stranger:
        self.scene.strangers.grew(500, time.monotonic_ns())
        self.scene.grow(grew)
        (found,) = self.scene.of(time.monotonic_ns())
        return found


@pytest.mark.parametrize(("grew", "decisive"), [(DECISIVE, False), (DECISIVE + 1, True)])
def test_one_that_began_during_the_test(scene: Scene, grew: int, decisive: bool) -> None:
    """A test may have started it and hidden that: no verdict says that its memory is within a limit."""
    nursery = Nursery(scene)
    lives(scene.proc, 500)
    found = nursery.stranger(grew=grew)
    assert found.decisive == decisive
    assert ("may have been started by it in a way that hides it (cleared environment, pipe)" in found.why) == decisive


def test_one_that_began_during_the_test_and_is_gone(scene: Scene) -> None:
    """What it was is known from the time when it grew."""
    nursery = Nursery(scene)
    lives(scene.proc, 500)
    scene.strangers.grew(500, time.monotonic_ns())
    scene.grow(1 << 30)
    shutil.rmtree(scene.proc / "500")
    (found,) = scene.of(time.monotonic_ns())
    assert found.decisive
    assert nursery.scene is scene


@pytest.mark.parametrize(
    "what",
    [
        {"age": 3.0},
        {"group": "/user.slice/desktop"},
        {"environment": b"PATH=/bin\0PYTEST_VRAM_RUN=other\0"},
        {"environment": b"PYTEST_VRAM_MEMBER=other\0"},
    ],
    ids=["older", "of another control group", "server of another run", "of a test of another run"],
)
def test_one_that_the_test_did_not_start(scene: Scene, what: dict[str, Any]) -> None:
    """The desktop, other runs and what was there before grow without a word in the verdict."""
    nursery = Nursery(scene)
    lives(scene.proc, 500, **what)
    assert not nursery.stranger().decisive


def test_one_of_another_user(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user started is not of the test."""
    nursery = Nursery(scene)
    lives(scene.proc, 500)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not nursery.stranger().decisive


@pytest.mark.parametrize("parent", [1, 499], ids=["pytest itself", "a worker"])
def test_pytest_of_another_run(scene: Scene, parent: int) -> None:
    """A pytest process has no mark, and is told by its keeper; its workers are below it."""
    nursery = Nursery(scene)
    lives(scene.proc, 500, parent=parent)
    lives(scene.proc, 499)
    lives(scene.proc, 501, environment=b"PYTEST_VRAM_RUN=other\0")
    (scene.proc / str(500 if parent == 1 else 499) / "task" / str(500 if parent == 1 else 499) / "children").write_text(
        "501 "
    )
    assert not nursery.stranger().decisive


def test_one_whose_number_is_anothers_now(scene: Scene) -> None:
    """Who had this PID before does not speak for who has it now."""
    nursery = Nursery(scene)
    lives(scene.proc, 500, age=50)
    scene.strangers.grew(500, time.monotonic_ns())
    lives(scene.proc, 500)
    assert nursery.stranger().decisive


def test_one_of_another_namespace_within_a_figure_of_the_whole_device(tmp_path: Path) -> None:
    """In a container the driver's PIDs are the host's: who is not here may be the run's own process, and is counted."""
    scene = Scene(tmp_path, per_process=False)
    scene.grow(1 << 30)
    assert not scene.of()[0].decisive


@pytest.mark.parametrize(("grew", "decisive"), [(DECISIVE, False), (DECISIVE + 1, True)])
def test_one_within_a_figure_of_the_whole_device(tmp_path: Path, grew: int, decisive: bool) -> None:
    """Where the device does not say who holds its memory, a stranger's growth is in the figures: no verdict."""
    scene = Scene(tmp_path, per_process=False)
    lives(scene.proc, 500, age=100)
    scene.grow(grew)
    (found,) = scene.of()
    assert found.decisive == decisive
    assert not found.talked_to
    assert ("does not say who holds its memory" in found.why) == decisive


def test_who_is_no_stranger(scene: Scene) -> None:
    """The keeper's own helpers, what became a part of the run, and what hardly grew are not listed."""
    scene.ignored = {500}
    scene.grow(1 << 30)
    scene.members.join(501)
    scene.grow(1 << 30, pid=501)
    scene.grow(MIB - 1, pid=502)
    scene.grow(0, opening=1 << 30, pid=503)
    scene.grow(1 << 30, pid=504)  # it has ended, and the driver lists it still
    scene.span.shares[("gpu0", 504)] = Held(504, "p", "agent#1", "gpu0", 1 << 30)
    assert scene.of() == []


def test_the_largest_come_first(scene: Scene) -> None:
    """Those that grew most are told, and not more than twenty."""
    for number in range(30):
        scene.grow((number + 1) * MIB, pid=600 + number)
    assert [one.pid for one in scene.of()] == [629 - number for number in range(20)]


def test_a_short_conversation_is_remembered(scene: Scene) -> None:
    """A connection that was seen when the growth was counts at the end of the window, and not for later windows."""
    scene.talks = "7 has a connection to its port 11434"
    scene.strangers.grew(500, 2 * SECOND)
    scene.strangers.tick(2 * SECOND)
    scene.talks = None
    scene.grow(1 << 30)
    assert scene.of(3 * SECOND)[0].decisive
    scene.span = Span(4 * SECOND, 0)
    scene.grow(1 << 30)
    assert not scene.of(5 * SECOND)[0].decisive


def test_looks_become_rare(scene: Scene) -> None:
    """Who grew is looked at ever more rarely, and no more once a connection was seen or no window is open."""
    scene.strangers.grew(500, 0)
    for millisecond in range(0, 100_000, 10):
        scene.strangers.tick(millisecond * 1_000_000)
    assert 5 < len(scene.asked) <= 8
    scene.strangers.forget()
    scene.strangers.tick(10**15)
    count = len(scene.asked)
    scene.talks = "7 has a connection to its port 1"
    scene.strangers.grew(500, 0)
    for second in range(100):
        scene.strangers.tick(second * SECOND)
    assert len(scene.asked) == count + 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/local/bin/ollama", "runner", "--key", "s3cret"], "ollama runner"),
        (["python3", "/srv/train.py", "--token=s3cret"], "python3 train.py"),
        (["/opt/app", "-x"], "app"),
    ],
)
def test_names(scene: Scene, arguments: list[str], name: str) -> None:
    """A stranger is named by its program and its verb; further arguments may hold secrets."""
    named(scene.proc, 500, *arguments)
    scene.grow(1 << 30)
    assert scene.of()[0].name == name


def test_the_name_of_one_that_ended(scene: Scene) -> None:
    """A stranger that ended before the window did keeps its name."""
    named(scene.proc, 500, "ollama", "runner")
    scene.strangers.grew(500, 0)
    (scene.proc / "500" / "cmdline").unlink()
    scene.grow(1 << 30)
    assert scene.of()[0].name == "ollama runner"
    scene.grow(1 << 30, pid=501)
    assert [one.name for one in scene.of()] == ["ollama runner", "a process that cannot be seen"]


@pytest.mark.parametrize("per_process", [True, False])
def test_what_nobody_lists(tmp_path: Path, per_process: bool) -> None:
    """Growth that no listed process explains is told where figures are by process; else it is the run's own as well."""
    scene = Scene(tmp_path, per_process=per_process)
    seen = scene.span.unlisted["gpu0"] = Seen(100 * MIB, 100 * MIB)
    seen.most = 600 * MIB
    found = scene.of()
    assert [(one.pid, one.grew, one.decisive) for one in found] == ([(0, 500 * MIB, False)] if per_process else [])

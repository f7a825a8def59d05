"""Processes that are not of the run and grow on its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.keeper.messages import Stranger
from pytest_vram.keeper.strangers import DECISIVE, Strangers
from pytest_vram.measure import PYTEST, Seen, Span
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


@pytest.mark.parametrize(("grew", "decisive"), [(DECISIVE, False), (DECISIVE + 1, True)])
def test_one_within_a_figure_of_the_whole_device(tmp_path: Path, grew: int, decisive: bool) -> None:
    """Where the device does not say who holds its memory, a stranger's growth is in the figures: no verdict."""
    scene = Scene(tmp_path, per_process=False)
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

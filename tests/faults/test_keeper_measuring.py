"""Figures of real processes, by way of a real keeper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.backends import binary, store
from pytest_vram.errors import KeeperError
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import Close, Figures, Now, Open, Opened
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec
from tests.faults.keeper_kit import Run, acquire, closed, opened, plan, status, until

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Runs with settings of their own."""
    runs: list[Run] = []

    def make(**changes: Any) -> Run:
        runs.append(Run(tmp_path, **changes))
        return runs[-1].start()

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def client(run: Run) -> KeeperClient:
    return run.client()


def reading(found: Measured) -> Reading:
    assert isinstance(found, Reading)
    return found


HOLD = """
import sys, time
block = bytearray(int(sys.argv[1]))
time.sleep(float(sys.argv[2]))
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def test_a_short_child_is_seen(client: KeeperClient) -> None:
    """300 MB held for 50 ms by a child are read within 2 % of the mark that the child reads itself."""
    window = opened(client)
    done = subprocess.run(
        [sys.executable, "-S", "-c", HOLD, "300000000", "0.05"], capture_output=True, text=True, check=True
    )
    own = int(done.stdout) * 1024
    peak = reading(closed(client, window).run["host"])
    assert abs(peak.bytes - own) <= own * 0.02
    assert not peak.exact
    assert (peak.note or "").startswith("contains a process that ended between two samples (")
    assert ";" not in (peak.note or "")
    assert peak.samples
    assert peak.interval_ms


def test_a_child_that_lives_is_exact(client: KeeperClient) -> None:
    """The mark of a child that still runs is exact, and it is named among the holders."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        window = opened(client)
        figures = closed(client, window)
        sleeper.kill()
    peak = reading(figures.run["host"])
    assert (peak.exact, peak.at_most, peak.note, peak.source) == (True, None, None, "host-hwm")
    assert [(share.pid, share.name, share.backend) for share in figures.shares] == [(sleeper.pid, "sleep", None)]
    assert reading(figures.baseline["host"]).bytes > 0


def test_nothing_but_pytest(client: KeeperClient) -> None:
    """A test without a process of its own holds nothing; the machine's figure is there all the same."""
    figures = closed(client, opened(client))
    peak = reading(figures.run["host"])
    assert (peak.bytes, peak.exact) == (0, False)
    assert "besides pytest" in (peak.note or "")
    device = reading(figures.device["host"])
    assert device.source == "host-meminfo"
    assert device.bytes > 50 * MIB


def test_the_process_scope_is_pytest_itself(client: KeeperClient) -> None:
    """What the test's own process holds counts for the scope `process`, and for no other."""
    before = reading(closed(client, opened(client)).process["host"]).bytes
    window = opened(client)
    block = bytearray(100 * MIB)
    del block
    figures = closed(client, window)
    assert reading(figures.process["host"]).bytes >= before + 90 * MIB
    assert reading(figures.run["host"]).bytes == 0
    after = reading(closed(client, opened(client)).process["host"]).bytes
    assert after < before + 90 * MIB


def test_starting_programs_does_not_count_pytest(client: KeeperClient) -> None:
    """Between vfork and exec a child shows pytest's memory as its own; that is not counted."""
    block = bytearray(400 * MIB)
    window = opened(client)
    for _ in range(60):
        subprocess.run(["/bin/true"], check=True)
    figures = closed(client, window)
    assert len(block) == 400 * MIB
    assert reading(figures.run["host"]).upper < 100 * MIB


def test_a_tree_is_an_interval(client: KeeperClient) -> None:
    """Three processes that hold at different moments peak between one of them and all, close to the truth."""
    code = "import sys, time\nfor line in sys.stdin:\n b = bytearray(int(line)); print(flush=True); del b"
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]

    def hold(child: subprocess.Popen[bytes], size: int) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"%d\n" % size)
        child.stdin.flush()
        child.stdout.readline()

    try:
        for child in children:
            hold(child, 1)
        window = opened(client)
        for child in children:
            hold(child, 100 * MIB)
        figures = closed(client, window)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    peak = reading(figures.run["host"])
    assert 100 * MIB <= peak.bytes < 140 * MIB
    assert peak.exact
    assert peak.bytes <= peak.upper <= 400 * MIB


def test_phases_of_a_test(run: Run, client: KeeperClient) -> None:
    """The peak of a phase lands in the test around it; phases of one name are one."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        window = opened(client)
        for _ in range(2):
            inner = client.call(Open(kind="phase", name="warm-up", parent=window))
            assert isinstance(inner, Opened)
            closed(client, inner.window)
        still = opened(client, "load", kind="phase", parent=window)
        figures = closed(client, window)
        sleeper.kill()
    assert set(figures.phases) == {"warm-up", "load"}
    assert [line["name"] for line in run.journal("phase")] == ["warm-up", "warm-up", "load"]
    assert reading(figures.phases["load"]["host"]).bytes > 0
    with pytest.raises(KeeperError, match=f"no open window {still}"):
        client.call(Close(window=still))


def test_idle_memory_settles(client: KeeperClient) -> None:
    """Idle memory is read until two reads agree; what still moves says that it has not settled."""
    running = acquire(client, plan(f"hold={50 * MIB}"))
    window = opened(client)
    acquire(client, plan(f"hold={50 * MIB}"), window)
    figures = client.call(Now(window=window, settle=5.0))
    assert isinstance(figures, Figures)
    assert figures.settled
    now = reading(figures.backend["host"])
    assert now.source == "host-anon"
    assert now.bytes >= 50 * MIB
    code = "import time\nkept = []\nwhile True:\n kept.append(b'x' * (8 << 20)); time.sleep(0.02)"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as grower:
        assert until(lambda: _resident(grower.pid) > 60 * MIB)
        moving = client.call(Now(settle=0.3))
        grower.kill()
    assert isinstance(moving, Figures)
    assert not moving.settled
    assert running.pids == [running.pid]


def test_a_backend_is_told_from_other_children(client: KeeperClient) -> None:
    """A test's own child counts for the run and not for the backend."""
    window = opened(client)
    acquire(client, plan(), window)
    with subprocess.Popen([sys.executable, "-S", "-c", HOLD, str(120 * MIB), "60"], stdout=subprocess.DEVNULL) as child:
        assert until(lambda: _resident(child.pid) > 100 * MIB)
        figures = closed(client, window)
        child.kill()
    assert reading(figures.backend["host"]).upper < 100 * MIB
    assert reading(figures.run["host"]).bytes > 100 * MIB
    assert isinstance(figures.host, Reading)
    assert figures.host.upper < 100 * MIB


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_sampling_tells_its_rate(client: KeeperClient) -> None:
    """A window knows how often it was sampled and the longest gap; the keeper knows what it costs."""
    window = opened(client)
    assert until(lambda: (status(client).own_cpu_share or 0) > 0)
    start = status(client).sampling
    assert start is not None
    assert until(lambda: (status(client).sampling or start).samples >= start.samples + 20)
    rate = closed(client, window).sampling
    assert rate is not None
    assert rate.samples >= 20
    assert rate.interval_ms is not None
    assert rate.longest_gap_ms is not None
    assert rate.longest_gap_ms >= rate.interval_ms >= 1


def test_samples_reach_the_journal(run: Run, client: KeeperClient) -> None:
    """What moved is in the journal in blocks; devices and processes are there as well."""
    acquire(client, plan(f"hold={64 * MIB}"))
    client.call(Now())
    lines = run.journal("sample")
    assert lines
    assert lines[-1]["max"] >= 64 * MIB
    assert lines[-1]["min"] <= lines[-1]["last"] <= lines[-1]["max"]
    assert run.journal("run")[0]["run"] == run.id
    assert set(run.journal("run")[0]["versions"]) == {"pytest-vram", "python", "kernel"}
    assert run.journal("device")[0]["label"] == "host"
    assert {line["owner"] for line in run.journal("process")} >= {"pytest", "agent#1"}


def test_an_rpc_device(made: Callable[..., Run]) -> None:
    """An RPC device is measured by its server's process: run and device alike, exact; without the server, not."""
    from tests.unit.test_measure_survey import SERVER

    command = [sys.executable, "-S", "-c", SERVER, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = f"127.0.0.1:{server.stdout.readline().strip()}"
        run = made(devices=[DeviceSpec(kind="rpc", text="rpc")], rpc=[endpoint])
        client = run.client()
        assert [device.label for device in client.welcome.devices] == ["gpu0"]
        window = opened(client)
        acquire(client, plan(), window)
        server.stdin.write(f"{80 * MIB}\n")
        server.stdin.flush()
        server.stdout.readline()
        figures = closed(client, window)
        for table in (figures.run, figures.device, figures.backend):
            peak = reading(table["gpu0"])
            assert abs(peak.bytes - 80 * MIB) < 6 * MIB  # the server of this test holds 4 MiB of its own
            assert (peak.source, peak.exact, peak.at_most) == ("rpc-hwm", True, None)
        assert isinstance(figures.host, Reading)
        assert figures.host.upper < 60 * MIB
        now = client.call(Now())
        assert isinstance(now, Figures)
        assert reading(now.run["gpu0"]).source == "rpc-anon"
        window = opened(client)
        server.kill()
        server.wait()
        lost = closed(client, window).run["gpu0"]
        assert isinstance(lost, Unmeasurable)
        assert "has ended" in lost.reason


@pytest.mark.engine
def test_a_real_server(client: KeeperClient) -> None:
    """A real llama-server: its phases have exact peaks, and it holds more when ready than at its start."""
    server, model = _engine(), _model()
    settings = msgspec.structs.replace(
        plan(),
        engine="llama-server",
        argv=[server, "-m", model, "-c", "1024", "--host", "127.0.0.1", "--port", "0", "-lv", "4", "-np", "1"],
        secret_env="LLAMA_API_KEY",
        boot_timeout=60.0,
    )
    window = opened(client)
    running = acquire(client, settings, window)
    figures = closed(client, window)
    names = [phase.name for phase in running.phases]
    assert names[0] == "start"
    assert names[-1] == "ready"
    assert {"weights", "kv"} <= set(names)
    for phase in running.phases[:-1]:
        assert reading(phase.peak["host"]).exact
        assert isinstance(phase.pss, Reading)
    assert reading(running.at_ready["host"]).bytes > reading(running.at_start["host"]).bytes + 20 * MIB
    assert reading(figures.run["host"]).upper >= reading(running.boot_peak["host"]).bytes


def _engine() -> str:
    found = next((place.path for place in binary.places() if place.usable and place.path), None)
    if found is None:
        pytest.skip("no llama-server is here: run `vram demo` once")
    return str(found)


def _model() -> str:
    found = store.find_model()
    if found is None:
        pytest.skip("the demo model is not in the cache: run `vram demo` once")
    return str(found)

"""A smaller card is given back whatever happens to the run that plays it; a server of a few lines stands for a device."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.errors import KeeperUnavailable
from pytest_vram.keeper import limits
from pytest_vram.spec import DeviceSpec
from tests.faults.keeper_kit import Run, of_run, status, until

CARD = 64_000_000
#: Serves a device as far as the keeper can see, and allocates as many bytes as a line of its input says.
DEVICE = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
kept = []
for line in sys.stdin:
    try:
        kept.append(bytearray(int(line)))
        print("yes", flush=True)
    except MemoryError:
        print("no", flush=True)
"""


class Device:
    """The process, its endpoint, and whether it gets memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", DEVICE, "-t", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.endpoint = f"127.0.0.1:{self._line()}"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def gets(self, size: int) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()
        return self._line() == "yes"

    @property
    def limit(self) -> int:
        return resource.prlimit(self.pid, resource.RLIMIT_DATA)[0]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keepers of others on this machine would lift what these leave behind."""
    with tempfile.TemporaryDirectory(prefix="vram-e-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.end()


def over(run: Run) -> None:
    """After the keeper was killed: nothing is left but its socket."""
    for client in run.clients:
        client.close()
    assert of_run(run.id) == []
    Path(run.launch.socket).unlink()


def playing(folder: Path, device: Device, size: int = CARD) -> Run:
    return Run(folder, devices=[DeviceSpec(kind="rpc", text="rpc")], rpc=[device.endpoint], emulate=size)


def test_allocations_beyond_the_card_fail(tmp_path: Path, device: Device) -> None:
    """While a run plays a smaller card, its device's server gets no more than that; afterwards it does."""
    run = playing(tmp_path, device).start()
    client = run.client()
    assert not device.gets(CARD + (2 << 20))
    assert device.gets(CARD // 2)
    assert status(client).devices[0].limit_from == "emulated"
    (line,) = run.journal("device")
    assert line["limit_from"] == "emulated"
    run.close()
    assert device.limit == resource.RLIM_INFINITY
    assert device.gets(CARD + (2 << 20))
    assert not limits.path_of(run.launch.socket).exists()


def test_kill_of_the_keeper_gives_the_card_back(tmp_path: Path, device: Device) -> None:
    """When the keeper is killed, its guard lifts the limit."""
    run = playing(tmp_path, device).start()
    client = run.client()
    assert device.limit != resource.RLIM_INFINITY
    os.kill(status(client).pid, signal.SIGKILL)
    assert until(lambda: device.limit == resource.RLIM_INFINITY and not of_run(run.id))
    over(run)


def test_kill_of_the_controller_gives_the_card_back(tmp_path: Path, device: Device) -> None:
    """When the controller is killed, the keeper ends and lifts the limit."""
    with subprocess.Popen(["sleep", "60"]) as process:
        start = limits.started(process.pid)
        assert start is not None
        run = Run(
            tmp_path,
            controller=(process.pid, start),
            devices=[DeviceSpec(kind="rpc", text="rpc")],
            rpc=[device.endpoint],
            emulate=CARD,
        ).start()
        assert device.limit != resource.RLIM_INFINITY
        process.kill()
    assert until(lambda: device.limit == resource.RLIM_INFINITY)
    run.close()


def test_kill_of_keeper_and_guard_is_made_good_by_the_next_keeper(tmp_path: Path, device: Device) -> None:
    """When keeper and guard are killed at once, the next keeper on this machine lifts the limit."""
    run = playing(tmp_path / "one", device).start()
    client = run.client()
    keeper = status(client).pid
    guard = next(pid for pid in of_run(run.id) if pid != keeper)
    for pid in (guard, keeper):
        os.kill(pid, signal.SIGSTOP)
    for pid in (guard, keeper):
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not of_run(run.id))
    assert device.limit != resource.RLIM_INFINITY
    other = Run(tmp_path / "two").start()
    other.client()
    assert device.limit == resource.RLIM_INFINITY
    other.close()
    over(run)


def test_two_runs_do_not_play_on_one_device(tmp_path: Path, device: Device) -> None:
    """A second run that would play a card on the same device is refused, naming the first one's keeper."""
    run = playing(tmp_path / "one", device).start()
    client = run.client()
    with pytest.raises(KeeperUnavailable, match=rf"its keeper is process {status(client).pid}\) plays a smaller card"):
        playing(tmp_path / "two", device, CARD // 2).start()
    run.close()
    assert device.limit == resource.RLIM_INFINITY


def test_memory_of_others_is_refused(tmp_path: Path, device: Device) -> None:
    """A device whose server holds more than the card already is refused with what it holds."""
    assert device.gets(CARD + (20 << 20))
    with pytest.raises(KeeperUnavailable, match=r"--vram-emulate=64MB .* holds 8\d\.\d+ MiB already; end what uses it"):
        playing(tmp_path, device).start()
    assert device.limit == resource.RLIM_INFINITY


def test_a_smaller_limit_is_refused(tmp_path: Path, device: Device) -> None:
    """A server that may allocate less than the card by a limit of its own is refused."""
    resource.prlimit(device.pid, resource.RLIMIT_DATA, (CARD // 2, resource.RLIM_INFINITY))
    with pytest.raises(KeeperUnavailable, match="it has only 30.52 MiB; name a size that is smaller"):
        playing(tmp_path, device).start()
    assert device.limit == CARD // 2


@pytest.mark.parametrize("damage", [b"", b"{", b'{"keeper": 1}', b'{"keeper": [1, 2], "limits": [[1]]}', b"[" * 10_000])
def test_a_damaged_note_of_limits_is_removed(tmp_path: Path, damage: bytes) -> None:
    """A note of limits that cannot be read belongs to nobody: it is removed and changes nothing."""
    path = tmp_path / "one.limits"
    path.write_bytes(damage)
    assert limits.stale(tmp_path) == [path]
    assert limits.lift(path) == []
    assert not path.exists()


def test_a_reused_pid_keeps_its_limit(tmp_path: Path, device: Device) -> None:
    """A process that has the number of one that ended, and not its start time, is left alone."""
    path = tmp_path / "one.limits"
    start = limits.started(device.pid)
    assert start is not None
    limits.put(path, [limits.Limit(device.pid, start + 1, 5 << 20, -1)], [CARD])
    assert limits.lift(path) == []
    assert device.limit == CARD

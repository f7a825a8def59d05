"""A driver whose calls never return: nothing waits for ever, nothing is left, and the words are right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.errors import KeeperUnavailable
from pytest_vram.journal import Journal
from pytest_vram.keeper import ensure
from pytest_vram.keeper.__main__ import _HANGS_AT_END
from pytest_vram.keeper.client import KeeperSilent
from pytest_vram.keeper.messages import Finish, Status
from pytest_vram.spec import DeviceSpec
from pytest_vram.testing import Card, FakeDriver, fake_nvml
from pytest_vram.units import GIB
from tests.conftest import Inner, ours
from tests.faults.keeper_kit import Run, opened, until
from tests.unit.nvml_kit import needs_fake

pytestmark = needs_fake
ARGUMENTS = ["-q", "-p", "no:cacheprovider", "--vram-device=cuda:0", "--vram-budget=20GB"]
#: The guard's times are for people and slow drivers; in a test they are short.
SHORT = """
import sys
import pytest_vram.keeper.launch as launch
plain = launch.subprocess.Popen
def popen(command, **more):
    if command[-1] == "pytest_vram.keeper":
        code = "from pytest_vram.keeper import __main__ as guard; guard._HANGS = 5.0; guard.main()"
        command = [*command[:-2], "-c", "import pytest_vram.measure.hanging as h; h.LONGEST = 0.5; " + code]
    return plain(command, **more)
launch.subprocess.Popen = popen
"""
SUITE = """
import time
from pathlib import Path
from pytest_vram import max_vram
@max_vram("10GB")
def test_one():
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.02)
@max_vram("10GB")
def test_two(): pass
@max_vram("10GB")
def test_three(): pass
"""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_nvml([Card(total=24 * GIB)]) as made:
        yield made
        made.heal()


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run of pytest whose first test has begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *ARGUMENTS, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert until((folder / "begun").exists, 30)
    return process


def marks(folder: Path) -> list[str]:
    return [one.name for one in (folder / ".vram" / "runs").glob("*") if one.is_dir()]


def test_a_driver_that_hangs_in_mid_run(pytester: pytest.Pytester, driver: FakeDriver) -> None:
    """The test under way is an error that names the keeper and why; those after it are undecided, and the run ends."""
    pytester.makeconftest(SHORT)
    pytester.makepyfile(SUITE)
    process = started(pytester.path, "-rE")
    driver.fail("memory", "OK", hang=1e9)
    (pytester.path / "go").touch()
    text, _ = process.communicate(timeout=100)
    assert "INTERNALERROR" not in text
    assert "2 inconclusive" in text
    assert "1 error" in text
    flat = " ".join(text.split())
    assert "hangs, most likely in a call of the graphics driver: no sign of life for 5 s; it is killed" in flat
    assert "the driver did not answer within 0.5 s" in flat
    assert "died" not in text
    assert until(lambda: not any(map(ours, marks(pytester.path))))


def test_nothing_is_left_of_a_killed_run(pytester: pytest.Pytester, driver: FakeDriver) -> None:
    """The controller is killed while the keeper is in a call that does not return."""
    pytester.makepyfile(SUITE)
    process = started(pytester.path)
    driver.fail("memory", "OK", hang=1e9)
    time.sleep(0.5)  # the keeper asks it ten times in that
    process.kill()
    process.communicate(timeout=60)
    assert until(lambda: not any(map(ours, marks(pytester.path))), 2 * _HANGS_AT_END)


def test_a_keeper_that_does_not_answer_is_dismissed(pytester: pytest.Pytester, driver: FakeDriver) -> None:
    """A controller whose keeper does not answer at the end has the guard end it, though its own process goes on."""
    run = Run(pytester.path, devices=[DeviceSpec(kind="cuda", index=0, text="cuda:0")]).start()
    client = run.client()
    opened(client)
    driver.fail("memory", "OK", hang=1e9)
    time.sleep(0.3)
    with pytest.raises(
        KeeperSilent, match=rf"PID {client.welcome.pid}\) did not answer for 0.5 s and is alive: it hangs"
    ):
        client.call(Status(), 0.5)
    client.dismiss()
    client.close()
    assert until(lambda: not ours(run.id), 2 * _HANGS_AT_END)
    os.unlink(run.launch.socket)
    assert "no sign of life for 3 s; it is killed" in (pytester.path / "keeper.log").read_text()


def test_a_listing_of_tests_asks_no_driver(pytester: pytest.Pytester, inner: Inner, driver: FakeDriver) -> None:
    """``--collect-only`` is done at once, whatever the driver does."""
    pytester.makepyfile(SUITE)
    driver.fail("init", "OK", card=None, hang=1e9)
    began = time.monotonic()
    result = inner("--collect-only", *ARGUMENTS)
    assert result.ret == 0
    assert time.monotonic() - began < 9  # a driver gets 10 s


def test_a_run_that_is_over_gets_no_second_keeper(pytester: pytest.Pytester) -> None:
    """A worker that is still at work when its run was ended does not begin it anew."""
    run = Run(pytester.path).start()
    client, worker = run.client(), run.client("worker")
    opened(worker)  # it is closed when the connection is, after the end
    client.call(Finish(outcome="0"))
    assert until(lambda: not os.path.exists(run.launch.socket))
    with pytest.raises(KeeperUnavailable, match="This run is over: its controller has ended it"):
        ensure(run.launch)
    run.close()
    lines = list(Journal(pytester.path / "journal.jsonl"))
    assert lines[-1]["kind"] == "end"
    assert len([line for line in lines if line["kind"] == "keeper"]) == 1


def test_a_slow_driver_is_said_once(pytester: pytest.Pytester, inner: Inner, driver: FakeDriver) -> None:
    """Where a read takes long, the summary says why the tests took so long."""
    pytester.makepyfile("from pytest_vram import max_vram\n@max_vram('1GB')\ndef test_it(): pass\n")
    assert "slow" not in inner(*ARGUMENTS).stdout.str()
    driver.fail("memory", "OK", hang=300)
    text = inner(*ARGUMENTS).stdout.str()
    assert text.count("the driver is slow: it was read only every 0.") == 1

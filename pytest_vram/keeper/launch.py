"""Starting the keeper of a run, once, whoever needs it first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_vram.errors import KeeperError, KeeperUnavailable
from pytest_vram.journal import FILE_NAME, ended_in_order
from pytest_vram.keeper.client import LOG_NAME, KeeperClient, KeeperSilent
from pytest_vram.keeper.messages import CONTROLLER_MARK, MEMBER_MARK, RUN_MARK, Launch
from pytest_vram.measure.procfs import alive
from pytest_vram.text import printable

LOCK_NAME = "keeper.lock"
#: Seconds for a keeper to come up; a loaded two-core machine needs one.
_START_SECONDS = 30.0
#: The kernel's limit for the path of a Unix socket is 108 bytes.
_LONGEST_PATH = 100
#: Runs within runs that are told apart; a process that runs pytest again and again in itself would add up more.
_MOST_RUNS = 8


def socket_path(run_id: str) -> str:
    """Path of the socket of this run: under 100 bytes, in a folder that only this user can enter.

    The folder is ``vram-UID`` in the folder for temporary files, or, where that is too long or not to be trusted, in
    ``$XDG_RUNTIME_DIR``, ``/tmp`` or ``/var/tmp``.

    :raises KeeperUnavailable: when none of them can be used, with the reasons.
    """
    if not hasattr(os, "getuid"):
        raise KeeperUnavailable("The keeper runs on Linux only.")
    name = hashlib.sha256(run_id.encode()).hexdigest()[:16] + ".sock"
    reasons: list[str] = []
    for base in dict.fromkeys([tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]):
        if not base:
            continue
        folder = os.path.join(base, f"vram-{os.getuid()}")
        path = os.path.join(folder, name)
        if len(os.fsencode(path)) >= _LONGEST_PATH:
            reasons.append(f"{folder} is too long a path for a socket")
            continue
        reason = _private(folder)
        if reason is None:
            return path
        reasons.append(reason)
    raise KeeperUnavailable("No folder can be used for the keeper's socket: " + "; ".join(reasons) + ".")


def _private(folder: str) -> str | None:
    """Make ``folder`` one that only this user can enter; a reason where that is not possible.

    In a folder that everybody may write to, somebody else may have made it first, or put a link there.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            return f"{folder} is not a folder"
        if found.st_uid != os.getuid():
            return f"{folder} belongs to another user"
        if found.st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def mark_environment(run_id: str) -> None:
    """Mark what this process starts from now on as part of the run, beside the runs that it belongs to already.

    The keeper counts a process by this that has left the process tree (a daemon of a test).
    """
    runs = [run for run in os.environ.get(MEMBER_MARK, "").split(":") if run]
    if run_id not in runs:
        os.environ[MEMBER_MARK] = ":".join([*runs[: _MOST_RUNS - 1], run_id])


def _environment(run_id: str) -> dict[str, str]:
    """The environment without the mark of this run: its keeper is not a part of what it measures."""
    found = dict(os.environ)
    runs = [run for run in found.pop(MEMBER_MARK, "").split(":") if run and run != run_id]
    if runs:
        found[MEMBER_MARK] = ":".join(runs)
    return found


def ensure(launch: Launch) -> None:
    """Make sure that a keeper answers at ``launch.socket``, starting one where none does.

    Any number of processes may call this at the same time; one keeper results. It outlives the caller and ends with
    the controller that ``launch`` names.

    :raises KeeperUnavailable: with the reason, such as that the run is over; nothing is left running then.
    """
    if not sys.platform.startswith("linux"):
        raise KeeperUnavailable(f"The keeper runs on Linux only, and this is {sys.platform}.")
    folder = Path(launch.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _answers(launch):
            return
        with _locked(folder / LOCK_NAME):
            if not _answers(launch):
                _refuse_what_is_over(launch)
                _start(launch, folder / LOG_NAME)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise KeeperUnavailable(f"The keeper could not be started: {where}{error.strerror}.") from None


def _answers(launch: Launch) -> bool:
    """Whether this run's keeper answers.

    :raises KeeperUnavailable: something else, or a keeper that is stuck, sits there.
    """
    if not os.path.exists(launch.socket):
        return False
    try:
        client = KeeperClient(launch.socket, role="viewer", name="ensure")
    except KeeperUnavailable:
        return False
    except KeeperSilent as error:
        # A keeper that is ending closes its connections. A stuck one does not; a second beside it would be worse.
        raise KeeperUnavailable(f"{error} No other one is started beside it: end it first.") from None
    except KeeperError:
        return False
    client.close()
    if client.welcome.run != launch.run:
        raise KeeperUnavailable(f"The keeper at {launch.socket} is that of another run ({client.welcome.run}).")
    return True


def _refuse_what_is_over(launch: Launch) -> None:
    """A worker that is still at work when its run has ended must not begin it anew.

    :raises KeeperUnavailable: the run is over.
    """
    pid, start = launch.controller
    if not alive(pid, start):
        raise KeeperUnavailable(f"This run is over: its controller, process {pid}, is gone.")
    if ended_in_order(Path(launch.folder, FILE_NAME)):
        raise KeeperUnavailable("This run is over: its controller has ended it, and its reports are written.")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock that lets one process at a time start a keeper; it is released when its holder dies."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + 2 * _START_SECONDS
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise KeeperUnavailable(
                        f"Another process has been starting the keeper for too long (it holds {path})."
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _start(launch: Launch, log: Path) -> None:
    """Start the guard, which forks the keeper; wait until the keeper listens."""
    try:
        text = msgspec.json.encode(launch)
    except UnicodeEncodeError:
        raise KeeperUnavailable(
            f"The keeper takes its orders as JSON, which cannot hold the path of this run, {printable(launch.folder)}:"
            " give the folder a name in UTF-8."
        ) from None
    # -P: a module of the project under test must not stand in for one of the standard library.
    command = [sys.executable, "-P", "-W", "ignore", "-m", "pytest_vram.keeper"]
    with (
        open(log, "ab") as stream,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            # What belongs to a run can be found by this, also when everything else has failed.
            env={
                **_environment(launch.run),
                RUN_MARK: launch.run,
                CONTROLLER_MARK: f"{launch.controller[0]}:{launch.controller[1]}",
            },
            start_new_session=True,
        ) as process,
    ):
        # The process is a launcher: it leaves the guard behind and ends, so that no child of ours stays.
        try:
            answer, _ = process.communicate(text, timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.kill()
            raise KeeperUnavailable(
                f"The keeper was not ready within {_START_SECONDS:.0f} s; its log is {log}."
            ) from None
    if answer.strip() != b"ready":
        reason = answer.decode("utf-8", "replace").strip() or _last_lines(log)
        raise KeeperUnavailable(f"The keeper could not be started: {reason} Its log is {log}.")


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
    except OSError:
        lines = []
    return f"it ended at once ({lines[-1].strip()})." if lines else "it ended at once and said nothing."

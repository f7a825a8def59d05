"""A run without pytest around it: a keeper, clients, and servers that misbehave on request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.journal import FILE_NAME, Journal
from pytest_vram.keeper import KeeperClient, ensure, socket_path, start_time
from pytest_vram.keeper.messages import Acquire, Close, Closed, Launch, Leave, Open, Opened, Running, State, Status
from pytest_vram.measure.procfs import alive, read_stat
from pytest_vram.spec import DeviceSpec, LaunchPlan

#: A server of a few lines. Arguments: port (0: any), then words that say how it misbehaves.
SERVER = r"""
import os, signal, socket, sys, time
port, words = int(sys.argv[1]), sys.argv[2:]
print("starting", flush=True)
if "die" in words:
    print("error: cannot do it", flush=True)
    sys.exit(7)
if "crash" in words:
    os.kill(os.getpid(), signal.SIGILL)
if "secret" in words:
    print("my key is", os.environ["KEY"], flush=True)
    sys.exit(1)
if "hang" in words:
    time.sleep(600)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for word in words:
    if word.startswith("hold="):
        block = bytearray(int(word[5:]))
    if word.startswith("fill="):
        block = b"x" * int(word[5:])
    if word.startswith("burst="):
        block = bytearray(int(word[6:]))
        time.sleep(0.05)
        del block
if "daemon" in words:
    # A helper that leaves its parent, its session and its process group.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
if "bare" in words:
    # A helper that leaves its parent and forgets its environment.
    if os.fork() == 0:
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()
for word in words:
    if word.startswith("flood="):
        for number in range(int(word[6:])):
            os.write(1, b"%06d " % number + b"x" * 999_992 + b"\n")
        time.sleep(0.3)
        print("the last words", flush=True)
said = port
if "lie" in words:
    said, port = int(words[words.index("lie") + 1]), 0
listener = socket.create_server(("127.0.0.1", port))
print(f"listening on http://127.0.0.1:{said or listener.getsockname()[1]}", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(5)
    try:
        request = connection.recv(4096)
        if b"/assert" in request:
            print("/src/vocab.cpp:7: GGML_ASSERT(tokenizer) failed", flush=True)
            print("\n".join(f"#{number}  0x00007fe0a54a3f7b in wait () from libc.so" for number in range(99)), flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        if b"/crash" in request:
            os.kill(os.getpid(), signal.SIGSEGV)
        status = b"503 Loading" if "loading" in words else b"200 OK"
        connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    except OSError:
        pass
    connection.close()
"""


def plan(*words: str, name: str = "agent", port: int = 0, **changes: Any) -> LaunchPlan:
    """A plan for the server above."""
    made = LaunchPlan(
        name=name,
        engine="command",
        argv=[sys.executable, "-S", "-c", SERVER, str(port), *words],
        url="http://127.0.0.1:{port}" if port == 0 else f"http://127.0.0.1:{port}",
        port_pattern=r"listening on http://\S+:(\d+)",
        health="/health",
        boot_timeout=20.0,
    )
    return msgspec.structs.replace(made, **changes)


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition; whether it came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.005)
    return true()


def of_run(run: str) -> list[int]:
    """PIDs of living processes that carry the run's marker: keeper, guard, servers and all they started."""
    marker = f"PYTEST_VRAM_RUN={run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


class Run:
    """One run, whose controller is this process unless another is named."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.id = str(changes.get("run") or f"test-{uuid.uuid4().hex[:12]}")
        self.clients: list[KeeperClient] = []
        me = os.getpid()
        made = Launch(
            run=self.id,
            folder=str(folder),
            socket=socket_path(self.id),
            controller=(me, start_time(me)),
            devices=[DeviceSpec(kind="cpu", text="cpu")],
        )
        self.launch = msgspec.structs.replace(made, **changes)

    def start(self) -> Run:
        ensure(self.launch)
        return self

    def client(self, role: str = "controller") -> KeeperClient:
        client = KeeperClient(self.launch.socket, role=role)
        self.clients.append(client)
        return client

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in Journal(self.folder / FILE_NAME) if line["kind"] == kind]

    def close(self) -> None:
        """End the run the hard way, if it still goes on, and check that nothing is left."""
        for client in self.clients:
            client.close()
        assert until(lambda: not of_run(self.id), 8.0), f"left behind: {of_run(self.id)}"
        assert not os.path.exists(self.launch.socket)


def opened(client: KeeperClient, name: str = "test", **more: Any) -> int:
    reply = client.call(Open(kind=more.pop("kind", "test"), name=name, **more))
    assert isinstance(reply, Opened)
    return reply.window


def closed(client: KeeperClient, window: int, *, leave: bool = True) -> Closed:
    """Close a window; the test is over then, unless its teardown is to come."""
    reply = client.call(Close(window=window))
    assert isinstance(reply, Closed)
    if leave:
        client.send(Leave(window=window))
    return reply


def acquire(client: KeeperClient, made: LaunchPlan, window: int | None = None) -> Running:
    reply = client.call(Acquire(plan=made, window=window))
    assert isinstance(reply, Running)
    return reply


def status(client: KeeperClient) -> State:
    reply = client.call(Status())
    assert isinstance(reply, State)
    return reply


def gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or not alive(pid, stat.start)


def controller(run: Run, code: str, *, first: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """A controller in a process of its own; ``code`` sees ``run`` (id), ``folder``, ``client`` and this module's names.

    It prints ``up`` when ``code`` is through, and then waits to be killed. ``first`` runs in the new process before
    everything else.
    """
    text = f"""
import os, sys, time
from pathlib import Path
from tests.faults.keeper_kit import *
run = Run(Path({str(run.folder)!r}), run={run.id!r}, socket={run.launch.socket!r})
run.start()
client = run.client()
{code}
print("up", flush=True)
time.sleep(120)
"""
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        preexec_fn=first,
    )


def wait_up(process: subprocess.Popen[str]) -> list[str]:
    """Lines that the controller printed before ``up``."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        if line.strip() == "up":
            return lines
        lines.append(line.strip())
    raise AssertionError(f"the controller ended: {lines}")


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and collect it."""
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    if process.stdout is not None:
        process.stdout.close()

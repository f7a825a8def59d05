"""A port for servers that must be told one on their command line."""

from __future__ import annotations

import hashlib
import socket

import psutil

from pytest_vram.errors import BackendError

#: Below the range that Linux hands out for outgoing connections, so that those do not take a chosen port.
FIRST, LAST = 20_000, 32_000
_TRIES = 64
RUN_MARK = "PYTEST_VRAM_RUN"


def steady_port(*parts: str, run: str) -> int:
    """A loopback port for one server of one run: the same for every process of the run that asks with equal parts.

    Plans are compared byte by byte to share servers between workers, so the port is drawn from a hash and not at
    random. A port that a stranger uses is passed over; one that this run's own server uses is that server's.

    :raises BackendError: dozens of ports in a row are taken.
    """
    seed = "\0".join((run, *parts)).encode()
    for attempt in range(_TRIES):
        digest = hashlib.sha256(seed + attempt.to_bytes(2, "big")).digest()
        port = FIRST + int.from_bytes(digest[:4], "big") % (LAST - FIRST)
        if _is_free(port) or (run and _listener_run(port) == run):
            return port
    raise BackendError(f"{_TRIES} ports between {FIRST} and {LAST} were tried and all are taken")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _listener_run(port: int) -> str | None:
    """The run that the listener of this port belongs to, as its environment says; ``None`` where unknown."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and tuple(connection.laddr)[1:2] == (port,):
                return psutil.Process(connection.pid).environ().get(RUN_MARK)
    except (psutil.Error, OSError):
        pass
    return None

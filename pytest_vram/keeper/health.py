"""One HTTP GET, for readiness. The keeper carries no HTTP library."""

from __future__ import annotations

import asyncio
import os
import ssl
from urllib.parse import urlsplit

_TIMEOUT = 5.0
_MOST = 8192
#: How the words begin for somebody who does not answer in time, as against nobody.
LATE = "no answer within"


def address(url: str) -> tuple[str, int, bool]:
    """Host, port and whether TLS is used.

    :raises ValueError: for what is not an ``http`` or ``https`` URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    secure = parts.scheme == "https"
    return parts.hostname, parts.port or (443 if secure else 80), secure


async def get(url: str, *, key: str | None = None, timeout: float = _TIMEOUT) -> int | str:
    """Status code of a GET, or in words why there is none."""
    try:
        return await asyncio.wait_for(_get(url, key), timeout)
    except TimeoutError:
        return f"{LATE} {timeout:g} s"
    except (OSError, ssl.SSLError, asyncio.IncompleteReadError, ValueError) as error:
        if isinstance(error, ConnectionError) and error.errno is not None:
            return os.strerror(error.errno).lower()
        return str(getattr(error, "strerror", None) or error) or type(error).__name__


async def _get(url: str, key: str | None) -> int | str:
    host, port, secure = address(url)
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context() if secure else None)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Connection: close"]
        lines += ["Accept: */*", "User-Agent: pytest-vram"]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"))
        await writer.drain()
        head = await reader.read(_MOST)
        while head and b"\n" not in head and len(head) < _MOST:
            piece = await reader.read(_MOST)
            if not piece:
                break
            head += piece
    finally:
        # Not a polite close: a server that does not answer would keep us.
        writer.transport.abort()
    if not head:
        return "the connection was closed without an answer"
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return "the answer is not HTTP"
    return int(words[1])


async def connects(url: str, *, timeout: float = _TIMEOUT) -> bool:
    """Whether somebody accepts connections there."""
    try:
        host, port, _ = address(url)
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
    except (TimeoutError, OSError, ValueError):
        return False
    writer.transport.abort()
    return True

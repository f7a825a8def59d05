"""What one run tells the others: a small file with a checksum, held by a lock of the run's keeper."""

from __future__ import annotations

import zlib

import msgspec

VERSION = 1
#: Longest sheet that is read, in bytes.
LARGEST = 1 << 20
_CHECK = 9


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a running test, a backend, or a pytest process besides its tests, holds.

    :ivar kind: ``test``, ``server`` or ``worker``. :ivar holds: device key → bytes; of a test, beyond what its backends
        hold; of a worker, beyond what its running tests were let in for.
    :ivar exclusive: it has its devices alone. :ivar idle: no test uses it; of a worker: it will give nothing back by
        itself. :ivar attached: the run will not end it.
    :ivar since: boot-clock nanoseconds.
    """

    kind: str
    name: str
    worker: str = ""
    holds: dict[str, int] = {}
    exclusive: bool = False
    idle: bool = False
    attached: bool = False
    since: int = 0


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A test that waits; see :class:`pytest_vram.leases.policy.Want`. ``since`` is its place in the order as well."""

    id: str
    name: str
    since: int
    worker: str = ""
    takes: dict[str, int] = {}
    ceiling: dict[str, int] = {}
    covered: dict[str, int] = {}
    exclusive: bool = False
    passed: int = 0
    blocked: bool = False
    competes: bool = False


class Sheet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run.

    :ivar pid: its keeper, which holds the file's lock. :ivar place: folder that pytest runs in, for people.
    :ivar pids: its pytest processes. :ivar devices: keys of its devices. :ivar whole: those that it has for itself
        until it ends, because they do not say who holds what.
    :ivar held: device key → bytes of all its leases. :ivar passes: id of a waiting test of another run → how many
        tests of this run have passed it.
    """

    version: int
    run: str
    pid: int
    uid: int = 0
    place: str = ""
    pids: list[int] = []
    devices: list[str] = []
    whole: list[str] = []
    held: dict[str, int] = {}
    leases: list[Lease] = []
    waiting: list[Waiting] = []
    passes: dict[str, int] = {}


class _Head(msgspec.Struct):
    version: int


class BadSheet(Exception):
    """It is not a sheet, and why. ``torn``: it may be one that is just being written."""

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Sheet)
_head = msgspec.json.Decoder(_Head)


def written(sheet: Sheet) -> bytes:
    """The file's content: eight hexadecimal digits of a CRC-32, a space, JSON."""
    body = _encoder.encode(sheet)
    return b"%08x " % zlib.crc32(body) + body


def read(data: bytes) -> Sheet:
    """The sheet in a file's content.

    :raises BadSheet: it is none of this version.
    """
    body = data[_CHECK:]
    if data[:_CHECK] != b"%08x " % zlib.crc32(body):
        raise BadSheet("it is damaged", torn=True)
    try:
        version = _head.decode(body).version
        if version != VERSION:
            raise BadSheet(f"it is of format {version}, and this pytest-vram writes {VERSION}")
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        raise BadSheet("it is not what pytest-vram writes") from None

"""A log as it lies on disk: any size, compressed by gzip or not, in UTF-8 or as PowerShell writes it.

Files of the kernel (``/proc``, ``/sys``) have no size, can often be read once only, and some wait for what comes next:
they are read as they are at the moment, and kept in a temporary file.

Read in blocks of whole lines, so that its size decides no memory. What is no text is refused by its beginning.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pytest_vram.errors import BadInput
from pytest_vram.units import mib

#: Bytes of a block.
BLOCK = 1 << 20
#: Bytes of a line that are kept.
LONGEST_LINE = 1 << 17
#: Bytes that a compressed log may unpack to: a few KB can hold terabytes.
MOST_UNPACKED = 8 << 30
#: Bytes of a stream that are kept, though never more than half of what is free; and of a file of the kernel: some never
#: end.
MOST_KEPT, MOST_OF_KERNEL = 8 << 30, 64 << 20
#: Bytes by which a file is judged to be a text or not.
_SNIFF = 1 << 18
#: That of UTF-32 first: it begins as that of UTF-16 does.
_BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
#: Encoding of a text without a mark → bytes of a character, and which of them an ASCII character is.
_WIDE = {"utf-32-le": (4, 0), "utf-32-be": (4, 3), "utf-16-le": (2, 0), "utf-16-be": (2, 1)}
#: Characters that no log has many of; colours of a terminal begin with an escape.
_NO_TEXT = re.compile("[\\x00-\\x06\\x0e-\\x1a\\x1c-\\x1f\\x7f\ufffd]")
_ASCII = bytes(range(1, 128))
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}


class Log:
    """One log, which can be read from its beginning as often as is wanted.

    :param packed: by gzip. :ivar origin: what messages call it.
    :ivar notes: what a reader must know of it, once it was read.
    :ivar zeros: it has blocks of nothing but zeros.
    """

    def __init__(self, stream: io.BufferedIOBase, origin: str, *, packed: bool = False) -> None:
        self._stream = stream
        self._packed = packed
        self.origin = origin
        self.notes: list[str] = []
        self.zeros = False

    def beginning(self) -> bytes:
        """The first bytes, without those that a file has which was emptied while somebody wrote to it.

        A whole character at most is left of those, so that what is wider than a byte can be told.

        :raises BadInput: it cannot be read.
        """
        for block in self._raw():
            zeros = len(block) - len(block.lstrip(b"\0"))
            if zeros < len(block):
                return block[zeros - zeros % 4 : zeros + _SNIFF].rstrip(b"\0")
        return b""

    def blocks(self) -> Iterator[bytes]:
        """The log as UTF-8, in blocks that end with a line; of lines that never end, the beginning.

        Carriage returns end lines where nothing else does, as of a progress bar, or of what a terminal recorded.

        :raises BadInput: it cannot be read.
        """
        rest = b""
        returns: bool | None = None
        for block in self._text():
            if returns is None:
                returns = b"\n" not in block and b"\r" in block
            if returns:
                block = block.replace(b"\r", b"\n")
            data = rest + block if rest else block.lstrip(b"\0")
            cut = data.rfind(b"\n") + 1
            if cut:
                yield data[:cut]
            rest = data[cut : cut + LONGEST_LINE]
        if rest:
            yield rest

    def whole(self, most: int) -> bytes:
        """All of it as UTF-8, as of a document: lines of any length; cut in its next block where it has over ``most``.

        :raises BadInput: it cannot be read.
        """
        parts: list[bytes] = []
        left = most
        for block in self._text():
            parts.append(block)
            left -= len(block)
            if left < 0:
                break
        return b"".join(parts)

    def _text(self) -> Iterator[bytes]:
        head = self.beginning()
        name = encoding_of(head)
        if name == "utf-8":
            skipped = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
            for block in self._raw():
                yield block[skipped:]
                skipped = 0
            return
        decoder = codecs.getincrementaldecoder(name)("replace")
        for block in self._raw():
            yield decoder.decode(block).replace("\ufeff", "").encode("utf-8", "replace")

    def _raw(self) -> Iterator[bytes]:
        """Blocks as they are in the file, unpacked; those of nothing but zeros, the holes of sparse files, left out."""
        total = 0
        try:
            self._stream.seek(0)
            while block := self._read():
                total += len(block)
                if self._packed and total > MOST_UNPACKED:
                    self._note(f"{self.origin} unpacks to over {mib(MOST_UNPACKED)}, of which no more was read")
                    return
                if block.count(0) == len(block):
                    self.zeros = True
                else:
                    yield block
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.origin} cannot be read: {reason(error)}") from None

    def _read(self) -> bytes:
        if not self._packed:
            return self._stream.read(BLOCK)
        parts: list[bytes] = []
        left = BLOCK
        try:
            while left > 0 and (part := self._stream.read1(left)):
                parts.append(part)
                left -= len(part)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self._note(f"{self.origin} is damaged, or was cut after it was packed: it was read up to there")
        return b"".join(parts)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Log]:
    """The log in a file.

    :raises BadInput: it is no file, or cannot be opened; in one sentence.
    """
    with opened_file(path) as stream:
        if os.fstat(stream.fileno()).st_size:
            yield log_of(stream, str(path))
        else:
            with spooled(stream, str(path), MOST_OF_KERNEL) as log:
                yield log


def opened_file(path: Path) -> io.BufferedReader:
    """A file for reading; where nothing is there to be read, such as in some of the kernel's, nothing is waited for.

    :raises BadInput: it is no file, or cannot be opened.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadInput(f"{path} is a folder: give the log file itself")
        if not stat.S_ISREG(mode):
            raise BadInput(f"{path} is a device or a pipe and not a file: `vram boot -` reads standard input")
        return open(path, "rb", opener=_without_waiting)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"{path} cannot be read: {reason(error)}") from None


def reason(error: OSError | ValueError) -> str:
    """What is wrong, in the system's words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def log_of(stream: io.BufferedIOBase, origin: str) -> Log:
    """The log in a stream that can be read again from its beginning.

    :raises BadInput: it is packed in a way that is not read here.
    """
    try:
        packer = packed_by(stream.read(8) or b"")
        stream.seek(0)
    except OSError as error:
        raise BadInput(f"{origin} cannot be read: {reason(error)}") from None
    if packer == "gzip":
        return Log(gzip.GzipFile(fileobj=stream), origin, packed=True)
    if packer is not None:
        raise BadInput(f"{origin} is packed by {packer}: unpack it first, as in `… | vram boot -`")
    return Log(stream, origin)


def packed_by(head: bytes) -> str | None:
    """The packer of a file that begins so, ``None`` where it is none of those that are known."""
    return next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)


def log_of_text(text: str) -> Log:
    """A text that is in memory already."""
    return Log(io.BytesIO(text.encode("utf-8", "replace")), "the text")


@contextlib.contextmanager
def spooled(stream: BinaryIO, origin: str, most: int = MOST_KEPT) -> Iterator[Log]:
    """The log of a stream that can be read only once, such as a pipe; it is kept in a temporary file meanwhile.

    :param most: bytes of it.
    :raises BadInput: it cannot be read, or there is no room for it.
    """
    with contextlib.ExitStack() as stack:
        where = tempfile.gettempdir()
        try:
            left = most = min(most, max(shutil.disk_usage(where).free // 2, BLOCK))
            kept = stack.enter_context(tempfile.TemporaryFile())
            while left > 0 and (block := _next(stream, min(BLOCK, left), origin)):
                kept.write(block)
                left -= len(block)
            kept.seek(0)
        except OSError as error:
            raise BadInput(
                f"{origin} cannot be kept in {where} while it is read: {reason(error)}; give the file itself, or set"
                " TMPDIR to a folder with room"
            ) from None
        log = log_of(kept, origin)
        if left <= 0:
            log.notes.append(f"{origin} goes on after {mib(most)}, of which no more was read")
        yield log


def _next(stream: BinaryIO, size: int, origin: str) -> bytes:
    try:
        return stream.read(size) or b""  # None where there may be more, but not now
    except OSError as error:
        raise BadInput(f"{origin} cannot be read: {reason(error)}") from None


def strange(head: bytes) -> bool:
    """Whether this beginning of a file is no text."""
    if encoding_of(head) != "utf-8":
        return False
    text = head.lstrip(b"\0").decode("utf-8", "replace").removesuffix("\ufffd")  # a character that was cut
    return len(_NO_TEXT.findall(text)) > len(text) // 20


def encoding_of(head: bytes) -> str:
    """Name of the encoding of a text that begins so."""
    for mark, name in _BOMS.items():
        if head.startswith(mark):
            return name
    for name, (width, place) in _WIDE.items():  # without a mark, as a part of such a file has none
        low = head[place::width]
        zeros = len(head) - len(low) - (head.count(0) - low.count(0))  # among the other bytes: those that are none
        if len(low) <= 8 or low.count(0) or zeros * 10 >= len(head) - len(low):
            continue
        if len(low.translate(None, _ASCII)) * 10 < len(low):
            return name
    return "utf-8"

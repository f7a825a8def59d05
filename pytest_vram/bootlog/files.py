"""A log as it lies on disk: any size, compressed by gzip or not, in UTF-8 or as PowerShell writes it.

Read in blocks of whole lines, so that its size decides no memory. What is no text is refused by its beginning.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
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
#: Bytes by which a file is judged to be a text or not.
_SNIFF = 1 << 18
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
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

        :raises BadInput: it cannot be read.
        """
        head = b""
        for block in self._raw():
            head = block.strip(b"\0")
            if head:
                break
        return head[:_SNIFF]

    def blocks(self) -> Iterator[bytes]:
        """The log as UTF-8, in blocks that end with a line; of lines that never end, the beginning.

        :raises BadInput: it cannot be read.
        """
        rest = b""
        for block in self._text():
            data = rest + block if rest else block.lstrip(b"\0")
            cut = data.rfind(b"\n") + 1
            if cut:
                yield data[:cut]
            rest = data[cut : cut + LONGEST_LINE]
        if rest:
            yield rest

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
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BadInput(f"{self.origin} cannot be read: {reason}") from None

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
        yield log_of(stream, str(path))


def opened_file(path: Path) -> io.BufferedReader:
    """A file for reading.

    :raises BadInput: it is no file, or cannot be opened.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadInput(f"{path} is a folder: give the log file itself")
        if not stat.S_ISREG(mode):
            raise BadInput(f"{path} is a device or a pipe and not a file: `vram boot -` reads standard input")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{path} cannot be read: {reason}") from None


def log_of(stream: io.BufferedIOBase, origin: str) -> Log:
    """The log in a stream that can be read again from its beginning.

    :raises BadInput: it is packed in a way that is not read here.
    """
    try:
        packer = packed_by(stream.read(8))
        stream.seek(0)
    except OSError as error:
        raise BadInput(f"{origin} cannot be read: {error.strerror}") from None
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
def spooled(stream: BinaryIO, origin: str) -> Iterator[Log]:
    """The log of a stream that can be read only once, such as a pipe; it is kept in a temporary file meanwhile."""
    with tempfile.TemporaryFile() as kept:
        shutil.copyfileobj(stream, kept, BLOCK)
        kept.seek(0)
        yield log_of(kept, origin)


def strange(head: bytes) -> bool:
    """Whether this beginning of a file is no text."""
    if encoding_of(head) != "utf-8":
        return False
    text = head.decode("utf-8", "replace").removesuffix("\ufffd")  # a character that was cut
    return len(_NO_TEXT.findall(text)) > len(text) // 20


def encoding_of(head: bytes) -> str:
    """Name of the encoding of a text that begins so."""
    for mark, name in _BOMS.items():
        if head.startswith(mark):
            return name
    even, odd = head[0::2], head[1::2]
    if len(odd) > 8 and odd.count(0) > len(odd) * 9 // 10 and not even.count(0):
        foreign = len(even.translate(None, _ASCII))
        if foreign < len(even) // 10:
            return "utf-16-le"  # without a mark, as a part of such a file has none
    return "utf-8"

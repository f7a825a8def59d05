"""The new lines of a file that is still being written."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import stat
from pathlib import Path
from types import TracebackType

from pytest_vram.bootlog.files import BLOCK, LONGEST_LINE, encoding_of, opened_file, packed_by, reason
from pytest_vram.errors import BadInput

#: Bytes by which the encoding of a file is known.
_ENOUGH = 16
#: As long as a file has no line feed, a carriage return ends a line: that of a progress bar.
_OTHER_END = re.compile(r"\n|\r(?=[^\n])")


class Tail:
    """Reads on in a file as it grows; from its beginning again after it was emptied or another took its place.

    :ivar fresh: times that it began anew.
    :raises BadInput: it is no file, cannot be opened, or is packed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = opened_file(path)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""
        self._place = 0
        self._feeds = False
        self.fresh = 0
        try:
            head = self._stream.read(_ENOUGH) or b""
            self._stream.seek(0)
        except OSError as error:
            self._stream.close()
            raise BadInput(f"{path} cannot be read: {reason(error)}") from None
        packer = packed_by(head)
        if packer is not None:
            self._stream.close()
            raise BadInput(f"{path} is packed by {packer}, so that nothing is being written to it: leave out --follow")

    def __enter__(self) -> Tail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def lines(self) -> list[str]:
        """The lines that were finished since the last call, at most those of one block; none where nothing is new."""
        block = self._read()
        if not block:
            return []
        text = self._rest + self._decoded(block)
        self._feeds = self._feeds or "\n" in text
        *lines, rest = text.split("\n") if self._feeds else _OTHER_END.split(text)
        self._rest = rest[:LONGEST_LINE]
        return lines

    def rest(self) -> list[str]:
        """The line that has no end yet, as if it had one; what is written to it later is another line."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []

    def _begin(self) -> None:
        self._feeds = False
        self._decoder = None
        self._rest = ""
        self._place = 0

    def _read(self) -> bytes:
        try:
            block = self._stream.read(BLOCK) or b""  # None: there may be more to wait for
            if not block and self._replaced():
                block = self._stream.read(BLOCK) or b""
        except OSError as error:
            raise BadInput(f"{self._path} cannot be read any more: {reason(error)}") from None
        self._place += len(block)
        return block

    def _replaced(self) -> bool:
        """Whether the file was emptied, or another has its name; it is then read from its beginning."""
        ours = os.fstat(self._stream.fileno())
        if ours.st_size < self._place:
            self._stream.seek(0)
        else:
            try:
                there = self._path.stat()
            except OSError:  # between two files there is none for a moment
                return False
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return False
            other: io.BufferedReader | None = None
            # a folder in its place, or a pipe, is said; a file that went away, or may not be read yet, is waited for
            with contextlib.suppress(*(BadInput,) if stat.S_ISREG(there.st_mode) else ()):
                other = opened_file(self._path)
            if other is None:
                return False
            self._stream.close()
            self._stream = other
        self._begin()
        self.fresh += 1
        return True

    def _decoded(self, block: bytes) -> str:
        if self._decoder is None:
            zeros = len(block) - len(block.lstrip(b"\0"))
            name = encoding_of(block[zeros - zeros % 4 :].rstrip(b"\0"))
            self._decoder = codecs.getincrementaldecoder(name)("replace")
            return self._decoder.decode(block).lstrip("\0").removeprefix("\ufeff")
        return self._decoder.decode(block)

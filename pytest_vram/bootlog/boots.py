"""Several boots in one log: a server that was started anew, a journal of days. The last one counts."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pytest_vram.bootlog.boot import Boot, Phase
from pytest_vram.bootlog.grammar import STARTS, grammar
from pytest_vram.bootlog.lines import split


class Boots:
    """Feeds a grammar, and a fresh one where a process of the engine begins after a boot.

    :ivar words: as :attr:`pytest_vram.bootlog.grammar.Grammar.words`, and ``noise`` as there.
    :ivar count: boots so far.
    :raises BadInput: for a pattern that cannot be used.
    """

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._engine, self._patterns = engine, patterns
        self._grammar = grammar(engine, patterns)
        self._start = STARTS.get(engine)
        self._line = 0
        self._prefixed: bool | None = None
        self.count = 1
        self.words = self._grammar.words
        self.noise: re.Pattern[str] | None = getattr(self._grammar, "noise", None)
        if self.words is not None and self._start is not None:
            known = self.words.pattern
            self.words = re.compile("|".join([known, *map(re.escape, self._start.words)]), self.words.flags)

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines
        self._grammar.skip(lines)

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``. Never raises."""
        if self._prefixed is None:
            self._prefixed = split(raw).prefix is not None
        if self._start is not None and any(word in raw for word in self._start.words) and self._begins(raw):
            self._grammar = grammar(self._engine, self._patterns)
            self._grammar.skip(self._line)
            self.count += 1
        self._line += 1
        return self._grammar.feed(raw)

    def _begins(self, raw: str) -> bool:
        """Whether this line begins another boot: it is a first line, and the boot so far came beyond its start."""
        line = split(raw)
        if self._start is None:
            return False
        again = self._start.again is not None and self._start.again.search(line.text) is not None
        if not again and not self._start.pattern.search(line.text):
            return False
        if self._prefixed and line.prefix is None:
            return False  # somebody's text in a message of several lines
        if line.process is not None and line.process.isascii() and line.process.isdigit():
            return False  # the child of a router, beside others
        boot = self._grammar.boot()
        return boot.failure is not None or (boot.ready if again else len(boot.phases) > 1)

    def boot(self) -> Boot:
        """What the lines so far said of the last boot."""
        boot = self._grammar.boot()
        if self.count == 1:
            return boot
        told = f"the log holds {self.count} boots: this is the last one"
        return msgspec.structs.replace(boot, boots=self.count, warnings=(told, *boot.warnings))

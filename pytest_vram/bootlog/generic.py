"""Logs of an engine without a grammar of its own, read with the user's patterns.

A pattern belongs to a phase: its first match begins the phase. It may hold named groups for sizes, spelled
``<bucket>_<unit>``, such as ``(?P<weights_mib>[\\d.]+)`` or ``(?P<kv_bytes>\\d+)``, and a group ``device`` with the
engine's name of the device; without one the bytes are on ``gpu0``, which then has no name. Sizes of one bucket and
device found again replace the earlier figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from pytest_vram.bootlog.boot import PHASES, Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.devices import Labels
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import size, split
from pytest_vram.bootlog.numbering import numbered
from pytest_vram.bootlog.patience import PATIENCE, Limited, OutOfPatience
from pytest_vram.errors import BadInput
from pytest_vram.ledger import BUCKETS, Bucket, Entry

_UNITS = {"bytes": "B", "kb": "KB", "mb": "MB", "gb": "GB", "kib": "KiB", "mib": "MiB", "gib": "GiB"}
_FIRST = "gpu0"


class Generic:
    """The grammar of the ``command`` engine."""

    words: re.Pattern[str] | None = None

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._engine = engine
        self._patterns: list[tuple[Phase, re.Pattern[str]]] = []
        for name, pattern in patterns.items():
            phase: Phase | None = next((known for known in get_args(Phase) if known == name), None)
            if phase is None:
                raise BadInput(f"log pattern for unknown phase {name!r}: the phases are {', '.join(PHASES)}")
            try:
                self._patterns.append((phase, re.compile(pattern)))
            except re.error as error:
                raise BadInput(f"log pattern of phase {name!r} is not a regular expression: {error}") from None
        self._labels = Labels()
        self._found: dict[tuple[Bucket, str], Entry] = {}
        self._spans: list[PhaseSpan] = []
        self._line = 0
        self._given_up: list[str] = []

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        line = split(raw)
        began: Phase | None = None
        if not self._spans:
            began = self._begin("start", line.time)
        for phase, match in self._matches(line.text):
            self._sizes(match)
            if not any(span.name == phase for span in self._spans):
                began = self._begin(phase, line.time)
        return began

    def _matches(self, text: str) -> list[tuple[Phase, re.Match[str]]]:
        """The patterns that match; one that takes too long is not used from then on."""
        found: list[tuple[Phase, re.Match[str]]] = []
        tried = 0
        try:
            with Limited():
                for phase, pattern in self._patterns:
                    match = pattern.search(text)
                    tried += 1
                    if match is not None:
                        found.append((phase, match))
        except OutOfPatience:
            tried = min(tried, len(self._patterns) - 1)  # a whisker: it ended between the last match and the timer
            phase, pattern = self._patterns.pop(tried)
            self._given_up.append(
                f"the pattern {pattern.pattern!r} for {phase!r} in `log_patterns` took over {PATIENCE:g} s for one line"
                " and is not used any more: it tries the same characters in too many ways, as (a+)+ does"
            )
        return found

    def _begin(self, phase: Phase, time: float | None) -> Phase:
        self._spans.append(PhaseSpan(name=phase, line=self._line, start=time))
        return phase

    def _sizes(self, match: re.Match[str]) -> None:
        groups = match.groupdict()
        device = groups.get("device")
        label = _FIRST if device is None else self._labels.of(device)
        for name, number in groups.items():
            bucket_name, _, unit = name.rpartition("_")
            bucket = next((bucket for bucket in BUCKETS if bucket == bucket_name), None)
            if bucket is None or bucket == "unattributed" or number is None or unit not in _UNITS:
                continue
            figure = size(number, _UNITS[unit])
            if figure is None:
                continue
            self._found[bucket, label] = Entry(
                bucket=bucket,
                device=label,
                bytes=figure[0],
                source="engine-log",
                detail=match[0].strip()[:120],
                resolution=figure[1],
            )

    def boot(self) -> Boot:
        """What the lines so far said; evidence is never better than partial, since the patterns are the user's."""
        entries = tuple(self._found.values())
        ready = any(span.name == "ready" for span in self._spans)
        warnings = list(self._given_up)
        if not entries:
            warnings.append("no buffer sizes were read: log_patterns may name them, as in (?P<weights_mib>[0-9.]+)")
        failure: Failure | None = None
        if self._given_up and not ready:  # it may be why nothing says that the server is ready
            failure = Failure(kind="bad_pattern", certainty="likely", text=self._given_up[0])
        found = Boot(
            engine=self._engine,
            era="",
            evidence="partial" if entries else "none",
            phases=with_ends(self._spans),
            entries=entries,
            devices=dict(self._labels.names),
            failure=failure,
            warnings=tuple(warnings),
            ready=ready,
        )
        return numbered(found)

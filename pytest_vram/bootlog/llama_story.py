"""How a boot or a request of llama.cpp ran into its end, put together from the several lines that say it.

One refused allocation is told two to six times: by the driver's wrapper (size in MiB, device by number), by the
allocator (buffer type, size to the byte), and by whoever wanted the buffer, which only then says what it was for. The
KV cache, weights and compute buffers are refused in the same words, so that a line alone does not tell which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.host_killer import Kill, with_kill
from pytest_vram.bootlog.lines import shown
from pytest_vram.bootlog.llama_failures import Sign
from pytest_vram.units import mib

#: No accelerator has more: one buffer that is larger was asked for by mistake (2026; 288 GB).
LARGEST_DEVICE = 288 * 10**9
_REFUSED = ("out_of_memory", "host_out_of_memory")
_BUCKET_OF = {"weights": "weights", "kv": "kv", "reserve": "compute", "warm-up": "compute"}
_PHASE_OF = {"weights": "weights", "kv": "kv", "recurrent": "kv", "compute": "reserve"}
_LONE = "weights, KV cache and compute buffers are refused in the same words, and nothing before this line tells which"


class Where(NamedTuple):
    """What the log had come to when a line was printed.

    :ivar known: lines of a boot came before, so that ``phase`` is more than the beginning of a log.
    :ivar cached: the context's KV cache was there. :ivar draft: a draft's model or context was being made.
    :ivar request: ``prefill`` or ``decode`` where a request was running. :ivar image: it brought an image.
    :ivar projector: the encoder of images was being loaded.
    :ivar dry: in a trial run, which allocates nothing. :ivar bare: printed without the engine's own prefix, so that it
        may be what a user wrote.
    """

    phase: str
    known: bool
    cached: bool = False
    draft: bool = False
    ready: bool = False
    request: str | None = None
    image: bool = False
    dry: bool = False
    bare: bool = False
    projector: bool = False


class _Told(NamedTuple):
    sign: Sign
    where: Where
    line: int
    explicit: str | None  # bucket in the engine's own words
    graph: bool


class Story:
    """The failure that a log tells of, so far."""

    def __init__(self) -> None:
        self._told: _Told | None = None
        self._failure: Failure | None = None

    @property
    def is_known(self) -> bool:
        """Whether something failed."""
        return self._told is not None or self._failure is not None

    @property
    def text(self) -> str:
        """The line that says it, ``""`` where nothing failed."""
        if self._failure is not None:
            return self._failure.text
        return "" if self._told is None else shown(self._told.sign.text)

    def tell(self, sign: Sign, where: Where, line: int) -> None:
        """Take a sign of a failure."""
        refused = sign.kind in _REFUSED
        told = self._told
        fresh = _Told(sign, where, line, sign.bucket, sign.graph)
        if told is None or (told.where.dry and not where.dry) or (refused and told.sign.kind not in _REFUSED):
            self._told = fresh
        elif refused:
            self._told = self._merged(told, fresh)
        elif self.is_refusal and sign.kind == "load_error" and sign.bucket is not None:
            # only the consequence says whose buffer it was
            if sign.bucket == "draft":
                self._told = told._replace(where=told.where._replace(draft=True))
            else:
                self._told = told._replace(where=told.where._replace(projector=True), explicit=sign.bucket)

    @staticmethod
    def _merged(told: _Told, fresh: _Told) -> _Told:
        """Later lines of the same failure know what the first one did not."""
        first, later = told.sign, fresh.sign
        better = first
        if later.device is not None and (first.device is None or (first.number is not None and later.number is None)):
            better = better._replace(device=later.device, number=later.number, kind=later.kind)
        if later.bytes is not None and (
            first.bytes is None or (later.exact and not first.exact and abs(later.bytes - first.bytes) < 1 << 20)
        ):
            better = better._replace(bytes=later.bytes, exact=later.exact)
        better = better._replace(limit=first.limit or later.limit)
        return told._replace(sign=better, explicit=told.explicit or fresh.explicit, graph=told.graph or fresh.graph)

    def at_device(self, number: int) -> None:
        """The device of an error of which the number is printed in a line of its own."""
        told = self._told
        if told is not None and told.sign.device is None and told.sign.number is None:
            self._told = told._replace(sign=told.sign._replace(number=number))

    def killed(self, kill: Kill, phase: str, line: int) -> None:
        """The kernel, or somebody, ended the process."""
        failure = kill.failure(phase=phase, line=line)
        known = self._failure or (None if self._told is None or self.is_refusal else self._other(self._told))
        if not self.is_refusal or kill.certain:
            self._failure = with_kill(known, failure)

    def survived(self, *, certain: bool) -> str | None:
        """The server goes on: what only looked like its end was not; the line that did, where it was one of serving.

        :param certain: the line that shows it is as good as any other of this log.
        """
        looked = None
        if self._told is not None and self._told.where.bare and self._told.where.ready and certain:
            looked = shown(self._told.sign.text)
            self._told = None
        if self._failure is not None and self._failure.certainty != "certain":
            self._failure = None
        return looked

    def trial_is_over(self) -> None:
        """What happened in a trial did not count: it allocates nothing. One without an end was none."""
        if self._told is not None and self._told.where.dry:
            self._told = None

    def forget(self) -> None:
        """It was not the end."""
        self._told = None
        self._failure = None

    @property
    def is_refusal(self) -> bool:
        """Whether an allocation was refused."""
        return self._told is not None and self._told.sign.kind in _REFUSED

    # ------------------------------------------------------------ the whole of it

    def failure(
        self, labels: Labels, free: Mapping[str, int], total: Mapping[str, int], taken: Mapping[str, int]
    ) -> Failure | None:
        """The failure, with the device's label; ``labels`` gets one for a device that had none.

        :param free: label → bytes that were free before the load. :param total: label → the device's size.
        :param taken: label → bytes of the buffers printed so far.
        """
        if self._failure is not None:
            return self._failure
        told = self._told
        if told is None:
            return None
        if told.sign.kind not in _REFUSED:
            return self._other(told)
        label = self._label(told.sign, labels)
        phase, bucket, certainty, note = _placed(told)
        asked = told.sign.bytes
        failure = Failure(
            kind=told.sign.kind,
            certainty=certainty,
            text=shown(told.sign.text),
            phase=phase,
            bucket=bucket,
            device=label,
            bytes=asked,
            line=told.line,
            free=None if label is None else free.get(label),
            total=None if label is None else total.get(label),
            note=note,
        )
        return _judged(failure, taken.get(label or "", 0), limit=told.sign.limit)

    @staticmethod
    def _other(told: _Told) -> Failure:
        return Failure(
            kind=told.sign.kind,
            certainty="certain" if told.sign.certain else "unknown",
            text=shown(told.sign.text),
            phase=_serving(told.where) if told.where.ready else told.where.phase,
            line=told.line,
        )

    @staticmethod
    def _label(sign: Sign, labels: Labels) -> str | None:
        if sign.number is not None:
            return labels.of(labels.like_cuda(sign.number, otherwise=sign.family))
        return None if sign.device is None else labels.of(sign.device)


def _serving(where: Where) -> str:
    return where.request or where.phase


def _placed(told: _Told) -> tuple[str | None, str | None, str, str | None]:
    """Phase, bucket, certainty and note of a refused allocation."""
    where, explicit = told.where, told.explicit
    if where.ready:
        taker = explicit or ("projector" if where.image else "compute")
        certainty = "certain" if explicit and where.request else "likely"
        when = "while an image was encoded" if where.image else "after the boot, while serving"
        if where.request is None and not where.image:
            when += "; the log does not say whether in prefill or decode"
        return ("prefill" if where.image else _serving(where)), taker, certainty, when
    if where.projector:
        return (
            where.phase,
            "projector",
            "certain" if explicit == "projector" else "likely",
            "while its model was loaded",
        )
    note = "while the draft's part was made: the target's own buffers were there already" if where.draft else None
    if explicit is not None:
        return _PHASE_OF.get(explicit) or where.phase, "draft" if where.draft else explicit, "certain", note
    phase = where.phase
    if told.graph or (phase == "kv" and where.cached):
        phase = "reserve"  # a graph's buffer, or the next thing that is allocated after the cache
    by_phase = _BUCKET_OF.get(phase) if where.known or told.graph else None
    if by_phase is None:
        return (phase if where.known else None), None, "unknown", _LONE
    certainty = "certain" if told.graph and where.cached else "likely"
    return phase, "draft" if where.draft else by_phase, certainty, note


def _judged(failure: Failure, taken: int, *, limit: bool) -> Failure:
    """With what the figures say: more than there is at all, or what was left."""
    asked, free, total = failure.bytes, failure.free, failure.total
    if asked is None or failure.device in (None, HOST):
        return failure
    notes = [] if failure.note is None else [failure.note]
    if limit:
        notes.append("the driver limits the size of one buffer, and this one is larger, whatever is free")
    absurd = asked > (total if total is not None else LARGEST_DEVICE)
    if absurd:
        size = f"the whole device has {mib(total)}" if total is not None else "no device has as much"
        notes.append(f"{mib(asked)} were asked for, and {size}: smaller settings alone will not help")
    elif free is not None and failure.phase != "weights":
        left = free - taken
        notes.append(
            f"{mib(free)} were free before the load, and buffers printed since take {mib(taken)} of them,"
            f" which leaves {mib(max(0, left))}"
        )
    return msgspec.structs.replace(failure, absurd=absurd, note="; ".join(notes) or None)

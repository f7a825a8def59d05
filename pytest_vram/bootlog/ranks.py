"""Which card a process of a parallel engine has: the one with the number of its rank.

vLLM and SGLang start one process for each card and name it in the prefix of its lines. Labels are given when all lines
were read, since the number of ranks may be known only then.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.bootlog.devices import HOST

_PARTS = re.compile(r"(?:^|(?<!MOE)_| )(DP|PP|TP)(\d{1,5})(?![0-9A-Za-z])", re.ASCII)
#: ``EngineCore_0``: the number is that of the data-parallel engine.
_ENGINE = re.compile(r"^EngineCore_(\d{1,5})\b", re.ASCII)
_GLOBAL = re.compile(r"\brank=(\d{1,5})\b|^(?:rank|default)(\d{1,5})$", re.ASCII)
#: Workers that are told apart by nothing but their process.
_NUMBERED = re.compile(r"^(?:VllmWorkerProcess|Ray\w{1,40}) pid=(\d{1,10})(?:, ip=([\w.:]{1,60}))?", re.ASCII)
#: Words for kinds of devices, and for plugins, that are not simply their names.
_PLATFORMS = {"rocm": "ROCm", "hip": "ROCm", "ascend": "NPU", "gaudi": "HPU", "metal": "Metal"}
#: Kinds of devices that torch and its plugins name; a word that was cut is none of them.
_KINDS = frozenset({*_PLATFORMS, "cuda", "cpu", "xpu", "npu", "hpu", "mps", "musa", "tpu", "mlu", "gcu", "xla"})
#: Ranks that are kept apart; a log with more of them is none of an engine.
_MOST = 1024


class Rank(NamedTuple):
    """A process, as its prefix names it; all ``None``: one that bears no rank, which has the first card.

    :ivar dp: data-parallel, ``pp``: pipeline-parallel, ``tp``: tensor-parallel rank. :ivar number: rank over all of
        them. :ivar pid: process of a worker that is told apart by nothing else. :ivar host: address of its machine.
    """

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    number: int | None = None
    pid: int | None = None
    host: str | None = None


MAIN = Rank()


class Ranks:
    """The processes of one log, and their labels.

    :ivar sizes: ``tp``, ``pp``, ``dp`` → how many there are, where the log says so.
    :ivar shared: the data-parallel ranks share the tensor-parallel ones (SGLang's attention); ``None``: not known.
    :ivar platform: kind of device as engines name cards (``CUDA``, ``ROCm``, ``NPU``), or ``CPU``; empty: not said.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.shared: bool | None = False
        self.platform = ""
        self._known: dict[str, Rank] = {}
        self._seen: dict[Rank, None] = {}

    def of(self, process: str | None) -> Rank:
        """The rank in what a line's prefix says of its process; one more than can be kept apart counts as the first."""
        if process is None:
            return MAIN
        known = self._known.get(process)
        if known is None:
            known = _rank(process)
            if len(self._known) >= _MOST:
                return MAIN
            self._known[process] = known
        return known

    def are(self, word: str) -> None:
        """Take what kind of device the log names; that torch calls cards of AMD "cuda" too gives way to any other."""
        word = word.partition(":")[0].lower()
        if self.platform in ("", "CUDA") and word in _KINDS:
            self.platform = _PLATFORMS.get(word, word.upper())

    def name(self, number: int) -> str:
        """The name of a card; one of a kind that the log does not say is ``GPU0``."""
        return f"{self.platform or 'GPU'}{number}"

    def used(self, rank: Rank) -> None:
        """Note that this rank told something of its card."""
        self._seen.setdefault(rank, None)

    def told(self, rank: Rank) -> bool:
        """Whether this rank told something of its card."""
        return rank in self._seen

    @property
    def world(self) -> int:
        """How many cards the engine uses: by what it says, else by the ranks that were seen."""
        told = self.sizes.get("tp", 1) * self.sizes.get("pp", 1) * (1 if self._sharing else self.sizes.get("dp", 1))
        return max(told, len({self.index(rank) for rank in self._seen}), 1)

    def index(self, rank: Rank) -> int:
        """The number of this rank's card."""
        if rank.number is not None:
            return rank.number
        if rank.pid is not None:
            pids = sorted((one.host or "", one.pid) for one in {*self._seen, rank} if one.pid is not None)
            first = 1 if MAIN in self._seen else 0
            return first + pids.index((rank.host or "", rank.pid))
        tensor = max(self.sizes.get("tp", 1), 1 + max((one.tp or 0 for one in self._seen), default=0))
        pipeline = max(self.sizes.get("pp", 1), 1 + max((one.pp or 0 for one in self._seen), default=0))
        replica = 0 if self._sharing else rank.dp or 0
        return (replica * pipeline + (rank.pp or 0)) * tensor + (rank.tp or 0)

    def label(self, rank: Rank) -> str:
        """The label of this rank's card."""
        return HOST if self.platform == "CPU" else f"gpu{self.index(rank)}"

    def names(self) -> dict[str, str]:
        """Label → the name that engines give the card, of all that told something of theirs."""
        found: dict[str, str] = {}
        for rank in sorted(self._seen, key=self.index):
            label = self.label(rank)
            name = "CPU" if label == HOST else self.name(self.index(rank))
            found[label] = name if rank.host is None else f"worker {rank.pid} on {rank.host}"
        return found

    @property
    def _sharing(self) -> bool:
        if self.shared is not None:
            return self.shared
        pairs = {(one.dp, one.tp) for one in self._seen if one.dp is not None and one.tp is not None}
        return len(pairs) > 1 and len({tp for _, tp in pairs}) == len(pairs)


def _rank(process: str) -> Rank:
    if match := _NUMBERED.match(process):
        return Rank(pid=int(match[1]), host=match[2])
    if match := _GLOBAL.search(process):
        return Rank(number=int(match[1] or match[2]))
    parts = {match[1].lower(): int(match[2]) for match in _PARTS.finditer(process)}
    if match := _ENGINE.match(process):
        parts["dp"] = int(match[1])
    return Rank(dp=parts.get("dp"), pp=parts.get("pp"), tp=parts.get("tp"))

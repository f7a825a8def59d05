"""What an engine's own log says about its boot: phases, buffers, facts, failure.

One grammar per engine turns lines into a :class:`Boot`. Grammars match phrases, never function names: those change
with every release. A log without memory lines is "no evidence", which never stands for zero bytes.
"""

from pytest_vram.bootlog.boot import PHASES, Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.reader import Follower, engines, read, read_own, read_stream, without_evidence
from pytest_vram.bootlog.replicated import Replica, Replicas, replicas

__all__ = [
    "PHASES",
    "Boot",
    "Failure",
    "Follower",
    "Phase",
    "PhaseSpan",
    "Replica",
    "Replicas",
    "engines",
    "read",
    "read_own",
    "read_stream",
    "replicas",
    "without_evidence",
]

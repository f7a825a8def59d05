"""What an engine's own log says about its boot: phases, buffers, facts, failure.

One grammar per engine turns lines into a :class:`Boot`. Grammars match phrases, never function names: those change
with every release. A log without memory lines is "no evidence", which never stands for zero bytes.
"""

from pytest_vram.bootlog.boot import PHASES, Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.reader import Follower, engines, read, read_own, read_stream, sampled, without_evidence
from pytest_vram.bootlog.replicated import Replica, Replicas, replicas
from pytest_vram.bootlog.samples import Samples, read_samples

__all__ = [
    "PHASES",
    "Boot",
    "Failure",
    "Follower",
    "Phase",
    "PhaseSpan",
    "Replica",
    "Replicas",
    "Samples",
    "engines",
    "read",
    "read_own",
    "read_samples",
    "read_stream",
    "replicas",
    "sampled",
    "without_evidence",
]

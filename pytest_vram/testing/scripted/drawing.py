"""What chance decides in a scripted backend: by hashes of names, so that order and process do not matter."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

from pytest_vram.testing.scripted.script import Script


def uniform(*parts: object) -> float:
    """A number in [0, 1) that these words decide."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def generator(*parts: object) -> random.Random:
    """A random generator that these words decide."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def is_right(script: Script, case: str, family: str, turn: int) -> bool:
    """Whether this case is answered right, at its first request (turn 0) or at a retry.

    Outcomes within a family are beta-binomial: its probability is drawn from the beta distribution with mean
    ``accuracy`` and variance accuracy · (1 − accuracy) · icc, so that two of its cases correlate by ``icc``.
    """
    if turn:
        return uniform(script.seed, case, "retry", turn) < script.recovery
    again = script.wobble and uniform(script.seed, case, "wobble", script.draw) < script.wobble
    words = (script.seed, case, "right", script.draw) if again else (script.seed, case, "right")
    return uniform(*words) < _probability(script, family)


def _probability(script: Script, family: str) -> float:
    mean, icc = script.accuracy, script.icc
    if icc == 0.0 or mean in (0.0, 1.0):
        return mean
    if icc == 1.0:
        return float(uniform(script.seed, family, "family") < mean)
    spread = (1.0 - icc) / icc
    return generator(script.seed, family, "family").betavariate(mean * spread, (1.0 - mean) * spread)


def kinds_in_turn(weights: Mapping[str, float], chance: random.Random) -> list[str]:
    """All kinds with a weight, the first drawn by weight, the next by the weights of the rest, and so on.

    Keys of exponential draws divided by weight sort into that order (Efraimidis and Spirakis, 2006).
    """
    drawn = {kind: chance.expovariate(1.0) / weight for kind, weight in sorted(weights.items()) if weight > 0}
    return sorted(drawn, key=drawn.__getitem__)

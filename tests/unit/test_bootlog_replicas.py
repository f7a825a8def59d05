"""Several servers of one model: whether each got its cache, and what is sure about the reason."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.bootlog import Boot, replicas
from pytest_vram.errors import BadInput


def boot(tokens: int | None, **facts: Any) -> Boot:
    known = {"memory_share": 0.27, "context": 4096, **facts}
    if tokens is not None:
        known["kv_tokens"] = tokens
    return Boot(engine="sglang", era="2026", evidence="complete", facts=known, ready=True)


def test_third_of_three_is_starved() -> None:
    """Three servers with the same share get less one after another; the third one has a fifth of the first."""
    found = replicas([boot(97503), boot(53149), boot(20961)])
    assert (found.kind, found.starved, found.certainty) == ("starved", ("#3",), "likely")
    assert [round(row.part or 0, 3) for row in found.replicas] == [1.0, 0.545, 0.215]
    assert "97,503, 53,149, 20,961 tokens" in found.text
    assert "does not add up" in found.text


def test_what_was_free_makes_it_certain() -> None:
    """Where each log says that less was free than for the one before, the reason is certain."""
    found = replicas(
        [boot(97503, free_bytes=80 << 30), boot(53149, free_bytes=58 << 30), boot(9000, free_bytes=9 << 30)]
    )
    assert found.certainty == "certain"
    assert "when they began" in found.text
    rising = replicas([boot(50_000, free_bytes=80 << 30), boot(97_503, free_bytes=58 << 30)])
    assert rising.certainty == "unknown"
    other = replicas([boot(97503, free_bytes=50 << 30), boot(53149, free_bytes=58 << 30)])
    assert other.certainty == "unknown"


def test_no_room_for_one_request_is_starved() -> None:
    """A cache that holds less than the context cannot serve one request of full length, however it compares."""
    found = replicas([boot(4000), boot(3900)], ["a", "b"])
    assert (found.kind, found.starved) == ("starved", ("a", "b"))
    negative = boot(None, profiled_tokens=-561981)
    assert replicas([boot(9000), negative]).starved == ("#2",)


def test_alike() -> None:
    """Caches within a twentieth of each other are alike."""
    assert replicas([boot(100_000), boot(96_000)]).kind == "alike"
    assert replicas([boot(100_000), boot(94_000)]).kind == "unequal"


def test_order_does_not_explain_what_rises() -> None:
    """Caches that do not fall in the order of the starts have no reason that a log would show."""
    found = replicas([boot(50_000), boot(100_000), boot(60_000)])
    assert (found.kind, found.certainty) == ("unequal", "unknown")


def test_other_settings_are_no_replicas() -> None:
    """Servers with other settings are compared, and no reason is claimed."""
    found = replicas([boot(97503), boot(20961, memory_share=0.1, build="2")])
    assert (found.differing, found.certainty) == (("memory_share",), "unknown")
    assert "no replicas of each other" in found.text


def test_silent_log_is_not_compared() -> None:
    """A log without the tokens of its cache makes the comparison unknown, and is named."""
    found = replicas([boot(97503), boot(None)])
    assert (found.kind, found.certainty) == ("unknown", "unknown")
    assert "#2" in found.text


def test_one_server_is_refused() -> None:
    """One server has nothing to be held against, and names must be as many as servers."""
    with pytest.raises(BadInput, match="two or more"):
        replicas([boot(1)])
    with pytest.raises(BadInput, match="1 names were given for 2 servers"):
        replicas([boot(1), boot(2)], ["a"])

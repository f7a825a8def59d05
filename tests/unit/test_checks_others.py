"""Host memory, throughput, idle memory and applied settings."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.backends.base import Properties
from pytest_vram.checks import (
    Finding,
    judge_applied,
    judge_context,
    judge_host,
    judge_idle_rollback,
    judge_layers,
    judge_loaded,
    judge_rate,
)
from pytest_vram.keeper.messages import Closed
from pytest_vram.readings import Measured, Reading, Unmeasurable

MIB = 1 << 20
NO = Unmeasurable(reason="nobody knows")


def reading(low: int, high: int | None = None) -> Reading:
    return Reading(bytes=low, at_most=high, source="host-anon", scope="backend", device="host", exact=False)


def verdict(finding: Finding | None) -> str | None:
    return None if finding is None else finding.verdict


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (reading(MIB), None),
        (reading(MIB + 1), "failed"),
        (reading(MIB, MIB + 1), "inconclusive"),
        (NO, "inconclusive"),
        (None, "inconclusive"),
    ],
)
def test_host(figure: Measured | None, expected: str | None) -> None:
    """The host limit follows the interval rule, and a window without a backend proves nothing."""
    assert verdict(judge_host(Closed(t0=0, t1=1, host=figure), MIB, limit_from="@max_host_memory")) == expected


def test_host_with_trouble() -> None:
    """A window whose measurement had trouble does not pass the host limit."""
    closed = Closed(t0=0, t1=1, host=reading(1), trouble=["stalled"])
    assert verdict(judge_host(closed, MIB, limit_from="h")) == "inconclusive"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([20.0], None),
        ([19.99], "failed"),
        ([1.0, 20.0, 30.0], None),
        ([1.0, 30.0], "failed"),
        ([None, 25.0], None),
        ([], "inconclusive"),
        ([None], "inconclusive"),
        ([float("nan"), 0.0, float("inf")], "inconclusive"),
    ],
)
def test_rate(rates: list[float | None], expected: str | None) -> None:
    """The median of the known rates is held against the floor; without any it is inconclusive."""
    floor = 15.75 if rates == [1.0, 30.0] else 20.0
    assert verdict(judge_rate(rates, floor, limit_from="floors")) == expected


def test_rate_text() -> None:
    """A rate under its floor says median, floor, place, count, range and what had no rate."""
    found = judge_rate([2.0, 4.0, None], 20, limit_from="profile of agent")
    assert found is not None
    for words in ("3.00 tokens/s", "20", "profile of agent", "2 requests", "2.00 to 4.00", "1 more had no rate"):
        assert words in found.text


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (reading(100), reading(164), None),
        (reading(100), reading(165), "failed"),
        (reading(100), reading(10), None),
        (reading(100, 200), reading(165), "inconclusive"),
        (reading(100), reading(150, 165), "inconclusive"),
        (NO, reading(1), "inconclusive"),
        (reading(1), NO, "inconclusive"),
    ],
)
def test_idle(before: Measured, after: Measured, expected: str | None) -> None:
    """Idle memory is back when it is within the tolerance of what it was, whatever the intervals hide."""
    assert verdict(judge_idle_rollback(before, after, 64)) == expected


def test_idle_that_still_moves() -> None:
    """Memory that was still moving when the wait ended proves no rollback."""
    assert verdict(judge_idle_rollback(reading(100), reading(100), 64, settled=False)) == "inconclusive"
    assert verdict(judge_idle_rollback(reading(100), reading(500), 64, settled=False)) == "failed"


FACTS: dict[str, Any] = {
    "context": 4096,
    "slots": 1,
    "layers": 30,
    "layers_offloaded": 31,
    "layers_offloadable": 31,
    "layers_on_device_real": 30,
    "cache_type_k": "q8_0",
    "flash_attention": "enabled",
    "ubatch": 512,
}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None),
        ({"context": 4096, "slots": 1, "cache_type_k": "q8_0", "ubatch": 512}, None),
        ({"context": 4000}, None),
        ({"context": 3840}, "failed"),
        ({"context": 4097}, "failed"),
        ({"context": 8192}, "failed"),
        ({"layers_offloaded": 999}, None),
        ({"layers_offloaded": "all"}, None),
        ({"layers_offloaded": 31}, None),
        ({"layers_offloaded": 10}, "failed"),
        ({"cache_type_k": "Q8_0"}, None),
        ({"cache_type_k": "f16"}, "failed"),
        ({"flash_attention": "on"}, None),
        ({"flash_attention": True}, None),
        ({"flash_attention": "disabled"}, "failed"),
        ({"rope_scaling": "yarn"}, "inconclusive"),
        ({"rope_scaling": "yarn", "ubatch": 1024}, "failed"),
    ],
)
def test_applied(asked: dict[str, Any], expected: str | None) -> None:
    """Every setting that was asked for is found in the boot log, rounded contexts and more layers than there are included."""
    assert verdict(judge_applied(asked, FACTS)) == expected


def test_applied_names_the_setting() -> None:
    """A setting that was ignored is named with both values, and the boot's warnings are shown."""
    found = judge_applied({"context": 8192}, FACTS, warnings=["the slot context was capped"])
    assert found is not None
    assert "asked for 8192, got 4096" in found.text
    assert "the slot context was capped" in found.text


def test_layers_on_paper_only() -> None:
    """Layers that the engine claims to have offloaded without a buffer on a device are not applied."""
    facts = FACTS | {"layers_on_device_real": 0}
    assert verdict(judge_applied({"layers_offloaded": 999}, facts)) == "failed"
    assert verdict(judge_applied({"layers_offloaded": 0}, facts | {"layers_offloaded": 0})) is None


def test_running_server_disagrees() -> None:
    """The running server's own word counts beside the boot log's."""
    found = judge_applied({"context": 4096, "slots": 1}, FACTS, properties=Properties(context=2048, slots=4))
    assert found is not None
    assert "the running server serves 2048" in found.text
    assert "the running server has 4" in found.text
    assert judge_applied({"context": 4096}, FACTS, properties=Properties(context=4096, slots=4)) is None


@pytest.mark.parametrize(
    ("facts", "properties", "expected"),
    [
        ({"context": 4096}, None, None),
        ({}, Properties(context=4096), None),
        ({"context": 4096}, Properties(context=2048), "failed"),
        ({"context": 4095}, None, "failed"),
        ({}, None, "inconclusive"),
        ({}, Properties(), "inconclusive"),
    ],
)
def test_context(facts: dict[str, Any], properties: Properties | None, expected: str | None) -> None:
    """The context that is served is the context that was asked for, by everyone who says."""
    assert verdict(judge_context(4096, facts, properties=properties)) == expected


@pytest.mark.parametrize(
    ("asked", "slots", "unified", "served", "expected"),
    [
        # what llama-server printed for -c, -np and -kvu
        (4100, 8, False, 6144, None),
        (4100, 3, False, 4608, None),
        (1000, 5, False, 1280, None),
        (4100, 3, True, 4352, None),
        (4100, 1, False, 4352, None),
        (4100, 4, True, 4352, None),
        # what no rounding explains
        (4100, 3, True, 4608, "failed"),
        (4100, 1, False, 4608, "failed"),
        (4100, 8, False, 6400, "failed"),
        (4100, 8, False, 4096, "failed"),
        (4100, 8, False, 8192, "failed"),
    ],
)
def test_context_that_is_rounded_for_each_slot(
    asked: int, slots: int, unified: bool, served: int, expected: str | None
) -> None:
    """Slots that do not share a cache have theirs rounded up each; the log and the server are held to that."""
    facts = {"context": served, "slots": slots, "kv_unified": unified}
    assert verdict(judge_context(asked, facts)) == expected
    assert verdict(judge_applied({"context": asked}, facts)) == expected
    properties = Properties(context=served, slots=slots, settings={"kv_unified": unified})
    assert verdict(judge_context(asked, {}, properties=properties)) == expected
    assert verdict(judge_applied({"context": asked}, {}, properties=properties)) == expected


@pytest.mark.parametrize(
    ("asked", "real", "expected"),
    [
        (999, 31, None),
        ("all", 31, None),
        (None, 31, None),
        (31, 0, "failed"),
        (31, 30, None),  # the model's own, without the output layer
        (10, 31, "failed"),
        (0, 31, "failed"),
    ],
)
def test_layers(asked: int | str | None, real: int, expected: str | None) -> None:
    """Layers on the device are those asked for, at most all of them."""
    facts = {"layers_offloaded": 31, "layers_offloadable": 31, "layers_on_device_real": real}
    assert verdict(judge_layers(asked, facts)) == expected


@pytest.mark.parametrize("missing", ["layers_offloaded", "layers_offloadable", "layers_on_device_real"])
def test_layers_without_evidence(missing: str) -> None:
    """A log that does not say where the layers are proves nothing."""
    facts = {key: value for key, value in FACTS.items() if key != missing}
    assert verdict(judge_layers(999, facts)) == "inconclusive"


@pytest.mark.parametrize(
    ("start", "ready", "expected"),
    [
        (reading(10), reading(11), None),
        (reading(10), reading(10), "failed"),
        (reading(10, 20), reading(15), "inconclusive"),
        (NO, reading(10), "inconclusive"),
        (reading(10), NO, "inconclusive"),
    ],
)
def test_loaded(start: Measured, ready: Measured, expected: str | None) -> None:
    """A server that loaded its model holds more memory when it is ready than when it started."""
    assert verdict(judge_loaded(start, ready)) == expected

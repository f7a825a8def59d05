"""Several sources of idle memory: which of them grows, what that means, and what only looks like a leak."""

from __future__ import annotations

import random

import pytest

from pytest_vram.checks import judge_idle
from pytest_vram.readings import Measured, Reading, Unmeasurable

MIB = 1 << 20
GIB = 1 << 30
TURNS = 120


def line(rate: float = 0.0, base: float = 2000, spread: float = 3.0, turns: int = TURNS) -> list[int]:
    """Bytes per turn: a base and a straight rise in MiB, and noise."""
    source = random.Random(f"{rate} {base}")
    return [round((base + rate * turn + source.gauss(0, spread)) * MIB) for turn in range(turns)]


def plus(one: list[int], other: list[int]) -> list[int]:
    """One layer inside of another."""
    return [first + second for first, second in zip(one, other, strict=True)]


def steps(size: float, every: int, base: float = 600) -> list[int]:
    """A level in MiB that goes up by ``size`` every so many turns, without noise."""
    return [round((base + size * (turn // every)) * MIB) for turn in range(TURNS)]


def test_live_tensors_that_grow_are_a_leak_of_theirs() -> None:
    """Allocator and driver follow them; the innermost layer is named."""
    live = line(1, base=300, spread=0.5)
    reserved = plus(live, line(0, base=100, spread=0))
    found = judge_idle({"process": plus(reserved, line(base=400)), "torch-reserved": reserved, "torch-allocated": live})
    assert (found.kind, found.layer, found.cause) == ("leak", "torch-allocated", "live tensors")
    assert "a cache of the framework" in found.alike
    assert found.layers["process"].startswith("grows (")


@pytest.mark.parametrize("every", [11, 17, 24])
def test_what_the_allocator_keeps_is_no_leak_of_tensors(every: int) -> None:
    """Live tensors level, reserved and with it the process up by 20 MiB again and again."""
    reserved = steps(20, every)
    found = judge_idle(
        {"torch-allocated": line(base=300, spread=0), "torch-reserved": reserved, "process": plus(reserved, line())}
    )
    assert found.kind in ("inconclusive", "step", "warming"), found.text
    assert found.layer == "torch-reserved"
    if found.kind == "inconclusive":
        assert found.cause == "allocator cache"
        assert any("empty_cache" in way for way in found.settles)


def test_unused_parts_of_segments_that_grow_are_fragmentation() -> None:
    """Reserved and its unused split parts grow together, live tensors do not."""
    found = judge_idle(
        {
            "torch-allocated": line(base=300, spread=0),
            "torch-reserved": line(2, base=600, spread=0),
            "torch-inactive-split": line(2, base=100, spread=0),
        }
    )
    assert (found.kind, found.layer, found.cause) == ("inconclusive", "torch-reserved", "fragmentation")
    assert any("expandable_segments" in way for way in found.settles)


def test_reserved_alone_does_not_say_what_fills_it() -> None:
    """As a layer by itself, and as the source of the readings of a plain series."""
    growing = line(2)
    found = judge_idle({"torch-reserved": growing})
    assert (found.kind, found.cause) == ("inconclusive", "unknown")
    assert "torch-allocated beside it" in found.settles
    readings = [
        Reading(bytes=size, source="torch-reserved", scope="process", device="gpu0", exact=True) for size in growing
    ]
    assert judge_idle(readings).kind == "inconclusive"


def test_growth_outside_of_torch_is_a_leak_of_the_process() -> None:
    """Both counters of torch are level, the driver's figure of the process is not."""
    found = judge_idle(
        {
            "torch-allocated": line(base=300, spread=0),
            "torch-reserved": line(base=600, spread=0),
            "process": line(1, base=1200),
        }
    )
    assert (found.kind, found.layer, found.cause) == ("leak", "process", "outside torch")


def test_growth_outside_of_torch_is_seen_beside_a_growing_cache() -> None:
    """What torch reserved is taken off before the process is judged."""
    reserved = steps(20, 17)
    found = judge_idle(
        {
            "torch-allocated": line(base=300, spread=0),
            "torch-reserved": reserved,
            "process": plus(reserved, line(1.5, base=500)),
        }
    )
    assert (found.kind, found.layer, found.cause) == ("leak", "process", "outside torch")
    assert found.slope is not None
    assert found.slope > MIB


def test_somebody_else_on_the_device_is_not_our_leak() -> None:
    """The process is level, the device is not: flat, and the text says who grows."""
    found = judge_idle({"process": line(), "device": line(4, base=5000)})
    assert (found.kind, found.layer, found.cause) == ("flat", "device", "another process")
    assert "another process on the device" in found.text


def test_a_device_alone_is_judged_with_a_warning() -> None:
    """Where no figure of the process exists the device's rise counts, and may be another's."""
    found = judge_idle({"device": line(4)})
    assert (found.kind, found.layer, found.cause) == ("leak", "device", "unknown")
    assert "another process" in found.alike
    beside = judge_idle({"device": line(4), "torch-allocated": line(base=300), "torch-reserved": line(base=600)})
    assert beside.kind == "inconclusive"


@pytest.mark.parametrize("unit", ["share", "bytes"])
def test_a_pool_that_fills_is_no_leak(unit: str) -> None:
    """The cache's usage grows, as a share or in bytes, and the memory under it does not."""
    usage = [turn / 200 if unit == "share" else turn * 5 * MIB for turn in range(TURNS)]
    found = judge_idle({"process": line(), "kv-usage": usage})  # type: ignore[dict-item]
    assert (found.kind, found.layer) == ("flat", "kv-usage")
    assert "the pool fills" in found.text
    alone = judge_idle({"kv-usage": usage})  # type: ignore[dict-item]
    assert alone.kind == "inconclusive"


def test_a_prompt_cache_below_its_cap_is_named_and_no_leak() -> None:
    """Host memory grows by 3 MiB a turn, far below 8 GiB."""
    layers = {"process": line(), "host": line(3)}
    found = judge_idle(layers, caps={"prompt-cache": 8 * GIB})
    assert (found.kind, found.layer) == ("inconclusive", "host")
    assert found.alike == ["llama.cpp's prompt cache (--cache-ram)"]
    assert "--cache-ram 0 --ctx-checkpoints 0" in found.settles[0]
    plain = judge_idle(layers)
    assert plain.kind == "leak"
    assert "8 GiB unless set" in plain.alike[0]


def test_a_prompt_cache_past_its_cap_is_a_leak() -> None:
    """Three times the cap and growing: the limit is not enforced."""
    found = judge_idle({"host": line(5)}, caps={"prompt-cache": 200 * MIB})
    assert found.kind == "leak"
    assert "the limit is not enforced" in found.text


def test_a_cache_that_was_filled_is_level() -> None:
    """Up to the cap and then level: warming, flat or open, never a leak."""
    for turns in (30, 60, 90):
        host = [2000 * MIB + min(turn, turns) * 10 * MIB for turn in range(TURNS)]
        assert judge_idle({"host": host}, caps={"prompt-cache": 10 * turns * MIB}).kind != "leak"


def test_a_cap_of_host_memory_excuses_no_memory_of_the_card() -> None:
    """The process on the card leaks, whatever the prompt cache may take of the host."""
    caps = {"prompt-cache": 8 * GIB, "context-checkpoints": GIB}
    assert judge_idle({"process": line(1), "host": line()}, caps=caps).kind == "leak"
    card = [Reading(bytes=size, source="nvml-process", scope="process", device="gpu0", exact=False) for size in line(1)]
    assert judge_idle(card, caps=caps).kind == "leak"
    host = [Reading(bytes=size, source="host-anon", scope="backend", device="host", exact=True) for size in line(1)]
    assert judge_idle(host, caps=caps).kind == "inconclusive"


def test_context_checkpoints_have_a_cap_of_their_own() -> None:
    """With --cache-ram 0 the checkpoints are what is named."""
    found = judge_idle({"host": line(3)}, caps={"context-checkpoints": GIB})
    assert found.kind == "inconclusive"
    assert found.alike == ["llama.cpp's context checkpoints (--ctx-checkpoints)"]


def test_workspaces_of_cublas_are_recognised_by_their_size() -> None:
    """One of 8,519,680 bytes every seven turns, and a straight rise that is none."""
    process = [2 * GIB + 8_519_680 * (turn // 7) for turn in range(TURNS)]
    found = judge_idle({"process": process})
    assert "workspaces of cuBLAS: it grows by multiples of 8,519,680 bytes" in found.alike
    assert not any("multiples" in cause for cause in judge_idle({"process": line(2)}).alike)


def test_torch_above_what_is_there_is_invalid() -> None:
    """198.68 GB reserved on a card of 140 GB; above the process's figure; live above reserved."""
    reserved: list[Measured | int] = [198_680_000_000] * TURNS
    found = judge_idle({"torch-reserved": reserved, "torch-allocated": line()}, limit=140_000_000_000)
    assert found.kind == "invalid"
    assert "no longer mapped" in found.text
    assert judge_idle({"torch-reserved": reserved, "process": line()}).kind == "invalid"
    assert judge_idle({"torch-reserved": line(base=300), "torch-allocated": line(base=900)}).kind == "invalid"


def test_a_driver_figure_that_never_moves_is_not_believed() -> None:
    """What torch reserved inside of it moved by hundreds of MiB."""
    found = judge_idle({"process": [4 * GIB] * TURNS, "torch-reserved": steps(50, 10)})
    assert found.kind == "invalid"
    assert "is stuck" in found.text


def test_a_layer_that_could_not_be_read_is_covered_or_leaves_it_open() -> None:
    """The process covers torch's counters; nothing covers the process or the host."""
    unread: list[Measured | int] = [Unmeasurable(reason="no such counter here")] * TURNS
    assert judge_idle({"process": line(), "torch-allocated": unread}).kind == "flat"
    open_ones: list[dict[str, list[Measured | int]]] = [
        {"process": unread, "torch-allocated": [*line()]},
        {"process": [*line()], "host": unread},
    ]
    for layers in open_ones:
        found = judge_idle(layers)
        assert found.kind == "inconclusive"
        assert "no such counter here" in found.text
    assert judge_idle({"process": line(2), "host": unread}).kind == "leak"


def test_no_layers_decide_nothing() -> None:
    """An empty mapping, and layers without a turn."""
    assert judge_idle({}).kind == "inconclusive"
    assert judge_idle({"process": [], "host": []}).kind == "inconclusive"


def test_what_torch_gives_back_is_no_growth_outside_of_it() -> None:
    """Reserved falls, the process stays: nothing of the process grows."""
    found = judge_idle({"process": line(base=3000), "torch-reserved": line(-2, base=1500)})
    assert found.kind == "flat"


def test_a_cache_that_passed_its_cap_and_stopped_is_open() -> None:
    """Twice its cap, then level for the last fifth of the run."""
    host = [2000 * MIB + min(turn, 96) * 10 * MIB for turn in range(TURNS)]
    found = judge_idle({"host": host}, caps={"prompt-cache": 480 * MIB})
    assert found.kind in ("inconclusive", "warming")
    assert judge_idle({"host": host}).kind == "leak"

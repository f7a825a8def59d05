"""Settings, boots and memory held against what logs, buffers, sockets and servers show."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.backends.base import Properties
from pytest_vram.backends.listening import Holder, Listening
from pytest_vram.bootlog.boot import Boot, PhaseSpan
from pytest_vram.checks import (
    judge_answered,
    judge_applied,
    judge_counted,
    judge_experts,
    judge_fresh,
    judge_moved,
)
from pytest_vram.checks.finding import Finding
from pytest_vram.ledger import Entry
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import MIB


def verdict(finding: Finding | None) -> str | None:
    return None if finding is None else finding.verdict


def boot(*entries: tuple[Any, str, int], warnings: tuple[str, ...] = (), **changes: Any) -> Boot:
    found = tuple(
        Entry(bucket=bucket, device=device, bytes=size * MIB, source="engine-log") for bucket, device, size in entries
    )
    devices = {entry.device: f"CUDA{entry.device[-1]}" if entry.device != "host" else "CPU" for entry in found}
    keys: dict[str, Any] = {
        "engine": "llama-server",
        "era": "2026",
        "evidence": "complete",
        "devices": devices,
        **changes,
    }
    return Boot(entries=found, warnings=warnings, **keys)


ON_TWO = boot(
    ("weights", "gpu0", 90), ("kv", "gpu0", 30), ("weights", "gpu1", 30), ("kv", "gpu1", 10), ("weights", "host", 9)
)
ON_HOST = boot(("weights", "host", 90), ("kv", "host", 30))


@pytest.mark.parametrize(
    ("asked", "facts", "expected"),
    [
        ({"memory_share": 0.9}, {"memory_share": 0.9000001}, None),
        ({"memory_share": 0.9}, {"memory_share": 0.85}, "failed"),
        ({"rope_freq_scale": 1 / 3}, {"rope_freq_scale": 0.33333}, None),
        ({"quantization": "awq"}, {"quantization": "awq_marlin"}, None),
        ({"quantization": "awq"}, {"quantization": "gptq"}, "failed"),
        ({"cache_type": "fp8"}, {"cache_type": "auto"}, "failed"),
        ({"batch": 2048}, {"batch": 1000, "context": 1024}, None),
        ({"batch": 2048}, {"batch": 512, "context": 1024}, "failed"),
        ({"ubatch": 2048}, {"ubatch": 1000, "batch": 1000}, None),
        ({"ubatch": 2048}, {"ubatch": 512, "batch": 600}, "failed"),
        ({"mmap": False}, {"load_mode": "none"}, None),
        ({"mmap": False}, {"load_mode": "mmap"}, "failed"),
        ({"mmap": False}, {}, "inconclusive"),
        ({"prompt_cache_limit_bytes": 0}, {"prompt_cache": False}, None),
        ({"prompt_cache_limit_bytes": 0}, {"prompt_cache": True}, "failed"),
        ({"prompt_cache_limit_bytes": 5}, {"prompt_cache": False}, "failed"),
        ({"prompt_cache_limit_bytes": 5}, {"prompt_cache_limit_bytes": 5}, None),
        ({"swa_full": True}, {"sliding_window": 0}, "failed"),
        ({"swa_full": True}, {"kv_cells": 4096, "kv_cells_sliding": 1024}, "failed"),
        ({"swa_full": True}, {"kv_cells": 4096, "kv_cells_sliding": 4096}, None),
        ({"n_cpu_moe": 2}, {"experts": 0}, "failed"),
        ({"n_cpu_moe": 2}, {"experts": 8, "tensor_overrides": 6, "layers": 4}, None),
        ({"n_cpu_moe": 99}, {"experts": 8, "tensor_overrides": 12, "layers": 4}, None),
        ({"n_cpu_moe": 9}, {"experts": 8, "tensor_overrides": 3, "layers": 30}, "failed"),
        ({"n_cpu_moe": 2}, {"experts": 8}, "inconclusive"),
        ({"override_tensor": True}, {}, "inconclusive"),
        ({"yarn_orig_ctx": 4096}, {}, "inconclusive"),
        ({"context_per_slot": 2048}, {"context_per_slot": 1024}, "failed"),
    ],
)
def test_settings_by_facts(asked: dict[str, Any], facts: dict[str, Any], expected: str | None) -> None:
    """What a log shows of a setting decides; what it does not show is not called applied."""
    assert verdict(judge_applied(asked, facts)) == expected


@pytest.mark.parametrize(
    ("asked", "seen", "expected"),
    [
        ({"tensor_split": "3,1"}, ON_TWO, None),
        ({"tensor_split": "1,1"}, ON_TWO, "failed"),
        ({"tensor_split": "1,0"}, ON_TWO, "failed"),
        ({"tensor_split": "nonsense"}, ON_TWO, "inconclusive"),
        ({"split_mode": "none"}, ON_TWO, "failed"),
        ({"split_mode": "layer"}, ON_TWO, None),
        ({"split_mode": "row"}, ON_TWO, "inconclusive"),
        ({"device": "CUDA0,CUDA1"}, ON_TWO, None),
        ({"device": "CUDA0"}, ON_TWO, "failed"),
        ({"device": "CUDA0,CUDA1,CUDA2"}, ON_TWO, "failed"),
        ({"device": "none"}, ON_TWO, "failed"),
        ({"device": "none"}, ON_HOST, None),
        ({"kv_offload": False}, ON_TWO, "failed"),
        ({"kv_offload": False}, ON_HOST, None),
        ({"n_cpu_moe": 4}, ON_HOST, None),
        ({"n_cpu_moe": 4}, ON_TWO, "inconclusive"),
        ({"draft": True}, ON_TWO, "inconclusive"),
        ({"draft": True}, boot(("draft", "gpu0", 5)), None),
        ({"projector": True}, boot(("projector", "host", 5)), None),
    ],
)
def test_settings_by_buffers(asked: dict[str, Any], seen: Boot, expected: str | None) -> None:
    """Settings of placement are judged by where the printed buffers lie."""
    assert verdict(judge_applied(asked, {}, boot=seen)) == expected


@pytest.mark.parametrize(
    ("asked", "properties", "expected"),
    [
        ({"draft": True}, Properties(draft=False), "failed"),
        ({"draft": True}, Properties(draft=True), None),
        ({"projector": True}, Properties(projector=False), "failed"),
        ({"lora": True}, Properties(adapters=0), "failed"),
        ({"lora": True}, Properties(adapters=1), None),
        ({"context": 8192}, Properties(context=4096), "failed"),
        ({"context_per_slot": 8192}, Properties(context_per_slot=8192), None),
        ({"tensor_parallel": 2}, Properties(settings={"tensor_parallel": 1}), "failed"),
    ],
)
def test_settings_by_the_server(asked: dict[str, Any], properties: Properties, expected: str | None) -> None:
    """The running server's word counts where the log has none."""
    assert verdict(judge_applied(asked, {}, properties=properties)) == expected


def test_names_of_what_is_wrong_and_of_what_is_not_provable() -> None:
    """A failure names the ignored setting first, and besides it what no source shows."""
    found = judge_applied({"ubatch": 1024, "yarn_orig_ctx": 4096}, {"ubatch": 512})
    assert found is not None
    assert "Asked for, but not in effect: ubatch." in found.text
    assert "asked for 1024, got 512" in found.text
    assert "yarn_orig_ctx" in found.text
    silent = judge_applied({"yarn_orig_ctx": 4096}, {})
    assert silent is not None
    assert "not provable: yarn_orig_ctx" in silent.text


@pytest.mark.parametrize(("locked", "expected"), [(None, None), (4096, None), (0, "failed")])
def test_a_lock_that_never_happened(locked: int | None, expected: str | None) -> None:
    """A log without complaint proves no lock where the kernel counts none."""
    assert verdict(judge_applied({"mlock": True}, {}, locked=locked)) == expected


@pytest.mark.parametrize(
    ("printed", "moved", "unmoved", "expected"),
    [(509, 500, 100, None), (101, 500, 100, "failed"), (300, 500, 100, "inconclusive"), (100, 100, 100, "failed")],
)
def test_experts_by_estimates(printed: int, moved: int, unmoved: int, expected: str | None) -> None:
    """The weights on the host are those with experts there, those without, or neither."""
    finding = judge_experts(printed * MIB, moved=moved * MIB, unmoved=unmoved * MIB, asked=4)
    assert verdict(finding) == expected


@pytest.mark.parametrize(
    ("sent", "counted", "expected"),
    [(100, 100, None), (100, 101, None), (100, 99, "failed"), (100, None, "inconclusive")],
)
def test_tokens_counted(sent: int, counted: int | None, expected: str | None) -> None:
    """A prompt of which a part is missing was cut, though it was answered."""
    assert verdict(judge_counted(sent, counted, context=64)) == expected


OURS = Holder(pid=7, program="llama-server", ours=True)


@pytest.mark.parametrize(
    ("changes", "seen", "expected"),
    [
        ({}, None, None),
        ({"holders": (Holder(pid=9, program="old", ours=False),)}, None, "failed"),
        ({"holders": (OURS, Holder(pid=9, program="old", ours=False))}, None, "failed"),
        ({"holders": (Holder(pid=9, program="old", ours=True, older_by=60.0),)}, None, "failed"),
        ({"holders": (), "reason": "its process belongs to another user"}, None, "inconclusive"),
        ({"log_older_by": 30.0}, None, "failed"),
        ({"log_older_by": 0.0}, None, None),
        ({}, boot(facts={"url": "http://127.0.0.1:8080"}), None),
        ({}, boot(facts={"url": "http://127.0.0.1:9090"}), "failed"),
        ({"reads_port": False}, boot(facts={"url": "http://127.0.0.1:9090"}), None),
        ({}, boot(facts={"url": "http://[broken"}), None),
        ({}, boot(clock="start", phases=(PhaseSpan(name="ready", line=9, start=300.0),)), "failed"),
        ({}, boot(clock="epoch", phases=(PhaseSpan(name="ready", line=9, start=3e9),)), None),
        ({}, boot(clock="start", phases=(PhaseSpan(name="ready", line=9, start=3.0),)), None),
    ],
)
def test_a_fresh_boot(changes: dict[str, Any], seen: Boot | None, expected: str | None) -> None:
    """The socket's owner and the log must be of this boot, and an owner that cannot be seen proves nothing."""
    keys: dict[str, Any] = {"port": 8080, "holders": (OURS,), "age": 10.0, **changes}
    assert verdict(judge_fresh(Listening(**keys), seen)) == expected


def reading(size: int, device: str = "gpu0", most: int | None = None) -> Reading:
    top = None if most is None else most * MIB
    return Reading(bytes=size * MIB, source="rpc-hwm", scope="backend", device=device, exact=True, at_most=top)


NO = Unmeasurable(reason="no counter")


@pytest.mark.parametrize(
    ("start", "ready", "seen", "expected"),
    [
        ({"gpu0": reading(0), "gpu1": reading(0)}, {"gpu0": reading(120), "gpu1": reading(40)}, ON_TWO, []),
        ({"gpu0": reading(0), "gpu1": reading(5)}, {"gpu0": reading(120), "gpu1": reading(5)}, ON_TWO, ["failed"]),
        ({"gpu0": reading(0)}, {"gpu0": reading(60)}, ON_TWO, ["failed"]),
        ({"gpu0": reading(0)}, {"gpu0": reading(60, most=200)}, ON_TWO, []),
        ({"gpu0": NO}, {"gpu0": reading(120)}, ON_TWO, ["inconclusive"]),
        ({"gpu7": reading(0)}, {"gpu7": reading(9)}, ON_TWO, ["inconclusive"]),
        ({"host": reading(5)}, {"host": reading(6)}, ON_HOST, []),
        ({"host": reading(5)}, {"host": reading(5)}, ON_HOST, ["failed"]),
        ({"gpu0": reading(5), "host": reading(5)}, {"gpu0": reading(5), "host": reading(9)}, None, []),
        ({"gpu0": reading(5)}, {"gpu0": reading(5)}, None, ["failed"]),
    ],
)
def test_memory_moved(
    start: dict[str, Measured], ready: dict[str, Measured], seen: Boot | None, expected: list[str]
) -> None:
    """Each device for which buffers were printed holds about that much more; without a log one of them does."""
    assert [one.verdict for one in judge_moved(start, ready, seen)] == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (reading(500), reading(500), None),
        (reading(500), reading(600), None),
        (reading(500), reading(437), None),
        (reading(500), reading(400), "failed"),
        (reading(500), NO, "inconclusive"),
    ],
)
def test_memory_stays_while_it_answers(before: Measured, after: Measured, expected: str | None) -> None:
    """A server whose memory falls by more than allocators give back does not hold what it answers with."""
    assert verdict(judge_answered(before, after)) == expected

"""Properties of boot logs: damage never invents memory, and a printed ledger reads back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import Follower, read
from pytest_vram.ledger import Bucket, Entry

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs"
RECORDED = {
    path.stem: path.read_text(encoding="utf-8").split("\n")
    for path in sorted(LOGS.glob("llama-server/2026-b*/*.log"))
    if path.stem != "verbose-dry-run"  # long; its own unit test covers it
}
MIB = 1 << 20
names = st.sampled_from(sorted(RECORDED))


def amounts(entries: tuple[Entry, ...]) -> Counter[tuple[int, str]]:
    return Counter((entry.bytes, entry.detail) for entry in entries)


def follow(lines: list[str]) -> tuple[Entry, ...]:
    follower = Follower("llama-server")
    for line in lines:
        follower.feed(line)
    return follower.boot().entries


@settings(max_examples=60, deadline=None)
@given(name=names, data=st.data())
def test_cut_log(name: str, data: st.DataObject) -> None:
    """A log that is cut anywhere reports no buffer that was not printed before the cut."""
    lines = RECORDED[name]
    cut = data.draw(st.integers(0, len(lines)))
    printed = "\n".join(lines[:cut])
    for entry in follow(lines[:cut]):
        assert f"{entry.bytes / MIB:.2f} MiB" in printed
        assert entry.detail.rsplit(" ", 2)[0] in printed


@settings(max_examples=60, deadline=None)
@given(name=names, data=st.data(), junk=st.text(max_size=60))
def test_garbled_line(name: str, data: st.DataObject, junk: str) -> None:
    """A log with one line garbled never fails to read, and reports no buffer that the whole log does not have."""
    lines = list(RECORDED[name])
    at = data.draw(st.integers(0, len(lines) - 1))
    keep = data.draw(st.integers(0, len(lines[at])))
    lines[at] = lines[at][:keep] + junk.replace("\n", " ")
    printed = "\n".join(lines)
    for entry in follow(lines):
        assert f"{entry.bytes / MIB:.2f} MiB" in printed


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=80), max_size=30))
def test_any_text(lines: list[str]) -> None:
    """Any text can be followed."""
    for engine in ("llama-server", "command"):
        follower = Follower(engine)
        for line in lines:
            follower.feed(line)
        follower.boot()


WORDS: dict[Bucket, str] = {"weights": "model", "kv": "KV", "recurrent": "RS", "compute": "compute", "lora": "LoRA"}
DEVICES = ["CUDA0", "CUDA1", "Vulkan0", "ROCm0", "RPC0[10.0.0.1:50052]", "RPC0[10.0.0.2:50052]"]
HOSTS = ["CPU", "CPU_Mapped", "CPU_REPACK", "CUDA_Host", "Vulkan_Host"]
hundredths = st.integers(0, 5_000_000)
bucket_rows = st.dictionaries(
    st.tuples(st.sampled_from(sorted(WORDS)), st.sampled_from(DEVICES + HOSTS)), hundredths, min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(rows=bucket_rows, prefixed=st.booleans())
def test_round_trip(rows: dict[tuple[Bucket, str], int], prefixed: bool) -> None:
    """A ledger that is printed as llama.cpp prints it reads back to the same buckets and devices."""
    order: dict[Bucket, int] = {"weights": 0, "lora": 1, "kv": 2, "recurrent": 3, "compute": 4}
    lines = ["load_tensors: loading model tensors, this can take a while... (mmap = true)"]
    began = {"kv": False, "compute": False}
    for (bucket, device), amount in sorted(rows.items(), key=lambda row: order[row[0][0]]):
        if bucket in ("kv", "recurrent", "compute") and not began["kv"]:
            began["kv"] = True
            lines.append("llama_context: constructing llama_context")
        if bucket == "compute" and not began["compute"]:
            began["compute"] = True
            lines.append("sched_reserve: reserving ...")
        lines.append(f"any_name: {device:>10} {WORDS[bucket]} buffer size = {amount / 100:8.2f} MiB")
    if prefixed:
        lines = [f"0.{i // 1000:02d}.{i % 1000:03d}.000 I {line}" for i, line in enumerate(lines)]
    boot = read("\n".join(lines) + "\n", engine="llama-server")
    labels = {name: label for label, name in boot.devices.items()}
    expected: Counter[tuple[Bucket, str]] = Counter()
    for (bucket, device), amount in rows.items():
        label = "host" if device in HOSTS else labels[device]
        expected[bucket, label] += round(amount * MIB / 100)
    found = {(bucket, label): size for bucket, row in boot.ledger().buckets().items() for label, size in row.items()}
    assert set(found) == set(expected)
    for key, size in found.items():
        assert abs(size - expected[key]) <= len(rows)  # each figure is rounded to whole bytes
    assert len({label for label in boot.devices if label != "host"}) == len({d for _, d in rows if d not in HOSTS})

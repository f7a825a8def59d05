"""Logs made of random figures, in the format of each era of each engine, read back to the same figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import Boot, Follower, read
from pytest_vram.bootlog.boots import Boots
from pytest_vram.bootlog.files import log_of_text
from pytest_vram.bootlog.grammar import recognise
from pytest_vram.bootlog.scanning import hand_over
from pytest_vram.ledger import Ledger
from pytest_vram.testing.bootlogs import Written, writers

WRITERS = writers()
every_era = pytest.mark.parametrize("name", sorted(WRITERS))
seeds = st.integers(0, 2**32 - 1)


def written(name: str, seed: int) -> Written:
    return WRITERS[name](Random(seed))


def figures(boot: Boot) -> dict[str, Any]:
    """What a boot says beside times: the same whatever carried the log."""
    failure = boot.failure
    told = None if failure is None else (failure.kind, failure.phase, failure.bucket, failure.device, failure.bytes)
    facts = {name: value for name, value in boot.facts.items() if not name.endswith("_seconds")}
    return {
        "engine": boot.engine,
        "buckets": boot.ledger().buckets(),
        "devices": boot.devices,
        "facts": facts,
        "failure": told,
        "ready": boot.ready,
        "evidence": boot.evidence,
        "phases": [span.name for span in boot.phases],
    }


# ---------------------------------------------------------------- as it was written


@every_era
@settings(max_examples=12, deadline=None)
@given(seed=seeds)
def test_reads_back(name: str, seed: int) -> None:
    """A log is recognised as its engine's, and gives back its buffers, facts, failure and readiness."""
    log = written(name, seed)
    engine = recognise(log.text)
    boot = read(log.text)
    assert boot.engine == log.engine
    assert engine is not None
    assert boot.ledger().buckets() == Ledger(entries=log.entries).buckets()
    assert {label: boot.devices.get(label) for label in log.devices} == log.devices
    assert {key: boot.facts.get(key) for key in log.facts} == log.facts
    assert boot.ready == log.ready
    assert (None if boot.failure is None else boot.failure.kind) == log.failure


# ---------------------------------------------------------------- as it was carried here


def docker(lines: list[str]) -> list[str]:
    return [
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-01-02T03:04:05.678901Z"}) for line in lines
    ]


def before(prefix: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [prefix + line for line in lines]


WRAPPERS: dict[str, Callable[[list[str]], list[str]]] = {
    "journald": before("Oct 13 12:00:00 host server.service[123]: "),
    "journalctl -o short-iso": before("2026-10-13T12:00:00+0200 host server[123]: "),
    "compose": before("server-1  | "),
    "kubernetes": before("2026-01-02T03:04:05.678901Z stderr F "),
    "kubectl --prefix": before("[pod/server-0/main] "),
    "docker": docker,
    "ci": before("2026-01-01T00:00:00.0000000Z "),
    "github": before("build\tRun the tests\t2026-01-01T00:00:00.0000000Z "),
    "gitlab": before("2026-01-01T00:00:00.000000Z 00O "),
    "localai": before("11:59PM DBG GRPC(model-127.0.0.1:41234): stderr "),
    "compose of docker": lambda lines: before("server-1  | ")(docker(lines)),
    "compose with times": before("server-1  | 2026-01-02T03:04:05.678901Z "),
    "colours": lambda lines: [f"\x1b[36mserver-1  | \x1b[0m{line}\x1b[0m" for line in lines],
    "windows": lambda lines: [f"{line}\r" for line in lines],
}  # fmt: skip


@every_era
@settings(max_examples=6, deadline=None)
@given(seed=seeds, wrapper=st.sampled_from(sorted(WRAPPERS)))
def test_wrapped(name: str, seed: int, wrapper: str) -> None:
    """What carries a log line by line changes nothing of what it says."""
    log = written(name, seed)
    lines = WRAPPERS[wrapper](log.text.removesuffix("\n").split("\n"))
    assert figures(read("\n".join(lines) + "\n")) == figures(read(log.text))


@every_era
@settings(max_examples=4, deadline=None)
@given(seeds=st.tuples(seeds, seeds))
def test_last_boot(name: str, seeds: tuple[int, int]) -> None:
    """Of two boots in one log the last one counts, with nothing of the first."""
    first, last = (written(name, seed) for seed in seeds)
    both, alone = read(first.text + last.text), read(last.text)
    assert both.ledger().buckets() == alone.ledger().buckets()
    assert both.ready == alone.ready
    assert (both.failure and both.failure.kind) == (alone.failure and alone.failure.kind)


# ---------------------------------------------------------------- damaged


def follow(engine: str, lines: list[str]) -> Boot:
    follower = Follower(engine)
    for line in lines:
        follower.feed(line)
    return follower.boot()


def printed(engine: str, lines: list[str]) -> set[tuple[str, str]]:
    """What is reported of the log as far as it goes, after each of its lines: later ones may say the same better."""
    follower = Follower(engine)
    found: set[tuple[str, str]] = set()
    for line in lines:
        follower.feed(line)
        found |= reported(follower.boot())
    return found


def reported(boot: Boot) -> set[tuple[str, str]]:
    """Which kind of memory on which device, by the engine's own name of it."""
    return {(entry.bucket, boot.devices.get(entry.device, entry.device)) for entry in boot.entries}


def damaged(lines: list[str], data: st.DataObject) -> list[str]:
    at = data.draw(st.integers(0, max(0, len(lines) - 1)))
    how = data.draw(st.sampled_from(["cut", "drop", "double", "shorten", "junk", "swap"]))
    if how == "cut":
        return lines[:at]
    if how == "drop":
        return [*lines[:at], *lines[at + 1 :]]
    if how == "double":
        return [*lines[: at + 1], *lines[at:]]
    if how == "swap":
        return [*lines[:at], *reversed(lines[at : at + 2]), *lines[at + 2 :]]
    keep = data.draw(st.integers(0, len(lines[at])))
    junk = data.draw(st.text(max_size=40)).replace("\n", " ") if how == "junk" else ""
    return [*lines[:at], lines[at][:keep] + junk, *lines[at + 1 :]]


#: What a draft model's part may be taken for.
_OTHERWISE = {"draft", "projector", "weights", "kv", "compute", "recurrent", "other"}


@every_era
@settings(max_examples=15, deadline=None)
@given(seed=seeds, data=st.data())
def test_damaged(name: str, seed: int, data: st.DataObject) -> None:
    """A log that is cut anywhere, or of which a line is garbled, lost, doubled or swapped, never fails to read, and
    reports no memory on a device that was not printed, and no kind of memory that was not."""
    log = written(name, seed)
    engine = recognise(log.text)
    assert engine is not None
    lines = log.text.split("\n")
    whole = printed(engine, lines)
    found = follow(engine, damaged(lines, data))
    buckets, devices = {bucket for bucket, _ in whole}, {device for _, device in whole}
    for bucket, device in reported(found) - whole:
        if "draft" in buckets:  # where the line is lost that says whose it is, it is taken for the model's own
            assert bucket in _OTHERWISE
        else:
            assert bucket in buckets
            assert device not in devices
        # where the line is lost that says of what kind it is, it has a name that claims nothing
        assert device in devices or device in log.text or re.fullmatch(r"GPU\d", device)


@every_era
@settings(max_examples=6, deadline=None)
@given(seed=seeds, data=st.data())
def test_lines_left_out(name: str, seed: int, data: st.DataObject) -> None:
    """A grammar that is given the lines with its words alone says the same as one that is given all of them, also where
    requests come between."""
    log = written(name, seed)
    lines = log.text.split("\n")
    noise = data.draw(st.lists(st.sampled_from(NOISE), max_size=12))
    for line in noise:
        lines.insert(data.draw(st.integers(1, len(lines))), line)
    engine = recognise(log.text)
    assert engine is not None
    some, every = Boots(engine, {}), Boots(engine, {})
    every.words = None
    for boots in (some, every):
        hand_over(log_of_text("\n".join(lines)).blocks(), boots)
    assert some.boot() == every.boot()


NOISE = [
    'INFO:     127.0.0.1:1234 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    '[GIN] 2025/10/22 - 10:00:00 | 200 |  1.2s | 127.0.0.1 | POST "/api/chat"',
    "0.03.041.783 D slot process_toke: id  0 | task 0 | n_decoded = 2, n_remaining = 6, next token:   816 ' –'",
    "0.03.041.784 D que    start_loop: processing task, id = 7",
    "0.03.041.784 D srv    operator(): http: streamed chunk: data: {\"choices\":[{\"delta\":{\"content\":\" the\"}}]}",
    "slot update_slots: id  0 | task 0 | n_past = 12, n_tokens = 1, progress = 0.5",
    '{"messages":[{"role":"user","content":"is this text a line of a log?"}]}',
    "You are a helpful assistant",
    "",
]  # fmt: skip

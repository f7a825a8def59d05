"""Advice where host memory ran out: the kernel ended the server, or refused it memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_vram.advice.records import Advice, Saving
from pytest_vram.advice.words import words
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.units import mib

_HOST = "host"
_PROMPT_CACHE = 8 << 30
#: What the reader of a log notes where it was the machine that ran out, and no limit of a container or a service.
_WHOLE = "the host's memory ran out"


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """What takes host memory by the log, the cheapest first."""
    return tuple(_advice(boot, failure))


def _advice(boot: Boot, failure: Failure) -> Iterator[Advice]:
    word = words(boot.engine)
    held: dict[str, int] = {}
    for entry in boot.entries:
        if entry.device == _HOST:
            held[entry.detail] = held.get(entry.detail, 0) + entry.bytes
    facts = boot.facts
    if "mlock" in word and (facts.get("mlock") is True or "mlock" in str(facts.get("load_mode", ""))):
        why = "locked pages can neither be dropped nor swapped out, so that every other program has less"
        yield _rule(word["mlock"].setting, "on", "off", why, "", word["mlock"].flag, "no `mlock` in the log", failure)
    if "mmap" in word and facts.get("mmap") is False and boot.engine != "ollama":
        why = "a mapped file's pages can be dropped and read again; what is read into buffers must stay"
        flag = "without --no-mmap"
        proof = "`CPU_Mapped model buffer size`"
        cost = "nothing, where the CPU does not need the weights in another order"
        yield _rule(word["mmap"].setting, "off", "on", why, cost, flag, proof, failure)
    mapped = sum(size for name, size in held.items() if "Mapped" in name)
    copied = sum(size for name, size in held.items() if "REPACK" in name or "AMX" in name)
    if "mmap" in word and mapped and copied:
        why = f"the file's pages ({mib(mapped)}) lie in memory beside the copy in the order of the CPU ({mib(copied)})"
        yield Advice(
            setting=word["mmap"].setting,
            before="on",
            after="off",
            effect="saves",
            why=why,
            device=_HOST,
            bucket="weights",
            saves_bytes=Saving(bytes=0, at_most=min(mapped, copied)),
            source="engine-log",
            cost="the model loads more slowly",
            flag=word["mmap"].flag,
            proof="no `CPU_Mapped model buffer size` line",
        )
    if "cache-ram" in word and boot.ready:
        why = f"finished prompts are kept in host memory, up to {mib(_PROMPT_CACHE)} where nothing else is said"
        cost = "a conversation that comes back is read again"
        proof = "no `cache state` lines"
        yield _rule("cache-ram", "not printed", "0", why, cost, word["cache-ram"].flag, proof, failure)
    weights = sum(size for name, size in held.items() if "model" in name)
    if weights:
        why = f"{mib(weights)} of weights are in host memory"
        cost = "a little accuracy, and another file of the same model"
        flag = word["model"].flag.format("Q4_K_M")
        before = str(facts.get("quantization") or "not printed")
        yield _rule(
            "model", before, "a smaller quantisation", why, cost, flag, "a smaller `model buffer size`", failure
        )
    cache: Any = sum(entry.bytes for entry in boot.entries if entry.device == _HOST and entry.bucket == "kv")
    if cache and "context" in word:
        why = f"a KV cache of {mib(cache)} is in host memory"
        before = str(facts.get("context") or "not printed")
        flag = word["context"].flag.format("N")
        cost = "shorter conversations and documents"
        proof = "a smaller `KV buffer size`"
        yield _rule(word["context"].setting, before, "a shorter one", why, cost, flag, proof, failure)
    why = "what the device does not take, host memory must: layers and experts that fit on the card leave the host"
    if "layers" in word and facts.get("layers_offloaded") not in (None, facts.get("layers_offloadable")):
        now = str(facts["layers_offloaded"])
        flag = word["layers"].flag.format("N")
        cost = "the device holds more"
        proof = "`offloaded N/` in the line about layers"
        yield _rule(word["layers"].setting, now, "more", why, cost, flag, proof, failure)
    if _WHOLE in (failure.note or ""):
        why = f"every program shares it ({failure.note})"
        yield _rule("other programs", "running", "ended", why, "", "", "more `available` in `free -m`", failure)
        return
    why = f"the host has a limit of its own ({failure.note or failure.text})"
    flag = "docker run --memory, systemd MemoryMax="
    yield _rule("memory limit", "not printed", "a higher one", why, "", flag, "", failure)


def _rule(
    setting: str, before: str, after: str, why: str, cost: str, flag: str, proof: str, failure: Failure
) -> Advice:
    return Advice(
        setting=setting,
        before=before,
        after=after,
        effect="saves",
        why=why,
        device=_HOST,
        bucket=failure.bucket,
        source="rule",
        cost=cost,
        flag=flag,
        proof=proof,
    )

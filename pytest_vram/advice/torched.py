"""Advice from torch's own message, for models that run in transformers."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_vram.advice.records import Advice, Saving
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.units import MIB, mib

#: Bits of a weight in four-bit formats of bitsandbytes, their scales included.
_FOUR_BITS = 4.5
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """What to change, the setting of the bucket that failed first."""
    if failure.bytes is not None and failure.free is not None and failure.free >= failure.bytes:
        return tuple(_no_shortage(failure))
    if failure.bucket == "other" and failure.certainty == "certain":
        return tuple(_training(failure))
    made = list(_advice(boot, failure))
    weights = failure.bucket in ("weights", "experts") or failure.phase == "weights"
    first = "weights" if weights else failure.bucket or "kv"
    return tuple(sorted(made, key=lambda one: (one.effect != "saves", one.bucket != first)))


def _no_shortage(failure: Failure) -> Iterator[Advice]:
    """More was free than was asked for: no smaller setting is about that."""
    free, size = mib(failure.free or 0), mib(failure.bytes or 0)
    said = f"{free} were free and {size} were refused: something else than the device's size holds it back"
    causes = "such as a limit of the process or of WSL, or a program that took memory at that moment"
    proof = "the same allocation alone, in a new process"
    yield _rule(failure, "limits of the process", "none", f"{said}, {causes}", proof=proof)
    why = f"{free} were free: {size} are not short of memory"
    for setting in ("batch_size", "cache_implementation", "max_new_tokens", "quantization_config"):
        yield _useless(failure, setting, why)


def _training(failure: Failure) -> Iterator[Advice]:
    """Gradients and an optimizer's state: settings of serving have no part in it."""
    for setting, after, why, cost, flag in (
        (
            "per_device_train_batch_size",
            "1",
            "activations of every sequence of a batch are kept until the step back",
            "slower steps; gradient_accumulation_steps keeps the size of a batch",
            "per_device_train_batch_size=1, gradient_accumulation_steps=N",
        ),
        (
            "gradient_checkpointing",
            "on",
            "activations are computed again in place of being kept",
            "steps take about a third longer",
            "gradient_checkpointing=True",
        ),
        (
            "optim",
            "8 bits",
            "an optimizer of Adam's kind keeps two more values for each weight",
            "a little accuracy, and the package bitsandbytes",
            'optim="adamw_bnb_8bit"',
        ),
    ):
        yield _rule(failure, setting, after, why, cost=cost, flag=flag, proof="`torch.cuda.max_memory_allocated()`")
    yield _useless(failure, "cache_implementation", "a step of training keeps no KV cache")


def _rule(
    failure: Failure, setting: str, after: str, why: str, *, cost: str = "", flag: str = "", proof: str = ""
) -> Advice:
    return Advice(
        setting=setting,
        before="not printed",
        after=after,
        effect="saves",
        why=why,
        device=failure.device,
        bucket=failure.bucket,
        source="rule",
        cost=cost,
        flag=flag,
        proof=proof,
    )


def _useless(failure: Failure, setting: str, why: str) -> Advice:
    return Advice(
        setting=setting,
        before="not printed",
        after="another",
        effect="nothing",
        why=why,
        device=failure.device,
        enough=False,
        source="engine-log",
    )


def _advice(boot: Boot, failure: Failure) -> Iterator[Advice]:
    device = failure.device
    allocated, reserved = (_number(boot, name) for name in ("allocated_bytes", "reserved_bytes"))
    # What the allocator keeps and nobody uses: old releases print all that it reserved, later ones the unused part.
    if reserved is not None and allocated is not None and reserved >= allocated:
        reserved -= allocated
    if reserved is not None and failure.bytes is not None:
        if reserved >= failure.bytes:
            yield Advice(
                setting=_ALLOCATOR,
                before="not printed",
                after="expandable_segments:True",
                effect="saves",
                why=f"{mib(reserved)} are reserved and unused, in pieces that are too small for {mib(failure.bytes)}",
                device=device,
                bucket=failure.bucket,
                saves_bytes=Saving(bytes=0, at_most=reserved),
                source="engine-log",
                cost="nothing on Linux with a recent torch",
                flag=f"{_ALLOCATOR}=expandable_segments:True",
                proof="less `reserved by PyTorch but unallocated`",
            )
        else:
            yield Advice(
                setting=_ALLOCATOR,
                before="not printed",
                after="expandable_segments:True",
                effect="nothing",
                why=f"only {mib(reserved)} are reserved and unused, and {mib(failure.bytes)} were asked for",
                device=device,
                enough=False,
                source="engine-log",
                flag=f"{_ALLOCATOR}=expandable_segments:True",
            )
    weights = failure.bucket in ("weights", "experts") or failure.phase == "weights"
    most = None
    if weights and allocated is not None and allocated > MIB:
        most = Saving(bytes=0, at_most=round(allocated * (1 - _FOUR_BITS / 16)))
    yield Advice(
        setting="quantization_config",
        before="not printed",
        after="4 bits",
        effect="saves",
        why="matrices of 16 bits become a little over four; embeddings and norms stay as they are",
        device=device,
        bucket="weights",
        saves_bytes=most,
        source="rule" if most is None else "engine-log",
        cost="a little accuracy, and the package bitsandbytes",
        flag="BitsAndBytesConfig(load_in_4bit=True)",
        proof="`model.get_memory_footprint()`",
    )
    if weights:
        for setting in ("cache_implementation", "max_new_tokens"):
            yield Advice(
                setting=setting,
                before="not printed",
                after="another",
                effect="nothing",
                why="memory ran out while the weights were loaded, before any cache",
                device=device,
                enough=False,
                source="engine-log",
            )
        yield Advice(
            setting="device_map",
            before="not printed",
            after="auto",
            effect="saves",
            why="blocks that do not fit go to other cards and to host memory",
            device=device,
            bucket="weights",
            source="rule",
            cost="blocks in host memory are very slow",
            flag='device_map="auto"',
            proof="`model.hf_device_map`",
        )
        return
    for setting, after, why, cost, flag in (
        (
            "batch_size",
            "1",
            "the cache holds every sequence that runs side by side",
            "one sequence at a time",
            "batch_size=1",
        ),
        (
            "cache_implementation",
            "quantized",
            "keys and values of 16 bits become four",
            "a little accuracy, slower decoding, and the package optimum-quanto",
            'cache_implementation="quantized"',
        ),
        (
            "cache_implementation",
            "offloaded",
            "the cache of all blocks but the one in use is in host memory",
            "answers are written more slowly",
            'cache_implementation="offloaded"',
        ),
        (
            "max_new_tokens",
            "less",
            "the cache grows with every token, and each growth copies it: both copies exist for a moment",
            "shorter prompts and answers",
            "max_new_tokens=N",
        ),
        (
            "attn_implementation",
            "sdpa",
            "eager attention holds the scores of every head for the whole prompt",
            "nothing",
            'attn_implementation="sdpa"',
        ),
    ):
        yield Advice(
            setting=setting,
            before="not printed",
            after=after,
            effect="saves",
            why=why,
            device=device,
            bucket="compute" if setting == "attn_implementation" else "kv",
            source="rule",
            cost=cost,
            flag=flag,
            proof="`torch.cuda.max_memory_allocated()`",
        )


def _number(boot: Boot, name: str) -> int | None:
    found = boot.facts.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None

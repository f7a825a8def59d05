"""Advice from the logs of vLLM and SGLang, which take a share of the card and fill it with cache.

Their planning says what it could not place; the figures are theirs, and what follows from them is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from pytest_vram.advice.records import Advice, Saving
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.units import mib

_GIB = 1 << 30
#: Shares beyond this leave too little for what the engine does not plan.
_LARGEST_SHARE = 0.95
_LONGEST = re.compile(r"estimated maximum model length is (\d{1,12})", re.ASCII)
_NEEDED = re.compile(
    r"max(?:imum)?[ _](?:seq(?:uence)?|model)[ _]len(?:gth)?\s*\((\d{1,12})\)", re.ASCII | re.IGNORECASE
)
_WANTED = re.compile(r"utilization \(([\d.]{1,12})|--mem-fraction-static=(\d?\.\d{1,6})", re.ASCII)
#: What SGLang says where the weights and what it keeps free take more than the share.
_NOTHING_LEFT = re.compile(
    r"profiled value (-\d{1,15})|KV cache memory: (-[\d.]{1,15})|No available memory for the cache blocks"
    r"|Not enough memory\. Please try to increase --mem-fraction-static|leave no GPU memory for the KV cache",
    re.ASCII,
)
_DUMMIES = re.compile(r"with (\d{1,6}) dummy requests", re.ASCII)
#: What a share is raised by beyond the least, so that there is a cache worth while.
_MORE = 0.03
#: What is proposed where the log does not say how many requests run at once.
_REQUESTS = 64
_TOKENS = 2048
_FEWEST_TOKENS = 512
#: Names of quantisations whose weights have four bits or so already.
_FOUR_BITS = ("awq", "gptq", "int4", "nvfp4", "mxfp4", "bitsandbytes", "w4a", "marlin", "auto-round", "gguf")


class _Words(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's own options."""

    share: str
    length: str
    requests: str
    cache: str
    graphs: str
    cards: str
    batch: str
    graph_sizes: str
    length_proof: str
    cache_proof: str


_VLLM = _Words(
    share="gpu-memory-utilization",
    length="max-model-len",
    requests="max-num-seqs",
    cache="kv-cache-dtype",
    graphs="enforce-eager",
    cards="tensor-parallel-size",
    batch="max-num-batched-tokens",
    graph_sizes="",
    length_proof="`Maximum concurrency for {} tokens per request`",
    cache_proof="`GPU KV cache size` with twice the tokens",
)
_SGLANG = _Words(
    share="mem-fraction-static",
    length="context-length",
    requests="max-running-requests",
    cache="kv-cache-dtype",
    graphs="disable-cuda-graph",
    cards="tp-size",
    batch="chunked-prefill-size",
    graph_sizes="cuda-graph-max-bs",
    length_proof="`context_len={}`",
    cache_proof="`#tokens` twice as many",
)


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """Advice for a planning that did not work out, a check before it, or a refused allocation."""
    made = _Log(boot, failure)
    ways = {"precheck": made.precheck, "kv_planning": made.planning}
    return tuple(sorted(ways.get(failure.kind, made.refused)(), key=lambda one: one.effect != "saves"))


class _Log:
    def __init__(self, boot: Boot, failure: Failure) -> None:
        self.boot, self.failure = boot, failure
        self.words = _VLLM if boot.engine == "vllm" else _SGLANG
        self.device = failure.device or next((label for label in boot.devices if label != "host"), None)
        self.share = self._share()
        self.weights = sum(
            entry.bytes
            for entry in boot.entries
            if entry.device == self.device and entry.bucket in ("weights", "experts")
        )

    def _share(self) -> float | None:
        found = self.boot.facts.get("memory_share")
        if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found <= 1:
            return float(found)
        said = _WANTED.search(self.failure.text)
        return float(said[1] or said[2]) if said else None

    def _number(self, name: str) -> int | None:
        found = self.boot.facts.get(name)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def precheck(self) -> Iterator[Advice]:
        """Less was free than the share of the card: nothing was loaded, and no setting of the model is to blame."""
        free, total = self.failure.free, self.failure.total
        before = "not printed" if self.share is None else f"{self.share:g}"
        if free is not None and total:
            share = math.floor(100 * free / total) / 100
            why = f"{mib(free)} of {mib(total)} are free before anything is loaded, and the share must be within that"
            yield self._made(
                self.words.share,
                before,
                f"{share:g}",
                why,
                cost="less room for the KV cache: fewer or shorter requests at once",
                proof="no `is less than desired GPU memory utilization`",
                enough=True,
                bucket=None,
            )
            held = total - free
            why = f"other programs, the desktop and what an earlier run left hold {mib(held)} of the card"
            yield self._made(
                "other programs", "running", "ended", why, proof="more in `Free memory on device`", bucket=None
            )
        for name in (self.words.length, self.words.cache, self.words.requests):
            why = "nothing was loaded yet: the check is about the share of the card alone"
            yield self._nothing(name, why)

    def planning(self) -> Iterator[Advice]:
        """After the weights too little was left for the cache."""
        room = self._room()
        negative = room is not None and room <= 0
        short = f"the weights{f' ({mib(self.weights)})' if self.weights else ''} leave nothing of the share of the card"
        if not negative:
            yield self._shorter()
            yield self._smaller_cache("each token takes half of it in the cache, so that twice as many fit")
        if self.share is None or self.share < _LARGEST_SHARE:
            yield self._more()
        why = "each card holds a part of the weights and of the cache"
        yield self._cards(why if not negative else f"{short}: each card holds a part")
        why = "fewer bytes of weights leave more for the cache"
        yield self._quantised(why if not negative else f"{short}: smaller weights do")
        if self.boot.engine == "vllm":  # which measures a step and keeps its peak free; SGLang keeps a fixed share
            yield from self._smaller_steps()
        if negative:
            for name in (self.words.length, self.words.cache):
                yield self._nothing(name, f"{short}: not even one token of cache fits, however small it is")

    def _shorter(self) -> Advice:
        """The longest request that the engine names, else a shorter one."""
        length = self._number("context") or self._length()
        said = _LONGEST.search(self.failure.text) or _LONGEST.search(self.failure.note or "")
        size = self._number("estimated_context") or (int(said[1]) if said else None)
        why = "the engine's own estimate of what the cache that is left holds: likely enough, so boot with it first"
        if not size:
            size = self._number("kv_tokens")
            why = "the cache that is left holds so many tokens: likely enough, so boot with it first"
        if not size or (length is not None and size >= length):
            why = "the cache must hold one request of full length"
            proof = self.words.length_proof.format("N")
            before = str(length or "not printed")
            return self._made(self.words.length, before, "less", why, cost="shorter requests", proof=proof)
        return self._made(
            self.words.length,
            str(length or "not printed"),
            str(size),
            why,
            cost=f"requests of at most {size} tokens",
            proof=self.words.length_proof.format(f"{size:,}"),
            source="engine-log",
        )

    def _smaller_cache(self, why: str) -> Advice:
        now = str(self.boot.facts.get("cache_type") or "auto")
        if now.startswith(("fp8", "int8", "int4", "nvfp4")):
            return self._nothing(self.words.cache, f"the cache is kept in {now} already", now, "fp8")
        return self._made(self.words.cache, now, "fp8", why, cost="a little accuracy", proof=self.words.cache_proof)

    def _cards(self, why: str, *, bucket: str = "kv") -> Advice:
        now = self._number("tensor_parallel")
        after = "twice as many" if now is None else str(2 * now)
        return self._made(
            self.words.cards,
            str(now or "not printed"),
            after,
            why,
            cost=f"{2 * now} cards" if now is not None else "twice as many cards",
            proof="smaller weights on each card",
            bucket=bucket,
        )

    def _quantised(self, why: str) -> Advice:
        now = str(self.boot.facts.get("quantization") or "").lower()
        if any(name in now for name in _FOUR_BITS):
            return self._nothing("model", f"the weights are in {now} already", now, "a quantised one")
        proof = "`Model loading took` less" if self.boot.engine == "vllm" else "`mem usage` of the weights is less"
        cost = "a little accuracy, and other files of the model"
        after = "one of four bits" if now and now != "none" else "a quantised one"
        return self._made("model", now or "not printed", after, why, cost=cost, proof=proof, bucket="weights")

    def refused(self) -> Iterator[Advice]:
        """The device refused an allocation: what the engine does not plan needs more room."""
        if self.failure.phase == "weights" or self.failure.bucket in ("weights", "experts"):
            yield self._quantised("the weights alone fill it")
            yield self._cards("each card holds a part", bucket="weights")
            for name in (self.words.share, self.words.length, self.words.cache):
                yield self._nothing(name, "memory ran out while the weights were loaded, before any cache")
            return
        capture = self.failure.phase == "graph-capture"
        named = self.words.share.replace("-", "_") in f"{self.failure.note} {self.failure.text}".replace("-", "_")
        steps = list(self._smaller_steps())
        if capture and self.words.graph_sizes:
            why = "a graph is recorded for each number of requests up to this one"
            cost = "more requests than that at once are answered more slowly"
            proof = "less in `Capture cuda graph end`"
            graphs = self._made(
                self.words.graph_sizes, "not printed", "16", why, cost=cost, proof=proof, bucket="compute"
            )
            yield self._less()
            yield graphs
        elif named:
            yield from steps[:1]
            yield self._less()
            steps = steps[1:]
        yield from steps
        if not named and not (capture and self.words.graph_sizes):
            yield self._less()

    def _less(self) -> Advice:
        """A smaller share: what is not planned has more."""
        now, before = self.share, "not printed"
        if now is not None:
            before = f"{now:g}"
        else:
            free = self._number("free_bytes")
            cache = sum(one.bytes for one in self.boot.entries if one.device == self.device and one.bucket == "kv")
            if free and cache and self.weights:
                now = min(1.0, (self.weights + cache) / free)
                before = f"about {now:.2f}"
        lower = None if now is None else f"{max(0.1, math.floor(round(100 * now - 5, 6)) / 100):g}"
        saves = None
        if self.share is not None and lower is not None and self.failure.total is not None:
            saves = Saving(bytes=math.floor(self.failure.total * (self.share - float(lower))))
        why = "what is not planned (activations, graphs, libraries) has what the share leaves"
        return self._made(
            self.words.share,
            before,
            lower or "less",
            why,
            cost="less room for the KV cache: fewer or shorter requests at once",
            proof="fewer tokens in the line of the cache's size",
            bucket="kv",
            saves=saves,
        )

    def _smaller_steps(self) -> Iterator[Advice]:
        said = _DUMMIES.search(self.failure.text)
        requests = self._number("slots") or self._number("max_num_seqs") or (int(said[1]) if said else None)
        if requests != 1:
            after = max(1, requests // 4) if requests is not None else _REQUESTS
            yield self._made(
                self.words.requests,
                str(requests or "not printed"),
                str(after),
                "what is computed at once is tried with as many requests at the start, and that memory is kept",
                cost="fewer requests at once",
                bucket="compute",
                proof="less memory for `graph`" if self.boot.engine == "vllm" else "less in `Capture cuda graph end`",
            )
        tokens = self._number("batch_tokens")
        if tokens is None or tokens > _FEWEST_TOKENS:
            fewer = _TOKENS if tokens is None or tokens > _TOKENS else tokens // 2
            why = "a step computes at most so many tokens, and its activations are kept free"
            before = str(tokens or "not printed")
            cost = "prompts are read more slowly"
            yield self._made(self.words.batch, before, str(fewer), why, cost=cost, bucket="compute")
        if self.boot.facts.get("eager") is not True:
            why = "recorded CUDA graphs take memory of their own"
            cost = "answers are written more slowly"
            proof = "no `Graph capturing finished`" if self.boot.engine == "vllm" else "no `Capture cuda graph begin`"
            yield self._made(self.words.graphs, "off", "on", why, cost=cost, proof=proof, bucket="compute")

    def _more(self) -> Advice:
        """A larger share, where the log says what it would have to be."""
        now = self.share
        before = "not printed" if now is None else f"{now:g}"
        why = "the engine takes this share of the card, and what the weights leave of it is cache"
        cost = "less is left for other programs and for what the engine does not plan"
        least = self._least_share()
        largest = self.boot.facts.get("largest_memory_share")
        after = min(_LARGEST_SHARE, largest) if isinstance(largest, float) and largest > (now or 0) else _LARGEST_SHARE
        if least is not None:
            if least > _LARGEST_SHARE:
                return self._nothing(self.words.share, f"it would have to be over {least:g} for any cache at all")
            why = f"the weights take more than the share: it must be over {least:g} for any cache at all"
            after = min(after, round(least + _MORE, 2))
        proof = "more tokens in the line of the cache's size"
        return self._made(self.words.share, before, f"{after:g}", why, cost=cost, proof=proof)

    def _least_share(self) -> float | None:
        """The share that the weights alone take, rounded up to two digits, where they take more than is given."""
        room, now = self._room(), self.share
        if room is None or room > 0:
            return None
        total = self.failure.total or self._number("device_bytes")
        if self.boot.engine == "vllm":
            if room >= -1 or not total or now is None:
                return None
            return math.ceil(round(100 * (now - room / total), 6)) / 100
        # SGLang counts from what was free before the weights, and keeps the rest of the share free beside them.
        before = self._number("free_bytes")
        if before is None and self.failure.free is not None and self.weights:
            before = self.failure.free + self.weights
        if before is None or not 0 < self.weights < before:
            return None
        return math.ceil(round(100 * self.weights / before, 6)) / 100

    def _room(self) -> int | None:
        """Bytes that were left for cache; negative where the weights took more than the share."""
        for entry in self.boot.entries:
            if entry.bucket == "kv" and entry.bytes < 0:
                return entry.bytes
        for name in ("kv_available_bytes", "kv_room", "kv_bytes_available"):
            found = self.boot.facts.get(name)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        tokens = self.boot.facts.get("kv_tokens")
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens <= 0:
            return tokens
        return -1 if _NOTHING_LEFT.search(self.failure.text) else None

    def _length(self) -> int | None:
        said = _NEEDED.search(self.failure.text)
        return int(said[1]) if said else None

    def _made(
        self,
        setting: str,
        before: str,
        after: str,
        why: str,
        *,
        cost: str = "",
        proof: str = "",
        enough: bool | None = None,
        bucket: str | None = "kv",
        saves: Saving | None = None,
        source: Literal["engine-log", "rule"] | None = None,
    ) -> Advice:
        flag = ""
        if setting not in ("model", "other programs"):
            value = re.fullmatch(r"[\w.-]+", after, re.ASCII) and after not in ("on", "less")
            flag = f"--{setting} {after}" if value else f"--{setting}"
        return Advice(
            setting=setting,
            before=before,
            after=after,
            effect="saves",
            why=why,
            device=self.device,
            bucket=bucket,
            saves_bytes=saves,
            enough=enough,
            source=source or ("engine-log" if enough or saves is not None else "rule"),
            cost=cost,
            flag=flag,
            proof=proof,
        )

    def _nothing(self, setting: str, why: str, before: str = "not printed", after: str = "another") -> Advice:
        return Advice(
            setting=setting,
            before=before,
            after=after,
            effect="nothing",
            why=why,
            device=self.device,
            enough=False,
            source="engine-log",
            flag="" if setting == "model" else f"--{setting}",
        )

"""Advice from the logs of vLLM and SGLang, which take a share of the card and fill it with cache.

Their planning says what it could not place; the figures are theirs, and what follows from them is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

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
_WANTED = re.compile(r"utilization \(([\d.]{1,12})", re.ASCII)


class _Words(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's own options."""

    share: str
    length: str
    requests: str
    cache: str
    graphs: str
    cards: str
    batch: str
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
    length_proof="`context_len={}`",
    cache_proof="`#tokens` twice as many",
)


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """Advice for a planning that did not work out, a check before it, or a refused allocation."""
    made = _Log(boot, failure)
    if failure.kind == "precheck":
        return tuple(made.precheck())
    if failure.kind == "kv_planning":
        return tuple(made.planning())
    return tuple(made.refused())


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
        return float(said[1]) if said else None

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
        longest = _LONGEST.search(self.failure.text) or _LONGEST.search(self.failure.note or "")
        room = self._room()
        negative = room is not None and room <= 0
        short = f"the weights{f' ({mib(self.weights)})' if self.weights else ''} leave nothing of the share of the card"
        if not negative:
            length = self._number("context") or self._length()
            if longest is not None and int(longest[1]) > 0:
                size = int(longest[1])
                why = "the engine says itself how long a request may be with the cache that is left"
                yield self._made(
                    self.words.length,
                    str(length or "not printed"),
                    str(size),
                    why,
                    cost=f"requests of at most {size} tokens",
                    proof=self.words.length_proof.format(f"{size:,}"),
                    enough=True,
                )
            else:
                why = "the cache must hold one request of full length"
                cost = "shorter requests"
                proof = self.words.length_proof.format("N")
                yield self._made(self.words.length, str(length or "not printed"), "less", why, cost=cost, proof=proof)
            why = "each token takes half of it in the cache, so that twice as many fit"
            yield self._made(
                self.words.cache, "auto", "fp8", why, cost="a little accuracy", proof=self.words.cache_proof
            )
        if self.share is None or self.share < _LARGEST_SHARE:
            yield self._more()
        why = (
            "each card holds a part of the weights and of the cache"
            if not negative
            else f"{short}: each card holds a part"
        )
        yield self._made(
            self.words.cards, "not printed", "2", why, cost="a second card", proof="smaller weights on each card"
        )
        why = "fewer bytes of weights leave more for the cache" if not negative else f"{short}: smaller weights do"
        proof = "`Model loading took` less" if self.boot.engine == "vllm" else "`mem usage` of the weights is less"
        cost = "a little accuracy, and other files of the model"
        yield self._made("model", "not printed", "a quantised one", why, cost=cost, proof=proof, bucket="weights")
        yield from self._smaller_steps()
        if negative:
            for name in (self.words.length, self.words.cache):
                yield self._nothing(name, f"{short}: not even one token of cache fits, however small it is")

    def refused(self) -> Iterator[Advice]:
        """The device refused an allocation: what the engine does not plan needs more room."""
        before = "not printed" if self.share is None else f"{self.share:g}"
        if self.failure.phase == "weights" or self.failure.bucket in ("weights", "experts"):
            cost = "a little accuracy, and other files of the model"
            yield self._made(
                "model", "not printed", "a quantised one", "the weights alone fill it", cost=cost, bucket="weights"
            )
            yield self._made(
                self.words.cards, "not printed", "2", "each card holds a part", cost="a second card", bucket="weights"
            )
            for name in (self.words.share, self.words.length, self.words.cache):
                yield self._nothing(name, "memory ran out while the weights were loaded, before any cache")
            return
        yield from self._smaller_steps()
        lower = None if self.share is None else f"{max(0.1, math.floor(100 * self.share - 5) / 100):g}"
        saves = None
        if self.share is not None and lower is not None and self.failure.total is not None:
            saves = Saving(bytes=math.floor(self.failure.total * (self.share - float(lower))))
        why = "what is not planned (activations, graphs, libraries) has what the share leaves"
        yield self._made(
            self.words.share,
            before,
            lower or "less",
            why,
            cost="less room for the KV cache: fewer or shorter requests at once",
            proof="fewer tokens in the line of the cache's size",
            bucket="kv",
            saves=saves,
            enough=None if saves is None or self.failure.bytes is None else self._covers(saves),
        )

    def _covers(self, saves: Saving) -> bool | None:
        return True if self.failure.bytes is not None and saves.bytes >= self.failure.bytes else None

    def _smaller_steps(self) -> Iterator[Advice]:
        requests = self._number("slots") or self._number("max_num_seqs")
        why = "what is computed at once is tried with as many requests at the start, and that memory is kept"
        cost = "fewer requests at once"
        after = "not printed" if requests is None else str(max(1, requests // 4))
        yield self._made(
            self.words.requests,
            str(requests or "not printed"),
            "less" if requests is None else after,
            why,
            cost=cost,
            bucket="compute",
            proof="less memory for `graph`" if self.boot.engine == "vllm" else "less in `Capture cuda graph end`",
        )
        why = "a step computes at most so many tokens, and its activations are kept free"
        cost = "prompts are read more slowly"
        yield self._made(self.words.batch, "not printed", "2048", why, cost=cost, bucket="compute")
        why = "recorded CUDA graphs take memory of their own"
        cost = "answers are written more slowly"
        proof = "no `Graph capturing finished`" if self.boot.engine == "vllm" else "no `Capture cuda graph begin`"
        yield self._made(self.words.graphs, "off", "on", why, cost=cost, proof=proof, bucket="compute")

    def _more(self) -> Advice:
        """A larger share, where the log says what it would have to be."""
        room, total, now = self._room(), self.failure.total, self.share
        before = "not printed" if now is None else f"{now:g}"
        why = "the engine takes this share of the card, and what the weights leave of it is cache"
        cost = "less is left for other programs and for what the engine does not plan"
        after, enough = f"up to {_LARGEST_SHARE:g}", None
        if room is not None and room < 0 and total and now is not None:
            least = math.ceil(100 * (now - room / total)) / 100
            if least > _LARGEST_SHARE:
                return self._nothing(self.words.share, f"it would have to be over {least:g} for any cache at all")
            after = f"more than {least:g}"
        proof = "more tokens in the line of the cache's size"
        return self._made(self.words.share, before, after, why, cost=cost, proof=proof, enough=enough)

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
        found_text = re.search(r"profiled value (-\d{1,15})|KV cache memory: (-[\d.]{1,15})", self.failure.text)
        return -1 if found_text or "No available memory for the cache blocks" in self.failure.text else None

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
    ) -> Advice:
        option = setting not in ("model", "other programs")
        on = after == "on"
        flag = (f"--{setting}" if on else f"--{setting} {after}") if option else ""
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
            source="engine-log" if enough or saves is not None else "rule",
            cost=cost,
            flag=flag
            if re.fullmatch(r"[\w.-]+|on", after) and after not in ("less",)
            else (f"--{setting}" if option else ""),
            proof=proof,
        )

    def _nothing(self, setting: str, why: str) -> Advice:
        return Advice(
            setting=setting,
            before="not printed",
            after="another",
            effect="nothing",
            why=why,
            device=self.device,
            enough=False,
            source="engine-log",
            flag=f"--{setting}",
        )

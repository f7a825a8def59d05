"""Requests that do not fit the context of a server: the fault of its setting, and not of the model.

Servers say so with an error (llama.cpp, vLLM, SGLang, llama-cpp-python, TabbyAPI, LM Studio, TensorRT-LLM and TGI each
in their own words), or end the answer at the end of the context, as its length limit would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pytest_vram.backends.answers import PATHS, read
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout
from pytest_vram.toolcalls.results import CaseResult, Results

#: Characters of an error that are read.
_READ = 20_000
#: What bounds a prompt, and what a prompt does to its bound. In small letters, as all that is read here.
_BOUND = re.compile(
    r"context[ _-]?(?:size|length|window)|max_(?:model|seq)_len|maximum (?:model|input|sequence) length"
    r"|kv (?:size|cache)|inputs` tokens"
)
_BEYOND = re.compile(
    r"exceed|(?:longer|larger|greater|bigger) than|too (?:long|large|big)|maximum context length|must be <="
    r"|context the overflows|of only"
)
_PROMPT = (
    r'"n_prompt_tokens": ?(\d+)',
    r"(\d+) in the messages",
    r"(\d+) (?:tokens from the input|input tokens|`inputs` tokens)",
    r"(?:request|input|prompt|requested tokens|prompt length|decoder prompt) ?\((?:total )?(?:length )?(\d+)",
    r"has (\d+) tokens",
    r"(?:requested|context length|prompt length) (\d+)(?: tokens| is greater)",
    r"first (\d+) tokens",
)
_CONTEXT = (
    r'"n_ctx": ?(\d+)',
    r"(?:context length is|context length of only|context length of|context window of|model length of) (\d+)",
    r"context (?:size|length) \(?(\d+) tokens",
    r"\(context length (\d+)\)",
    r"max_(?:model|seq)_len[ (]{1,2}(\d+)",
    r"maximum input length \((\d+)",
    r"must be <= (\d+)",
)
_SETTINGS = {
    "llama-server": "`ctx-size`, which its slots share",
    "vllm": "`max-model-len`",
    "sglang": "`context-length`",
    "ollama": "`num_ctx`",
}
_ANY = "`--ctx-size` of llama-server, which its slots share; `--max-model-len` of vLLM; `num_ctx` of Ollama"


class Unfit(NamedTuple):
    """A request that did not fit. :ivar prompt: its tokens, and those of the ``context``, where they are known."""

    prompt: int | None = None
    context: int | None = None

    def sentence(self, max_tokens: int) -> str:
        """What did not fit, as a clause."""
        known = []
        if self.prompt is not None:
            known.append(f"the prompt has {self.prompt:,} tokens")
            if self.context is not None and self.prompt <= self.context:
                known.append(f"the answer may have {max_tokens:,}")
        if self.context is not None:
            known.append(f"the context {'has ' if not known else ''}{self.context:,}{'' if known else ' tokens'}")
        told = f": {', '.join(known)}" if known else ""
        return f"the request does not fit the context{told}"


def refused(words: str) -> Unfit | None:
    """What an error says of a request that does not fit; ``None``: it is about something else."""
    words = words[:_READ].casefold()
    if not _BOUND.search(words) or not _BEYOND.search(words):
        return None
    return Unfit(_figure(_PROMPT, words), _figure(_CONTEXT, words))


def _figure(patterns: Iterable[str], words: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, words, re.ASCII)
        if found is not None and len(found[1]) <= 9:
            return int(found[1])
    return None


def of_server(client: Any) -> int | None:
    """The context of a request, as the server tells it; ``None``: it does not."""
    get: Callable[[str], Any] | None = getattr(client, "get", None)
    if not callable(get):
        return None
    told: dict[str, object] = {}
    for path in PATHS:
        try:
            told[path] = get(path)
        except (RequestFailed, RequestTimeout):
            continue
        except BackendDied:
            return None
    return read(told).context_per_slot


def unfit(results: Iterable[CaseResult], judge: str) -> list[CaseResult]:
    """The cases that have no answer to judge since they do not fit."""
    return [result for result in results if result.first.unfit or result.judged(judge).unfit]


def needed(results: Results, judge: str) -> str | None:
    """What to set so that all requests fit, as an imperative; ``None``: none was too long."""
    cases = unfit(results.results, judge)
    if not cases:
        return None
    answers = [answer for case in cases for answer in (case.first, case.judged(judge)) if answer.unfit]
    longest = max((answer.tokens_in or 0 for answer in answers), default=0)
    most = results.sampling.get("max_tokens", 512)
    size = ""
    if longest and isinstance(most, int):
        size = f" of at least {longest + most:,} tokens ({longest:,} of the longest prompt and {most:,} of an answer)"
    setting = _SETTINGS.get(str(results.settings.get("engine")), _ANY)
    return f"give the server a context{size or ' that is larger'}: {setting}"

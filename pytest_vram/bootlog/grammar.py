"""What a grammar is, and which engine has which."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from pytest_vram.bootlog.boot import Boot, Phase, PhaseSpan


class Grammar(Protocol):
    """Reads one log, line by line.

    :ivar words: finds something in every line that this grammar may learn from; ``None``: all lines must be fed. A
        reader of long logs leaves the other lines out, and tells their number to :meth:`skip`.
    """

    words: re.Pattern[str] | None

    def skip(self, lines: int) -> None:
        """Count lines that were left out, because :attr:`words` is not in them."""

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``. Never raises, whatever the line is."""

    def boot(self) -> Boot:
        """What the lines so far said."""


def with_ends(spans: Sequence[PhaseSpan]) -> tuple[PhaseSpan, ...]:
    """The phases with their ends: each ends where the next one begins, the last one is open."""
    starts: list[float | None] = [span.start for span in spans[1:]]
    return tuple(
        PhaseSpan(name=span.name, line=span.line, start=span.start, end=end)
        for span, end in zip(spans, [*starts, None], strict=False)
    )


#: Engine → ``module:class``, resolved on use. Engines that are not listed are read with the user's own patterns.
GRAMMARS: dict[str, str] = {
    "llama-server": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "llama.cpp": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "ollama": "pytest_vram.bootlog.ollama:Ollama",
    "vllm": "pytest_vram.bootlog.vllm:Vllm",
    "sglang": "pytest_vram.bootlog.sglang:Sglang",
    "transformers": "pytest_vram.bootlog.transformers:Transformers",
}
GENERIC = "pytest_vram.bootlog.generic:Generic"


def grammar(engine: str, patterns: Mapping[str, str]) -> Grammar:
    """The grammar of ``engine``; user's ``patterns`` (phase → regular expression) are for engines without one.

    :raises BadInput: a pattern that is not a regular expression, or of an unknown phase.
    """
    module, _, name = GRAMMARS.get(engine, GENERIC).partition(":")
    found: Grammar = getattr(importlib.import_module(module), name)(engine, patterns)
    return found


#: Phrases that give an engine away, for logs of unknown origin.
_SIGNS: dict[str, tuple[str, ...]] = {
    "llama-server": (
        "llama_model_loader",
        "llama_context",
        "llama_load_model",
        "llama_server",
        "llm_load_tensors",
        "loading model tensors",
        "ggml_",
        "llama.cpp",
        "error: invalid argument: ",
        'error while handling argument "',
    ),
}


def recognise(text: str) -> str:
    """The engine whose phrases are in ``text``; ``command`` where none is known."""
    for engine, signs in _SIGNS.items():
        if any(sign in text for sign in signs):
            return engine
    return "command"

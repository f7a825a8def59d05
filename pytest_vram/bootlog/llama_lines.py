"""Which lines of a llama.cpp log are read at all, and how their numbers are spelled.

A server at full verbosity prints a hundred lines for each token, and whole requests. Nothing is learnt from a line in
which none of :data:`WORDS` is found, so that a reader may leave such lines out without a difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_vram.bootlog.lines import size

#: Parts of the phrases that the grammar knows. Each begins with a letter that is rare in text (`f memory` instead of
#: `out of memory`), since a search stops at every letter that may begin one.
_PARTS = (
    # sizes, which nearly all lines about memory have
    *("MiB", "MB", "GiB"),
    # levels W, E and F of the log's own prefix, and warnings without one
    *("W ", "E ", "F ", "warn", "WARN", "Warn", "ERR"),
    # steps of a boot
    *("build", "KoboldCpp", "g model", "meta data", "model tensors", "ffload", "_context", "ving ...", "ve took"),
    *("warming up", "model loaded", "p://", "_slots: a", "_slots] a", "ping state", "g up before", "m endpoint"),
    *(
        "Model OK",
        "Service Ready",
        "fitting params",
        "_alloc ",
        "ft model",
        "MTP",
        "Embeddings",
        "CLIP",
        "Uvicorn",
        "generate: ",
    ),
    # requests; not what is said of each token, as `processing task, id = 7` and `n_ctx = 4096` are
    *(
        "| processing",
        "t is processing",
        "prompt done",
        "prompt processing",
        "mage ",
        "mage:",
        "h_size",
        "stop processing",
    ),
    # facts
    *(
        "_ctx_",
        "_ctx  ",
        "_layer",
        "_batch  ",
        "_ubatch",
        "_seq_max",
        "_swa",
        "_expert",
        "_slots = ",
        "_threads",
        "_copies",
    ),
    *("_attn", "_unified", "_mode", "flash_attn", "Flash", "file type", "ftype", "file size", "model params"),
    *("general.name", "h  ", "graph splits", "h copies", "prompt cache", "verbosity", "mmap", "mla", "pipeline"),
    *("KV cache", "k cache", "v cache", "found ", "buffer", "|   -", "xt size", "Device ", "verridden", "fused"),
    # failures
    *("fail", "Fail", "f memory", "fficient memory", "mory alloc", "bad_alloc", "ble to ", "Bytes of", "OutOf"),
    *(
        "OUT_OF",
        "CUDA",
        "ROCm",
        "MUSA",
        "HIP",
        "vice: ",
        "GGML_ASSERT",
        "ggml",
        "bort",
        "minate called",
        "what()",
        "Segm",
    ),
    *("PC server", "valid arg", "while handl", "known model", "known arg", "known opt", "known val", "ould not load"),
    *("requires ", "bind", "y in use", "xiting due", "but only", "magic", "graph exec"),
    # ended from outside
    *("Killed", "killed", "kill:", "Killing", "OOM", "KILL", "KERNEL", "xit code", "xit status", "status="),
)


def _grouped(parts: Iterable[str]) -> str:
    """One alternative for each first letter, which is ten times as fast as one for each part."""
    table: dict[str, set[str]] = {}
    for part in parts:
        table.setdefault(part[0], set()).add(part[1:])
    return "|".join(f"{re.escape(first)}(?:{'|'.join(map(re.escape, sorted(rest)))})" for first, rest in table.items())


#: Found in every line from which something may be learnt.
WORDS: re.Pattern[str] = re.compile(_grouped(_PARTS), re.ASCII)

_OWN_PREFIX = r"(?:[^\n]{0,80}?[ \"m])??\d{1,9}\.\d\d\.\d{3}\.\d{3} "
_TOKENS = (
    r"D (?:que|res|set_|adapters_|slot +(?:handle_last_|process_toke)"
    r"|srv +(?:decode: n_batch|update_slots: posting|operator\(\): http: streamed))"
)
#: What a server at full verbosity says of each token, and of each part of a reply; a wrapper's prefix may stand before.
NOISE: re.Pattern[str] = re.compile(_OWN_PREFIX + _TOKENS, re.ASCII)
#: The same, and what it says again and again of a long prompt, of which any one line is as good as all: it goes on.
REPEATED: re.Pattern[str] = re.compile(
    _OWN_PREFIX + rf"(?:{_TOKENS}|[DI] slot +update_slots: id +\d+ \| task -?\d+ \| prompt processing progress)",
    re.ASCII,
)

#: Lines of a server about requests that carry what users wrote.
_BODY = re.compile(
    r"^(?:srv +(?:log_server|params_from|send\b|to_json)|(?:que|res|slot|request|response|http)\b)|- kv +\d+:|"
    r"[{,\[] ?\"(?:role|content|messages|prompt|model|text|id|input|index|delta)\"|^\{|\bdata: ?\{|\\n|<\|im_|\[INST\]"
)
#: 2023 and early 2024 the server wrote its own lines as JSON.
_JSON_LINE = re.compile(r"^\{\"(?:timestamp|tid)\":.*\"(?:message|msg)\":\"(?P<message>[^\"]{1,200})\"")
_COMMA = re.compile(r"(?<=\d),(?=\d{1,4} (?:[KMG]i?B|ms)\b|\d{1,4},? [KV] \()", re.ASCII)


def is_request(text: str) -> bool:
    """True for a line that may hold what a user wrote, which is nobody's evidence."""
    return _BODY.search(text) is not None


def message(text: str) -> str | None:
    """The message of one of the server's own lines in JSON; ``None`` for any other line."""
    match = _JSON_LINE.match(text)
    return None if match is None else match["message"]


def with_points(text: str) -> str:
    """The line with decimal points, where the engine ran under a locale with decimal commas (``4095,05 MiB``)."""
    return _COMMA.sub(".", text) if "," in text else text


def mebi(number: str, unit: str) -> tuple[int, int] | None:
    """Bytes of a size as llama.cpp prints it, and half of its last digit.

    Its ``MB`` of 2023 are 2**20 bytes too: the sources of the time divide by ``1024.0*1024.0``.
    """
    return size(number, {"MB": "MiB", "KB": "KiB", "GB": "GiB"}.get(unit, unit))

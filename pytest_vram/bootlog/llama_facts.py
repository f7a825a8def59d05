"""Facts of a llama.cpp boot log: pattern → fact, and lines that warn."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pytest_vram.bootlog.devices import Labels
from pytest_vram.bootlog.lines import count
from pytest_vram.bootlog.llama_lines import mebi

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _bytes(number: str, unit: str) -> int | None:
    figure = mebi(number, unit)
    return None if figure is None else figure[0]


def _parameters(number: str, scale: str) -> int:
    return round(float(number) * _SCALE[scale])


def _milliseconds(number: str) -> float:
    return round(float(number) / 1e3, 6)


def _switch(word: str) -> bool | None:
    return {"enabled": True, "true": True, "1": True, "disabled": False, "false": False, "0": False}.get(word)


def _flash(word: str) -> str:
    return {"1": "enabled", "0": "disabled"}.get(word, word)


Rule = tuple[str, str, tuple[str, ...], Callable[..., Any]]
#: (needle that a line must hold, pattern, facts of its groups, conversion).
_RULES: tuple[Rule, ...] = (
    ("offloaded", r"\boffloaded (\d+)/(\d+) layers to GPU", ("layers_offloaded", "layers_offloadable"), count),
    ("repeating", r"\boffloading (\d+) repeating layers to GPU", ("layers_repeating",), count),
    ("n_layer ", r"\bn_layer\s+= (\d+)", ("layers",), count),
    ("n_ctx_train", r"\bn_ctx_train\s+= (\d+)", ("context_trained",), count),
    ("n_expert ", r"\bn_expert\s+= (\d+)", ("experts",), count),
    ("n_expert_used", r"\bn_expert_used\s+= (\d+)", ("experts_used",), count),
    ("n_swa ", r"\bn_swa\s+= (\d+)", ("sliding_window",), count),
    ("arch ", r"\barch\s+= (\S+)", ("architecture",), str),
    ("file type", r"\bfile type\s+= (.+)", ("quantization",), str),
    ("ftype", r"\bftype\s+= (?:\d{1,4} \()?([^()]+)\)?", ("quantization",), str),
    ("general.name", r"\bgeneral\.name\s+= (.+)", ("model_name",), str),
    ("model params", r"\bmodel params\s+= (\d{1,12}(?:\.\d{1,6})?) ([KMBT]?)", ("parameters",), _parameters),
    ("file size", r"\bfile size\s+= ([\d.]+) ([KMGT]iB)", ("model_bytes",), _bytes),
    ("load_mode", r"\(load_mode = (\w+)\)", ("load_mode",), str),
    ("mmap = ", r"\(mmap = (\w+)", ("mmap",), _switch),
    ("n_copies", r"\(n_copies=(\d+)\)", ("pipeline_copies",), count),
    ("sched copies", r"\bsched copies = (\d+)", ("pipeline_copies",), count),
    ("attn_max_b", r"\battn_max_b\s+= (\d+)", ("attention_max_batch",), count),
    ("mla_attn", r"\bmla_attn\s+= (\d+)", ("mla",), count),
    ("retrying without pipeline", r"retrying without pipeline parallelism", ("pipeline_copies",), lambda: 1),
    ("n_seq_max", r"\bn_seq_max\s+= (\d+)", ("slots",), count),
    ("n_ctx ", r"\bn_ctx\s+= (\d+)\s*$", ("context",), count),
    ("n_ctx_seq ", r"\bn_ctx_seq\s+= (\d+)", ("context_per_slot",), count),
    ("n_ctx_per_seq ", r"\bn_ctx_per_seq\s+= (\d+)", ("context_per_slot",), count),
    ("n_batch ", r"\bn_batch\s+= (\d+)", ("batch",), count),
    ("n_ubatch", r"\bn_ubatch\s+= (\d+)", ("ubatch",), count),
    ("flash_attn ", r"\bflash_attn\s+= (enabled|disabled|0|1)\s*$", ("flash_attention",), _flash),
    ("lash ", r"\bFlash Attention (?:enabled|was auto, set to enabled)", ("flash_attention",), lambda: "enabled"),
    (
        "lash ",
        r"\bFlash Attention.{0,200}(?:set to disabled|not supported)",
        ("flash_attention",),
        lambda: "disabled",
    ),
    ("failed to mlock", r"\bfailed to mlock \d+-byte buffer", ("mlock",), lambda: False),
    ("failed to VirtualLock", r"\bfailed to VirtualLock \d+-byte buffer", ("mlock",), lambda: False),
    ("kv_unified", r"\bkv_unified\s+= (true|false)", ("kv_unified",), _switch),
    ("freq_base ", r"\bfreq_base\s+= (\d{1,12}(?:\.\d{1,9})?)\s*$", ("rope_freq_base",), float),
    ("freq_scale ", r"\bfreq_scale\s+= (\d{1,12}(?:\.\d{1,9})?)\s*$", ("rope_freq_scale",), float),
    ("reserve took", r"\breserve took (\d{1,12}(?:\.\d{1,6})?) ms", ("reserve_seconds",), _milliseconds),
    ("graph splits", r"\bgraph splits = (\d+)", ("graph_splits",), count),
    (
        "n_slots",
        r"\bn_slots = (\d+), n_ctx_slot = (\d+)",
        ("slots", "context_per_slot"),
        count,
    ),
)
#: Facts of the server, whichever model it is loading.
_SERVER: tuple[Rule, ...] = (
    ("build", r"\bbuild(?::| =)? (\d+ \(\w+\))", ("build",), str),
    ("build info", r"\bbuild info \|.{0,200}\bbuild=(\d+)", ("build",), str),
    ("KoboldCpp", r"^Welcome to KoboldCpp - Version (\S+)", ("build",), str),
    ("verbosity", r"\bverbosity = (\d+)", ("verbosity",), count),
    ("n_threads", r"\bn_threads = (\d+)", ("threads",), count),
    ("prompt cache is enabled", r"size limit: (\d+) (MiB)", ("prompt_cache_limit_bytes",), _bytes),
    ("prompt cache is disabled", r"prompt cache is (disabled)", ("prompt_cache",), _switch),
    ("prompt cache is enabled", r"prompt cache is (enabled)", ("prompt_cache",), _switch),
    ("checkpoints enabled", r"context checkpoints enabled, max = (\d{1,9})", ("checkpoints",), count),
    ("checkpoints disabled", r"context checkpoints disabled", ("checkpoints",), lambda: 0),
    ("projected to use", r"projected to use (\d+) (MiB) of device", ("projected_device_bytes",), _bytes),
    ("of free device memory", r"vs\. (\d+) (MiB) of free device memory", ("fit_free_bytes",), _bytes),
    ("projected to use", r"projected to use (\d+) (MiB) of host", ("projected_host_bytes",), _bytes),
    ("context size reduced", r"context size reduced from (\d+) to", ("context_reduced_from",), count),
    ("listening on http", r"listening on (https?://\S+)", ("url",), str),
)
_COMPILED: dict[Rule, re.Pattern[str]] = {rule: re.compile(rule[1], re.ASCII) for rule in (*_RULES, *_SERVER)}
_CELLS = re.compile(
    r"\bsize =\s*[\d.]+ MiB \(\s*(\d{1,18}) cells,\s*(\d{1,18}) layers,\s*(\d{1,9})(?:/\s*(\d{1,9}))? seqs\),"
    r" K \((\w+)\):[^()]{1,60} V \((\w+)\):",
    re.ASCII,
)
_OLD_CELLS = re.compile(r"\bKV self size\s*=[^()]{1,60}K \((\w+)\):[^()]{1,60}V \((\w+)\):", re.ASCII)
#: Attention over latents (ik_llama.cpp): ``c^KV (f16): 2196.00 MiB, kv^T: not used``; there is no V beside it.
_LATENT = re.compile(
    r"\bKV self size\s*=[^()]{1,60}(?:c\^KV|K-only) \((\w+)\):(?:[^()]{1,60}kv\^T \((\w+)\):)?", re.ASCII
)
_CREATING = re.compile(
    r"\bcreating\s++(?P<name>\S(?:.{0,38}?\S)?)\s++(?:KV cache|state|cache)\b(?:, size = (?P<cells>\d{1,18}) cells)?",
    re.ASCII,
)

#: A line with one of these says that something asked for is not what happens.
_SIGNS = re.compile(
    r"will be ignored|\bdisabling\b|not supported|falling back|fallback to|\bforcing\b|set to disabled|force disabled"
    r"|\bclamping\b|\bcapping\b|\boverridden to\b|is not compatible|might be suboptimal|will be suboptimal"
    r"|possible training context overflow|does not match expectation|Failed to connect to|using device .{0,200} instead"
    r"|only last value will be used|memory usage will increase|no usable GPU found"
    r"|cannot be used with preferred buffer type|failed to mlock|failed to VirtualLock",
    re.IGNORECASE,
)


#: What ``--fit`` changed without being told to, or could not do; some of it is printed as information only.
_FITTING = re.compile(
    r"failed to fit params|error while trying to fit params|context size reduced from|cannot meet free memory target"
)


def is_about_fitting(text: str) -> bool:
    """True for a line of the trial run that says that settings were changed, or could not be, to fit the device."""
    return _FITTING.search(text) is not None


def _apply(rules: tuple[Rule, ...], text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rule in rules:
        needle, _, names, convert = rule
        if needle not in text:
            continue
        match = _COMPILED[rule].search(text)
        if match is None:
            continue
        groups = match.groups()
        # One fact may need several groups (a number and its unit); several facts take one group each.
        values = (convert(*groups),) if len(names) == 1 else tuple(convert(group) for group in groups)
        if None in values:
            continue  # of a pair that is printed together no half is a fact
        for name, value in zip(names, values, strict=True):
            found[name] = value.strip() if isinstance(value, str) else value
    return found


def creating(text: str) -> tuple[str, int | None] | None:
    """The name of the cache that is being made (``SWA``, ``non-SWA``, ``indexer`` …) and its cells, where said."""
    if "creating" not in text:
        return None
    match = _CREATING.search(text)
    return None if match is None else (match["name"], int(match["cells"]) if match["cells"] else None)


def of_load(text: str) -> dict[str, Any]:
    """Facts in a line about the model or the context that is being loaded."""
    if "cells" in text and (match := _CELLS.search(text)):
        cells, layers, sequences, streams, key, value = match.groups()
        facts: dict[str, Any] = {"kv_cells": int(cells), "kv_layers": int(layers), "sequences": int(sequences)}
        facts |= {} if streams is None else {"streams": int(streams)}
        return facts | {"cache_type_k": key, "cache_type_v": value}
    if "KV self size" in text:
        if match := _OLD_CELLS.search(text):
            return {"cache_type_k": match[1], "cache_type_v": match[2]}
        if match := _LATENT.search(text):
            return {"cache_type_k": match[1]} | ({} if match[2] is None else {"cache_type_v": match[2]})
    return _apply(_RULES, text)


def of_server(text: str) -> dict[str, Any]:
    """Facts in a line about the server itself."""
    return _apply(_SERVER, text)


_USING = re.compile(r"\busing device (\S{1,200}) \((.{0,200}?)\)(?: \([^()]{0,80}\))? - (\d{1,9}) MiB free", re.ASCII)
_LISTED = re.compile(r"^\W*(?:\w+ +\w+: +)?- (\S+) *: .* \((\d{1,9}) MiB, (\d{1,9}) MiB free\)", re.ASCII)
_NUMBERED = re.compile(r"^ *Device (\d{1,3}): .*\bVRAM: (\d{1,9}) MiB", re.ASCII)
_MIB = 1 << 20
_MOST_DEVICES = 256


class DeviceSizes:
    """What the log says of the devices before anything is loaded: how large they are, and how much of it is free."""

    def __init__(self) -> None:
        self._free: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._numbered: dict[int, int] = {}

    def read(self, text: str) -> None:
        """Take a line; a later figure of a device replaces the earlier one."""
        if "MiB" not in text or len(self._free) + len(self._numbered) > _MOST_DEVICES:
            return
        if match := _USING.search(text):
            self._free[match[1]] = int(match[3]) * _MIB
        elif match := _LISTED.search(text):
            self._total[match[1]] = int(match[2]) * _MIB
            self._free.setdefault(match[1], int(match[3]) * _MIB)
        elif match := _NUMBERED.search(text):
            self._numbered[int(match[1])] = int(match[2]) * _MIB

    def free(self, labels: Labels) -> dict[str, int]:
        """Label → bytes free before the load, cut off to MiB."""
        return {label: size for name, size in self._free.items() if (label := labels.known(name)) is not None}

    def total(self, labels: Labels) -> dict[str, int]:
        """Label → bytes of the whole device, cut off to MiB."""
        numbered = {labels.like_cuda(number): size for number, size in self._numbered.items()}
        return {
            label: size for name, size in (numbered | self._total).items() if (label := labels.known(name)) is not None
        }


def is_warning(text: str, level: str | None) -> bool:
    """True for a line that says that something asked for does not happen.

    Information lines that describe the model are left alone: only warnings, errors and lines without a level count.
    """
    if level is not None and level not in "WE":
        return False
    if level is None and not text.lower().startswith(("warning", "warn:", "error")):
        return False
    return _SIGNS.search(text) is not None

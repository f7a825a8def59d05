"""Quantised weights of Hugging Face models: what ``quantization_config`` says, and what a matrix takes under it.

Where the weights are in the folder their own headers give the bytes; this arithmetic stands in where there is only a
``config.json``, and tells packed tensors from whole ones when parameters are counted.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pytest_vram.sizing.hf_config import Config
from pytest_vram.sizing.shape import Note


class Quant(msgspec.Struct, frozen=True, kw_only=True):
    """How the linear layers of a model are stored.

    :ivar method: ``awq``, ``gptq``, ``bnb-4bit``, ``bnb-8bit``, ``fp8``, ``packed`` (compressed-tensors integers),
        ``mxfp4``, ``hqq``, ``int8``. :ivar bits: of one weight. :ivar group: weights that share a scale, along the
        input; 0: one scale for each output. :ivar block: rows and columns that share an FP8 scale.
    :ivar zero_point: whether groups have one. :ivar act_order: GPTQ's index of groups. :ivar nested: scales are
        quantised again (bitsandbytes' double quantisation). :ivar skipped: modules that stay whole, as patterns.
    :ivar embeddings: bytes of one element of embedding and output matrix where those are quantised too; 0: whole.
    :ivar known: whether the arithmetic of this method is known.
    """

    method: str
    bits: int
    group: int = 128
    block: tuple[int, int] | None = None
    zero_point: bool = True
    act_order: bool = False
    nested: bool = False
    skipped: tuple[str, ...] = ()
    embeddings: int = 0
    known: bool = True
    scale_bytes: int = 2

    @property
    def label(self) -> str:
        """For people, such as ``awq int4 g128``."""
        if self.method in ("fp8", "mxfp4"):
            return self.method + (f" {self.block[0]}x{self.block[1]}" if self.block else "")
        group = f" g{self.group}" if self.group and not self.method.startswith("bnb") else ""
        return f"{self.method} int{self.bits}{group}" if self.method != "bnb-4bit" else "bnb nf4"

    def skips(self, module: str) -> bool:
        """Whether a module stays whole: named whole, by some of its parts, or by a ``re:`` pattern."""
        for pattern in self.skipped:
            if pattern.startswith("re:"):
                if _matches(pattern[3:], module):
                    return True
            elif f".{pattern}." in f".{module}.":
                return True
        return False

    def matrix(self, rows: int, columns: int) -> int:
        """Bytes of one linear layer of ``rows`` outputs and ``columns`` inputs, with all that comes with it.

        Sources: AutoAWQ ``WQLinear_GEMM`` and GPTQModel's linear (packed weights; for each group and output column an
        fp16 scale and a packed zero point); bitsandbytes ``quantize_4bit`` (blocks of 64, one f32 or, quantised
        again, one byte and one f32 per 256 blocks) and ``LLM.int8`` (one f32 per output); fine-grained FP8 (one f32
        per block of 128 × 128); OCP MX (one byte per 32); compressed-tensors' ``pack_quantized``; HQQ (scale and zero
        in 16 bits per group).
        """
        elements = rows * columns
        if self.method == "fp8":
            if self.block is None:
                return elements + 4
            return elements + 4 * -(-rows // self.block[0]) * -(-columns // self.block[1])
        if self.method == "mxfp4":
            return -(-elements // 32) * 17
        if self.method == "bnb-8bit":
            return elements + 4 * rows
        if self.method == "bnb-4bit":
            blocks = -(-elements // 64)
            return -(-elements // 2) + (blocks + 4 * -(-blocks // 256) + 4 * 256 if self.nested else 4 * blocks)
        if self.method == "int8":
            return elements + self.scale_bytes * rows
        groups = -(-columns // self.group) if self.group else 1
        packed = -(-elements * self.bits // 8)
        scales = self.scale_bytes * groups * rows
        if self.method == "hqq":
            return packed + 2 * scales
        zeros = -(-groups * rows * self.bits // 8) if self.zero_point else 0
        return packed + scales + zeros + (4 * columns if self.act_order else 0)


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern of a config matches; one that could take for ever to say so counts as not matching."""
    if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        return False
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def read(config: Config) -> Quant | None:
    """The quantisation of a model, ``None`` for whole weights; an unknown method is said to be unknown."""
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return None
    method = section.get("quant_method") or section.get("quant_type") or section.get("quant_algo") or ""
    if not isinstance(method, str):
        raise config.bad("quantization_config.quant_method", "is not a name")
    method = method.lower().replace("_", "-")
    skipped = _skipped(section)
    if not method and section.get("load_in_4bit"):
        method = "bitsandbytes"
    if method == "awq":
        return Quant(method="awq", bits=_bits(config, section), group=_group(config, section), skipped=skipped)
    if method in ("gptq", "gptqmodel", "auto-round", "autoround"):
        return Quant(
            method="gptq",
            bits=_bits(config, section),
            group=_group(config, section),
            act_order=True,
            skipped=skipped or ("lm_head",),
        )
    if method == "bitsandbytes":
        if section.get("load_in_8bit"):
            return Quant(method="bnb-8bit", bits=8, group=0, skipped=skipped or ("lm_head",))
        return Quant(
            method="bnb-4bit",
            bits=4,
            group=64,
            nested=bool(section.get("bnb_4bit_use_double_quant")),
            skipped=skipped or ("lm_head",),
        )
    if method in ("fp8", "fbgemm-fp8"):
        block = section.get("weight_block_size")
        sizes = block if isinstance(block, list) and len(block) == 2 else None
        whole = (
            (_count(config, "weight_block_size", sizes[0]), _count(config, "weight_block_size", sizes[1]))
            if sizes
            else None
        )
        return Quant(method="fp8", bits=8, group=0, block=whole, skipped=skipped or ("lm_head",))
    if method == "mxfp4":
        return Quant(method="mxfp4", bits=4, group=32, skipped=skipped or ("self_attn", "router", "lm_head"))
    if method == "hqq":
        return Quant(
            method="hqq",
            bits=_hqq(config, section, "nbits", 4),
            group=_hqq(config, section, "group_size", 64),
            skipped=skipped or ("lm_head",),
        )
    if method == "compressed-tensors":
        return _compressed(config, section, skipped)
    text = (
        f"{config.path}: quantization {method or 'without a name'!r} is not known; its linear layers are not counted."
    )
    config.notes.append(Note(kind="unknown", bucket="weights", text=text))
    return Quant(method=method or "unknown", bits=0, known=False, skipped=skipped)


def _compressed(config: Config, section: dict[str, Any], skipped: tuple[str, ...]) -> Quant:
    """compressed-tensors: one scheme for all linear layers, and INT8 embeddings where a group targets them."""
    groups = section.get("config_groups")
    schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    linear: dict[str, Any] | None = None
    embeddings = 0
    for scheme in schemes:
        weights, targets = scheme.get("weights"), scheme.get("targets")
        if not isinstance(weights, dict):
            continue
        names = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
        if any("embed" in name.lower() or "lm_head" in name for name in names):
            embeddings = max(1, _count(config, "num_bits", weights.get("num_bits", 8)) // 8)
        if linear is None or "Linear" in names:
            linear = weights if linear is None or not any("embed" in name.lower() for name in names) else linear
    if linear is None:
        text = f"{config.path}: quantization_config has no scheme for weights; its linear layers are not counted."
        config.notes.append(Note(kind="unknown", bucket="weights", text=text))
        return Quant(method="compressed-tensors", bits=0, known=False, skipped=skipped)
    bits = _count(config, "num_bits", linear.get("num_bits", 8))
    if linear.get("type") == "float" and bits == 8:
        block = linear.get("block_structure")
        sizes = block if isinstance(block, list) and len(block) == 2 else None
        whole = (
            (_count(config, "block_structure", sizes[0]), _count(config, "block_structure", sizes[1]))
            if sizes
            else None
        )
        if whole is None:
            return Quant(method="int8", bits=8, group=0, skipped=skipped, embeddings=embeddings)
        return Quant(method="fp8", bits=8, group=0, block=whole, skipped=skipped, embeddings=embeddings)
    if linear.get("type") == "float" and bits == 4:
        # NVFP4 and MXFP4: one FP8 (E4M3 or E8M0) scale for each group, a global f32 scale beside it.
        size = _count(config, "group_size", linear.get("group_size") or 16)
        return Quant(
            method="packed", bits=4, group=size, zero_point=False, scale_bytes=1, skipped=skipped, embeddings=embeddings
        )
    if bits == 8 and linear.get("strategy") in (None, "channel", "tensor"):
        return Quant(method="int8", bits=8, group=0, skipped=skipped, embeddings=embeddings)
    return Quant(
        method="packed",
        bits=bits,
        group=_count(config, "group_size", linear.get("group_size") or 0, low=0),
        zero_point=linear.get("symmetric") is False,
        skipped=skipped,
        embeddings=embeddings,
    )


def _skipped(section: dict[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules"):
        names = section.get(key)
        if isinstance(names, list):
            found.extend(name for name in names if isinstance(name, str) and len(name) <= 512)
    return tuple(dict.fromkeys(found))


def _count(config: Config, key: str, value: object, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 30:
        raise config.bad(f"quantization_config.{key}", "is not a whole number that makes sense")
    return value


def _bits(config: Config, section: dict[str, Any]) -> int:
    for key in ("bits", "w_bit"):
        if section.get(key) is not None:
            return _count(config, key, section[key])
    config.assumed["quantization_config.bits"] = 4
    return 4


def _group(config: Config, section: dict[str, Any]) -> int:
    for key in ("group_size", "q_group_size"):
        value = section.get(key)
        if value == -1:
            return 0
        if value is not None:
            return _count(config, key, value)
    config.assumed["quantization_config.group_size"] = 128
    return 128


def _hqq(config: Config, section: dict[str, Any], key: str, default: int) -> int:
    """HQQ nests its sizes under ``quant_config.weight_quant_params`` (or gives them flat)."""
    inner = section.get("quant_config")
    params = inner.get("weight_quant_params") if isinstance(inner, dict) else None
    value = params.get(key) if isinstance(params, dict) else section.get(key)
    if value is None:
        config.assumed[f"quantization_config.{key}"] = default
        return default
    return _count(config, key, value)

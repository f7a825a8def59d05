"""From the metadata and tensor table of a GGUF file to the shape that the memory rules read.

Every rule here is llama.cpp's own reading of the file: ``llama-model.cpp:load_hparams`` for the common keys,
``load_arch_hparams`` of each architecture (rows of :mod:`~pytest_vram.sizing.gguf_architectures`) and
``llama-hparams.cpp`` for sizes derived from them. Sources of October 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_vram.errors import BadModel
from pytest_vram.sizing import ggml, sense
from pytest_vram.sizing.gguf_architectures import ARCHITECTURES, PLAIN, Architecture, Window
from pytest_vram.sizing.shape import Layer, Mla, ModelShape, Note, Ssm, Tensor

if TYPE_CHECKING:
    from pytest_vram.sizing.gguf import Gguf

MOST_BLOCKS = 512  # llama-hparams.h, LLAMA_MAX_LAYERS
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.weight$|^blk\.(\d+)\.ffn_up\.\d+\.weight$")
_DENSE = re.compile(r"^(?:enc\.|dec\.)?blk\.(\d+)\.ffn_(?:down|up)\.weight$")


def shape_of(gguf: Gguf) -> ModelShape:
    """The shape of the model in a GGUF file.

    :raises BadModel: it is not a language model (a projector, an adapter), or a key that llama.cpp insists on is
        missing or contradicts another.
    """
    return sense.checked(_Reader(gguf).shape())


class _Keys:
    """Metadata under the architecture's prefix, checked as it is read."""

    def __init__(self, gguf: Gguf, prefix: str, source: str) -> None:
        self._gguf, self._prefix, self._source = gguf, prefix, source

    def _key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def has(self, name: str) -> bool:
        return self._key(name) in self._gguf.metadata

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or value < 0:
            raise BadModel(
                f"{self._source}: key {self._key(name)} holds {str(value)[:60]!r} where llama.cpp reads a whole "
                "number: the file is damaged, get or convert it again"
            )
        return int(value)

    def number(self, name: str, default: int = 0) -> int:
        """A whole number, ``default`` where the key is missing; arrays count as missing."""
        value = self._gguf.metadata.get(self._key(name))
        if value is None or isinstance(value, list | tuple):
            return default
        return self._whole(name, value)

    def needed(self, name: str) -> int:
        if not self.has(name):
            raise BadModel(
                f"{self._source}: metadata key {self._key(name)} is missing, and llama.cpp refuses a file without it: "
                "get or convert it again"
            )
        return self.number(name)

    def array(self, name: str) -> tuple[int, ...] | None:
        """All numbers of an array; ``None`` where the key is missing or no array."""
        value = self._gguf.metadata.get(self._key(name))
        if value is None and self._key(name) in self._gguf.arrays:
            raise BadModel(
                f"{self._source}: key {self._key(name)} is a list of {self._gguf.length(self._key(name))} texts or too "
                "many numbers, where llama.cpp reads one number for each block: get or convert the file again"
            )
        if not isinstance(value, list | tuple):
            return None
        return tuple(self._whole(name, one) for one in value)

    def each(self, name: str, blocks: int, default: Sequence[int], *, exact: bool = True) -> list[int]:
        """A value for each block, from an array or from one number for all (``get_key_or_arr``)."""
        values = self.array(name)
        if values is None:
            return [self.number(name)] * blocks if self.has(name) else list(default)
        if exact and len(values) != blocks:
            raise BadModel(
                f"{self._source}: key {self._key(name)} has {len(values)} values for {blocks} blocks, and llama.cpp "
                "refuses that: the file is damaged or of an unfinished conversion"
            )
        return [*values[:blocks], *([0] * (blocks - len(values)))]


class _Reader:
    """One file on its way to a shape; attributes are llama.cpp's hyperparameters under plain names."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self.source = str(gguf.files[0]) if gguf.files else "the GGUF file"
        self.notes: list[Note] = []
        self.name = self._architecture_name()
        self.known = self.name in ARCHITECTURES
        self.rules: Architecture = ARCHITECTURES.get(self.name, PLAIN)
        self.keys = _Keys(gguf, self.name, self.source)
        if not self.known:
            self._unknown()

        self.embedding = self.keys.needed("embedding_length")
        self.context = self.keys.needed("context_length")
        self.blocks = self.keys.needed("block_count")
        self.extra = self.keys.number("nextn_predict_layers")
        if not 0 < self.blocks <= MOST_BLOCKS or self.extra > self.blocks:
            raise BadModel(
                f"{self.source}: {self.blocks} blocks of which {self.extra} for prediction cannot be: llama.cpp takes "
                f"1 to {MOST_BLOCKS}"
            )
        if self.name == "deepseek4" and not self._has_tensor(f"blk.{self.blocks - self.extra}.nextn.eh_proj.weight"):
            self.extra = 0
        self.heads = self.keys.each("attention.head_count", self.blocks, [0] * self.blocks)
        self.kv_heads = self.keys.each("attention.head_count_kv", self.blocks, self.heads)
        self.feed_forward = self.keys.each("feed_forward_length", self.blocks, [0] * self.blocks)
        self._repeat()
        self.main = self.blocks - self.extra
        self._head_sizes()
        self.windowed = self._windows()
        self.recurrent = self._recurrent()

    def _architecture_name(self) -> str:
        name = self.gguf.metadata.get("general.architecture")
        kind = self.gguf.metadata.get("general.type")
        if name == "clip" or kind in ("mmproj", "adapter"):
            option = "--lora" if kind == "adapter" else "--mmproj"
            raise BadModel(f"{self.source} is not a language model but an addition to one: give it with {option}")
        if not isinstance(name, str) or not name:
            raise BadModel(f"{self.source}: metadata key general.architecture is missing: the file is not a model")
        return name

    def _unknown(self) -> None:
        for bucket in ("kv", "recurrent", "compute"):
            self.notes.append(
                Note(
                    kind="unknown",
                    bucket=bucket,
                    text=f"architecture {self.name!r} is not known here: {bucket} follows from the common keys alone "
                    "and is a lower bound",
                )
            )

    def _has_tensor(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self.gguf.tensors)

    def _repeat(self) -> None:
        """Blocks that run several times (``nanbeige.cpp``) or are added (``granite-switch.cpp``: a router's)."""
        if self.rules.loops:
            loops = max(1, self.keys.number("num_loops", 1))
            if self.blocks * loops > MOST_BLOCKS:
                raise BadModel(f"{self.source}: {loops} loops over {self.blocks} blocks: llama.cpp takes {MOST_BLOCKS}")
            self.heads, self.kv_heads = self.heads * loops, self.kv_heads * loops
            self.feed_forward = self.feed_forward * loops
            self.blocks *= loops
        if self.rules.router:
            self.blocks, self.extra = self.blocks - self.extra + 1, 1
            for values, own in ((self.heads, 1), (self.kv_heads, 1), (self.feed_forward, 0)):
                values[self.blocks - 1 :] = [own]

    def _head_sizes(self) -> None:
        """Elements of a K and a V head, for blocks with and without a window (``llama-model.cpp:load_hparams``)."""
        first = self.heads[0]
        usual = self.embedding // first if first else 0
        if first and not self.keys.has("attention.key_length"):
            self.notes.append(
                Note(
                    kind="assumed",
                    bucket="kv",
                    text=f"the file names no head size: {usual} = {self.embedding} / {first}, as llama.cpp takes it",
                )
            )
        reads = first > 0 or self.name == "plamo2"
        self.key = self.keys.number("attention.key_length", usual) if reads else 0
        self.value = self.keys.number("attention.value_length", usual) if reads else 0
        self.key_window = self.keys.number("attention.key_length_swa", self.key)
        self.value_window = self.keys.number("attention.value_length_swa", self.value)
        if self.name == "kimi-k3":
            self.value = self.keys.number("attention.kv_lora_rank")
        self.latent = (
            self.rules.latent
            and self.keys.number("attention.key_length_mla") > 0
            and self.keys.number("attention.value_length_mla") > 0
        )

    def _windows(self) -> list[int]:
        """Tokens that each block sees, 0 for all (``llama-hparams.cpp:set_swa_pattern``, the models' rules)."""
        none = [0] * self.blocks
        rule = self.rules.window
        if rule is None or (rule.blocks and rule.blocks != self.main):
            return none
        found = self.keys.has("attention.sliding_window")
        tokens = self.keys.number("attention.sliding_window")
        if (rule.needs_key and not found) or (rule.zero_disables and found and tokens == 0):
            return none
        if rule.fixed:
            tokens = rule.fixed
        elif not found:
            tokens = rule.default
            if tokens:
                text = f"the file names no sliding window: {tokens} tokens, llama.cpp's default for {self.name}"
                self.notes.append(Note(kind="assumed", bucket="kv", text=text))
            else:
                self.keys.needed("attention.sliding_window")
        flags = self._window_flags(rule)
        return [tokens if flag else 0 for flag in flags]

    def _window_flags(self, rule: Window) -> list[bool]:
        pattern = "attention.sliding_window_pattern"
        if rule.attention:
            return [self.name == "deepseek4" or kv > 0 for kv in self.kv_heads]
        listed = self.keys.array(pattern)
        if rule.pattern == "flags" or (rule.pattern == "either" and listed is not None):
            blocks = self.blocks if listed is None or len(listed) == self.blocks else self.main
            if not self.keys.has(pattern):
                self.keys.needed(pattern)
            flags = self.keys.each(pattern, blocks, [], exact=False)
            return [bool(flag) for flag in flags] + [False] * (self.blocks - len(flags))
        period = self.keys.number(pattern, rule.period)
        return [self._in_window(block, period, first=rule.dense_first) for block in range(self.blocks)]

    def _in_window(self, block: int, period: int, *, first: bool) -> bool:
        if block >= self.main:
            return False
        if period == 0:
            return True
        return block % period != 0 if first else block % period < period - 1

    def _recurrent(self) -> list[bool]:
        """Blocks that keep a recurrent state (``is_recr`` of each architecture)."""
        rule = self.rules.recurrent
        inner = [block < self.main for block in range(self.blocks)]
        if rule == "none":
            return [False] * self.blocks
        if rule in ("all", "both"):
            return inner
        if rule == "interval":
            if self.keys.has("attention.recurrent_layers"):
                flags = self.keys.each("attention.recurrent_layers", self.blocks, [])
                return [bool(flag) and own for flag, own in zip(flags, inner, strict=True)]
            every = max(1, self.keys.number("full_attention_interval", self.rules.interval))
            return [own and (block + 1) % every != 0 for block, own in enumerate(inner)]
        bare = [own and kv == 0 for own, kv in zip(inner, self.kv_heads, strict=True)]
        if rule == "no-kv-heads":
            return bare
        return [own and ff == 0 for own, ff in zip(bare, self.feed_forward, strict=True)]

    def _attends(self, block: int) -> bool:
        """Whether the block has a KV cache of its own (``llama-model.cpp:create_memory``, ``has_kv``)."""
        if self.rules.cache == "none" or self.rules.recurrent == "all":
            return False
        if self.rules.kv_from_start is not None and block >= self._own_caches():
            return False
        if self.rules.recurrent == "both":
            return True
        if self.rules.recurrent == "no-kv-heads-no-ff" and self.feed_forward[block] > 0:
            return False
        return not self.recurrent[block]

    def _own_caches(self) -> int:
        """Blocks from the start with caches of their own; later ones reuse theirs (``gemma3n.cpp``, ``gemma4.cpp``)."""
        shared = self.keys.number("attention.shared_kv_layers")
        if shared > self.blocks:
            raise BadModel(f"{self.source}: {shared} of {self.blocks} blocks share a cache: the file is damaged")
        return self.rules.kv_from_start or self.blocks - shared

    def _states(self) -> tuple[int, int]:
        """Elements of convolution and recurrent state of one block and sequence (``n_embd_r``, ``n_embd_s``)."""
        keys, heads = self.keys, self.heads[0]
        conv, inner = keys.number("ssm.conv_kernel"), keys.number("ssm.inner_size")
        state, groups = keys.number("ssm.state_size"), keys.number("ssm.group_count")
        if self.rules.state == "wkv":
            size = keys.number("wkv.head_size")
            return keys.number("token_shift_count", 2) * self.embedding, self.embedding * size
        if self.rules.state == "shortconv":
            return self.embedding * max(0, keys.number("shortconv.l_cache") - 1), state * inner
        if self.rules.state == "kda":
            size = keys.number("kda.head_dim")
            return 3 * (conv - 1 if conv else 3) * heads * size, size * size * heads
        convolution = max(0, conv - 1) * (inner + 2 * groups * state)
        if self.rules.state == "lightning":
            return convolution, self.key * self.key * heads
        return convolution, state * inner

    def _history(self, block: int) -> int:
        """Elements of the n-gram embedding's own history (``llama-hparams.cpp:ple_conv_state``; qwen4exp)."""
        if self.name != "qwen4exp" or block not in (self.keys.array("ple.layers") or ()):
            return 0
        kernel, ngram = self.keys.number("ple.conv_kernel"), self.keys.number("ple.ngram_size")
        return max(0, kernel - 1) * ngram * self.keys.number("hyper_connection.count") * self.embedding

    def _indexed(self) -> list[bool]:
        """Blocks with an indexer cache (the filters of ``create_memory``)."""
        rule = self.rules.indexer
        inner = [block < self.main for block in range(self.blocks)]
        if rule == "none" or not self.keys.number("attention.indexer.key_length"):
            return [False] * self.blocks
        if rule == "after-dense":
            dense = self.keys.number("leading_dense_block_count")
            return [block >= dense for block in range(self.blocks)]
        if rule == "attention":
            return [own and not recurrent for own, recurrent in zip(inner, self.recurrent, strict=True)]
        if rule == "all":
            return inner
        # GLM: all blocks before version 5.2, then blocks 0, 1, 2 and every fourth from there, unless the file says.
        usual = [block < 2 or (block - 2) % 4 == 0 or self.context < 1 << 20 for block in range(self.main)]
        flags = self.keys.each("attention.indexer.types", self.main, usual, exact=rule == "glm")
        return [bool(flag) for flag in flags] + [False] * (self.blocks - self.main)

    def _layers(self) -> list[Layer]:
        state_r, state_s = self._states() if any(self.recurrent) else (0, 0)
        indexed = self._indexed()
        index_key = self.keys.number("attention.indexer.key_length")
        ratios = self.keys.array("attention.compress_ratios") or ()
        dense, mixed = self._tensors_by_block()
        experts = self.keys.number("expert_count")
        layers = []
        for block in range(self.blocks):
            attends = self._attends(block)
            bare = self.recurrent[block] and self.rules.recurrent != "both"
            heads, kv_heads = (0, 0) if bare else (self.heads[block], self.kv_heads[block])
            window = self.windowed[block]
            key = self.key_window if window else self.key
            value = self.value_window if window else self.value
            latent = self.latent or self.rules.cache == "compressed"
            recurrent = self.recurrent[block]
            layers.append(
                Layer(
                    heads=heads,
                    kv_heads=kv_heads,
                    key_length=key if heads or kv_heads else 0,
                    value_length=value if heads or kv_heads else 0,
                    k_row=key * kv_heads if attends else 0,
                    v_row=value * kv_heads if attends and not latent else 0,
                    empty_cache=attends and key * kv_heads == 0,
                    window=window,
                    state_r=state_r + self._history(block) if recurrent else 0,
                    state_s=state_s if recurrent else 0,
                    indexer_row=index_key if indexed[block] else 0,
                    indexer_v_row=value if indexed[block] and not latent else 0,
                    compress=ratios[block] if self.rules.cache == "compressed" and block < len(ratios) else 0,
                    feed_forward=dense.get(block, 0 if self.gguf.tensors else self.feed_forward[block]),
                    experts=experts if block in mixed or (experts and not self.gguf.tensors) else 0,
                )
            )
        return layers

    def _tensors_by_block(self) -> tuple[dict[int, int], set[int]]:
        """Dense feed-forward sizes and the blocks with experts, as the tensors have them."""
        dense: dict[int, int] = {}
        mixed: set[int] = set()
        for tensor in self.gguf.tensors:
            if match := _DENSE.match(tensor.name):
                size = tensor.dims[0] if ".ffn_down." in tensor.name else tensor.dims[-1]
                if ".ffn_down." in tensor.name or int(match[1]) not in dense:
                    dense[int(match[1])] = size
            elif match := _EXPERTS.match(tensor.name):
                mixed.add(int(match[1] or match[2]))
        return dense, mixed

    def _ssm(self) -> Ssm | None:
        if not any(self.recurrent):
            return None
        number = self.keys.number
        return Ssm(
            kind=self.rules.ssm or self.rules.state,
            inner=number("ssm.inner_size") or number("wkv.head_size") or number("kda.head_dim"),
            state=number("ssm.state_size"),
            conv=number("ssm.conv_kernel") or number("shortconv.l_cache"),
            groups=number("ssm.group_count"),
            dt_rank=number("ssm.time_step_rank"),
        )

    def _mla(self) -> Mla | None:
        if not self.latent:
            return None
        number = self.keys.number
        rope = number("rope.dimension_count", self.key)
        return Mla(
            query_rank=number("attention.q_lora_rank"),
            kv_rank=number("attention.kv_lora_rank"),
            rope=rope,
            nope=max(0, number("attention.key_length_mla") - rope),
            value=number("attention.value_length_mla"),
        )

    def _vocabulary(self) -> int:
        tokens = self.gguf.arrays.get("tokenizer.ggml.tokens")
        counted = tokens.count if tokens is not None else 0
        counted = counted or self.keys.number("vocab_size")  # what is read where there is no tokenizer
        if counted:
            return counted
        for tensor in self.gguf.tensors:
            if tensor.name in ("token_embd.weight", "output.weight") and len(tensor.dims) > 1:
                return tensor.dims[1]
        return 0

    def _meta(self) -> dict[str, int | float | str | bool]:
        """Single values under the architecture's prefix, without it, and what the rules here found out."""
        prefix = f"{self.name}."
        found: dict[str, int | float | str | bool] = {}
        for key, value in self.gguf.metadata.items():
            if key.startswith(prefix) and isinstance(value, bool | int | float | str) and len(str(value)) < 200:
                found[key.removeprefix(prefix)] = value
        rule = self.rules
        found |= {"extra_cached": rule.extra_cached, "extra_loaded": rule.extra_loaded, "extra_alone": rule.extra_alone}
        if any(self.windowed) and rule.window is not None:
            found["window_kind"] = rule.window.kind
        return found | {"cache": rule.cache, "rollback": rule.rollback, "draft": rule.draft}

    def shape(self) -> ModelShape:
        layers = self._layers()
        main, extra = tuple(layers[: self.main]), tuple(layers[self.main :])
        names = {tensor.name for tensor in self.gguf.tensors}
        tied = self.rules.copies_output and "token_embd.weight" in names and "output.weight" not in names
        windowed = sum(layer.window > 0 for layer in main)
        file_type = self.gguf.metadata.get("general.file_type")
        title = self.gguf.metadata.get("general.name")
        causal = self.gguf.metadata.get(f"{self.name}.attention.causal", True)
        if self.rules.draft:
            text = f"{self.name} only runs beside the model that it drafts for: its own cache follows from that one"
            self.notes.append(Note(kind="warning", text=text, bucket="kv"))
        return ModelShape(
            source=self.source,
            format="gguf",
            architecture=self.name,
            name=title if isinstance(title, str) else "",
            known=self.known,
            layers=main,
            extra_layers=len(extra),
            extra_blocks=extra,
            embedding=self.embedding,
            vocabulary=self._vocabulary(),
            context=self.context,
            experts=self.keys.number("expert_count"),
            experts_used=self.keys.number("expert_used_count"),
            expert_feed_forward=self._expert_size(),
            shared_experts=self.keys.number("expert_shared_count"),
            leading_dense=self.keys.number("leading_dense_block_count"),
            tied=tied,
            encoder=self.rules.cache == "none",
            causal=self.rules.causal and bool(causal),
            mla=self._mla(),
            ssm=self._ssm(),
            swa_pattern=f"{windowed} of {len(main)}" if windowed else "",
            quantization=ggml.file_type_name(file_type) if isinstance(file_type, int) else "",
            tensors=self.gguf.tensors,
            files=tuple(str(file) for file in self.gguf.files),
            file_bytes=self.gguf.file_bytes,
            meta=self._meta(),
            notes=tuple(self.notes),
        )

    def _expert_size(self) -> int:
        """Hidden size of one routed expert: as its tensors have it, else as the file says."""
        for tensor in self.gguf.tensors:
            if _is_expert_down(tensor):
                return tensor.dims[0]
        return self.keys.number("expert_feed_forward_length", self.feed_forward[0])


def _is_expert_down(tensor: Tensor) -> bool:
    return tensor.name.endswith(".ffn_down_exps.weight") and len(tensor.dims) > 1

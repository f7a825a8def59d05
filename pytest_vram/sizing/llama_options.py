"""What a user wrote for llama-server, checked: Python keywords, a spec file's ``options``, or a pasted command line.

Accepted values and defaults are those of llama.cpp's ``common/arg.cpp`` (October 2026) and ``tools/server/server.cpp``.
Options without a say in memory are accepted, and kept for the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml, option_values, patterns
from pytest_vram.sizing.engine_options import Value, known, named, spelled
from pytest_vram.sizing.options import Device, DeviceKind, Draft, LlamaOptions
from pytest_vram.sizing.shape import Note

#: ``kv_cache_types`` of ``common/arg.cpp``.
CACHE_TYPES = ggml.CACHE_TYPES
QUANTIZED_CACHE_TYPES = CACHE_TYPES[3:]
#: Sequences that one context can hold (``LLAMA_MAX_SEQ``).
MOST_SLOTS = 256
_LARGEST = (1 << 31) - 1
_YES = ("on", "enabled", "true", "1")
_NO = ("off", "disabled", "false", "0")
_LOAD_MODES = {
    "auto": (True, False),
    "none": (False, False),
    "mmap": (True, False),
    "mlock": (False, True),
    "mmap+mlock": (True, True),
    "dio": (False, False),
}
#: Beginning of a device's name, lower case → kind.
_KINDS: dict[str, DeviceKind] = {
    "cuda": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "metal": "metal",
    "mtl": "metal",
    "sycl": "sycl",
    "rpc": "rpc",
}
#: Beginnings of the names of devices that no rule knows more about (``GGML_*_NAME`` of ``ggml/include/*.h``).
_OTHERS = ("musa", "cann", "gpuopencl", "opencl", "webgpu", "openvino", "htp", "et", "ggml-virtgpu", "virtgpu")
#: A kind, an index, and what older builds put behind it: ``RPC[127.0.0.1:50052]``.
_DEVICE = re.compile(rf"(?:{'|'.join((*_KINDS, *_OTHERS))})\d{{0,2}}(?:\[[\w.:-]+\])?", re.ASCII | re.IGNORECASE)
_SERVER = re.compile(r"[\w.\[\]:%-]+:(\d{1,5})", re.ASCII)
#: Shares that ``--tensor-split`` takes: fewer than ``llama_max_devices`` (``common/arg.cpp``).
_MOST_SHARES = 15
#: ``string_parse_kv_override`` of ``common/common.cpp``.
_OVERRIDE = re.compile(r"(?P<key>[^=]{1,127})=(?:int:[+-]?\d+|float:\S+|bool:(?:true|false)|str:.{0,127})", re.DOTALL)
#: Metadata that no memory depends on: the words' own, what describes the file, and factors inside of operators.
_NO_SAY = re.compile(
    r"tokenizer\..+|general\.(?!architecture|alignment).+"
    r"|.+\.(?:rope\.freq_\w+|rope\.scaling\.(?!finetuned)\w+|\w+_epsilon|logit_scale|attention\.scale)"
)
#: Dense feed-forward matrices of one block (``LLM_FFN_DENSE_REGEX`` of ``common/common.h``).
_DENSE = r"blk\.{}\.ffn_(up|down|gate)\."
#: Options that change memory in a way that no rule here follows.
_UNFOLLOWED = {
    "control-vector": "a control vector is not counted",
    "control-vector-scaled": "a control vector is not counted",
    "models-dir": "a router starts servers of its own, each as large as its model: size them one by one",
    "models-preset": "a router starts servers of its own, each as large as its model: size them one by one",
    "spec-draft-override-tensor": "tensor overrides of the draft model are not applied: it is counted on its device",
    "spec-draft-device": "the draft model is counted on the target's devices",
    "mmproj-device": "the projector is counted on the first device",
}
#: Options that print something and exit: there is no deployment to size.
_ENDING = ("help", "usage", "version", "cache-list", "list-devices", "completion-bash")
#: Options that stand for a model and several settings at once, or for a model elsewhere.
_PRESETS = ("b-default", "-300m-default", "gemma-default", "b-spec")
_ELSEWHERE = ("model-url", "docker-repo", "hf-repo", "hf-file", "mmproj-url", "hf-repo-draft")
_T = TypeVar("_T")


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for.

    :ivar options: what decides memory. :ivar model: the model where it was among the options.
    :ivar kept: words of a command line for everything else. :ivar given: full names of all options that were given.
    :ivar notes: what a reader must know about how they were understood.
    """

    options: LlamaOptions
    model: str | None = None
    kept: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def options_of(mapping: Mapping[str, Any], *, origin: str = "") -> LlamaOptions:
    """The options that decide memory; see :func:`read`.

    :raises BadInput: naming option, value and what is accepted.
    """
    return read(mapping, origin=origin).options


def read(mapping: Mapping[str, Any], *, origin: str = "") -> Given:
    """Check options of llama-server given by name, with dashes or underscores; ``None`` means not given.

    :param origin: where they came from, for messages, such as ``[backend.agent] in vram.toml``.
    :raises BadInput: an unknown option, one given under two names, or a bad value; the message names option, value
        and what is accepted.
    """
    values = _by_full_name(mapping, origin)
    take = _Taker(values, origin)
    devices, notes = _devices(take)
    flash = take.flash_attention()
    type_k, type_v = take.cache_type("cache-type-k"), take.cache_type("cache-type-v")
    if flash == "off" and type_v in QUANTIZED_CACHE_TYPES:
        raise BadInput(
            f"cache-type-v = {type_v!r} with flash-attn = 'off'{take.origin}: a quantised V cache needs flash"
            " attention; write flash-attn = 'on', or cache-type-v = 'f16'"
        )
    batch, ubatch = take.whole("batch-size", 1, 2048), take.whole("ubatch-size", 1, 512)
    embeddings, reranking = take.switch("embeddings", False), take.switch("reranking", False)
    if (embeddings or reranking) and batch > ubatch:
        batch = ubatch
        notes.append(
            Note(kind="rule", text=f"embeddings run in one batch: llama-server sets batch-size to {ubatch}, the ubatch")
        )
    parallel = take.parallel()
    mmap, mlock = take.loading()
    options = LlamaOptions(
        ctx_size=take.whole("ctx-size", 0, 0),
        batch_size=batch,
        ubatch_size=ubatch,
        parallel=parallel,
        kv_unified=take.switch("kv-unified", None),
        flash_attn=flash,
        cache_type_k=type_k,
        cache_type_v=type_v,
        swa_full=take.switch("swa-full", False),
        kv_offload=take.switch("kv-offload", True),
        op_offload=take.switch("op-offload", True),
        n_gpu_layers=take.gpu_layers("n-gpu-layers"),
        n_cpu_moe=take.whole("n-cpu-moe", 0, 0),
        cpu_moe=take.switch("cpu-moe", False),
        override_tensor=take.overrides(),
        split_mode=take.word("split-mode", ("none", "layer", "row", "tensor"), "layer"),
        tensor_split=take.shares(),
        main_gpu=take.main_gpu(devices),
        devices=devices,
        mmap=mmap,
        mlock=mlock,
        no_host=take.switch("no-host", False),
        repack=take.switch("repack", True),
        embeddings=embeddings or reranking,
        reranking=reranking,
        pooling=take.word("pooling", ("none", "mean", "cls", "last", "rank"), None),
        mmproj=take.projector(),
        mmproj_offload=take.switch("mmproj-offload", True),
        image_max_tokens=take.maybe("image-max-tokens", 1),
        lora=take.adapters(),
        draft=take.draft(notes),
        cache_ram=take.whole("cache-ram", -1, 8192),
        ctx_checkpoints=take.whole("ctx-checkpoints", 0, 32),
    )
    per_slot = take.maybe("kv-unified-per-slot", 1)
    if per_slot is not None and "ctx-size" not in values:
        most = _LARGEST // options.slots
        if per_slot > most:
            raise take.bad("kv-unified-per-slot", per_slot, f"at most {most} tokens for each of {options.slots} slots")
        options = msgspec.structs.replace(options, ctx_size=per_slot * options.slots)
    return _rest(take, options, notes)


def command(options: LlamaOptions, model: str, kept: Sequence[str] = ()) -> tuple[str, ...]:
    """The command line of llama-server for these options: what differs from the engine's defaults, then ``kept``."""
    plain = LlamaOptions()
    words = ["llama-server", "--model", model]
    others = list(kept)
    if "--rpc" in others:  # before --device, which may name what it adds
        place = others.index("--rpc")
        words.extend(others[place : place + 2])
        del others[place : place + 2]

    def add(name: str, value: Value | None) -> None:
        if value is not None:
            words.extend(spelled(name, value))

    for field in ("ctx_size", "batch_size", "ubatch_size", "parallel", "kv_unified", "flash_attn", "cache_type_k"):
        _add_changed(add, field, options, plain)
    for field in ("cache_type_v", "swa_full", "kv_offload", "op_offload"):
        _add_changed(add, field, options, plain)
    add("n-gpu-layers", options.n_gpu_layers)
    for field in ("n_cpu_moe", "cpu_moe"):
        _add_changed(add, field, options, plain)
    if options.override_tensor:
        add("override-tensor", ",".join(f"{pattern}={where}" for pattern, where in options.override_tensor))
    _add_changed(add, "split_mode", options, plain)
    if options.tensor_split:
        add("tensor-split", ",".join(f"{share:g}" for share in options.tensor_split))
    _add_changed(add, "main_gpu", options, plain)
    if not options.devices:
        add("device", "none")
    elif any(device.name for device in options.devices):
        add("device", ",".join(device.name or device.label for device in options.devices))
    if options.mlock:  # the older spellings where there is one: every build knows them
        words.extend(["--load-mode", "mmap+mlock"] if options.mmap else ["--mlock"])
    elif not options.mmap:
        words.append("--no-mmap")
    for field in ("no_host", "repack"):
        _add_changed(add, field, options, plain)
    if options.embeddings and not options.reranking:
        add("embeddings", True)
    for field in ("reranking", "pooling", "mmproj", "mmproj_offload", "image_max_tokens"):
        _add_changed(add, field, options, plain)
    if options.lora:
        add("lora", ",".join(options.lora))
    if options.draft is not None:
        for name, value in _draft_options(options.draft):
            add(name, value)
    for field in ("cache_ram", "ctx_checkpoints"):
        _add_changed(add, field, options, plain)
    return (*words, *others)


def _add_changed(
    add: Callable[[str, Value | None], None], field: str, options: LlamaOptions, plain: LlamaOptions
) -> None:
    value = getattr(options, field)
    if value != getattr(plain, field):
        add(field.replace("_", "-"), value)


def _draft_options(draft: Draft) -> list[tuple[str, Value | None]]:
    plain = Draft()
    return [
        ("spec-type", draft.kind),
        ("model-draft", draft.model),
        ("spec-draft-n-max", draft.n_max if draft.n_max != plain.n_max else None),
        ("n-gpu-layers-draft", draft.n_gpu_layers),
        ("cache-type-k-draft", draft.cache_type_k if draft.cache_type_k != plain.cache_type_k else None),
        ("cache-type-v-draft", draft.cache_type_v if draft.cache_type_v != plain.cache_type_v else None),
    ]


def _by_full_name(mapping: Mapping[str, Any], origin: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for key, value in mapping.items():
        if value is None:
            continue
        row, on = named(key, origin=origin)
        value = option_values.plain(key, value, f" ({origin})" if origin else "")
        if row.name in values:
            raise BadInput(
                f"option {key!r} is the same as {spelling[row.name]!r}, which is given too: keep one of them"
            )
        spelling[row.name] = key
        if not row.value:
            value = _switched(key, value, on, f" ({origin})" if origin else "")
        values[row.name] = value
    return values


def _switched(key: str, value: object, on: bool, origin: str) -> bool:
    if isinstance(value, str) and value.lower() in (*_YES, *_NO):
        value = value.lower() in _YES
    if not isinstance(value, bool):
        raise BadInput(f"option {key!r} = {value!r}{origin} is a switch: write true or false")
    return value is on


class _Taker:
    """Takes checked values out of the options that were given, and remembers which it took."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = f" ({origin})" if origin else ""
        self.taken: set[str] = set()

    def get(self, name: str) -> Any:
        self.taken.add(name)
        return self.values.get(name)

    def bad(self, name: str, value: object, accepted: str) -> BadInput:
        return BadInput(f"option {name!r} = {option_values.shown(value)}{self.origin} cannot be used: write {accepted}")

    def switch(self, name: str, default: _T) -> bool | _T:
        value = self.get(name)
        return default if value is None else bool(value)

    def whole(self, name: str, least: int, default: int) -> int:
        value = self.maybe(name, least)
        return default if value is None else value

    def maybe(self, name: str, least: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        number = option_values.integer(value)
        if number is None or not least <= number <= _LARGEST:
            to = f"to {_LARGEST}" if number is not None and number > _LARGEST else "on"
            raise self.bad(name, value, f"a whole number from {least} {to}")
        return number

    def word(self, name: str, accepted: Sequence[str], default: _T) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if value not in accepted:
            raise self.bad(name, value, f"one of {', '.join(accepted)}")
        return value

    def flash_attention(self) -> Literal["on", "off", "auto"]:
        value = self.get("flash-attn")
        if value is None or value in ("auto", "-1"):
            return "auto"
        if value is True or str(value).lower() in _YES:
            return "on"
        if value is False or str(value).lower() in _NO:
            return "off"
        raise self.bad("flash-attn", value, "on, off or auto")

    def cache_type(self, name: str) -> str:
        return str(self.word(name, CACHE_TYPES, "f16"))

    def parallel(self) -> int | None:
        value = self.get("parallel")
        number = -1 if value is None or value == "auto" else option_values.integer(value)
        if number == -1:
            return None
        if number is None or not 1 <= number <= MOST_SLOTS:
            raise self.bad("parallel", value, f"a number of slots from 1 to {MOST_SLOTS}, or -1 (automatic)")
        return number

    def gpu_layers(self, name: str) -> int | None:
        value = self.get(name)
        if value in (None, "auto", "all"):
            return None
        number = option_values.integer(value)
        if number is None or number > _LARGEST:
            raise self.bad(name, value, "a number of layers, auto or all")
        return None if number < 0 else number

    def overrides(self) -> tuple[tuple[str, str], ...]:
        found: list[tuple[str, str]] = []
        for text in option_values.items(self.get("override-tensor")):
            if isinstance(text, (tuple, list)) and len(text) == 2:
                found.append((str(text[0]), str(text[1])))
                continue
            for part in str(text).split(","):
                pattern, equals, where = part.partition("=")
                if not equals or not pattern or not where:
                    raise self.bad("override-tensor", text, "PATTERN=BUFFER such as 'ffn_.*_exps=CPU'")
                found.append((pattern, where))
        for pattern, _ in found:
            patterns.compiled(pattern, "--override-tensor")
        layers = self.whole("n-cpu-ffn", 0, 0)
        if layers > 1 << 14:
            raise self.bad("n-cpu-ffn", layers, f"a number of layers up to {1 << 14}")
        return (*found, *((_DENSE.format(layer), "CPU") for layer in range(layers)))

    def shares(self) -> tuple[float, ...]:
        value = self.get("tensor-split")
        if value is None:
            return ()
        parts = re.split(r"[,/]+", value) if isinstance(value, str) else option_values.items(value)
        try:
            shares = tuple(float(part) for part in parts if "_" not in str(part))
        except (TypeError, ValueError, OverflowError):
            shares = (-1.0,)
        if len(shares) > _MOST_SHARES:
            raise self.bad("tensor-split", value, f"up to {_MOST_SHARES} shares, one for each device")
        if len(shares) != len(parts) or not shares or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
            raise self.bad("tensor-split", value, "shares such as 3,1")
        return shares

    def main_gpu(self, devices: Sequence[Device]) -> int:
        number = self.whole("main-gpu", 0, 0)
        if number and number >= len(devices):
            raise self.bad("main-gpu", number, f"the index of one of the {len(devices)} devices, from 0")
        return number

    def loading(self) -> tuple[bool, bool]:
        """Whether weights are mapped, and whether they are locked (``load-mode``, or its older switches)."""
        # In common/arg.cpp each of them sets the same variable, so that the last one counts.
        mode = self.word("load-mode", tuple(_LOAD_MODES), None)
        mapped, locked, direct = self.switch("mmap", None), self.switch("mlock", False), self.switch("direct-io", None)
        meant = {
            "load-mode": mode,
            "mmap": "mmap" if mapped else "none",
            "mlock": "mlock" if locked else None,
            "direct-io": "dio" if direct else "none",
        }
        given = [meant[name] for name in self.values if meant.get(name) is not None]
        return _LOAD_MODES[str(given[-1]) if given else "auto"]

    def projector(self) -> str | None:
        path = self.text("mmproj")
        return path if self.switch("mmproj-auto", True) else None

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.bad(name, value, "a path or a name")
        return value

    def adapters(self) -> tuple[str, ...]:
        return (*self._paths("lora"), *(self._scaled(one) for one in self._paths("lora-scaled")))

    def _paths(self, name: str) -> Iterator[str]:
        for one in option_values.items(self.get(name)):
            if not isinstance(one, str) or not all(one.split(",")):
                raise self.bad(name, one, "paths of GGUF adapters")
            yield from one.split(",")

    def _scaled(self, text: str) -> str:
        path, _, scale = text.rpartition(":")
        if not path or not option_values.is_fraction(scale):
            raise self.bad("lora-scaled", text, "PATH:SCALE such as adapter.gguf:0.5")
        return path

    def overridden(self) -> Iterator[Note]:
        """What must be said about metadata that is overridden.

        :raises BadInput: what the engine cannot read.
        """
        for one in option_values.items(self.values.get("override-kv")):
            for text in option_values.row(one) if isinstance(one, str) else [one]:
                match = _OVERRIDE.fullmatch(text) if isinstance(text, str) else None
                if match is None:
                    raise self.bad("override-kv", one, "KEY=TYPE:VALUE, with the type int, float, bool or str")
                if not _NO_SAY.fullmatch(match["key"]):
                    yield Note(
                        kind="unknown",
                        text=f"override-kv {text}: overridden metadata is not applied, the figures are those of the"
                        " file as it stands; the engine itself says more (--exact)",
                    )

    def draft(self, notes: list[Note]) -> Draft | None:
        """Speculative decoding by a model or by the target's own head; n-gram kinds keep tables on the host only."""
        model = self.text("model-draft")
        kinds = [kind.strip() for one in option_values.items(self.get("spec-type")) for kind in str(one).split(",")]
        n_max = self.whole("spec-draft-n-max", 0, 3)
        layers = self.gpu_layers("n-gpu-layers-draft")
        type_k, type_v = self.cache_type("cache-type-k-draft"), self.cache_type("cache-type-v-draft")
        for kind in kinds:
            if not re.fullmatch(r"none|draft-\w+|ngram-[\w-]+", kind):
                raise self.bad("spec-type", kind, "none, draft-simple, draft-eagle3, draft-mtp … or ngram-…")
        drafting = [kind for kind in kinds if kind.startswith("draft-")]
        if not drafting and model is not None and set(kinds) <= {"none"}:
            drafting = ["draft-simple"]
            notes.append(Note(kind="assumed", bucket="draft", text="the draft model is a plain one (draft-simple)"))
        if not drafting:
            return None
        if model is None and drafting[0] != "draft-mtp":
            raise BadInput(f"option 'spec-type' = {drafting[0]!r}{self.origin} needs a draft model: add model-draft")
        return Draft(
            kind=drafting[0],
            model=model,
            n_max=n_max,
            n_gpu_layers=layers,
            cache_type_k=type_k,
            cache_type_v=type_v,
        )


def _devices(take: _Taker) -> tuple[tuple[Device, ...], list[Note]]:
    """The devices that layers go to (``--device`` and ``--rpc``); one CUDA card where nothing is said."""
    servers = [
        part.strip() for one in option_values.items(take.get("rpc")) for part in str(one).split(",") if part.strip()
    ]
    for server in servers:
        match = _SERVER.fullmatch(server)
        if match is None or not 0 < int(match[1]) < 1 << 16:
            raise take.bad("rpc", server, "servers as HOST:PORT, such as 192.168.1.5:50052")
    asked = take.get("device")
    if "rpc" in take.values and not servers:
        raise take.bad("rpc", take.values["rpc"], "servers as HOST:PORT, such as 192.168.1.5:50052")
    names = [part.strip() for one in option_values.items(asked) for part in str(one).split(",") if part.strip()]
    if asked is not None and not names:
        raise take.bad("device", asked, "device names such as CUDA0, Vulkan0 or RPC0, or none")
    if names:
        if names == ["none"]:
            return (), []
        for name in names:
            if not _DEVICE.fullmatch(name):
                raise take.bad("device", name, "device names such as CUDA0, Vulkan0 or RPC0, or none alone")
            if [one.lower() for one in names].count(name.lower()) > 1:
                raise take.bad("device", asked, f"each device once: {name} stands for one card, however often")
        return devices_named(names, servers), []
    if servers:
        text = "no --device: only the RPC devices are used, cards of the machine itself are not known here"
        return (
            devices_named([f"RPC{index}" for index in range(len(servers))], servers),
            [Note(kind="assumed", text=text)],
        )
    text = "no --device: one CUDA card is assumed; write --device Vulkan0, ROCm0, CUDA0,CUDA1 or none"
    return LlamaOptions().devices, [Note(kind="assumed", text=text)]


def devices_named(names: Iterable[str], servers: Sequence[str] = ()) -> tuple[Device, ...]:
    """Devices under the names that the engine has for them, in its order.

    :param servers: of RPC, each taken to have one device: ``RPC1`` is the second server's.
    """
    return tuple(_device(index, name, servers) for index, name in enumerate(names))


def _device(index: int, name: str, servers: Sequence[str]) -> Device:
    start = next((known_start for known_start in _KINDS if name.lower().startswith(known_start)), "")
    kind = _KINDS.get(start, "other")
    number = re.fullmatch(r"rpc(\d{1,4})", name, re.ASCII | re.IGNORECASE)
    server = servers[int(number[1])] if number and int(number[1]) < len(servers) else ""
    return Device(label=f"gpu{index}", kind=kind, name=name, server=server)


def _rest(take: _Taker, options: LlamaOptions, notes: list[Note]) -> Given:
    """What decides nothing here: kept for the command line, with a note where it does matter."""
    model = take.text("model")
    notes.extend(take.overridden())
    if len(options.tensor_split) > max(1, len(options.devices)):
        notes.append(
            Note(
                kind="warning",
                text=f"tensor-split: {len(options.tensor_split)} shares for {len(options.devices)} devices; those that"
                " are left over are ignored",
            )
        )
    kept: list[str] = []
    for name, value in take.values.items():
        if name in _ELSEWHERE or name.endswith(_PRESETS):
            raise BadInput(
                f"option {name!r}{take.origin} names a model that may have to be fetched: give the path of its file,"
                " or its name in the local Hugging Face or Ollama store"
            )
        if name in _ENDING:
            raise BadInput(f"option {name!r}{take.origin} prints something and exits: leave it out")
        if name in _UNFOLLOWED:
            notes.append(Note(kind="warning", text=f"{name}: {_UNFOLLOWED[name]}"))
        if name in take.taken and name != "rpc":
            continue
        if known()[name].value and ((isinstance(value, bool) and "on" not in known()[name].value) or value == ""):
            raise take.bad(name, value, f"a value ({known()[name].value})")
        kept.extend(spelled(name, value))
    return Given(options=options, model=model, kept=tuple(kept), given=tuple(take.values), notes=tuple(notes))

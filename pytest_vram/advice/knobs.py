"""What is known about each setting of llama.cpp: what it is about, what it costs, how it is written, what proves it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pytest_vram.ledger import Bucket
from pytest_vram.sizing import changes
from pytest_vram.sizing.changes import CACHE_TYPES, Change, Fits
from pytest_vram.sizing.engine_options import known, spelled
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST
from pytest_vram.units import MIB

Make = Callable[[ModelShape, LlamaOptions, str, Fits], Change | None]

#: Of a setting that costs too much to come first, whichever bucket failed.
_LATE: frozenset[Bucket] = frozenset()


#: A context below this is no advice, unless the present one is hardly longer.
USEFUL_CONTEXT = 2048


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that may be turned.

    :ivar make: the change, with the value that is enough where there is one. :ivar buckets: that it is about; advice
        about the bucket that failed comes first. :ivar cost: to the user, a sentence.
    :ivar proof: a sign in the log; ``{after}`` is the new value, ``{first}`` its first part.
    :ivar buffer: the kind of buffer whose size shows it: ``model``, ``KV`` or ``compute``.
    """

    name: str
    make: Make
    buckets: frozenset[Bucket]
    cost: str
    proof: str
    buffer: str = ""


def _about(*buckets: Bucket) -> frozenset[Bucket]:
    return frozenset(buckets)


#: In the order of what they cost the user.
KNOBS: tuple[Knob, ...] = (
    Knob(
        name="mmap",
        make=lambda shape, options, device, fits: changes.unmapped(options) if device == HOST else None,
        buckets=_about("weights", "experts"),
        cost="the model loads more slowly, and its pages can no longer be dropped and read again",
        proof="no `CPU_Mapped model buffer size` line",
    ),
    Knob(
        name="flash-attn",
        make=lambda shape, options, device, fits: changes.flash_attention(options),
        buckets=_about("compute", "kv"),  # V is padded without it, and cannot be quantised
        cost="nothing where the device has kernels for it",
        proof="`flash_attn = enabled`",
        buffer="compute",
    ),
    Knob(
        name="ubatch-size",
        make=lambda shape, options, device, fits: changes.ubatch(shape, options, fits),
        buckets=_about("compute"),
        cost="prompts are read more slowly; answers are written as fast as before",
        proof="`n_ubatch = {after}`",
        buffer="compute",
    ),
    Knob(
        name="parallel",
        make=lambda shape, options, device, fits: changes.one_slot(options),
        buckets=_about("kv", "recurrent", "compute"),
        cost="requests wait for each other; nothing for one user at a time",
        proof="`n_seq_max = {after}`",
        buffer="KV",
    ),
    Knob(
        name="swa-full",
        make=lambda shape, options, device, fits: changes.window_cache(shape, options),
        buckets=_about("kv"),
        cost="a prompt that changed in its middle is read again from further back",
        proof="`creating SWA KV cache` with fewer cells than the context",
        buffer="KV",
    ),
    Knob(
        name="override-tensor",
        make=lambda shape, options, device, fits: changes.one_copy(options),
        buckets=_about("compute"),
        cost="long prompts are read more slowly, because the cards no longer work on several batches at once",
        proof="no `pipeline parallelism enabled` line",
        buffer="compute",
    ),
    Knob(
        name="model",
        make=lambda shape, options, device, fits: changes.weights(shape, options, fits),
        buckets=_about("weights", "experts"),
        cost="a little accuracy, and another file of the same model",
        proof="`file type = {after}` or a mixture of that name",
        buffer="model",
    ),
    Knob(
        name="cache-8",
        make=lambda shape, options, device, fits: changes.cache(options, CACHE_TYPES[:1]),
        buckets=_about("kv"),
        cost="hardly any accuracy; attention over a long context may be a little slower",
        proof="`K ({first})` in the line of the KV cache's size",
        buffer="KV",
    ),
    Knob(
        name="draft-cache",
        make=lambda shape, options, device, fits: changes.draft_cache(options),
        buckets=_about("draft"),
        cost="a few more drafted tokens are refused",
        proof="`K (q8_0)` in the second line of a KV cache's size",
    ),
    Knob(
        name="ctx-size",
        make=lambda shape, options, device, fits: changes.context(shape, options, fits, least=USEFUL_CONTEXT),
        buckets=_about("kv", "compute"),
        cost="conversations and documents of at most {after} tokens over all slots",
        proof="`n_ctx = {after}`",
        buffer="KV",
    ),
    Knob(
        name="mmproj-offload",
        make=lambda shape, options, device, fits: changes.projector_on_host(options, shape),
        buckets=_about("projector"),
        cost="images and sound are encoded on the CPU, which takes seconds each",
        proof="`CLIP using CPU backend`",
    ),
    Knob(
        name="n-cpu-moe",
        make=lambda shape, options, device, fits: changes.experts(shape, options, fits),
        buckets=_about("experts", "weights"),
        cost="answers are written more slowly, the more experts are on the CPU",
        proof="the device's `model buffer size`, because the line `offloaded N/N layers` stays as it is",
        buffer="model",
    ),
    Knob(
        name="split-mode",
        make=lambda shape, options, device, fits: changes.every_card(options),
        buckets=_about("weights", "experts", "kv", "compute"),
        cost="the other cards are in use as well",
        proof="a `model buffer size` line of each card",
        buffer="model",
    ),
    Knob(
        name="tensor-split",
        make=lambda shape, options, device, fits: changes.shares(shape, options, device, fits),
        buckets=_about("weights", "experts", "kv"),
        cost="the other cards hold more",
        proof="the `model buffer size` of each card",
        buffer="model",
    ),
    Knob(
        name="kv-offload",
        make=lambda shape, options, device, fits: changes.cache_on_host(shape, options),
        buckets=_LATE,
        cost="attention runs on the CPU: answers are written much more slowly with a long context",
        proof="`CPU KV buffer size`, and none of the device",
    ),
    Knob(
        name="n-gpu-layers",
        make=lambda shape, options, device, fits: changes.layers(shape, options, fits),
        buckets=_LATE,
        cost="every layer on the CPU makes prompts and answers slower",
        proof="`offloaded {after}/` in the line about layers",
        buffer="model",
    ),
    Knob(
        name="spec-type",
        make=lambda shape, options, device, fits: changes.no_draft(options),
        buckets=_about("draft"),
        cost="answers are written one token at a time",
        proof="one `constructing llama_context` line for the model, and no second one for a draft",
    ),
    Knob(
        name="cache-4",
        make=lambda shape, options, device, fits: changes.cache(options, CACHE_TYPES[1:]),
        buckets=_LATE,
        cost="accuracy, above all with tool calls and long contexts",
        proof="`K ({first})` in the line of the KV cache's size",
        buffer="KV",
    ),
)


def ranked(bucket: str | None) -> list[Knob]:
    """The settings in the order in which they are advised: those of the bucket that failed first, then by cost."""
    return sorted(KNOBS, key=lambda knob: bucket not in knob.buckets)


_SWITCHES = {"on": True, "off": False}
_DRAFT_FILE = "model-draft"


def flag(change: Change) -> str:
    """The change as written on the command line of llama-server."""
    if change.weights is not None:
        return f"--model FILE (a {change.weights} file of the same model)"
    words: list[str] = []
    gone: list[str] = []
    for name, value in _options(change).items():
        said = spelled(name, value) if value is not None else []
        if said:
            words.extend(said)
        else:
            gone.append(f"--{name}")
    return " ".join(filter(None, [shlex.join(words), f"without {' and '.join(gone)}" if gone else ""]))


def _options(change: Change) -> dict[str, Any]:
    """Full option name → its new value."""
    if change.setting == "spec-type" and change.before != "draft-mtp":
        return {_DRAFT_FILE: None}
    if change.setting == "override-tensor":
        return {"override-tensor": change.after}
    names = change.setting.split(", ")
    texts = change.after.split("/") if len(names) > 1 else [change.after]
    values = dict(zip(names, texts if len(texts) == len(names) else [change.after] * len(names), strict=True))
    return {
        name: _SWITCHES.get(text, text) if name in known() and not known()[name].value else text
        for name, text in values.items()
    }


def proof(knob: Knob, change: Change, after: Estimate, device: str, names: Mapping[str, str]) -> str:
    """What the log shows once the change is in force."""
    said = knob.proof.format(after=change.after, first=change.after.partition("/")[0])
    buckets = {"model": ("weights", "experts"), "KV": ("kv",), "compute": ("compute",)}.get(knob.buffer)
    if buckets is None or device not in after.devices:
        return said
    rows = [entry for entry in after.entries if entry.device == device and entry.bucket in buckets]
    low = sum(entry.bytes for entry in rows)
    high = sum(entry.bytes if entry.at_most is None else entry.at_most for entry in rows)
    size = f"{low / MIB:,.2f}" if low == high else f"{low / MIB:,.2f} to {high / MIB:,.2f}"
    name = names.get(device) or device
    return f"{said}; the `{knob.buffer} buffer size` of {name} then is {size} MiB (several lines are summed)"

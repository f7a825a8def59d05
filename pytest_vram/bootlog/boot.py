"""What a boot log said."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.readings import Measured

Phase = Literal[
    "start",
    "weights",
    "kv",
    "reserve",
    "warm-up",
    "graph-capture",
    "ready",
    "prefill",
    "decode",
    "idle",
    "sleep",
    "stop",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A phase as the log shows it; times in seconds on the log's own clock, ``None`` where it has no clock.

    :ivar line: number of the line that begins it, from 1. :ivar peak: device label → the largest figure of the samples
        that fall into it, where samples were given.
    """

    name: Phase
    line: int
    start: float | None = None
    end: float | None = None
    peak: dict[str, Measured] = {}


#: Kind of failure → what it means.
FAILURES: dict[str, str] = {
    "out_of_memory": "the device refused an allocation",
    "host_out_of_memory": "the host refused an allocation",
    "host_oom_killed": "the kernel's out-of-memory killer, or a control group's, ended the process",
    "kv_planning": "after the weights too little was left for the KV cache that was asked for; nothing was refused",
    "precheck": "less was free than the engine wants before it loads anything",
    "load_error": "the model could not be loaded",
    "bad_option": "an option or its value is not known to the engine",
    "port_taken": "another program has the port",
    "illegal_instruction": "the engine was built for another processor",
    "crash": "the engine ended by a fault of its own",
    "bad_pattern": "a pattern in `log_patterns` could not be used",
}


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a boot failed, or a request after it did.

    :ivar kind: one of :data:`FAILURES`.
    :ivar certainty: ``certain`` (the engine says so), ``likely`` or ``unknown``; it is that of ``phase`` and ``bucket``
        where the kind itself is beyond doubt.
    :ivar text: the line that says it. :ivar line: its number, from 1. :ivar bytes: what was asked for and not given.
    :ivar free: bytes that the log says were free on that device. :ivar total: its size in bytes by the log.
    :ivar absurd: more was asked for than the whole device has, so that smaller settings would not help.
    :ivar note: what a reader must know besides, in a sentence.
    """

    kind: str
    certainty: str
    text: str
    phase: str | None = None
    bucket: str | None = None
    device: str | None = None
    bytes: int | None = None
    line: int | None = None
    free: int | None = None
    total: int | None = None
    absurd: bool = False
    note: str | None = None


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "which part of the memory is it?": where the largest figure of one device fell.

    :ivar phase: phase of the peak, ``None`` where samples and log could not be brought together.
    :ivar part: ``weights`` (reached while they were loaded, or made of them), ``later`` (KV cache, compute, requests)
        or ``unknown``. :ivar figure: the peak. :ivar text: the answer as a sentence, with its grounds.
    """

    device: str
    part: Literal["weights", "later", "unknown"]
    text: str
    phase: Phase | None = None
    figure: Measured | None = None


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot as its log tells it.

    :ivar evidence: ``complete`` (every buffer of the boot was printed), ``partial``, or ``none`` (a log without
        memory lines: raise the engine's verbosity); ``none`` never stands for zero bytes.
    :ivar entries: buffers as printed, with device labels of :attr:`devices`.
    :ivar devices: label (``gpu0``, ``host``) → the engine's own name (``RPC0[127.0.0.1:50052]``, ``CPU``).
    :ivar facts: ``context``, ``context_per_slot``, ``slots``, ``layers``, ``layers_offloaded``, ``cache_type_k``,
        ``cache_type_v``, ``flash_attention`` (``enabled`` or ``disabled``), ``model_bytes``, ``parameters``,
        ``ubatch``, ``build`` …; a fact that was not printed is absent. ``layers`` is the model's own number, and the
        engine offloads one more (the output layer, in 2023 two halves of the cache besides): it says
        ``layers_offloaded`` of ``layers_offloadable``, while ``layers_on_device_real`` is how many of the model's own
        are there, 0 where no buffer of the model is on a device, whatever it says. Other engines
        besides: ``kv_tokens`` (tokens that the whole KV cache holds), ``tensor_parallel``, ``pipeline_parallel``,
        ``memory_share`` (of the card, 0 to 1), ``max_concurrency``, ``allocated_bytes`` and ``reserved_bytes`` (torch),
        ``free_bytes`` and ``device_bytes`` (of a card at the start), ``kv_available_bytes`` (below zero where nothing
        was left), ``estimated_context`` (what vLLM recommends), ``profiled_tokens`` (SGLang), ``largest_memory_share``.
        llama.cpp besides: ``kv_bytes`` and ``recurrent_bytes`` (of the whole cache and state, whatever they lie on),
        ``draft_kv_bytes``, ``kv_cells`` and ``kv_cells_sliding``, ``kv_layers``, ``indexer_cells``, ``sequences``,
        ``streams``, ``pipeline_copies``, ``tensor_overrides`` (tensors placed elsewhere, where the log names them),
        ``mla``; and by device label ``free_bytes`` (before the load), ``total_bytes``, ``unaccounted_bytes`` (signed,
        by the table at the end: used on the device, but by no buffer of the engine).
        Sizes are bytes, times are seconds.
    :ivar clock: what the times of the phases count from: ``start`` (of the process), ``epoch`` (1970, UTC), or
        ``None``: the log has no clock. :ivar boots: boots that the log holds; this is the last one.
    :ivar peaks: where the memory of each device peaked, by samples where they were given, else by what was printed.
    """

    engine: str
    era: str
    evidence: Literal["complete", "partial", "none"]
    phases: tuple[PhaseSpan, ...] = ()
    entries: tuple[Entry, ...] = ()
    devices: dict[str, str] = {}
    facts: dict[str, Any] = {}
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    ready: bool = False
    clock: Literal["start", "epoch"] | None = None
    boots: int = 1
    peaks: tuple[Peak, ...] = ()

    @property
    def buckets(self) -> dict[Bucket, dict[str, int]]:
        """Bucket → device label → bytes, as printed; see :meth:`pytest_vram.ledger.Ledger.buckets`."""
        return self.ledger().buckets()

    def ledger(self) -> Ledger:
        """The printed buffers as a ledger without a measured total."""
        return Ledger(entries=self.entries, devices=self.devices)

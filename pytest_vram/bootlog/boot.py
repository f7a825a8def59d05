"""What a boot log said."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from pytest_vram.ledger import Entry, Ledger

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
    """A phase as the log shows it; times in seconds on the log's own clock, ``None`` where it has no clock."""

    name: Phase
    line: int
    start: float | None = None
    end: float | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a boot failed.

    :ivar kind: ``out_of_memory``, ``load_error``, ``bad_option``, ``port_taken``, ``illegal_instruction`` …
    :ivar certainty: ``certain`` (the engine says so), ``likely`` or ``unknown``.
    """

    kind: str
    certainty: str
    text: str
    phase: str | None = None
    bucket: str | None = None
    device: str | None = None
    bytes: int | None = None


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot as its log tells it.

    :ivar evidence: ``complete`` (every buffer of the boot was printed), ``partial``, or ``none`` (a log without
        memory lines: raise the engine's verbosity); ``none`` never stands for zero bytes.
    :ivar entries: buffers as printed, with device labels of :attr:`devices`.
    :ivar devices: label (``gpu0``, ``host``) → the engine's own name (``RPC0[127.0.0.1:50052]``, ``CPU``).
    :ivar facts: ``context``, ``context_per_slot``, ``slots``, ``layers``, ``layers_offloaded``, ``cache_type_k``,
        ``cache_type_v``, ``flash_attention`` (``enabled`` or ``disabled``), ``model_bytes``, ``parameters``,
        ``ubatch``, ``build`` …; a fact that was not printed is absent. ``layers`` is the model's own number, and the
        engine offloads one more (the output layer): it says ``layers_offloaded`` of ``layers_offloadable``, and
        ``layers_on_device_real`` is 0 where no buffer of the model is on a device, whatever it says.
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

    def ledger(self) -> Ledger:
        """The printed buffers as a ledger without a measured total."""
        return Ledger(entries=self.entries, devices=self.devices)

"""One turn of a conversation as data: the row of the turn table, and the line of a soak's journal."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.readings import Measured


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one turn was asked and what it took.

    :ivar number: from 1, over the whole session. :ivar conversation: its name; ``cycle`` counts its repeats from 1 and
        ``phase`` is the turn's place in the cycle from 0: turns of one phase are of one length and comparable.
    :ivar segment: from 1; a restarted server begins a new one, and no slope goes across it.
    :ivar peak: device label → peak during the turn. :ivar idle: the same once memory has settled after it.
    :ivar layers: layer → idle figure, where several sources are there: ``torch-allocated``, ``torch-reserved``,
        ``process``, ``device``, ``host``.
    :ivar tokens_in: tokens of the prompt. :ivar output_cap: most tokens that were asked for. :ivar context: tokens that
        the conversation holds after the turn, of ``context_size``.
    :ivar calls: tool calls that were asked for; ``calls_right`` of them were right; ``None``: not judged.
    :ivar repeated: calls identical to one before in this conversation.
    :ivar events: ``evicted 3 messages``, ``summarised``, ``restarted`` …: a step at such a turn is explained.
    :ivar result: ``ok``, ``error`` (the request failed), ``lost`` (the server died).
    :ivar nothing: why there is no answer, though no request failed: all of them are empty, or one is none that can be
        read: it did not end, or the server says that it could not read what the model wrote.
    :ivar t: nanoseconds on the run's clock. :ivar at: wall clock, ISO 8601.
    """

    number: int
    conversation: str
    cycle: int
    phase: int
    segment: int = 1
    tokens_in: int | None = None
    output_cap: int | None = None
    tokens_out: int | None = None
    context: int | None = None
    context_size: int | None = None
    peak: dict[str, Measured] = {}
    idle: dict[str, Measured] = {}
    layers: dict[str, Measured] = {}
    host: Measured | None = None
    latency: float | None = None
    tokens_per_second: float | None = None
    time_to_first_token: float | None = None
    calls: int | None = None
    calls_right: int | None = None
    kinds: list[str] = []
    repeated: int = 0
    events: list[str] = []
    result: Literal["ok", "error", "lost"] = "ok"
    error: str | None = None
    nothing: str | None = None
    t: int = 0
    at: str = ""

    @property
    def unanswered(self) -> str | None:
        """Why there is no answer; ``None``: there is one."""
        return self.nothing if self.result == "ok" else self.error or self.result

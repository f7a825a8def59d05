"""One request of the client, as data."""

from __future__ import annotations

import msgspec

from pytest_vram.keeper.messages import HostUse
from pytest_vram.readings import Measured


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of the client.

    :ivar latency: seconds from sending to the whole answer, without the wait for a turn.
    :ivar tokens_per_second: decode rate, as the server timed it, else output tokens over latency (``rate_from``).
    :ivar time_to_first_token: seconds from sending to the first piece of a streamed answer.
    :ivar result: ``ok``, ``error`` or ``timeout``.
    :ivar host_use: pages that the server read from disk and memory of it that went to swap meanwhile.
    :ivar doubt: figures of the server that cannot be true, and why; they are absent from the record.
    """

    id: str
    backend: str
    path: str
    result: str
    t: int
    latency: float
    waited: float = 0.0
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_per_second: float | None = None
    rate_from: str | None = None
    prompt_tokens_per_second: float | None = None
    time_to_first_token: float | None = None
    status: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    task: str | None = None
    peak: dict[str, Measured] = {}
    host_use: HostUse | None = None
    error: str | None = None
    doubt: str | None = None

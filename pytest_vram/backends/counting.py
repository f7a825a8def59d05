"""Figures of one answer: tokens and rates, taken from the server only where they can be true."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

#: Tokens per second of one request that no hardware decodes, by more than a factor of ten.
FASTEST = 100_000.0
#: A decode phase may be a small part of a request, behind a long prompt or a queue, but not less than one in so many.
SMALLEST_PART = 1000
#: Pieces of a stream that must come apart from each other before their times say how fast it decodes.
PACED = 4
_MOST = 1 << 40


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one answer; ``None`` where the server does not say, or cannot be believed.

    :ivar rate: tokens per second of the decode phase. :ivar rate_from: ``server``, ``stream`` or ``latency``.
    :ivar prompt_rate: tokens per second of the prompt phase.
    :ivar doubt: what the server said that cannot be true, and why.
    """

    tokens_in: int | None = None
    tokens_out: int | None = None
    rate: float | None = None
    rate_from: str | None = None
    prompt_rate: float | None = None
    doubt: str | None = None


def most_asked(body: Mapping[str, object]) -> int | None:
    """The most tokens that a request allows to be generated, over all of its choices; ``None``: it sets no limit."""
    limits = [body.get(key) for key in ("max_tokens", "max_completion_tokens", "n_predict")]
    known = [limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0]
    if not known:
        return None
    choices = [body.get(key) for key in ("n", "best_of")]
    return max(known) * max([1, *(count for count in choices if isinstance(count, int))])


def counts(
    answer: Mapping[str, object],
    latency: float,
    first: float | None,
    *,
    arrivals: int = PACED,
    most: int | None = None,
) -> Counts:
    """Tokens and decode rate of an answer.

    The server's own timing of its decode phase comes first; else tokens after the first over the time after the
    first piece of a stream; else tokens over the whole latency, which includes the prompt. One token has no rate.

    :param latency: seconds from sending to the whole answer. :param first: seconds to the first piece of a stream.
    :param arrivals: how many times text came; a stream that came at once (a proxy kept it back) times nothing.
    :param most: :func:`most_asked` of the request.
    """
    usage, timings = _table(answer.get("usage")), _table(answer.get("timings"))
    doubts: list[str] = []
    tokens_in = _count(usage.get("prompt_tokens"), "prompt tokens", None, doubts)
    tokens_out = _count(usage.get("completion_tokens"), "generated tokens", most, doubts)
    rate, rate_from = None, None
    if tokens_out is not None and tokens_out > 1:
        if (served := _number(timings.get("predicted_per_second"))) is not None and served > 0:
            rate, rate_from = served, "server"
        elif first is not None and latency > first and arrivals >= min(tokens_out, PACED):
            rate, rate_from = (tokens_out - 1) / (latency - first), "stream"
        elif latency > 0:
            rate, rate_from = tokens_out / latency, "latency"
        if rate is not None and (reason := _impossible(rate, tokens_out, latency, timings)) is not None:
            doubts.append(reason)
            rate, rate_from = None, None
    prompt_rate = _number(timings.get("prompt_per_second"))
    return Counts(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        rate=rate,
        rate_from=rate_from,
        prompt_rate=prompt_rate if prompt_rate is not None and 0 < prompt_rate < math.inf else None,
        doubt="; ".join(doubts) or None,
    )


def _impossible(rate: float, tokens: int, latency: float, timings: Mapping[str, object]) -> str | None:
    """Why this decode rate cannot be true, or ``None``.

    A rate that is too low is believed: it makes no check pass.
    """
    if not rate <= FASTEST:
        return f"{rate:.4g} tokens/s is more than any hardware decodes"
    prompt = _number(timings.get("prompt_ms"))
    rest = latency - (prompt / 1e3 if prompt is not None and 0 <= prompt / 1e3 < latency else 0.0)
    if rate * rest > SMALLEST_PART * tokens:
        needed = tokens / rate
        return f"{rate:.4g} tokens/s would be {needed:.3g} s for {tokens} tokens, but the answer took {latency:.3g} s"
    return None


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _count(value: object, what: str, most: int | None, doubts: list[str]) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if value < 0:
        doubts.append(f"the server says {_plain(value)} {what}")
    elif most is not None and value > most:
        doubts.append(f"the server says {_plain(value)} {what} where at most {most} were asked for")
    elif value > _MOST:
        doubts.append(f"the server says {_plain(value)} {what}")
    else:
        return value
    return None


def _plain(value: int) -> str:
    return str(value) if abs(value) <= _MOST else f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"


def _number(value: object) -> float | None:
    """A number, perhaps infinite; ``None`` for anything else, NaN included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return None if math.isnan(number) else number

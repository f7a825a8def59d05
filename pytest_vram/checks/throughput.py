"""Decode rate against a floor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pytest_vram.checks.finding import Finding


def judge_rate(
    rates: Sequence[float | None],
    floor: float,
    *,
    check: str = "min_tokens_per_second",
    limit_from: str,
    doubts: Sequence[str | None] = (),
) -> Finding | None:
    """Hold the median decode rate of a test's requests against ``floor``, both in tokens per second.

    :param rates: one per request; ``None`` where a request has no rate.
    :param doubts: why rates that the server gave are not believed; see ``RequestRecord.doubt``.
    :returns: ``None`` where the median is at least the floor; inconclusive where no request has a rate.
    """
    known = sorted(rate for rate in rates if rate is not None and math.isfinite(rate) and rate > 0)
    missing = len(rates) - len(known)
    if not known:
        what = "the test made no requests" if not rates else f"none of its requests ({len(rates)}) has a decode rate"
        reasons = list(dict.fromkeys(doubt for doubt in doubts if doubt))
        if rates and reasons:
            what += f" that can be true ({reasons[0]}{'; and more' if len(reasons) > 1 else ''})"
        return Finding(
            check=check,
            verdict="inconclusive",
            section="throughput undecided",
            text=f"The decode rate could not be measured: {what}. The floor is {floor:g} tokens/s, from {limit_from}.",
            limit_from=limit_from,
        )
    median = statistics.median(known)
    if median >= floor:
        return None
    without = f"; {missing} more had no rate" if missing else ""
    requests = f"{len(known)} request{'' if len(known) == 1 else 's'}"
    return Finding(
        check=check,
        verdict="failed",
        section="throughput under its floor",
        text=(
            f"The median decode rate is {median:.2f} tokens/s, under the floor of {floor:g} from {limit_from}.\n"
            f"  {requests}, from {known[0]:.2f} to {known[-1]:.2f} tokens/s{without}\n"
            "  A rate that falls to a fraction at once usually means layers or cache in host memory:"
            " look at the layers on the device and at the memory breakdown."
        ),
        limit_from=limit_from,
    )

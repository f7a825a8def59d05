"""Host memory of a backend against a limit."""

from __future__ import annotations

from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import HOST, amount, block, provenance, surroundings
from pytest_vram.keeper.messages import Closed
from pytest_vram.ledger import Ledger
from pytest_vram.readings import Unmeasurable, floor
from pytest_vram.units import mib, with_mib


def judge_host(
    closed: Closed,
    limit: int,
    *,
    check: str = "max_host_memory",
    limit_from: str,
    ledger: Ledger | None = None,
) -> Finding | None:
    """Hold the peak host memory of the process trees of a window's backends, boot included, against ``limit`` bytes.

    The interval rule is that of :func:`pytest_vram.checks.judge_peak`.
    """
    figure = closed.host
    if figure is None:
        figure = Unmeasurable(reason="this test used no backend, so no process tree of one was measured")
    known = floor(figure)
    if known is not None and known.bytes > limit:
        figure = known
    rows = [("limit", f"{with_mib(limit)}, from {limit_from}")]
    if isinstance(figure, Unmeasurable):
        rows.append(("reason", figure.reason))
        return Finding(
            check=check,
            verdict="inconclusive",
            section="host memory limit undecided",
            text=block("The host memory of the backend could not be measured, so its limit is undecided.", rows),
            device=HOST,
            measured=figure,
            limit=limit,
            limit_from=limit_from,
        )
    failed = figure.bytes > limit
    if not failed and figure.upper <= limit and not figure.missed and not closed.trouble:
        return None
    rows.append(("reading", provenance(figure)))
    largest = ledger.largest(HOST) if ledger is not None else None
    if largest is not None:
        rows.append(("largest bucket", f"{largest[0]} with {mib(largest[1])} on the host"))
    rows.extend(surroundings(closed, HOST))
    if failed:
        certain = figure.upper == figure.bytes and not figure.missed
        over = f"{'' if certain else 'at least '}{mib(figure.bytes - limit)}"
        title = f"The host peak of the backend is {amount(figure)}, {over} over the limit {with_mib(limit)}."
    elif figure.upper > limit:
        title = (
            f"The host peak of the backend is {amount(figure)}; the limit {with_mib(limit)} lies in between: undecided."
        )
        rows.append(("what settles it", f"a limit of at least {mib(figure.upper)}, or a backend with fewer processes"))
    else:
        why = f"undecided: {figure.missed}" if figure.missed else "its measurement had trouble"
        title = f"The host peak read is {amount(figure)}, within {with_mib(limit)}, but {why}."
    parts = [block(title, rows)]
    if ledger is not None:
        parts.append("\n".join(ledger_table(ledger)))
    return Finding(
        check=check,
        verdict="failed" if failed else "inconclusive",
        section="host memory over its limit" if failed else "host memory limit undecided",
        text="\n\n".join(parts),
        device=HOST,
        measured=figure,
        limit=limit,
        limit_from=limit_from,
    )

"""Whether a deployment serves what makes it grow, and by how much it grows while it does."""

from __future__ import annotations

from pytest_vram.backends.growth import Growth, Step
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import amount, block, provenance
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.units import mib, with_mib

CHECK = "growth"
_WORDS = {
    "refused": "was refused",
    "timed_out": "was not answered in time",
    "out_of_memory": "ran out of memory",
    "died": "ended the server",
}


def judge_served(growth: Growth) -> Finding | None:
    """Every step of a probe was served, or there was nothing here to ask for it.

    :returns: failed where the deployment ran out of memory; an error where it refused, died or did not answer;
        inconclusive where the time of the probe was used up before a step.
    """
    step = growth.failed
    if step is not None:
        failure = step.failure
        rows: list[tuple[str, str]] = []
        if failure is not None:
            rows.append(("the log says", failure.text.strip()))
            parts = [
                f"{mib(failure.bytes)} could not be allocated" if failure.bytes else "",
                f"on {failure.device}" if failure.device else "",
                f"for {failure.bucket}" if failure.bucket else "",
                "" if failure.certainty == "certain" else f"({failure.certainty})",
            ]
            what = " ".join(part for part in parts if part)
            rows.append(("failure", f"{failure.kind}{f': {what}' if what else ''}"))
        peaks = [f"{label} {amount(peak)}" for label, peak in step.peak.items() if isinstance(peak, Reading)]
        if peaks:
            rows.append(("peak", "; ".join(peaks)))
        return Finding(
            check=CHECK,
            verdict="failed" if step.outcome == "out_of_memory" else "error",
            section="serving",
            text=block(f"Step {step.name!r} {_WORDS[step.outcome]} after a good boot: {step.reason}", rows),
            device=failure.device if failure is not None else None,
        )
    late = [step for step in growth.steps if step.outcome == "no_time"]
    if late:
        return Finding(
            check=CHECK,
            verdict="inconclusive",
            section="serving undecided",
            text=f"Not sent: {_names(late)}: {late[0].reason}.",
        )
    return None


def judge_growth(
    growth: Growth, limit: int | None = None, *, check: str = CHECK, limit_from: str = CHECK
) -> Finding | None:
    """What stays after serving was measured, and is no more than ``limit`` bytes beyond idle memory after the boot.

    Pages of the boot's own buffers that are written for the first time are no growth (:attr:`Growth.touched`).

    :param limit: bytes on each device; ``None``: the growth is known, and nothing more is asked.
    """
    if growth.unmeasured or not growth.growth:
        reason = growth.unmeasured or "no device of this run could be read while it served"
        return _undecided(check, reason, limit, limit_from)
    for label, figure in growth.growth.items():
        if isinstance(figure, Unmeasurable):
            return _undecided(check, f"on {label}: {figure.reason}", limit, limit_from)
        if limit is None:
            continue
        mine = [entry for entry in growth.entries if entry.device == label]
        least, most = max(0, figure.bytes - growth.touched.get(label, 0)), figure.upper
        if most <= limit:
            continue
        rows = [
            ("at ready", _amount(growth, label, ready=True)),
            ("after serving", _amount(growth, label, ready=False)),
            ("limit", f"{with_mib(limit)}, from {limit_from}"),
            *((entry.bucket, f"{mib(entry.bytes)} {entry.detail}") for entry in mine),
        ]
        if growth.touched.get(label):
            rows.append(("no growth", f"up to {mib(growth.touched[label])} may be buffers of the boot, written now"))
        if least > limit:
            title = f"Serving left {mib(least)} more on {label} than the boot did, over {mib(limit)}."
        else:
            title = f"Serving left between {mib(least)} and {mib(most)} more on {label} than the boot did: undecided."
        return Finding(
            check=check,
            verdict="failed" if least > limit else "inconclusive",
            section="growth while serving",
            text=block(title, rows),
            device=label,
            measured=figure,
            limit=limit,
            limit_from=limit_from,
        )
    restless = [step for step in growth.steps if not step.settled]
    if limit is not None and restless and restless[-1] is growth.steps[-1]:
        return _undecided(check, f"memory was still moving after {_names(restless)}", limit, limit_from)
    return None


def _undecided(check: str, reason: str, limit: int | None, limit_from: str) -> Finding:
    return Finding(
        check=check,
        verdict="inconclusive",
        section="growth undecided",
        text=f"Growth while serving could not be measured: {reason}.",
        limit=limit,
        limit_from=limit_from if limit is not None else None,
    )


def _amount(growth: Growth, label: str, *, ready: bool) -> str:
    figure = (growth.at_ready if ready else growth.idle).get(label)
    return f"{amount(figure)} ({provenance(figure)})" if isinstance(figure, Reading) else "not read"


def _names(steps: list[Step]) -> str:
    return ", ".join(repr(step.name) for step in steps)

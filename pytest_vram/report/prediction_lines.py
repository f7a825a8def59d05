"""Predictions for a terminal: data in, lines out."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from pytest_vram.report.predictions import Exact, Table, table
from pytest_vram.sizing.plans import Impossible, Plan, Search
from pytest_vram.sizing.prediction import Estimate, ModelFacts, Verdict
from pytest_vram.sizing.shape import Note
from pytest_vram.sizing.sweep import Point
from pytest_vram.sizing.verdict import cards_of
from pytest_vram.text import printable
from pytest_vram.units import MIB, card_hint, mib, with_mib

HOST = "host"
_WIDTH = 80
#: Sentences are wrapped for a narrower terminal too, down to this.
_NARROWEST = 30
_PER_BLOCK = 4
_NONE = "-"
_COLUMN = 12
_KINDS = {"unknown": "unknown", "assumed": "assumed", "rule": "based on", "warning": "warning"}
_ORDER = ("unknown", "warning", "assumed", "rule")
#: What a list of figures needs to be read rightly; what a rule is based on stands in an estimate.
_CAVEATS = _ORDER[:3]
#: Names of buckets that mean something else to most people.
_ROWS = {"context": "context (driver)"}
#: Less than this to spare on a card and something else on it decides.
CLOSE = 256 * MIB


def estimate_lines(estimate: Estimate, *, verdict: Verdict | None = None, exact: Exact | None = None) -> list[str]:
    """Everything that ``vram estimate`` says."""
    lines = [*model_lines(estimate.model, estimate.engine), ""]
    lines += breakdown(estimate, title="predicted" if exact is None else "by the engine's dry run")
    if exact is not None:
        lines += ["", *_compared(exact)]
    if estimate.textbook_kv is not None:
        lines += _wrapped(_textbook(estimate))
    if estimate.pressure:
        lines += _wrapped(estimate.pressure)
    if estimate.notes:
        lines += ["", "notes"]
        lines += _notes(estimate.notes)
    if estimate.command:
        lines += ["", "command line", f"  {shlex.join(estimate.command)}"]
    if verdict is not None:
        lines += ["", *verdict_lines(verdict, estimate)]
    return [printable(line) for line in lines]


def model_lines(model: ModelFacts, engine: str) -> list[str]:
    """Which model under which engine."""
    named = model.name or model.source
    details = [model.architecture, *([model.quantization] if model.quantization else [])]
    facts = [f"{_count(model.parameters)} parameters", f"{model.layers} layers"]
    if model.trained_context:
        facts.append(f"trained context {model.trained_context:,}")
    lines = _wrapped(f"{named} ({', '.join(details)}) under {engine}: {', '.join(facts)}", indent="")
    if model.experts and model.parameters:
        share = model.active_parameters / model.parameters
        lines += _wrapped(
            f"mixture of experts: {model.experts_used} of {model.experts} experts per token;"
            f" {_count(model.active_parameters)} of {_count(model.parameters)} parameters are active ({share:.1%}),"
            f" {_count(model.non_expert_parameters)} belong to no expert"
        )
    return lines


def breakdown(estimate: Estimate, *, title: str = "predicted") -> list[str]:
    """The memory breakdown as a table of buckets by device, in MiB; a range is shown with both ends."""
    lower, upper = table(estimate.entries), table(estimate.entries, upper=True)
    used = {label for row in lower.values() for label in row} | set(estimate.devices)
    labels = sorted(used - {HOST}, key=lambda label: (len(label), label)) + ([HOST] if HOST in used else [])
    if not lower:
        return ["memory breakdown (ledger): nothing is known"]
    lines: list[str] = []
    for start in range(0, len(labels), _PER_BLOCK):
        lines += _block(estimate, lower, upper, labels[start : start + _PER_BLOCK], title)
    for label in labels:
        name = estimate.devices.get(label)
        if name and label != HOST:
            lines.append(f"  {label}: {name}")
    if estimate.unknown:
        lines += _wrapped(f"lower bounds only, because something of it is unknown: {', '.join(estimate.unknown)}")
    return lines


def _block(estimate: Estimate, lower: Table, upper: Table, labels: Sequence[str], title: str) -> list[str]:
    rows = [
        (_ROWS.get(bucket, bucket), [_cell(row.get(label), upper[bucket].get(label)) for label in labels])
        for bucket, row in lower.items()
    ]
    total, most = estimate.total(), estimate.at_most()
    rows.append((title, [_cell(total.get(label), most.get(label)) for label in labels]))
    width = max(_COLUMN, *(len(cell) + 2 for _, cells in rows for cell in cells))
    first = max(24, min(36, _WIDTH - width * len(labels) - 2))
    head = "memory breakdown (ledger), MiB".ljust(first + 2)
    lines = [head + "".join(label.rjust(width) for label in labels)]
    lines += [f"  {name.ljust(first)}" + "".join(cell.rjust(width) for cell in cells) for name, cells in rows]
    return lines


def _cell(low: int | None, high: int | None) -> str:
    if low is None:
        return _NONE
    if high is None or high == low:
        return f"{low / MIB:,.2f}"
    return f"{low / MIB:,.2f}–{high / MIB:,.2f}"


def _whole(lower: Table, upper: Table, bucket: str, labels: Sequence[str]) -> str:
    """A bucket over these devices."""
    low, high = (sum(one.get(bucket, {}).get(label, 0) for label in labels) for one in (lower, upper))
    return _cell(low, high)


def _textbook(estimate: Estimate) -> str:
    rules = sum(size for bucket in ("kv",) for size in table(estimate.entries).get(bucket, {}).values())
    book = estimate.textbook_kv or 0
    return f"cross-check: the textbook formula says {mib(book)} of KV cache, the rules {mib(rules)}"


def _compared(exact: Exact) -> list[str]:
    lines = [f"rules beside the dry run of {exact.binary}, MiB; what a dry run leaves out is in the ledger alone"]
    head = ("group", "device", "rules", "engine", "difference")
    rows = [
        (
            one.group,
            one.device,
            _cell(one.rule, one.rule_at_most),
            _cell(one.engine_low, one.engine_high) if one.engine_low != one.engine_high else _cell(one.engine, None),
            "agree" if one.agree else f"{(one.rule - one.engine) / MIB:+,.2f}",
        )
        for one in exact.compared
    ]
    return lines + columns((head, *rows))


def verdict_lines(verdict: Verdict, estimate: Estimate) -> list[str]:
    """The answer to a budget, and the setting to turn first where it is no."""
    limit = with_mib(verdict.limit)
    kept = f" with {with_mib(verdict.reserve)} kept free" if verdict.reserve else ""
    host = "the host" if cards_of(estimate) else "the host, which stands in for a card"
    where = {"sum": "all cards together", HOST: host}.get(verdict.device, verdict.device)
    said = amount(verdict.predicted, verdict.at_most)
    if verdict.fits == "yes":
        lines = [f"fits: {said} of {limit}{kept} on {where}, {mib(verdict.spare)} to spare"]
        if verdict.device in (*cards_of(estimate), "sum"):
            lines += _close([verdict])
    elif verdict.fits == "no":
        missing = verdict.predicted + verdict.reserve - verdict.limit
        ends = (
            f"{mib(missing)} missing"
            if missing == -verdict.spare
            else f"{mib(missing)} to {mib(-verdict.spare)} missing"
        )
        lines = [f"does not fit: {said} of {limit}{kept} on {where}, {ends}"]
        hint = card_hint(verdict.predicted, verdict.limit)
        if hint is not None:
            lines.append(f"  {hint}")
    elif estimate.unknown:
        unknown = ", ".join(estimate.unknown)
        lines = [f"inconclusive: at least {mib(verdict.predicted)} of {limit}{kept} on {where}; unknown: {unknown}"]
    else:
        lines = [f"inconclusive: {said}, and {limit}{kept} on {where} lies in between"]
    if verdict.first is not None:
        turn = verdict.first
        enough = "enough alone" if turn.enough else "not enough alone: `vram plan` searches combinations"
        lines.append(
            f"  turn first: {turn.setting} {turn.before} → {turn.after} saves {mib(turn.saves)} there, {enough}"
        )
        if turn.enough and turn.command:
            lines += ["  with it:", f"  {shlex.join(turn.command)}"]
    if verdict.fits != "yes":
        lines += _lowered(estimate)
    return lines


def _close(verdicts: Sequence[Verdict]) -> list[str]:
    """A warning where little is left of a card: nothing of a file says what else will be on it."""
    if all(one.spare >= CLOSE for one in verdicts):
        return []
    return _wrapped(
        f"less than {mib(CLOSE)} to spare: a display, another process or a library that is loaded at the first request"
        " takes as much; keep room with --reserve, such as --reserve 500MB"
    )


def _lowered(estimate: Estimate) -> list[str]:
    """What llama-server does by itself where no context is given; its figures depend on what is free at its start."""
    if not any(note.text.startswith("ctx-size is not given") and "--fit" in note.text for note in estimate.notes):
        return []
    words = estimate.command
    least = words[words.index("--fit-ctx") + 1] if "--fit-ctx" in words[:-1] else "4096"
    return _wrapped(
        "this is the verdict on the trained context: without ctx-size, llama-server (--fit) lowers it at its start,"
        f" down to {least} tokens (--fit-ctx), to what the free memory of the card holds then; give -c for a verdict on"
        " what you need, or search with `vram plan`"
    )


def amount(low: int, high: int) -> str:
    """A figure, or both ends where it is a range."""
    return mib(low) if low == high else f"{mib(low)} to {mib(high)}"


def search_lines(search: Search, confirmed: dict[int, bool] | None = None) -> list[str]:
    """Everything that ``vram plan`` says about one budget."""
    if search.impossible is not None:
        return [printable(line) for line in _impossible(search, search.impossible)]
    ways = "1 way" if len(search.plans) == 1 else f"{len(search.plans)} ways"
    lines = _wrapped(
        f"{ways} to stay within {_budget(search)}, best first, with {search.wishes.minimum_context:,} tokens or more"
        " for each slot",
        indent="",
    )
    for index, plan in enumerate(search.plans):
        lines += ["", *_plan(plan, index, (confirmed or {}).get(index))]
    lines += _caveats([plan.estimate for plan in search.plans], [str(n + 1) for n in range(len(search.plans))])
    if cards_of(search.plans[0].estimate):
        lines += _close([plan.verdict for plan in search.plans])
    return [printable(line) for line in lines]


def _plan(plan: Plan, index: int, confirmed: bool | None) -> list[str]:
    made = plan.estimate
    total = made.total()
    labels = [*cards_of(made), *([HOST] if HOST in total else [])]
    figures = ", ".join(f"{label} {amount(total.get(label, 0), made.at_most().get(label, 0))}" for label in labels)
    slots = f" for each of {plan.slots} slots" if plan.slots > 1 else ""
    lines = _wrapped(
        f"{index + 1}. context {plan.context:,}{slots}, {plan.cache_type} KV cache, "
        + (f"{plan.layers_on_gpu} of {plan.layers} layers on the GPU" if plan.options.devices else "all on the host")
        + (f", experts of {plan.experts_on_cpu} layers on the CPU" if plan.experts_on_cpu else ""),
        indent="",
        hang="   ",
    )
    lines.append(f"   predicted: {figures}; {mib(plan.verdict.spare)} to spare")
    lines += _wrapped(f"gives up: {'; '.join(plan.gives_up) or 'nothing'}", indent="   ", hang="     ")
    if confirmed is not None:
        lines.append(f"   the engine's dry run: {'fits' if confirmed else 'does NOT fit'}")
    lines.append(f"   {shlex.join(plan.command)}")
    return lines


def _impossible(search: Search, found: Impossible) -> list[str]:
    lines = _wrapped(f"nothing fits {_budget(search)}: {found.reason}", indent="", hang="  ")
    for one in found.relaxed:
        option = "--" + one.wish.replace("_", "-")
        lines += _wrapped(f"it would fit with {option} {one.after} (instead of {one.before}), all else kept")
    if not found.relaxed and not found.unknown:
        lines.append("  no single wish, relaxed, makes it fit")
    lines += ["  the cheapest configuration:", f"  {shlex.join(found.cheapest.command)}"]
    return lines


def _budget(search: Search) -> str:
    each = search.budget.each
    kept = f" with {with_mib(search.wishes.reserve)} kept free" if search.wishes.reserve else ""
    host = search.wishes.host_memory
    beside = f" and {with_mib(host)} of the host" if host is not None else ""
    return f"{with_mib(each) if each is not None else search.budget.text}{kept}{beside}"


def _caveats(estimates: Sequence[Estimate], names: Sequence[str]) -> list[str]:
    """Notes without which the figures of a list could be misread: once each, with what they are about where it is not
    all of it."""
    about: dict[Note, list[str]] = {}
    for name, one in zip(names, estimates, strict=True):
        for note in one.notes:
            if note.kind in _CAVEATS and not note.text.startswith("n-gpu-layers is not given"):
                about.setdefault(note, []).append(name)
    if not about:
        return []
    lines = ["", "notes"]
    for note in sorted(about, key=lambda note: _ORDER.index(note.kind)):
        of = "" if len(about[note]) == len(names) else f" ({', '.join(about[note])})"
        bucket = f"{note.bucket}: " if note.bucket else ""
        lines += _wrapped(f"{_KINDS[note.kind]}{of}: {bucket}{note.text}")
    return lines


def tier_lines(searches: Iterable[Search]) -> list[str]:
    """The best plan of each budget, in a table."""
    head = ("budget", "at least", "context", "KV cache", "layers on GPU", "experts on CPU", "GPU, MiB", "host, MiB")
    rows: list[tuple[str, ...]] = []
    commands: list[str] = []
    bests: list[tuple[str, Plan]] = []
    for search in searches:
        if not search.plans:
            reason = search.impossible.reason if search.impossible is not None else ""
            rows.append((search.budget.text, f"{search.wishes.minimum_context:,}", "nothing fits", "", "", "", "", ""))
            commands.append(f"  {search.budget.text}: {reason}")
            continue
        best = search.plans[0]
        bests.append((search.budget.text, best))
        most = best.estimate.at_most()
        gpu = sum(size for label, size in most.items() if label != HOST)
        rows.append(
            (
                search.budget.text,
                f"{search.wishes.minimum_context:,}",
                f"{best.context:,}",
                best.cache_type,
                f"{best.layers_on_gpu} of {best.layers}" if best.options.devices else "no GPU",
                str(best.experts_on_cpu),
                f"{gpu / MIB:,.0f}",
                f"{most.get(HOST, 0) / MIB:,.0f}",
            )
        )
        commands.append(f"  {search.budget.text}: {shlex.join(best.command)}")
    lines = ["best settings by budget (upper ends)", *columns((head, *rows)), "", "command lines", *commands]
    lines += _caveats([plan.estimate for _, plan in bests], [text for text, _ in bests])
    lines += _close([plan.verdict for _, plan in bests if plan.options.devices])
    return [printable(line) for line in lines]


def sweep_lines(points: Sequence[Point], over: str) -> list[str]:
    """A sweep as a table, in MiB: all buckets of each device, the cards' KV cache and compute beside them."""
    made = [point.estimate for point in points if point.estimate is not None]
    labels = sorted({label for one in made for label in one.total()} - {HOST}, key=lambda label: (len(label), label))
    shown = labels or [HOST]
    judged = any(point.verdict is not None for point in points)
    head = [over, "KV cache", "compute", *labels, HOST, *(["verdict"] if judged else [])]
    rows: list[Sequence[str]] = [head]
    for point in points:
        one = point.estimate
        if one is None:
            continue
        lower, upper = table(one.entries), table(one.entries, upper=True)
        row = [point.value, *(_whole(lower, upper, bucket, shown) for bucket in ("kv", "compute"))]
        row += [_cell(one.total().get(label), one.at_most().get(label)) for label in (*labels, HOST)]
        if judged:
            row.append({"yes": "fits", "no": "does not fit"}.get(point.verdict.fits, "?") if point.verdict else "")
        rows.append(row)
    where = {0: "the host", 1: labels[0] if labels else ""}.get(len(labels), "all cards together")
    lines = [f"predicted over {over}, MiB; KV cache and compute are those on {where}", *columns(rows)]
    if over == "parallel" and any(one.command and "--ctx-size" in one.command for one in made):
        lines += _wrapped("ctx-size is kept for each slot here: the engine's own -c is the sum, and grows with them")
    for point in points:
        if point.refused:
            lines += _wrapped(f"{point.value}: refused: {point.refused}")
    lines += _caveats(made, [point.value for point in points if point.estimate is not None])
    return [printable(line) for line in lines]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _notes(notes: Iterable[Note]) -> list[str]:
    lines: list[str] = []
    for note in sorted(notes, key=lambda note: _ORDER.index(note.kind)):
        bucket = f"{note.bucket}: " if note.bucket else ""
        lines += _wrapped(f"{_KINDS[note.kind]}: {bucket}{note.text}")
    return lines


def _wrapped(text: str, *, indent: str = "  ", hang: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        max(_NARROWEST, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)),
        initial_indent=indent,
        subsequent_indent=indent + "  " if hang is None else hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,}"

"""Advice in the report of a failing test: data in, lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_vram.advice.records import Advice, Saving, first_sufficient
from pytest_vram.text import printable
from pytest_vram.units import mib

_SHOWN = 3
#: Changes that ``vram boot`` describes; the answer must not drown in a list.
_DESCRIBED = 5


def advice_lines(
    advice: Sequence[Advice],
    reason: str | None = None,
    *,
    width: int = 80,
    where: str = "--vram-report=FILE.json",
) -> list[str]:
    """The change to make first, the three that lead the list, and how many more the report has.

    :param reason: why there is no advice. :param where: has all of it.
    """
    if not advice:
        return _wrapped(f"no advice: {reason}", width) if reason else []
    useful = [one for one in advice if one.effect == "saves"]
    if not useful:
        return _wrapped("no setting is known that would save anything here", width)
    lines = _first(useful, width)
    for number, one in enumerate(useful[:_SHOWN], 1):
        lines += _wrapped(f"{number}. {summed(one)}", width, hang=3)
        lines += _wrapped(one.flag or one.why, width, indent=3)
    more, nothing = len(useful) - _SHOWN, [one.setting for one in advice if one.effect == "nothing"]
    rest = [f"{more} more" if more > 0 else "", f"of no use here: {', '.join(nothing)}" if nothing else ""]
    if any(rest):
        lines += _wrapped(f"{'; '.join(filter(None, rest))} ({where} has all of it)", width)
    return [printable(line) for line in lines]


def ranked_lines(advice: Sequence[Advice], reason: str | None = None, *, width: int = 80) -> list[str]:
    """What to change for a boot that failed: what comes first, the changes that lead the list with their reasons, and
    what would save nothing.

    :param reason: why there is no advice.
    """
    if not advice:
        return ["what to change", *_wrapped(reason or "nothing is known that would help", width, indent=2)]
    useful = [one for one in advice if one.effect == "saves"]
    if not useful:
        lines = ["what to change", *_wrapped("no setting is known that would save anything here", width, indent=2)]
    else:
        lines = ["what to change, best first"]
        chosen = first_sufficient(list(useful))
        enough = {0: "no change here is known to be enough", 1: "enough alone"}.get(len(chosen), "enough together")
        wanted = " ".join(one.flag or change(one) for one in chosen or useful[:1])
        lines += _wrapped(f"first: {wanted} ({enough})", width, indent=2, hang=2)
    for number, one in enumerate(useful[:_DESCRIBED], 1):
        lines += _wrapped(f"{number}. {summed(one)}", width, indent=2, hang=3)
        for name, text in (("", one.why), ("costs: ", one.cost), ("", one.flag), ("shown by: ", one.proof)):
            if text:
                lines += _wrapped(f"{name}{text}", width, indent=5, hang=0)
    if len(useful) > _DESCRIBED:
        lines += _wrapped(f"{len(useful) - _DESCRIBED} more with --json", width, indent=2)
    without: dict[str, list[str]] = {}
    for one in advice:
        if one.effect == "nothing":
            without.setdefault(one.why, []).append(one.setting)
    for why, settings in without.items():
        lines += _wrapped(
            f"{', '.join(dict.fromkeys(settings))} would save nothing here: {why}", width, indent=2, hang=2
        )
    return lines


def _first(useful: Sequence[Advice], width: int) -> list[str]:
    chosen = first_sufficient(list(useful))
    if len(chosen) == 1:
        one = chosen[0]
        where = f" on {one.device}" if one.device is not None else ""
        return _wrapped(f"first: {one.flag or change(one)} ({_bytes(one)}{where}: enough alone)", width)
    if chosen:
        return _wrapped(f"first: {' '.join(one.flag or change(one) for one in chosen)} (enough together)", width)
    return _wrapped(f"first: {useful[0].flag or change(useful[0])}; no change here is known to be enough", width)


def change(one: Advice) -> str:
    """The change in a few words."""
    if one.before and one.after:
        return f"{one.setting} {one.before} → {one.after}"
    return f"{one.setting}: {one.after}" if one.after else one.setting


def summed(one: Advice) -> str:
    """The change with what it saves."""
    parts = [change(one), _bytes(one)]
    after = one.saves_bytes_after
    if after is not None and after != one.saves_bytes:
        parts.append(f"{saved(after)} after those before it")
    if one.enough:
        parts.append("enough alone")
    elif one.enough_after:
        parts.append("enough with those before it")
    return ", ".join(filter(None, parts))


def _bytes(one: Advice) -> str:
    return "saves an unknown amount" if one.saves_bytes is None else f"saves {saved(one.saves_bytes)}"


def saved(saving: Saving) -> str:
    """Bytes of a saving."""
    if saving.upper == saving.bytes:
        return mib(saving.bytes)
    return f"at most {mib(saving.upper)}" if saving.bytes == 0 else f"{mib(saving.bytes)} to {mib(saving.upper)}"


def _wrapped(text: str, width: int, *, indent: int = 0, hang: int | None = None) -> list[str]:
    """Lines of at most ``width`` columns; the first begins after ``indent`` columns, others ``hang`` further in."""
    further = (0 if indent else 2) if hang is None else hang
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + further),
        break_long_words=False,
        break_on_hyphens=False,
    )

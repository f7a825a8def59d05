"""Advice in the report of a failing test: data in, lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_vram.advice.records import Advice, Saving, first_sufficient
from pytest_vram.text import printable
from pytest_vram.units import mib

_SHOWN = 3


def advice_lines(advice: Sequence[Advice], reason: str | None = None, *, width: int = 80) -> list[str]:
    """The change to make first, the three that lead the list, and how many more the report has.

    :param reason: why there is no advice.
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
        lines += _wrapped(f"{'; '.join(filter(None, rest))} (--vram-report=FILE.json has all of it)", width)
    return [printable(line) for line in lines]


def _first(useful: Sequence[Advice], width: int) -> list[str]:
    chosen = first_sufficient(list(useful))
    if len(chosen) == 1:
        one = chosen[0]
        return _wrapped(f"first: {one.flag or change(one)} ({_bytes(one)} on {one.device}: enough alone)", width)
    if chosen:
        return _wrapped(f"first: {' '.join(one.flag or change(one) for one in chosen)} (enough together)", width)
    return _wrapped(f"first: {useful[0].flag or change(useful[0])}; no change here is known to be enough", width)


def change(one: Advice) -> str:
    """The change in a few words."""
    return f"{one.setting} {one.before} → {one.after}" if one.before or one.after else one.setting


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
    return mib(saving.bytes) if saving.upper == saving.bytes else f"{mib(saving.bytes)} to {mib(saving.upper)}"


def _wrapped(text: str, width: int, *, indent: int = 0, hang: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent or hang),
        break_long_words=False,
        break_on_hyphens=False,
    )

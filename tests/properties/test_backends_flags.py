"""Any help that is laid out as llama.cpp lays it out reads back as the options that it lists."""

from __future__ import annotations

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.backends import flags

WORD = st.from_regex(r"[a-mo-z][a-z0-9]{0,8}", fullmatch=True)
LONG = st.lists(WORD, min_size=1, max_size=3).map("-".join)
HINT = st.sampled_from(["", "N", "FNAME", "[on|off|auto]", "<0|1>", "{none,layer}", "A0,A1,...", "<name>=<type>,..."])
TEXT = st.lists(st.from_regex(r"[a-z(:')]{1,12}", fullmatch=True), min_size=1, max_size=40).map(" ".join)


@st.composite
def options(draw: st.DrawFn) -> list[flags.Flag]:
    """Options without a spelling in common."""
    names = draw(st.lists(LONG, min_size=1, max_size=12, unique=True))
    found = []
    while names:
        own = tuple(names.pop() for _ in range(min(len(names), draw(st.integers(1, 2)))))
        hint = draw(HINT)
        switch = not hint and draw(st.booleans())
        found.append(
            flags.Flag(
                names=own,
                negatives=tuple(f"no-{name}" for name in own) if switch else (),
                short=draw(st.sampled_from([(), ("x",), ("x", "yz")])),
                hint=hint,
                text=draw(TEXT),
            )
        )
    return found


def rendered(flag: flags.Flag) -> str:
    """As llama.cpp prints it: the spellings in a column of 40, or on a line of their own where they are too long."""
    spellings = [f"-{name}" for name in flag.short] + [f"--{name}" for name in (*flag.names, *flag.negatives)]
    first, *rest = spellings
    head = f"{first + ',':<6} " + ", ".join(rest) if flag.short and rest else ", ".join(spellings)
    head = f"{head} {flag.hint}" if flag.hint else head
    lines = textwrap.wrap(flag.text, 70)
    if len(head) > 37:
        return "\n".join([head, *(" " * 40 + line for line in lines)])
    return "\n".join([head.ljust(40) + lines[0], *(" " * 40 + line for line in lines[1:])])


@given(options(), st.sampled_from(["", "\n", "\n\n----- sampling params -----\n\n"]))
def test_help_reads_back_to_its_options(listed: list[flags.Flag], between: str) -> None:
    """Spellings, negative forms, hints and descriptions survive the layout, wherever its lines break."""
    text = ("\n" + between).join(rendered(flag) for flag in listed)
    assert list(flags.parse("server", text).flags) == listed


@given(st.text(max_size=400))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    """Whatever a program prints for --help, reading it does not raise."""
    flags.parse("server", text)

"""The options of llama-server by name: long and short spellings, negatives, and which of them take a value.

The table beside this (``data/llama_server_options.json``) was read from the ``--help`` of builds 10068 and 10434 and
completed from the source of October 2026. Nothing here knows what an option means.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_vram.errors import BadInput

_TABLE = Path(__file__).with_name("data") / "llama_server_options.json"
#: Programs whose name opens a command line that somebody pastes.
_PROGRAMS = ("llama-server", "llama-server.exe", "llama-server-vulkan")
#: Words that an option with an optional value takes in older builds (``-fa`` alone was on).
_WORDS = ("on", "off", "auto", "true", "false", "enabled", "disabled", "0", "1")

Value = str | int | float | bool | Sequence[object]


class EngineOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One option of llama-server; spellings are without dashes.

    :ivar name: the full long name. :ivar aliases: other long names. :ivar negatives: long names that switch it off.
    :ivar short: names with one dash, :ivar negative_short: those that switch it off.
    :ivar value: what the help writes in place of the value; empty for a switch.
    :ivar joined: several values stand in one word, with commas. :ivar adds: may be given several times.
    """

    name: str
    aliases: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    negative_short: tuple[str, ...] = ()
    value: str = ""
    joined: bool = False
    adds: bool = False


@functools.cache
def known() -> dict[str, EngineOption]:
    """Long spelling (negatives included) → option."""
    table = msgspec.json.decode(_TABLE.read_bytes(), type=tuple[EngineOption, ...])
    return {spelling: row for row in table for spelling in (row.name, *row.aliases, *row.negatives)}


@functools.cache
def _short() -> dict[str, tuple[EngineOption, bool]]:
    """Short spelling → option, and whether it switches it on."""
    found: dict[str, tuple[EngineOption, bool]] = {}
    for row in known().values():
        found.update(dict.fromkeys(row.short, (row, True)))
        found.update(dict.fromkeys(row.negative_short, (row, False)))
    return found


def named(key: str, *, origin: str = "") -> tuple[EngineOption, bool]:
    """The option that ``key`` names, and whether it is switched on by it.

    :param key: ``n_gpu_layers``, ``n-gpu-layers``, ``--n-gpu-layers`` or ``-ngl``.
    :raises BadInput: no such option; the message has the nearest name.
    """
    if key.startswith("-") and not key.startswith("--") and key[1:] in _short():
        return _short()[key[1:]]
    spelling = key.lstrip("-").replace("_", "-")
    row = known().get(spelling)
    if row is not None:
        return row, spelling not in row.negatives
    # What somebody left the end of is nearer than what merely has its letters: ctx is ctx-size and not fit-ctx.
    begun = sorted((name for name in known() if len(spelling) > 1 and name.startswith(f"{spelling}-")), key=len)
    near = begun or difflib.get_close_matches(spelling, known(), n=1, cutoff=0.6)
    if spelling in _short():
        near = [_short()[spelling][0].name]
    hint = f"did you mean {near[0]!r}?" if near else "write llama-server's own long option names, as in its --help"
    raise BadInput(f"llama-server has no option {key!r}{_from(origin)}: {hint}")


def pairs(words: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Words of a command line as options by full name, and the words that belong to no option.

    A pasted command line may begin with the program's name. Of several values of one option the last counts, as in
    the engine, unless they add up. ``--ctx-size=8192`` is read as well, which the engine itself refuses.

    :raises BadInput: an unknown option, or one without its value.
    """
    found: dict[str, Value] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-" or _number(word):
            if Path(word).name not in _PROGRAMS or others:
                others.append(word)
            continue
        name, equals, joined = word.partition("=")
        row, on = named(name)
        if not row.value:
            if equals:
                raise BadInput(f"option {name!r} is a switch and takes no value: leave {'=' + joined!r} out")
            found[row.name] = on
            continue
        value: Value
        if equals:
            value = joined
        elif row.name == "flash-attn" and (not rest or not _may_be_word(rest[0])):
            value = True  # builds before August 2025 took -fa without a word
        elif not rest:
            raise BadInput(f"option {word!r} has no value: write {word} {row.value}")
        else:
            value = rest.pop(0)
            if row.name == "control-vector-layer-range" and rest:
                value = [value, rest.pop(0)]
        before = found.get(row.name)
        if row.adds and before is not None:
            found[row.name] = [*(before if isinstance(before, list) else [before]), value]
        else:
            found[row.name] = value
    return found, others


def spelled(name: str, value: Value) -> list[str]:
    """Words of a command line that set option ``name`` (a full name) to ``value``."""
    row = known()[name]
    if not row.value:
        if value:
            return [f"--{name}"]
        return [f"--{row.negatives[0]}"] if row.negatives else []
    if isinstance(value, (str, int, float)):
        return [f"--{name}", _text(value)]
    texts = [_text(one) for one in value]
    if row.name == "control-vector-layer-range":
        return [f"--{name}", *texts]
    if row.joined:
        return [f"--{name}", ",".join(texts)]
    return [word for text in texts for word in (f"--{name}", text)]


def _may_be_word(text: str) -> bool:
    """Whether ``text`` is, or was meant as, the word of an option that older builds took alone: no option and no
    model."""
    return text.lower() in _WORDS or (text.isascii() and text.isalnum() and not Path(text).exists())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _from(origin: str) -> str:
    return f" ({origin})" if origin else ""

"""What is wrong with an answer that should have been tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.text import printable
from pytest_vram.toolcalls import evidence, formats, telling
from pytest_vram.toolcalls.cases import ExpectedCall, Tool
from pytest_vram.toolcalls.evidence import Evidence, Piece
from pytest_vram.toolcalls.formats.tokens import AT_END
from pytest_vram.toolcalls.scoring import against_schema, match
from pytest_vram.toolcalls.tolerant import Defect

#: Every kind of defect, ``valid`` first; of several in one answer, the first in this order explains the failure unless
#: :func:`diagnose` says why another does.
KINDS = (
    "valid",
    # server
    "server_parse_error",
    "history_rejected",
    # JSON
    "runaway",
    "truncated",
    "empty",
    "leaked_token",
    "double_encoded",
    "over_escaped",
    "unterminated_string",
    "missing_bracket",
    "extra_bracket",
    "missing_comma",
    "trailing_comma",
    "single_quotes",
    "unquoted_key",
    "duplicate_key",
    "non_finite_number",
    # envelope
    "wrapper_mismatch",
    "call_in_text",
    "text_around",
    "alias_key",
    "arguments_as_object",
    # choice
    "no_call",
    "irrelevant_call",
    "invented_tool",
    "near_miss_tool",
    "extra_call",
    # arguments
    "misspelt_field",
    "missing_field",
    "extra_field",
    "wrong_type",
    "wrong_value",
)


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that was found in an answer.

    :ivar name: of the tool, as written. :ivar arguments: as read, tolerantly where the text is malformed.
    :ivar text: what it was read from. :ivar form: ``openai``, ``hermes``, ``pythonic``, ``mistral``, ``gemma``,
        ``deepseek``, ``fenced``, ``bare`` …
    :ivar well_formed: whether it was read without repair. :ivar id: of an OpenAI tool call.
    """

    name: str | None
    arguments: Any
    text: str = ""
    form: str = "openai"
    well_formed: bool = True
    id: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer is.

    :ivar well_formed: its calls (or its plain text) could be read without repair.
    :ivar kind: ``valid``, or the first kind that explains the failure. :ivar kinds: all of them, ``()`` where valid.
    :ivar calls: in the order of the answer. :ivar detail: sentences for a person; "" where valid and complete.
    :ivar right: whether the calls are the expected ones; ``None`` where nothing was expected.
    :ivar knowable: the sentences that need no knowledge of the right calls, so that a runtime could tell them to the
        model; "" where there are none.
    """

    well_formed: bool
    kind: str
    kinds: tuple[str, ...] = ()
    calls: list[Call] = []
    detail: str = ""
    right: bool | None = None
    knowable: str = ""


PROTOCOLS = ("tools", "json_schema", "few_shot")
#: Kinds that leave an answer well-formed: what it says is wrong, or where it says it.
_WELL_FORMED = frozenset(
    {"call_in_text", "text_around", "alias_key", "arguments_as_object"} | set(KINDS[KINDS.index("no_call") :])
)
#: A server's deviation from the protocol that clients put up with: the model called right.
_FORGIVEN = frozenset({"arguments_as_object"})
_NAMING = ("invented_tool", "near_miss_tool")
#: Kinds that a text has that was cut, and what it has where it is cut between two wrappers.
_CUT = frozenset({"unterminated_string", "missing_bracket", "wrapper_mismatch", "runaway", "empty"})
_RANK = {kind: rank for rank, kind in enumerate(KINDS)}
_QUOTED = 2000
#: What may begin a call where a text begins, or is cut.
_BEGUN = re.compile(r"^[<\[{✿]|(?:\s|\A)[<\[{✿]\S*\Z")


def diagnose(
    message: str | Mapping[str, Any],
    tools: Sequence[Tool | Mapping[str, Any]],
    *,
    expected: Sequence[ExpectedCall | Mapping[str, Any]] | None = None,
    finish_reason: str | None = None,
    protocol: str = "tools",
) -> Diagnosis:
    """Say what is wrong with an answer, before anything in it is repaired.

    :param message: raw text of a model (chat template's wrappers included), or an OpenAI assistant message. Raw text
        that is nothing but an object with parameters of the only tool is read as that tool's arguments.
    :param tools: those that were offered, OpenAI's form accepted. :param expected: the calls that are right; an empty
        list: an answer without a call is right; ``None``: only form, names and schema are judged.
    :param finish_reason: ``length`` tells a truncated answer. :param protocol: ``tools``, ``json_schema`` or
        ``few_shot``.
    :raises TypeError: a message, tools or expected calls that are neither. :raises ValueError: an unknown protocol.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is {protocol!r}; accepted are {', '.join(PROTOCOLS)}")
    offered = [_tool(tool) for tool in _each_of(tools, "tools are a list of those that were offered")]
    wanted = None
    if expected is not None:
        wanted = [_expected(one) for one in _each_of(expected, "expected calls are a list, or None")]
    if isinstance(message, str):
        found = evidence.of_text(message, offered, protocol, in_message=False)
    elif isinstance(message, Mapping):
        found = evidence.of_message(message, offered, protocol)
    else:
        raise TypeError(f"a message is raw text or an OpenAI assistant message, not {type(message).__name__}")
    form = _form(found, finish_reason)
    schema = _schema(found, offered, judged=wanted is not None)
    choice = schema if wanted is None else _choice(found, offered, wanted)
    told = [*form, *schema]
    if found.unasked is not None:
        told.append(found.unasked)
        if not any(defect.kind == "no_call" for defect in choice):
            form.append(found.unasked)
    if (wanted is None or choice) and (leak := _leak(found)) is not None:
        # A runtime can tell that it is there, only the case that it does not belong there.
        told.append(leak)
        without = _without_leak(found, offered, wanted) if wanted is not None else choice
        if len(without) < len(choice):
            choice = without
            form.append(leak)
    remark = ""
    if wanted == [] and {defect.kind for defect in form} == {"truncated"} and _is_prose(found):
        # A text that was cut is still one without a call.
        form, told, remark = [], [], "The answer is text, as it should be; it was cut by its length limit."
    return _diagnosis(found, offered, [*form, *choice], told, remark, judged=wanted is not None)


def feedback(diagnosis: Diagnosis, tools: Sequence[Tool | Mapping[str, Any]]) -> str:
    """The message that is given back to the model once: what it wrote, what is wrong, and how a call looks.

    It tells only what a runtime could know, never which call would be right; "" where that is nothing.
    """
    if not diagnosis.knowable:
        return ""
    offered = [_tool(tool) for tool in tools]
    parts = [f"This could not be executed. {diagnosis.knowable}"]
    written = "\n".join(call.text for call in diagnosis.calls[:5] if call.text)
    if written:
        cut = " …" if len(written) > _QUOTED else ""
        parts.append(f"You wrote:\n{written[:_QUOTED]}{cut}")
    named = next((call.name for call in diagnosis.calls if call.name is not None), None)
    names = ", ".join(tool.name for tool in offered[:50])
    if names:
        parts.append(f"The tools are: {names}.")
    shape = telling.example(offered, named)
    if shape:
        parts.append(f"A call has a name and arguments that are one JSON object: {shape}")
    return "\n\n".join(parts)


def _each_of(listed: Any, what: str) -> list[Any]:
    """The items of a list. :raises TypeError: it is none."""
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
        raise TypeError(f"{what}, not {printable(repr(listed)[:80])}")
    return list(listed)


def _tool(tool: Tool | Mapping[str, Any]) -> Tool:
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, Mapping):
        inner = tool.get("function", tool)
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            parameters = inner.get("parameters", inner.get("input_schema"))
            described = inner.get("description")
            if parameters is not None and not isinstance(parameters, Mapping):
                shown = printable(repr(parameters)[:80])
                raise TypeError(f"the parameters of the tool {inner['name']!r} are a JSON Schema, not {shown}")
            return Tool(
                name=inner["name"],
                description=described if isinstance(described, str) else "",
                parameters=dict(parameters or {}),
            )
    shown = printable(repr(tool)[:80])
    raise TypeError(f"a tool is {{'type': 'function', 'function': {{'name': …}}}} or a Tool, not {shown}")


def _expected(one: ExpectedCall | Mapping[str, Any]) -> ExpectedCall:
    if isinstance(one, ExpectedCall):
        return one
    try:
        return msgspec.convert(one, ExpectedCall)
    except msgspec.ValidationError as error:
        raise TypeError(
            "an expected call is {'name': NAME, 'arguments': {ARGUMENT: [VALUE, …]}} with a list of the values that "
            f"are right: {error}"
        ) from None


def _form(found: Evidence, finish_reason: str | None) -> list[Defect]:
    """What is wrong with the form of an answer, and whether its length limit explains it."""
    defects = list(found.defects)
    for index, piece in enumerate(found.pieces, 1):
        defects += _of_call(piece.defects, piece, index, len(found.pieces))
    kinds = {defect.kind for defect in defects}
    if finish_reason == "length" and (not found.pieces or kinds & _CUT):
        detail = "the answer was cut by its length limit"
        if not found.pieces:
            detail += " before there was a call"
        defects.append(Defect("truncated", -1, detail))
    return defects


def _is_prose(found: Evidence) -> bool:
    """Whether an answer is text with nothing in it that may have been the beginning of a call."""
    text = found.content.strip()
    return bool(text) and not found.pieces and _BEGUN.search(text[:1] + " " + text[-200:]) is None


def _of_call(defects: Sequence[Defect], piece: Piece, number: int, calls: int) -> list[Defect]:
    """Defects of one call that say which one it is, where there are several."""
    if calls == 1:
        return list(defects)
    name = printable(piece.name[:60]) if piece.name else "without a name"
    return [defect._replace(detail=f"call {number} ({name}): {defect.detail}") for defect in defects]


def _schema(found: Evidence, tools: Sequence[Tool], *, judged: bool = True) -> list[Defect]:
    """What is wrong with calls by the tools alone. Of malformed ones only the name can be judged."""
    defects: list[Defect] = []
    for index, piece in enumerate(found.pieces, 1):
        if not tools and (piece.form == "arguments" or not judged):
            # Without tools there is nothing that a name could be held against.
            continue
        if piece.broken:
            named = against_schema(piece.plain_name, {}, tools) if piece.plain_name is not None else []
            own = [defect for defect in named if defect.kind in _NAMING]
        elif not isinstance(piece.arguments, Mapping):
            named = against_schema(piece.plain_name, {}, tools)
            own = [defect for defect in named if defect.kind in _NAMING]
        else:
            own = against_schema(piece.plain_name, piece.arguments, tools)
        defects += _of_call(own, piece, index, len(found.pieces))
    return defects


def _choice(found: Evidence, tools: Sequence[Tool], expected: Sequence[ExpectedCall]) -> list[Defect]:
    """What is wrong with calls beside the expected ones."""
    pieces = found.pieces
    if not pieces:
        if not expected or found.empty:
            return []
        return [Defect("no_call", -1, _no_call(found, tools, expected))]
    if any(piece.broken or not isinstance(piece.arguments, Mapping) for piece in pieces):
        # What was meant can be guessed, not judged.
        defects = _schema(found, tools)
        if not expected and any(piece.name is not None or piece.native for piece in pieces):
            defects.append(Defect("irrelevant_call", -1, "a call is attempted, where no tool fits"))
        return defects
    return list(match([(piece.plain_name, piece.arguments) for piece in pieces], expected, tools).defects)


def _leak(found: Evidence) -> Defect | None:
    """A special token at the end of a value, by the form of the answer alone.

    It may have been asked for: it is told only of an answer that is wrong.
    """
    tokens: list[str] = []

    def look(text: str) -> str:
        ended = _token(text)
        if ended is not None:
            tokens.append(ended[0].strip())
        return text

    for piece in found.pieces:
        if not piece.broken:
            _each(piece.arguments, look)
    if not tokens:
        return None
    return Defect("leaked_token", -1, f"a value ends in the special token {printable(tokens[0][:60])}")


def _without_leak(found: Evidence, tools: Sequence[Tool], expected: Sequence[ExpectedCall]) -> list[Defect]:
    """What is wrong with the choice besides tokens at the end of values."""
    if any(piece.broken or not isinstance(piece.arguments, Mapping) for piece in found.pieces):
        return _choice(found, tools, expected)
    cleaned = [(piece.plain_name, _each(piece.arguments, _without_token)) for piece in found.pieces]
    return list(match(cleaned, expected, tools).defects)


def _each(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A value with each of its texts changed, down to where arguments are not nested any more in practice."""
    if isinstance(value, str):
        return change(value)
    if depth < 20:
        if isinstance(value, Mapping):
            return {key: _each(one, change, depth + 1) for key, one in value.items()}
        if isinstance(value, list):
            return [_each(one, change, depth + 1) for one in value]
    return value


def _without_token(text: str) -> str:
    found = _token(text)
    return text if found is None else text[: found.start()]


def _token(text: str) -> re.Match[str] | None:
    # Tokens are short: the end of a long text is enough.
    return AT_END.search(text, max(0, len(text) - 200))


def _no_call(found: Evidence, tools: Sequence[Tool], expected: Sequence[ExpectedCall]) -> str:
    """Why there is no call, as a clause."""
    names = ", ".join(dict.fromkeys(printable(one.name) for one in expected[:5]))
    if found.answered:
        return f"the answer says that nothing is called, where a call of {names} belongs"
    detail = f"the answer is text, where a call of {names} belongs: {printable(found.content[:80])!r}"
    if found.thinking and formats.read(found.thinking, tools).calls:
        detail += "; a call stands in the thinking only, where nothing executes it"
    return detail


def _diagnosis(
    found: Evidence,
    tools: Sequence[Tool],
    wrong: list[Defect],
    told: list[Defect],
    remark: str,
    *,
    judged: bool,
) -> Diagnosis:
    """The diagnosis. :param told: those that a runtime could tell. :param remark: of an answer without defects."""
    defects = sorted(wrong, key=lambda defect: _RANK[defect.kind])
    kinds = tuple(dict.fromkeys(defect.kind for defect in defects))
    calls = [
        Call(
            name=piece.name,
            arguments=piece.arguments,
            text=piece.text,
            form=piece.form,
            well_formed=not piece.broken,
            id=piece.id,
        )
        for piece in found.pieces
    ]
    detail = telling.sentences(defects, found.text) or remark
    if defects:
        called = {call.name for call in calls}
        remarks = telling.odd_types(tool for tool in tools if tool.name in called)
        detail = " ".join([detail, *map(telling.sentence, remarks)])
    told = sorted(told, key=lambda defect: _RANK[defect.kind])
    return Diagnosis(
        well_formed=all(kind in _WELL_FORMED for kind in kinds) and all(call.well_formed for call in calls),
        kind=kinds[0] if kinds else "valid",
        kinds=kinds,
        calls=calls,
        detail=detail,
        right=not set(kinds) - _FORGIVEN if judged else None,
        knowable=telling.sentences((one for one in told if one.kind not in _FORGIVEN), found.text),
    )

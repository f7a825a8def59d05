"""What is wrong with an answer that should have been tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.toolcalls.cases import ExpectedCall, Tool

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


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is.

    :ivar well_formed: its calls (or its plain text) could be read without repair.
    :ivar kind: ``valid``, or the first kind that explains the failure. :ivar kinds: all of them, ``()`` where valid.
    :ivar calls: in the order of the answer. :ivar detail: sentences for a person; "" where valid.
    :ivar right: whether the calls are the expected ones; ``None`` where nothing was expected.
    """

    well_formed: bool
    kind: str
    kinds: tuple[str, ...] = ()
    calls: list[Call] = []
    detail: str = ""
    right: bool | None = None


def diagnose(
    message: str | Mapping[str, Any],
    tools: Sequence[Tool | Mapping[str, Any]],
    *,
    expected: Sequence[ExpectedCall | Mapping[str, Any]] | None = None,
    finish_reason: str | None = None,
    protocol: str = "tools",
) -> Diagnosis:
    """Say what is wrong with an answer, before anything in it is repaired.

    :param message: raw text of a model (chat template's wrappers included), or an OpenAI assistant message.
    :param tools: those that were offered, OpenAI's form accepted. :param expected: the calls that are right; an empty
        list: an answer without a call is right; ``None``: only form, names and schema are judged.
    :param finish_reason: ``length`` tells a truncated answer. :param protocol: ``tools``, ``json_schema`` or
        ``few_shot``.
    :raises TypeError: a message or tools that are neither.
    """
    raise NotImplementedError  # frame

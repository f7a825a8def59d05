"""Valid calls are never called malformed, and no text breaks the diagnosis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_vram.toolcalls import KINDS, ExpectedCall, diagnose
from pytest_vram.toolcalls.diagnosis import feedback
from tests.unit import toolcall_formats_kit as kit

TOOLS = [
    kit.tool(
        "write_file", path="string", content="string", lines="integer", flags="array", options="object", force="boolean"
    ),
    kit.tool("list_jobs", state="string"),
]
#: What breaks readers that look for tags, quotes and brackets without knowing what a string is.
NASTY = [
    "use </tool_call> to close", '<tool_call>{"name": "x"', 'if (a[0] == "}") {', 'print("{\\"a\\": 1}")',
    "it's \"quoted\"", '```json\n{"a": 1}\n```', "[TOOL_CALLS]x[ARGS]{", "<|im_end|>", "<think>no</think>",
    "C:\\new\\table", "\\", '"', "</s>", "[INST] hi [/INST]", "a\nb\tc", "-- }", "<|python_tag|>{", "</function>",
    "<function=x>", "<｜tool▁calls▁end｜>", "<|call|>", "<|channel|>final<|message|>", ">>>all\n", "}}}}", "]]",
    '{"name": "list_jobs", "arguments": {}}', "“quoted” ‘x’", "[f(x=1)]", "", "   ", "^\\s*(\\d+)$", "~~~\nx\n~~~",
    "\u2028", "😀", "SELECT 'x' FROM t WHERE a = \"b\";",
]  # fmt: skip
#: What a value of a format that escapes nothing cannot hold.
CLOSERS = {
    "gemma": ('<|"|>',),
    "function_gemma": ("<escape>", '<|"|>'),
    "qwen_coder": ("</parameter>", "\n"),
    "glm": ("</arg_value>",),
    "invoke": ("</parameter>",),
}
TEXT = st.one_of(
    st.lists(st.sampled_from(NASTY), min_size=1, max_size=3).map(" ".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
)
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(-(10**9), 10**9), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": TEXT,
        "content": TEXT,
        "lines": st.integers(0, 10**6),
        "flags": st.lists(VALUE, max_size=3),
        "options": st.dictionaries(st.sampled_from("abcd"), VALUE, max_size=3),
        "force": st.booleans(),
    },
)
CALL = st.one_of(
    st.tuples(st.just("write_file"), ARGUMENTS),
    st.tuples(st.just("list_jobs"), st.fixed_dictionaries({}, optional={"state": TEXT})),
)
CALLS = st.lists(CALL, min_size=1, max_size=3)
# Twenty-two formats each: more than 2400 valid calls in one run.
MANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def said(diagnosis: Any) -> list[tuple[str | None, Any]]:
    return [(call.name, call.arguments) for call in diagnosis.calls]


def fits(form: str, calls: Any) -> bool:
    """Whether a format can carry these calls at all."""
    values = json.dumps(calls, ensure_ascii=False)
    return not any(json.dumps(closer, ensure_ascii=False)[1:-1] in values for closer in CLOSERS.get(form, ()))


@MANY
@given(CALLS)
@example([("write_file", {"path": "a.md", "content": "use </tool_call> to close"})])
def test_a_valid_call_is_valid_in_every_format(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Calls with brackets, quotes, tags and code inside of their strings are read as written, without any defect."""
    for form, render in kit.EVERY.items():
        if fits(form, calls):
            protocol = "few_shot" if form in kit.UNWRAPPED else "tools"
            diagnosis = diagnose(render(calls), TOOLS, protocol=protocol)
            assert (diagnosis.kind, diagnosis.well_formed) == ("valid", True), (form, diagnosis)
            assert said(diagnosis) == calls, form


@MANY
@given(CALLS)
def test_a_valid_call_of_a_server_is_valid(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Calls that a server read are valid, and right where they are the expected ones."""
    listed = [{"type": "function", "function": {"name": name, "arguments": json.dumps(one)}} for name, one in calls]
    diagnosis = diagnose({"role": "assistant", "content": None, "tool_calls": listed}, TOOLS)
    assert (diagnosis.kind, diagnosis.well_formed) == ("valid", True)
    assert said(diagnosis) == calls
    expected = [
        ExpectedCall(name=name, arguments={key: [value] for key, value in one.items()}, exact=list(one))
        for name, one in calls
    ]
    assert diagnose({"tool_calls": listed}, TOOLS, expected=expected).right is True


@MANY
@given(CALLS)
def test_bare_json_is_never_malformed(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """JSON that stands where a server should have read a call is in the text, and nothing worse."""
    for render in kit.UNWRAPPED.values():
        diagnosis = diagnose(render(calls), TOOLS)
        assert (diagnosis.kind, diagnosis.kinds, diagnosis.well_formed) == ("call_in_text", ("call_in_text",), True)


PIECES = st.sampled_from(
    ["{", "}", "[", "]", '"', "'", ",", ":", "<", ">", "|", "\\", "\n", "`", "=", "(", "```", "<|"]
)


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(sorted(kit.EVERY)),
    CALLS,
    st.sampled_from(["cut", "drop", "put", "turn"]),
    st.integers(0, 10**6),
    PIECES,
    st.sampled_from(["tools", "json_schema", "few_shot"]),
    st.sampled_from([None, "stop", "length"]),
    st.sampled_from([None, [], [ExpectedCall(name="list_jobs")]]),
)
def test_a_garbled_call_is_diagnosed(
    form: str, calls: Any, how: str, place: int, piece: str, protocol: str, finish: str | None, expected: Any
) -> None:
    """Whatever is cut, lost, put in or turned around, there is a diagnosis that holds together."""
    text = kit.EVERY[form](calls)
    at = place % len(text)
    text = {
        "cut": text[:at],
        "drop": text[:at] + text[at + 1 :],
        "put": text[:at] + piece + text[at:],
        "turn": text[at:] + text[:at],
    }[how]
    for answer in (text, {"content": text}, {"tool_calls": [{"function": {"name": "write_file", "arguments": text}}]}):
        diagnosis = diagnose(answer, TOOLS, expected=expected, finish_reason=finish, protocol=protocol)
        holds_together(diagnosis, judged=expected is not None)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.one_of(st.sampled_from(NASTY), PIECES), max_size=12).map("".join)))
def test_any_text_is_diagnosed(text: str) -> None:
    """There is a diagnosis for any text."""
    for answer in (text, {"content": text}, {"tool_calls": [{"function": {"name": text, "arguments": text}}]}):
        holds_together(diagnose(answer, TOOLS, expected=[]), judged=True)
        holds_together(diagnose(answer, []), judged=False)


def holds_together(diagnosis: Any, *, judged: bool) -> None:
    """What every diagnosis promises."""
    assert diagnosis.kind == (diagnosis.kinds[0] if diagnosis.kinds else "valid")
    assert set(diagnosis.kinds) <= set(KINDS) - {"valid"}
    assert bool(diagnosis.detail) == bool(diagnosis.kinds) or "it was cut by its length limit" in diagnosis.detail
    assert diagnosis.detail.isprintable()
    assert len(diagnosis.detail) < 3000
    assert (diagnosis.right is None) == (not judged)
    if diagnosis.right:
        assert diagnosis.well_formed
        assert set(diagnosis.kinds) <= {"arguments_as_object"}
    if not all(call.well_formed for call in diagnosis.calls):
        assert not diagnosis.well_formed
    assert len(feedback(diagnosis, TOOLS)) < 10_000

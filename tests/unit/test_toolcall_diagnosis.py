"""What an answer is: which kind explains it, whether it is right, and what is told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_vram.toolcalls import KINDS, ExpectedCall, diagnose
from pytest_vram.toolcalls.diagnosis import feedback
from pytest_vram.toolcalls.telling import sentences
from pytest_vram.toolcalls.tolerant import Defect
from tests.unit import toolcall_formats_kit as kit

ADD = kit.tool("add", ["first", "second"], first="integer", second="integer")
READ = kit.tool("read_log", ["path"], path="string", lines="integer")
JOBS = kit.tool("list_jobs")
TOOLS = [READ, JOBS]
RIGHT = [ExpectedCall(name="read_log", arguments={"path": ["/var/log/cron.log"]})]


def message(arguments: Any, name: Any = "read_log", **more: Any) -> dict[str, Any]:
    """An assistant message of a server that read one call."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | more


def test_kinds_are_those_of_the_contract() -> None:
    """The kinds are a fixed set of names that reports and users' scripts rely on."""
    assert sorted(KINDS) == sorted(
        [
            "valid",
            "missing_bracket",
            "extra_bracket",
            "missing_comma",
            "trailing_comma",
            "single_quotes",
            "unquoted_key",
            "unterminated_string",
            "duplicate_key",
            "non_finite_number",
            "double_encoded",
            "over_escaped",
            "truncated",
            "runaway",
            "leaked_token",
            "text_around",
            "call_in_text",
            "wrapper_mismatch",
            "arguments_as_object",
            "alias_key",
            "empty",
            "no_call",
            "extra_call",
            "irrelevant_call",
            "invented_tool",
            "near_miss_tool",
            "missing_field",
            "extra_field",
            "misspelt_field",
            "wrong_type",
            "wrong_value",
            "server_parse_error",
            "history_rejected",
        ]
    )


def test_a_call_that_a_server_read() -> None:
    """A call with the right arguments is right, and nothing is told of it."""
    diagnosis = diagnose(message('{"path": "/var/log/cron.log"}'), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.kinds, diagnosis.right, diagnosis.detail) == ("valid", (), True, "")
    assert (diagnosis.calls[0].id, diagnosis.calls[0].form) == ("c1", "openai")


ARGUMENTS = {
    "missing bracket": ('{"path": "/var/log/cron.log"', "missing_bracket"),
    "extra bracket": ('{"path": "/var/log/cron.log"}}', "extra_bracket"),
    "trailing comma": ('{"path": "/var/log/cron.log",}', "trailing_comma"),
    "missing comma": ('{"path": "/var/log/cron.log" "lines": 5}', "missing_comma"),
    "single quotes": ("{'path': '/var/log/cron.log'}", "single_quotes"),
    "unquoted key": ('{path: "/var/log/cron.log"}', "unquoted_key"),
    "duplicate key": ('{"path": "a", "path": "/var/log/cron.log"}', "duplicate_key"),
    "not a number": ('{"path": "/var/log/cron.log", "lines": NaN}', "non_finite_number"),
    "double encoded": ('"{\\"path\\": \\"/var/log/cron.log\\"}"', "double_encoded"),
    "over-escaped": ('{\\"path\\": \\"/var/log/cron.log\\"}', "over_escaped"),
    "unterminated": ('{"path": "/var/log/cron', "unterminated_string"),
    "special token": ('{"path": "/var/log/cron.log"}<|im_end|>', "leaked_token"),
    "text before": ('Sure: {"path": "/var/log/cron.log"}', "text_around"),
    "text after": ('{"path": "/var/log/cron.log"} as you wished', "text_around"),
    "twice": ('{"path": "/var/log/cron.log"}{"path": "/var/log/cron.log"}', "text_around"),
    "no JSON": ("path=/var/log/cron.log", "wrapper_mismatch"),
    "opening bracket": ('"path": "/var/log/cron.log", "lines": 5}', "missing_bracket"),
    "both brackets": ('"path": "/var/log/cron.log"', "missing_bracket"),
    "white space": ('{"path": "/var/log/cron.log"' + "\n" * 200, "runaway"),
}


@pytest.mark.parametrize(("arguments", "kind"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_are_not_json_to_the_letter(arguments: str, kind: str) -> None:
    """A consumer of ``arguments`` fails on anything but one JSON object, so the call is malformed whatever is meant."""
    diagnosis = diagnose(message(arguments), TOOLS, expected=RIGHT)
    assert diagnosis.kind == kind, diagnosis
    assert (diagnosis.well_formed, diagnosis.right, diagnosis.calls[0].well_formed) == (False, False, False)
    assert diagnosis.detail
    assert diagnosis.knowable


def test_arguments_as_an_object_are_the_servers_deviation() -> None:
    """A server that sends an object for the string deviates from the protocol; the model called right."""
    diagnosis = diagnose(message({"path": "/var/log/cron.log"}), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.right) == ("arguments_as_object", True, True)
    assert diagnosis.knowable == ""


@pytest.mark.parametrize("arguments", ["", "{}", None, " "])
def test_no_arguments(arguments: str | None) -> None:
    """An empty text is no arguments: right for a tool without parameters, a missing field for another."""
    assert diagnose(message(arguments, "list_jobs"), TOOLS, expected=[{"name": "list_jobs"}]).right is True
    assert diagnose(message(arguments), TOOLS, expected=RIGHT).kind == "missing_field"


@pytest.mark.parametrize("arguments", ["[1]", "5", '"x"', "null", "true"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """JSON that is no object cannot be arguments."""
    diagnosis = diagnose(message(arguments), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.right) == ("wrong_type", False)


CHOICES = {
    "wrong value": ('{"path": "/var/log/syslog"}', "read_log", "wrong_value"),
    "wrong type": ('{"path": 5}', "read_log", "wrong_type"),
    "misspelt field": ('{"pth": "/var/log/cron.log"}', "read_log", "misspelt_field"),
    "missing field": ("{}", "read_log", "missing_field"),
    "extra field": ('{"path": "/var/log/cron.log", "colour": 1}', "read_log", "extra_field"),
    "near miss": ('{"path": "/var/log/cron.log"}', "read_logs", "near_miss_tool"),
    "invented": ('{"path": "/var/log/cron.log"}', "fetch_weather", "invented_tool"),
    "another tool": ("{}", "list_jobs", "extra_call"),
}


@pytest.mark.parametrize(("arguments", "name", "kind"), CHOICES.values(), ids=CHOICES)
def test_a_well_formed_call_that_is_wrong(arguments: str, name: str, kind: str) -> None:
    """What a call says can be wrong while its form is right."""
    diagnosis = diagnose(message(arguments, name), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.right) == (kind, True, False), diagnosis


def test_fields_are_named() -> None:
    """An object alone is the only tool's arguments: the fields of wrong type are named, and no other."""
    diagnosis = diagnose('{"first": "3", "second": "1"}', [ADD])
    assert (diagnosis.kind, diagnosis.kinds, diagnosis.well_formed) == ("wrong_type", ("wrong_type",), True)
    assert "first" in diagnosis.detail
    assert "second" in diagnosis.detail
    one = diagnose('{"first": 3, "second": "1"}', [ADD])
    assert "first" not in one.detail


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ('{"query": \\\\"errors\\\\"}', "over_escaped", {"query": "errors"}),
        ('{"query": "def f():\\n    \\"\\"', "unterminated_string", {"query": 'def f():\n    ""'}),
        ('```json\n{\n  "query": "errors"\n', "missing_bracket", {"query": "errors"}),
    ],
)
@pytest.mark.parametrize("tools", [[], [kit.tool("search", ["query"], query="string")]])
def test_malformed_arguments_alone(text: str, kind: str, value: dict[str, str], tools: list[Any]) -> None:
    """Arguments alone that are malformed are told by their kind, with what was meant, also where no tool is known."""
    diagnosis = diagnose(text, tools)
    assert (diagnosis.kind, diagnosis.well_formed) == (kind, False)
    assert diagnosis.calls[0].arguments == value


def test_a_type_that_json_schema_does_not_have_is_told() -> None:
    """A tool's own mistake stands beside the model's."""
    odd = {
        "type": "function",
        "function": {"name": "square", "parameters": {"type": "object", "properties": {"number": {"type": "int"}}}},
    }
    diagnosis = diagnose("[square(number=5)]", [odd])
    assert (diagnosis.kind, diagnosis.well_formed) == ("call_in_text", True)
    assert diagnosis.calls[0].arguments == {"number": 5}
    assert "'int'" in diagnosis.detail


@pytest.mark.parametrize("protocol", ["tools", "json_schema", "few_shot"])
@pytest.mark.parametrize("expected", [None, [], RIGHT])
@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_is_empty(text: str, expected: Any, protocol: str) -> None:
    """No answer is a failure, also where an answer without a call is right."""
    for answer in (text, {"role": "assistant", "content": text}, {"role": "assistant", "content": None}):
        diagnosis = diagnose(answer, TOOLS, expected=expected, protocol=protocol)
        assert (diagnosis.kind, diagnosis.well_formed) == ("empty", False)
        assert not diagnosis.right


def test_white_space_without_end_is_a_runaway() -> None:
    """Repetition explains an answer that its length limit ended, more than the limit does."""
    for text in ("\t" * 3000, '{"name": "list_jobs", "arguments": {' + "\t" * 3000, "so so " * 500):
        diagnosis = diagnose(text, TOOLS, finish_reason="length")
        assert (diagnosis.kind, diagnosis.well_formed) == ("runaway", False)
        assert "truncated" in diagnosis.kinds
    calls = kit.hermes([("list_jobs", {})] * 40)
    assert diagnose(calls, TOOLS).kind == "runaway"
    huge = diagnose("a b c " * 3_000_000, TOOLS, expected=[])
    assert (huge.kind, huge.right) == ("runaway", False)


def test_a_limit_after_the_call_did_not_cut_it() -> None:
    """A call that is complete was not truncated by what came after it."""
    diagnosis = diagnose(message('{"path": "/var/log/cron.log"}'), TOOLS, expected=RIGHT, finish_reason="length")
    assert diagnosis.right is True
    assert diagnose("I would look into", TOOLS, expected=RIGHT, finish_reason="length").kind == "truncated"


GARBAGE = {
    "call": (message("{}", "list_jobs"), "irrelevant_call"),
    "call in text": (kit.bare([("list_jobs", {})]), "call_in_text"),
    "malformed call": ('<tool_call>{"name": "list_jobs", "arguments": {', "missing_bracket"),
    "special tokens": ("It is noon.<|im_end|>\n<|im_start|>user\nThanks", "leaked_token"),
    "stray closer": ("It is noon.</tool_call>", "wrapper_mismatch"),
    "repetition": ("noon " * 300, "runaway"),
    "closing brackets": ("]]]]}}}", "extra_bracket"),
    "empty brackets": ("[]", "empty"),
    "a full stop": (".", "empty"),
    "what could not be decoded": ("\ufffd", "empty"),
    "a call of nothing": ('{"name": null, "arguments": null}', "call_in_text"),
}


@pytest.mark.parametrize(("answer", "kind"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_no_answer_without_a_call(answer: Any, kind: str) -> None:
    """Where no tool fits, only a well-formed answer without a call is right."""
    diagnosis = diagnose(answer, TOOLS, expected=[])
    assert (diagnosis.kind, diagnosis.right) == (kind, False), diagnosis
    assert diagnose("It is noon.", TOOLS, expected=[]).right is True


def test_thinking_is_no_text_and_no_call() -> None:
    """Thinking stands beside an answer in every protocol; a call inside of it is none, and that is told."""
    call = kit.bare([("read_log", {"path": "/var/log/cron.log"})])
    thought = "<think>\nI could do " + call + "\n</think>\n"
    answered = diagnose(
        thought + kit.asked_for([("read_log", {"path": "/var/log/cron.log"})]),
        TOOLS,
        expected=RIGHT,
        protocol="few_shot",
    )
    assert answered.right is True
    for answer in (
        thought + "Done.",
        {"content": "Done.", "reasoning_content": call},
        "I could do " + call + "\n</think>\nDone.",
    ):
        diagnosis = diagnose(answer, TOOLS, expected=RIGHT)
        assert diagnosis.kind == "no_call"
        assert "thinking" in diagnosis.detail
    for hidden in ({"content": "", "reasoning_content": call}, f"<think>\n{kit.hermes([('list_jobs', {})])}\n</think>"):
        diagnosis = diagnose(hidden, TOOLS, expected=RIGHT)
        assert diagnosis.kind == "empty"
        assert "with a call inside of it" in diagnosis.detail


def test_tokens_that_leaked_into_a_call() -> None:
    """A name or a value that is right but for a special token at its end is a leaked token; one asked for is not."""
    named = diagnose(message('{"path": "/var/log/cron.log"}', "read_log<|channel|>commentary"), TOOLS, expected=RIGHT)
    assert (named.kind, named.kinds) == ("leaked_token", ("leaked_token",))
    value = diagnose(message('{"path": "/var/log/cron.log<|im_end|>"}'), TOOLS, expected=RIGHT)
    assert (value.kind, value.well_formed) == ("leaked_token", False)
    asked = [ExpectedCall(name="read_log", arguments={"path": ["ends in <|im_end|>"]})]
    assert diagnose(message('{"path": "ends in <|im_end|>"}'), TOOLS, expected=asked).right is True


def test_content_beside_calls() -> None:
    """Text beside calls is usual; a second call in it is lost, and a token left in it has leaked."""
    arguments = '{"path": "/var/log/cron.log"}'
    assert diagnose(message(arguments, content="I will look."), TOOLS, expected=RIGHT).right is True
    same = kit.hermes([("read_log", {"path": "/var/log/cron.log"})])
    assert diagnose(message(arguments, content=same), TOOLS, expected=RIGHT).right is True
    other = kit.hermes([("list_jobs", {})])
    assert diagnose(message(arguments, content=other), TOOLS, expected=RIGHT).kind == "call_in_text"
    assert diagnose(message(arguments, content="Look.<|eot_id|>"), TOOLS, expected=RIGHT).kind == "leaked_token"


def test_positions_and_control_characters() -> None:
    """A detail says where, and does not obey what a model wrote."""
    diagnosis = diagnose("<tool_call>\n\x1b[2J <b>read_log</b>\n</tool_call>", TOOLS)
    assert "line 2" in diagnosis.detail
    assert diagnosis.detail.isprintable()
    assert "Call 2 (read_log)" in diagnose(kit.hermes([("list_jobs", {}), ("read_log", {})]), TOOLS).detail.replace(
        "call", "Call"
    )


def test_sentences_are_bounded_and_printable() -> None:
    """However many and however long the defects are, what is told of them is a few lines that a terminal can show."""
    told = sentences([Defect("wrong_value", -1, f"value {number} is \x1b[2J" + "x" * 900) for number in range(500)], "")
    assert told.isprintable()
    assert len(told) < 2500
    assert told.endswith("more.")
    assert sentences([Defect("wrong_type", -1, "a is '3', a string")], "") == "a is '3', a string."
    assert sentences([Defect("empty", -1, "a call is missing")] * 3, "") == "A call is missing."


def test_a_leaked_token_is_told_by_its_form() -> None:
    """What a runtime is told of a token in a value is the same whether the value is right without it or not."""
    said = []
    for path in ("/var/log/cron.log", "/var/log/syslog"):
        found = diagnose(message(json.dumps({"path": path + "<|im_end|>"})), TOOLS, expected=RIGHT)
        said.append(found.knowable)
        assert ("leaked_token" in found.kinds) is (path == "/var/log/cron.log")
        assert "right" not in feedback(found, TOOLS)
        assert diagnose(message(json.dumps({"path": path + "<|im_end|>"})), TOOLS).knowable == found.knowable
    assert said[0] == said[1] == "A value ends in the special token <|im_end|>."


def test_a_text_that_was_cut_is_still_no_call() -> None:
    """Where no call is right, a text that its length limit cut is right; thinking or JSON that was cut is not."""
    cut = {"content": "It is noon, and the jobs of the"}
    right = diagnose(cut, TOOLS, expected=[], finish_reason="length")
    assert (right.kind, right.right, right.knowable) == ("valid", True, "")
    assert "cut by its length limit" in right.detail
    assert "before there was a call" not in right.detail
    assert diagnose(cut, TOOLS, expected=RIGHT, finish_reason="length").kind == "truncated"
    for begun in ("<tool_ca", "It is noon. <tool", "[TOOL", '{"'):
        found = diagnose({"content": begun}, TOOLS, expected=[], finish_reason="length")
        assert (found.kind, found.right) == ("truncated", False)
    thought = {"content": "", "reasoning_content": "It is noon, and"}
    assert diagnose(thought, TOOLS, expected=[], finish_reason="length").right is False
    answering = {"content": '{"calls": [], "answer": "It is'}
    for protocol in ("json_schema", "few_shot"):
        found = diagnose(answering, TOOLS, expected=[], finish_reason="length", protocol=protocol)
        assert (found.kind, found.right) == ("truncated", False)


def test_json_that_was_cut_and_names_no_call() -> None:
    """Malformed JSON is malformed; that it attempts a call is said only where something names one."""
    assert diagnose({"content": '{"error": "no'}, TOOLS, expected=[]).kinds == (
        "unterminated_string",
        "missing_bracket",
    )
    named = diagnose({"content": '{"name": "list_jobs", "arguments": {'}, TOOLS, expected=[])
    assert {"missing_bracket", "irrelevant_call"} <= set(named.kinds)


def test_without_tools_names_are_not_judged() -> None:
    """Where it is not known which tools were offered, and nothing was expected, only the form is judged."""
    call = kit.hermes([("anything", {"at": "all"})])
    for answer in (call, message("{}", "anything")):
        assert diagnose(answer, []).kind == "valid"
    assert diagnose(call[:-13] + "}</tool_call>", []).kind == "extra_bracket"
    assert diagnose(message("{}", "anything"), [], expected=[]).right is False


@pytest.mark.parametrize("bad", [None, 5, "x", {"name": "read_log"}])
def test_what_is_no_list(bad: Any) -> None:
    """Tools and expected calls are lists; what is none is a mistake of the caller that names which."""
    with pytest.raises(TypeError, match="tools are a list"):
        diagnose("x", bad)
    if bad is not None:
        with pytest.raises(TypeError, match="expected calls are a list"):
            diagnose("x", TOOLS, expected=bad)
    with pytest.raises(TypeError, match="parameters of the tool 'x' are a JSON Schema"):
        diagnose("x", [{"name": "x", "parameters": 3}])


@pytest.mark.parametrize("bad", [None, 5, b"x", ["x"]])
def test_what_is_no_message(bad: Any) -> None:
    """A message that is neither text nor a mapping is a mistake of the caller."""
    with pytest.raises(TypeError, match="raw text or an OpenAI assistant message"):
        diagnose(bad, TOOLS)


@pytest.mark.parametrize("bad", [5, {"type": "function"}, {"function": {"name": 5}}])
def test_what_is_no_tool(bad: Any) -> None:
    """A tool without a name is a mistake of the caller."""
    with pytest.raises(TypeError, match="a tool is"):
        diagnose("x", [bad])


def test_other_mistakes_of_the_caller() -> None:
    """Expected calls without lists of values and unknown protocols are told."""
    with pytest.raises(TypeError, match="list of the values"):
        diagnose("x", TOOLS, expected=[{"name": "read_log", "arguments": {"path": "x"}}])
    with pytest.raises(ValueError, match="json_schema"):
        diagnose("x", TOOLS, protocol="xml")


def test_feedback_tells_what_a_runtime_knows() -> None:
    """The message to the model quotes its call, says what is wrong and how a call looks, and gives no answer away."""
    text = feedback(diagnose(message('{"path": "/var/log/syslog",}'), TOOLS, expected=RIGHT), TOOLS)
    assert '{"path": "/var/log/syslog",}' in text
    assert "comma" in text
    assert "read_log" in text
    assert "cron" not in text
    wrong = diagnose(message('{"path": "/var/log/syslog"}'), TOOLS, expected=RIGHT)
    assert (wrong.kind, feedback(wrong, TOOLS)) == ("wrong_value", "")
    assert len(feedback(diagnose(message('{"path": "' + "x" * 100_000), TOOLS), TOOLS)) < 5000
    assert "invented" not in feedback(diagnose(message("{}", "launch"), TOOLS), TOOLS)

"""Shapes around a call: those that are asked for, those that models write instead, and what is no call at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_vram.toolcalls import ExpectedCall, diagnose
from tests.unit import toolcall_formats_kit as kit

READ = kit.tool("read_log", ["path"], path="string", lines="integer")
JOBS = kit.tool("list_jobs")
TOOLS = [READ, JOBS]
RIGHT = [ExpectedCall(name="read_log", arguments={"path": ["/var/log/cron.log"]})]
GIVEN = {"path": "/var/log/cron.log"}

ALIASES: dict[str, Any] = {
    "parameters": {"name": "read_log", "parameters": GIVEN},
    "args": {"tool": "read_log", "args": GIVEN},
    "action": {"action": "read_log", "action_input": GIVEN},
    "JSON-RPC": {"jsonrpc": "2.0", "method": "read_log", "params": GIVEN, "id": 1},
    "nested": {"function": {"name": "read_log", "arguments": GIVEN}},
    "nested, typed": {"type": "function", "function": {"name": "read_log", "arguments": json.dumps(GIVEN)}},
    "misspelt": {"name": "read_log", "argumnets": GIVEN},
    "flat": {"name": "read_log", "path": "/var/log/cron.log"},
    "keyed": {"read_log": GIVEN},
    "function": {"function": "read_log", "arguments": GIVEN},
}


@pytest.mark.parametrize("shape", ALIASES.values(), ids=ALIASES)
def test_other_keys_are_aliases(shape: Any) -> None:
    """A call under other keys is read, well-formed, and not right: a consumer that asked for a shape does not get it."""
    diagnosis = diagnose(json.dumps(shape), TOOLS, expected=RIGHT, protocol="few_shot")
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.right) == ("alias_key", True, False), diagnosis
    assert [(call.name, call.arguments) for call in diagnosis.calls] == [("read_log", GIVEN)]
    assert set(diagnosis.kinds) == {"alias_key"}
    in_text = diagnose(f"```json\n{json.dumps(shape, indent=2)}\n```", TOOLS)
    assert in_text.kinds == ("call_in_text", "alias_key")


CALLS = [("read_log", GIVEN)]
ASKED = {
    "as asked": kit.asked_for(CALLS),
    "with an answer": json.dumps({"calls": [{"name": "read_log", "arguments": GIVEN}], "answer": ""}),
    "one object": kit.bare(CALLS),
    "a list": kit.bare_list(CALLS),
    "indented": json.dumps({"name": "read_log", "arguments": GIVEN}, indent=4),
}


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
@pytest.mark.parametrize("text", ASKED.values(), ids=ASKED)
def test_json_that_was_asked_for(text: str, protocol: str) -> None:
    """Bare JSON is right where JSON was asked for, as text or as a message's content."""
    for answer in (text, {"role": "assistant", "content": text}, {"content": [{"type": "text", "text": text}]}):
        diagnosis = diagnose(answer, TOOLS, expected=RIGHT, protocol=protocol)
        assert (diagnosis.kind, diagnosis.right) == ("valid", True), diagnosis


OPENAIS = {
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read_log", "arguments": json.dumps(GIVEN)}}]
}


@pytest.mark.parametrize("text", [*ASKED.values(), json.dumps(OPENAIS)], ids=[*ASKED, "OpenAI's list"])
def test_bare_json_is_never_malformed(text: str) -> None:
    """The same JSON where a server should have read a call is in the text, and not malformed."""
    diagnosis = diagnose(text, TOOLS, expected=RIGHT)
    assert diagnosis.kinds == ("call_in_text",)
    assert diagnosis.well_formed
    assert diagnosis.calls[0].well_formed


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
@pytest.mark.parametrize(
    "text", ['{"calls": []}', '{"calls": [], "answer": "It is noon."}', '<think>Hm.</think>\n{"calls": []}\n']
)
def test_saying_that_nothing_is_called(text: str, protocol: str) -> None:
    """An empty list of calls is an answer without a call."""
    assert diagnose(text, TOOLS, expected=[], protocol=protocol).right is True
    wrong = diagnose(text, TOOLS, expected=RIGHT, protocol=protocol)
    assert (wrong.kind, wrong.knowable) == ("no_call", "")
    assert "says that nothing is called" in wrong.detail


@pytest.mark.parametrize("text", ["It is noon.", "No tool fits this, I am afraid.", "无法执行此操作。"])
def test_words_are_an_answer_where_no_grammar_keeps_from_them(text: str) -> None:
    """Under examples alone a model may answer a person in words, which call nothing; a grammar makes that impossible."""
    assert diagnose(text, TOOLS, expected=[], protocol="few_shot").right is True
    missing = diagnose(text, TOOLS, expected=RIGHT, protocol="few_shot")
    assert (missing.kinds, missing.right) == (("no_call",), False)
    constrained = diagnose(text, TOOLS, expected=[], protocol="json_schema")
    assert (constrained.kind, constrained.right) == ("wrapper_mismatch", False)


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
@pytest.mark.parametrize(
    "text",
    [
        "{}", "[]", "null", "42", '"x"', '{"calls": null}', '{"calls": "none"}', '{"calls": {}}',
        '{"calls": [{}]}', '{"calls": [null]}', '{"calls": [[]]}', '{"tool_calls": []}', '{"error": "no tool"}',
        '{"answer": "It is noon."}', "}}}}", "abc %%% ]]}}",
    ],
)  # fmt: skip
def test_anything_else_is_not_what_was_asked_for(text: str, protocol: str) -> None:
    """Where one object was asked for, only that says that nothing is called; a runtime can tell the rest is not it."""
    diagnosis = diagnose(text, TOOLS, expected=[], protocol=protocol)
    assert (diagnosis.kind, diagnosis.right, diagnosis.well_formed) == ("wrapper_mismatch", False, False), diagnosis
    assert diagnose(text, TOOLS, expected=None, protocol=protocol).kind == "wrapper_mismatch"
    missing = diagnose(text, TOOLS, expected=RIGHT, protocol=protocol)
    assert missing.kinds == ("no_call",)
    assert missing.knowable == diagnosis.knowable != ""


@pytest.mark.parametrize(
    ("text", "protocols"),
    [
        ('```json\n{"calls": []}\n```', ("json_schema",)),
        ('I cannot: {"calls": []}', ("json_schema", "few_shot")),
        ('{"calls": []}{"calls": []}', ("json_schema", "few_shot")),
        ('{"calls": []}\nI hope that helps.', ("json_schema", "few_shot")),
        (kit.asked_for([("read_log", {"path": "/srv/a.log"})]) + '{"calls": []}', ("json_schema", "few_shot")),
    ],
)
def test_text_around_an_answer_without_a_call(text: str, protocols: tuple[str, ...]) -> None:
    """What stands around the object is told as it is around calls."""
    for protocol in ("json_schema", "few_shot"):
        assert ("text_around" in diagnose(text, TOOLS, protocol=protocol).kinds) is (protocol in protocols)


CALL = {"name": "read_log", "arguments": GIVEN}
NEAR = {
    "tool_calls": ({"tool_calls": [CALL]}, ("alias_key",)),
    "Calls": ({"Calls": [CALL]}, ("alias_key",)),
    "call": ({"call": [CALL]}, ("alias_key",)),
    "an object": ({"calls": CALL}, ("wrong_type",)),
    "an object under another key": ({"call": CALL}, ("alias_key", "wrong_type")),
    "a list in a list": ({"calls": [[CALL]]}, ("wrong_type",)),
    "capitals": ({"calls": [{"Name": CALL["name"], "Arguments": CALL["arguments"]}]}, ("alias_key",)),
}


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
@pytest.mark.parametrize(("value", "kinds"), NEAR.values(), ids=NEAR)
def test_a_call_under_another_key_is_seen(value: Any, kinds: tuple[str, ...], protocol: str) -> None:
    """An object that is nearly the one that was asked for has the call; what keeps a reader from it is told."""
    diagnosis = diagnose(json.dumps(value), TOOLS, expected=RIGHT, protocol=protocol)
    assert (diagnosis.kinds, diagnosis.right, diagnosis.well_formed) == (kinds, False, True)
    assert [(call.name, call.arguments) for call in diagnosis.calls] == CALLS
    assert diagnosis.knowable


def test_keys_that_the_schema_of_answers_forbids() -> None:
    """One more key beside the calls breaks the JSON Schema; in a few-shot prompt nothing forbids it."""
    for calls, expected in (([CALL], RIGHT), ([], [])):
        text = json.dumps({"calls": calls, "reason": "asked"})
        assert diagnose(text, TOOLS, expected=expected, protocol="json_schema").kind == "extra_field"
        assert diagnose(text, TOOLS, expected=expected, protocol="few_shot").right is True


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<tool_call>\n{}\n</tool_call>", "alias_key"),
        ("[TOOL_CALLS][{}]</s>", "alias_key"),
        ("<|python_tag|>{}<|eom_id|>", "valid"),
    ],
)
def test_parameters_are_llamas(text: str, kind: str) -> None:
    """Llama's template writes ``parameters``; in the wrappers of others a server looks for ``arguments``."""
    call = json.dumps({"name": "read_log", "parameters": GIVEN})
    diagnosis = diagnose(text.replace("{}", call), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.right) == (kind, kind == "valid")


def test_command_names_the_tool_its_own_way() -> None:
    """Command's template writes ``tool_name`` and ``parameters``."""
    call = json.dumps([{"tool_call_id": "0", "tool_name": "read_log", "parameters": GIVEN}])
    assert diagnose(f"<|START_ACTION|>{call}<|END_ACTION|>", TOOLS, expected=RIGHT).right is True


AROUND = {
    "prose before": (f"Here is the call:\n{kit.bare(CALLS)}", ("json_schema", "few_shot")),
    "prose after": (f"{kit.asked_for(CALLS)}\nI hope that helps.", ("json_schema", "few_shot")),
    "a fence": (kit.fenced(CALLS), ("json_schema",)),
    "tags": (kit.hermes(CALLS), ("json_schema", "few_shot")),
    "prose and a fence": (f"Sure!\n{kit.fenced(CALLS)}", ("json_schema", "few_shot")),
}


@pytest.mark.parametrize(("text", "protocols"), AROUND.values(), ids=AROUND)
def test_text_around_json_that_was_asked_for(text: str, protocols: tuple[str, ...]) -> None:
    """Anything around the JSON is told where JSON alone was asked for; a fence is put up with in a few-shot prompt."""
    for protocol in ("json_schema", "few_shot"):
        diagnosis = diagnose(text, TOOLS, expected=RIGHT, protocol=protocol)
        assert diagnosis.well_formed
        assert diagnosis.kind == ("text_around" if protocol in protocols else "valid"), diagnosis
        assert diagnosis.right is (protocol not in protocols)


def test_prose_before_a_wrapped_call_is_usual() -> None:
    """A chat template's wrapper tells a call from the text before it."""
    text = "I will look into the log.\n" + kit.hermes(CALLS) + "<|im_end|>\n"
    assert diagnose(text, TOOLS, expected=RIGHT).right is True


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"name": "read_log", "arguments": json.dumps(GIVEN)}),
        json.dumps(kit.bare(CALLS)),
        kit.hermes(CALLS).replace(json.dumps(GIVEN), json.dumps(json.dumps(GIVEN))),
    ],
)
def test_json_inside_of_a_string(text: str) -> None:
    """Arguments, or a whole call, that are a string of JSON are encoded once too often."""
    diagnosis = diagnose(text, TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.right) == ("double_encoded", False, False)
    assert diagnosis.calls[0].arguments == GIVEN


def test_arguments_named_like_a_call() -> None:
    """An object whose keys are all the only tool's parameters is its arguments, also where one of them is ``name``."""
    job = kit.tool("run_job", ["name"], name="string", input="string")
    diagnosis = diagnose('{"name": "backup", "input": "/srv"}', [job])
    assert (diagnosis.kind, diagnosis.calls[0].name) == ("valid", "run_job")
    assert diagnosis.calls[0].arguments == {"name": "backup", "input": "/srv"}
    both = kit.tool("run_job", ["name"], name="string", params="object")
    call = diagnose('{"name": "backup", "params": {"full": true}}', [both]).calls[0]
    assert (call.name, call.arguments) == ("run_job", {"name": "backup", "params": {"full": True}})


def test_arguments_alone_are_in_the_text_of_a_message() -> None:
    """Arguments without a name do not make a call: a server executes none, and JSON that was asked for has a name."""
    assert diagnose({"content": json.dumps(GIVEN)}, [READ], expected=RIGHT).kind == "call_in_text"
    assert diagnose(json.dumps(GIVEN), [READ], expected=RIGHT, protocol="few_shot").kind == "alias_key"


@pytest.mark.parametrize(
    "value",
    [
        {"status": "ok", "count": 3},
        {"name": "cron.log", "size": 5},
        {"action": "closed", "input": "none"},
        [1, 2],
        {"name": "unknown"},
    ],
)
def test_other_json_is_text(value: Any) -> None:
    """JSON that is no call is an answer in text."""
    diagnosis = diagnose(json.dumps(value), TOOLS, expected=RIGHT)
    assert (diagnosis.kind, diagnosis.calls) == ("no_call", [])


def test_a_message_without_sense_is_told() -> None:
    """Entries of ``tool_calls`` that are no calls are a wrong wrapper, and never an exception."""
    for entry in (None, 5, {}, {"function": None}, {"function": "read_log"}):
        diagnosis = diagnose({"tool_calls": [entry]}, TOOLS, expected=RIGHT)
        assert (diagnosis.kind, diagnosis.right) == ("wrapper_mismatch", False)
    unnamed = diagnose({"tool_calls": [{"function": {"arguments": "{}"}}]}, TOOLS, expected=RIGHT)
    assert unnamed.kind == "invented_tool"


def test_the_older_function_call_is_read() -> None:
    """OpenAI's earlier ``function_call`` is a call as well."""
    message = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "read_log", "arguments": json.dumps(GIVEN)},
    }
    assert diagnose(message, TOOLS, expected=RIGHT).right is True

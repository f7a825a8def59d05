"""Formats of tool calls: each is read, and what is wrong with its wrapper is told apart from what is wrong inside."""

from __future__ import annotations

import json

import pytest

from pytest_vram.toolcalls import diagnose
from tests.unit import toolcall_formats_kit as kit

READ = kit.tool("read_log", ["path"], path="string", lines="integer", follow="boolean", units="array", filter="object")
JOBS = kit.tool("list_jobs")
TOOLS = [READ, JOBS]
ARGUMENTS = {
    "path": "/var/log/cron.log",
    "lines": 20,
    "follow": False,
    "units": ["a", "b"],
    "filter": {"level": "warn"},
}
TWO = [("read_log", ARGUMENTS), ("list_jobs", {})]


def protocol_of(form: str) -> str:
    return "few_shot" if form in kit.UNWRAPPED else "tools"


@pytest.mark.parametrize("form", kit.EVERY)
def test_every_format_is_read(form: str) -> None:
    """Two calls in one answer are found in every format, with values of every type, and nothing is wrong."""
    diagnosis = diagnose(kit.EVERY[form](TWO), TOOLS, protocol=protocol_of(form))
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.detail) == ("valid", True, "")
    assert [(call.name, call.arguments) for call in diagnosis.calls] == TWO


@pytest.mark.parametrize("form", [*kit.JSON_INSIDE, *kit.PYTHON_INSIDE])
@pytest.mark.parametrize(
    "text",
    [
        "close it with </tool_call> and </function>",
        '<tool_call>{"name": "list_jobs", "arguments": {}}</tool_call>',
        "```json\n{}\n```",
        "[TOOL_CALLS]x[ARGS]{ <|call|> <｜tool▁call▁end｜> <|tool_call_end|>",
        'if (row["a"][0] == "}") { // it\'s \\"quoted\\"',
        "<think>no</think> <|channel|>final<|message|> >>>all\n",
    ],
)
def test_a_closer_inside_of_a_string_is_text(form: str, text: str) -> None:
    """Tags, fences, tokens and brackets inside of a string are part of the string in every format that escapes."""
    calls = [("read_log", {"path": text}), ("read_log", {"path": "x"})]
    diagnosis = diagnose(kit.EVERY[form](calls), TOOLS)
    assert diagnosis.kind == "valid", diagnosis.detail
    assert [(call.name, call.arguments) for call in diagnosis.calls] == calls


@pytest.mark.parametrize("form", kit.EVERY)
def test_a_format_left_in_a_message_is_a_call_in_text(form: str) -> None:
    """A call that a server left in the content is in the text, whatever its format, and is not executed."""
    message = {"role": "assistant", "content": kit.EVERY[form]([("read_log", {"path": "x"})])}
    diagnosis = diagnose(message, TOOLS, expected=[{"name": "read_log", "arguments": {"path": ["x"]}}])
    assert (diagnosis.kind, diagnosis.well_formed, diagnosis.right) == ("call_in_text", True, False)


@pytest.mark.parametrize("form", kit.JSON_INSIDE)
def test_a_cut_inside_of_a_string(form: str) -> None:
    """A text that ends inside of a string is unterminated in every format, and truncated where its limit ended it."""
    text = kit.EVERY[form]([("read_log", {"path": "/var/log/cron.log"})])
    cut = text[: text.index("cron.log") + 4]
    assert diagnose(cut, TOOLS).kind == "unterminated_string"
    limited = diagnose(cut, TOOLS, finish_reason="length")
    assert limited.kind == "truncated"
    assert "unterminated_string" in limited.kinds


@pytest.mark.parametrize("form", kit.JSON_INSIDE)
def test_a_bracket_that_is_missing(form: str) -> None:
    """The last bracket of the arguments, taken away, is missing in every format."""
    text = kit.EVERY[form]([("read_log", {"path": "/var/log/cron.log"})])
    at = text.rindex("}")
    diagnosis = diagnose(text[:at] + text[at + 1 :], TOOLS)
    assert (diagnosis.kind, diagnosis.well_formed) == ("missing_bracket", False)
    assert diagnosis.calls[0].name == "read_log"


def test_a_bad_call_does_not_take_the_next_one_along() -> None:
    """A string that is never closed ends where its wrapper does: the call after it is read as it stands."""
    bad = '<tool_call>\n{"name": "read_log", "arguments": {"path": "/var/log}}\n</tool_call>\n'
    diagnosis = diagnose(bad + kit.hermes([("list_jobs", {})]), TOOLS)
    assert [(call.name, call.well_formed) for call in diagnosis.calls] == [("read_log", False), ("list_jobs", True)]
    assert diagnosis.kind == "unterminated_string"


WRAPPERS = {
    "tags inside of the wrapper": '<tool_call>\n<name>read_log</name> {"file": "/etc"}\n</tool_call>',
    "closer missing": '<tool_call>\n{"name": "read_log", "arguments": {"path": "x"}}',
    "closer of another": '<tool_call>{"name": "read_log", "arguments": {"path": "x"}}</function>',
    "opener missing": '{"name": "read_log", "arguments": {"path": "x"}}\n</tool_call>',
    "wrapper of definitions": '<tools>{"name": "read_log", "arguments": {"path": "x"}}</tools>',
    "two in one": '<tool_call>{"name": "read_log", "arguments": {"path": "x"}}\n{"name": "list_jobs", "arguments": {}}</tool_call>',
    "text before the closer": '<tool_call>{"name": "read_log", "arguments": {"path": "x"}} is called</tool_call>',
    "parameters without their function's end": "<tool_call><function=read_log><parameter=path>\nx\n</parameter></tool_call>",
    "DeepSeek's section without an end": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_log<｜tool▁sep｜>{"path": "x"}',
    "Kimi's call without an end": '<|tool_calls_section_begin|><|tool_call_begin|>functions.read_log:0<|tool_call_argument_begin|>{"path": "x"}<|tool_calls_section_end|>',
    "Mistral's name without [ARGS]": '[TOOL_CALLS]read_log{"path": "x"}',
    "argument without a name": '<|python_start|>[read_log("x")]<|python_end|>',
    "something to be computed": "<|python_start|>[read_log(path=base + '/x')]<|python_end|>",
}


@pytest.mark.parametrize("text", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrong_wrapper_is_a_call_that_failed(text: str) -> None:
    """A wrapper with something wrong about it is a malformed call of the tool that was meant, never no call."""
    diagnosis = diagnose(text, TOOLS, expected=[{"name": "read_log", "arguments": {"path": ["x"]}}])
    assert diagnosis.kind == "wrapper_mismatch", diagnosis
    assert (diagnosis.well_formed, diagnosis.right) == (False, False)
    assert diagnosis.calls[0].name == "read_log"
    assert "no_call" not in diagnosis.kinds


def test_what_was_not_understood_is_not_made_up() -> None:
    """Of a wrapper with another format inside, the name is told and the arguments are not."""
    call = diagnose(WRAPPERS["tags inside of the wrapper"], TOOLS).calls[0]
    assert (call.name, call.arguments, call.well_formed) == ("read_log", None, False)


SEARCH = kit.tool("find_host", ["query"], query="string", limit="integer")
GEMMA = {
    "opening delimiter": (
        '<|tool_call>call:find_host{query:web nodes<|"|>}<tool_call|>',
        {"query": "web nodes"},
        "opening",
    ),
    "opening, with a comma": (
        '<|tool_call>call:find_host{query:Oslo, Norway<|"|>,limit:5}<tool_call|>',
        {"query": "Oslo, Norway", "limit": 5},
        "opening",
    ),
    "closing delimiter": (
        'query:<|"|>if a[0] }],limit:<|"|>many<|"|>',
        {"query": "if a[0] }]", "limit": "many"},
        "closing",
    ),
    "closing, at the end": ('<|tool_call>call:find_host{query:<|"|>web}<tool_call|>', {"query": "web"}, "closing"),
    "both": ("<|tool_call>call:find_host{query:web,limit:5}<tool_call|>", {"query": "web", "limit": 5}, "neither"),
}


@pytest.mark.parametrize(("text", "arguments", "which"), GEMMA.values(), ids=GEMMA)
def test_which_delimiter_of_gemma_is_missing(text: str, arguments: dict[str, object], which: str) -> None:
    """A string of Gemma's with a delimiter missing is read as it was meant, and it is told which one."""
    diagnosis = diagnose(text, [SEARCH])
    assert diagnosis.kind == "unterminated_string"
    assert which in diagnosis.detail
    assert diagnosis.calls[0].arguments == arguments
    assert not diagnosis.calls[0].well_formed


def test_function_gemma_that_is_broken() -> None:
    """The smaller Gemma's calls are told apart from its faults, as those of the larger one."""
    whole = kit.function_gemma([("find_host", {"query": "web }", "limit": 5})])
    assert diagnose(whole + "<start_function_response>", [SEARCH]).kind == "valid"
    assert diagnose(whole.removesuffix("<end_function_call>"), [SEARCH]).kind == "wrapper_mismatch"
    assert diagnose(whole.replace("call:", ""), [SEARCH]).kind == "wrapper_mismatch"
    assert diagnose(whole.replace("}<escape>", "}", 1), [SEARCH]).kind == "unterminated_string"
    assert diagnose(whole[: whole.index("web") + 2], [SEARCH]).kind == "unterminated_string"


PROMPTED = {
    "Qwen-Agent": '✿FUNCTION✿: read_log\n✿ARGS✿: {"path": "x"}\n✿RESULT✿',
    "ReAct": 'Thought: I look.\nAction: read_log\nAction Input: {"path": "x"}\nObservation:',
}


@pytest.mark.parametrize("text", PROMPTED.values(), ids=PROMPTED)
def test_notations_of_prompts(text: str) -> None:
    """Qwen-Agent's and ReAct's calls are calls that stand in the text: no server reads them."""
    expected = [{"name": "read_log", "arguments": {"path": ["x"]}}]
    for answer in (text, {"content": text}):
        diagnosis = diagnose(answer, TOOLS, expected=expected)
        assert (diagnosis.kinds, diagnosis.right) == (("call_in_text",), False), diagnosis
        assert diagnosis.calls[0].arguments == {"path": "x"}
    assert diagnose(text, TOOLS, expected=expected, protocol="few_shot").kind == "wrapper_mismatch"
    assert diagnose(text[: text.index("}")], TOOLS).kind == "missing_bracket"
    assert diagnose("Action: nothing\nAction Input: {}", TOOLS, expected=[]).kind == "valid"


def test_a_collapsed_opener() -> None:
    """Calls whose opener has run into the name are read, all of them, as a wrong wrapper."""
    text = (
        "<tool_call:read_log{path:<|\"|>a 'b'<|\"|>}><tool_call|>\n"
        '<tool_call:read_log{path:<|"|>mkdir -p /srv<|"|>}<tool_call|>\n'
        "<tool_call:list_jobs{}<tool_call|>"
    )
    diagnosis = diagnose(text, TOOLS)
    assert diagnosis.kind == "wrapper_mismatch"
    assert [(call.name, call.arguments) for call in diagnosis.calls] == [
        ("read_log", {"path": "a 'b'"}),
        ("read_log", {"path": "mkdir -p /srv"}),
        ("list_jobs", {}),
    ]


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    """Where a format writes values without quotes, the schema says what they are; what does not fit stays text."""
    text = "<tool_call>\n<function=read_log>\n<parameter=path>\n5\n</parameter>\n<parameter=lines>\nmany\n</parameter>\n</function>\n</tool_call>"
    diagnosis = diagnose(text, TOOLS)
    assert diagnosis.calls[0].arguments == {"path": "5", "lines": "many"}
    assert diagnosis.kind == "wrong_type"


def test_talking_about_a_tag_is_no_call() -> None:
    """Tags and tokens between back-ticks are talked about."""
    text = "A call begins with `<tool_call>` and ends with `</tool_call>`; `<|im_end|>` ends the turn."
    assert diagnose(text, TOOLS, expected=[]).kind == "valid"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The </s> token ends a turn.", "valid"),
        ("A turn ends with <eos>, as the template says.", "valid"),
        ("The tag that ends it is </tool_call> in this format.", "valid"),
        ("The price was <s>10</s> 8 euros.", "valid"),
        ("It is noon. </s> User: thanks", "leaked_token"),
        ("It is noon </s>", "leaked_token"),
        ("It is noon<eos>and more", "leaked_token"),
        ("It is noon </tool_call>\nand more", "wrapper_mismatch"),
    ],
)
def test_a_sentence_about_a_token_is_text(text: str, kind: str) -> None:
    """A token in the middle of a sentence is talked about, and HTML is text; one where a turn ended has leaked."""
    diagnosis = diagnose({"content": text}, TOOLS, expected=[])
    assert (diagnosis.kind, diagnosis.right) == (kind, kind == "valid")


def test_a_parameter_without_its_end() -> None:
    """A value of tags goes on to its own closer, unless the next parameter of the tool begins first."""
    text = kit.qwen_coder([("read_log", {"path": "/srv/a.log", "lines": 5})])
    diagnosis = diagnose(text.replace("</parameter>\n", "", 1), TOOLS)
    assert (diagnosis.kind, diagnosis.well_formed) == ("wrapper_mismatch", False)
    assert diagnosis.calls[0].arguments == {"path": "/srv/a.log", "lines": 5}
    about = kit.qwen_coder([("read_log", {"path": "write\n<parameter=other>\nthere"})])
    assert diagnose(about, TOOLS).kind == "valid"


def test_which_bracket_of_python_is_wrong() -> None:
    """A bracket that closes one further out shows that one inside is missing; one that closes nothing is too many."""
    missing = diagnose('<|python_tag|>[read_log(path="x"]', TOOLS)
    assert (missing.kind, "'('" in missing.detail) == ("missing_bracket", True)
    assert diagnose('<|python_start|>[read_log(path="x"))]<|python_end|>', TOOLS).kind == "extra_bracket"


def test_a_definition_is_no_call() -> None:
    """A model that repeats the definition of a tool does not call it."""
    text = json.dumps({"name": "read_log", "description": "Reads.", "parameters": READ.parameters})
    assert diagnose(text, TOOLS, expected=[{"name": "read_log"}]).kind == "no_call"


@pytest.mark.parametrize(
    "text",
    [
        "[docs](https://example.org) say {x} and [1] and f(x)",
        "```python\nread(path)\n```",
        'The configuration is\n```json\n{"level": "info"}\n```\nas it should be.',
    ],
)
def test_brackets_in_prose_are_no_calls(text: str) -> None:
    """Links, citations, code and other JSON are text."""
    diagnosis = diagnose(text, TOOLS, expected=[])
    assert (diagnosis.kind, diagnosis.right, diagnosis.calls) == ("valid", True, [])


HOSTILE = {
    "brackets": "[" * 300_000,
    "objects": '{"a":' * 200_000,
    "openers": "<tool_call>" * 60_000,
    "broken calls": '<tool_call>\n{"name": "read_log", "arguments": {"path": "x}}\n</tool_call>\n' * 8_000,
    "line ends": "\n" * 500_000 + "{",
    "python": 'read_log(path="\n' * 60_000,
    "gemma": "<|tool_call>call:read_log{" + "a:{" * 200_000,
    "gemma's closers in a string": "<start_function_call>call:x{a:<escape>"
    + "<end_function_call>" * 50_000
    + "<escape>}",
    "parameters without their ends": "<tool_call><function=read_log>"
    + "<parameter=path>\nx\n" * 50_000
    + "</parameter></function></tool_call>",
    "tokens in prose": "a </s> b <s> " * 50_000,
    "fences": '```json\n{"a": \n```\n' * 40_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_ends(text: str) -> None:
    """Whatever is repeated how often, the answer is a failure with a reason, and short to tell."""
    diagnosis = diagnose(text, TOOLS, expected=[])
    assert diagnosis.right is False
    assert len(diagnosis.detail) < 3000
    assert len(diagnosis.calls) <= 1000

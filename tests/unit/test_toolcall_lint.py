"""Contradictions in cases of tool calls: each is found, said with its place, and not found where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_vram.cli import entry
from pytest_vram.toolcalls import Case, ExpectedCall, Tool, case_schema
from pytest_vram.toolcalls.lint import Finding, lint
from pytest_vram.toolcalls.lint_schema import flaws

DAYS = ["mon", "tue", "wed"]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "job": {"type": "string", "pattern": "^[a-z-]+$"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
        "day": {"type": "string", "enum": DAYS},
        "when": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]},
        "days": {"type": "array", "items": {"type": "string", "enum": DAYS}},
        "share": {"type": "number"},
        "dry": {"type": "boolean"},
    },
    "required": ["job"],
}
RUNS = Tool(name="job_runs", description="List the runs of a job.", parameters=PARAMETERS)
LIST = Tool(name="job_list", description="List the jobs.", parameters={"type": "object", "properties": {}})
USER = {"role": "user", "content": "Which runs of sync were there?"}


def call(name: str = "job_runs", **changes: Any) -> ExpectedCall:
    changes.setdefault("arguments", {"job": ["sync"]})
    return ExpectedCall(name=name, **changes)


def arguments(**values: Any) -> ExpectedCall:
    return call(arguments={"job": ["sync"], **values})


def case(number: int = 1, **changes: Any) -> Case:
    found = Case(
        id=f"a-{number:02d}",
        family="a",
        category="single",
        messages=[USER],
        tools=[RUNS, LIST],
        expect=[call()],
        origin=f"cases.jsonl:{number}",
    )
    return msgspec.structs.replace(found, **changes)


def past(name: str = "job_runs", arguments: str = '{"job": "sync"}', id: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def result(id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "[]"}


def of(*cases: Case) -> list[Finding]:
    return lint(cases)


#: What is clean → cases without a finding.
CLEAN: dict[str, list[Case]] = {
    "single": [case()],
    "choice": [case(category="choice")],
    "parallel": [case(category="parallel", expect=[call(), call("job_list", arguments={})])],
    "irrelevance": [case(category="irrelevance", expect=[])],
    "missing": [case(category="missing", expect=[])],
    "nested": [case(category="nested", expect=[arguments(when=[{"hour": 5}])])],
    "array": [case(category="array", expect=[arguments(days=[["mon"]])])],
    "enum": [case(category="enum", expect=[arguments(day=["tue"])])],
    "enum in a list": [case(category="enum", expect=[arguments(days=[["mon"]])])],
    "units": [case(category="units", expect=[arguments(share=[0.5])])],
    "default": [case(expect=[call(arguments={"job": ["sync"], "limit": [10, 20]}, omittable=["limit"])])],
    "multi_turn": [case(category="multi_turn", messages=[USER, past(), result()], expect=[])],
    "two results": [
        case(
            category="multi_turn",
            messages=[
                {"role": "system", "content": "Short."},
                {"role": "developer", "content": "Shorter."},
                USER,
                {**past(), "tool_calls": past()["tool_calls"] + past("job_list", "{}", "call00002")["tool_calls"]},
                result("call00002"),
                result(),
            ],
        )
    ],
    "other tools": [case(), case(2, tools=[RUNS])],
    "other description": [case(), case(2, tools=[msgspec.structs.replace(RUNS, description="Runs of a job."), LIST])],
    "other words": [case(), case(2, messages=[{"role": "user", "content": "runs of sync?"}])],
    "choosing family": [
        case(category="choice"),
        case(2, category="choice", messages=[past(), result(), USER], expect=[call("job_list", arguments={})]),
    ],
    "script": [case(language="zh-Hant-TW")],
}

#: Rule → level, cases, words of the text, of the one finding that there is.
WRONG: dict[str, tuple[str, str, list[Case], str]] = {
    "not offered": ("error", "not-offered", [case(tools=[LIST])], "tool 'job_runs' is not one of the case's tools"),
    "no tools": ("error", "no-tools", [case(category="irrelevance", tools=[], expect=[])], "nothing is decided"),
    "unknown argument": ("error", "unknown-argument", [case(expect=[arguments(jb=["x"])])], "has no such argument"),
    "type": ("error", "refused-value", [case(expect=[arguments(share=["half"])])], "'half' is not of type 'number'"),
    "enum value": ("error", "refused-value", [case(expect=[arguments(day=["mon", "sunday"])])], "'sunday' is not one of"),
    "range": ("error", "refused-value", [case(expect=[arguments(limit=[101])])], "101 is greater than the maximum"),
    "pattern": ("error", "refused-value", [case(expect=[call(arguments={"job": ["Sync!"]})])], "does not match"),
    "nested value": ("error", "refused-value", [case(expect=[arguments(when=[{}])])], "'hour' is a required property"),
    "required": ("error", "required", [case(expect=[call(arguments={})])], "argument 'job' of job_runs is required"),
    "required omittable": ("error", "omittable", [case(expect=[call(omittable=["job"])])], "but job_runs requires it"),
    "unknown omittable": ("error", "omittable", [case(expect=[call(omittable=["limit"])])], "none of the expected"),
    "unknown exact": ("error", "exact", [case(expect=[call(exact=["jobs"])])], "none of the expected arguments"),
    "exact number": (
        "error",
        "exact",
        [case(expect=[call(arguments={"job": ["sync"], "share": [1]}, exact=["share"])])],
        "only text is compared",
    ),
    "repeated": ("warning", "repeated-value", [case(expect=[call(arguments={"job": ["sync", "sync"]})])], "twice"),
    "default not allowed": (
        "warning",
        "default",
        [case(expect=[call(arguments={"job": ["sync"], "limit": [20]}, omittable=["limit"])])],
        "which says its default 10",
    ),
    "default not omittable": ("warning", "default", [case(expect=[arguments(limit=[10])])], "make it omittable"),
    "language": ("warning", "language", [case(language="English")], "is no tag such as"),
    "single with two": ("error", "category", [case(expect=[call(), call()])], "single expects 2 calls: one belong"),
    "parallel with one": ("error", "category", [case(category="parallel")], "expects 1 call: two or more"),
    "irrelevance with one": ("error", "category", [case(category="irrelevance")], "expects 1 call: none belong"),
    "choice of one": ("error", "category", [case(category="choice", tools=[RUNS])], "there is nothing to choose"),
    "short list": ("error", "category", [case(category="long_list")], "offers 2 tools: at least 20"),
    "multi_turn": ("error", "category", [case(category="multi_turn")], "no tool result"),
    "missing": ("error", "category", [case(category="missing", tools=[LIST], expect=[])], "requires anything"),
    "nested": ("error", "category", [case(category="nested")], "no argument that is an object"),
    "array": ("error", "category", [case(category="array")], "no argument that is a list"),
    "units": ("error", "category", [case(category="units", expect=[arguments(dry=[True])])], "that is a number"),
    "enum": ("error", "category", [case(category="enum")], "that its schema enumerates"),
    "no such call": ("error", "history", [case(messages=[USER, past(), result(), result("call00009"), USER])], "is not there"),
    "answered twice": ("error", "history", [case(messages=[USER, past(), result(), result()])], "was answered already"),
    "no result": ("error", "history", [case(messages=[USER, past(), USER])], "call 'call00001' has no result before it"),
    "no result, and talk": (
        "error",
        "history",
        [case(messages=[USER, past(), USER, {"role": "assistant", "content": "x"}, USER])],
        "call 'call00001' has no result before it",
    ),
    "same id": ("error", "history", [case(messages=[past(), result(), past(), result()])], "two calls have the id 'call00001'"),
    "name": ("warning", "inexact", [case(expect=[arguments(job=["sync-two"])])], "'sync-two' is compared without regard"),
    "path in object": (
        "warning",
        "inexact",
        [
            case(
                tools=[Tool(name="job_runs", description="x", parameters={"type": "object", "properties": {"job": {}}})],
                expect=[call(arguments={"job": [{"paths": ["some words", "/etc/Hosts"]}]})],
            )
        ],
        "put 'job' into exact",
    ),
    "call id": ("warning", "call-id", [case(messages=[USER, past(id="g1"), result("g1"), USER])], "'g1' is not nine letters"),
    "past no json": ("error", "history", [case(messages=[past(arguments="{job"), result()])], "no JSON object"),
    "past list": ("error", "history", [case(messages=[past(arguments="[]"), result()])], "no JSON object"),
    "past deep": ("error", "history", [case(messages=[past(arguments="[" * 99999), result()])], "no JSON object"),
    "past tool": ("warning", "history", [case(messages=[past("jobs"), result()])], "'jobs' is not one of"),
    "past schema": ("warning", "history", [case(messages=[past(arguments="{}"), result()])], "refuses its arguments"),
    "two users": ("warning", "history", [case(messages=[USER, USER])], "two messages of the user in a row"),
    "late system": ("warning", "history", [case(messages=[USER, {"role": "system", "content": "x"}, past(), result()])],
                    "a system message after the beginning"),
    "empty request": ("error", "history", [case(messages=[{"role": "user", "content": " "}])], "is empty"),
    "last word": ("error", "history", [case(messages=[USER, {"role": "assistant", "content": "x"}])], "of the assistant"),
    "half answered": (
        "error",
        "history",
        [case(messages=[{**past(), "tool_calls": past()["tool_calls"] + past(id="call00002")["tool_calls"]}, result()])],
        "call 'call00002' has no result",
    ),
    "twins": ("warning", "twins", [case(tools=[RUNS, msgspec.structs.replace(RUNS, name="job-run")])], "does the same"),
    "tool name": ("warning", "tool-name", [case(tools=[RUNS, msgspec.structs.replace(LIST, name="a.b")])], "servers take"),
    "description": ("warning", "description", [case(tools=[RUNS, msgspec.structs.replace(LIST, description="")])], "no desc"),
    "schema": ("error", "schema", [case(tools=[RUNS, msgspec.structs.replace(LIST, parameters={"type": "dict"})])], "dict"),
    "duplicate": ("error", "duplicate", [case(), case(2)], "the same as case 'a-01' (cases.jsonl:1)"),
    "duplicate with tools and calls in another order": (
        "error",
        "duplicate",
        [
            case(category="parallel", expect=[call("job_list", arguments={}), call()]),
            case(2, category="parallel", tools=[LIST, RUNS], expect=[call(), call("job_list", arguments={})]),
        ],
        "it would count twice",
    ),
    "contradiction": ("error", "contradiction", [case(), case(2, expect=[call("job_list", arguments={})], family="b"),
                                                 case(3, tools=[LIST], category="irrelevance", expect=[]),
                                                 case(4, family="b", tools=[LIST], expect=[call("job_list", arguments={})],
                                                      messages=[{"role": "user", "content": "jobs?"}])],
                      "another answer is right"),
    "family of one": ("warning", "family", [case(), case(2, tools=[RUNS]), case(3, family="b", tools=[RUNS], messages=[
        {"role": "user", "content": "runs of sync?"}])], "has this case only"),
    "two intents": ("warning", "family", [case(), case(2, tools=[LIST], expect=[call("job_list", arguments={})])],
                    "a family has one intent"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_clean_cases_have_no_finding(name: str) -> None:
    """Nothing is found in cases that are right."""
    assert of(*CLEAN[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_contradiction_is_found(name: str) -> None:
    """Each contradiction is one finding, of its level, with file, line, case and reason."""
    level, rule, cases, words = WRONG[name]
    found = [finding for finding in of(*cases) if finding.rule != "category" or rule == "category"]
    assert [(finding.level, finding.rule) for finding in found] == [(level, rule)], found
    assert words in found[0].text
    assert found[0].origin.startswith("cases.jsonl:")
    assert found[0].case in {case.id for case in cases}


def schema(**changes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": changes}}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "parameters have type None: a tool takes an object"),
        ({"type": "array", "items": {}}, "parameters have type 'array'"),
        (schema(type="int"), "parameters.x: type 'int' is unknown: did you mean 'integer'?"),
        (schema(type="strin"), "did you mean 'string'?"),
        (schema(type=["string", "None"]), "did you mean 'null'?"),
        (schema(type="???"), "type '???' is unknown"),
        (schema(type={"a": 1}), "is unknown"),
        ({**schema(type="string"), "required": ["y"]}, "required names 'y', which is none of its properties"),
        ({**schema(type="string"), "required": ["X"]}, "required names 'X'"),
        (schema(type="string", required=True), "parameters.x.required is no list"),
        (
            schema(type="string", enum=["a", 1]),
            "enum has a value that the rest of the schema refuses: 1 is not of type",
        ),
        (schema(type="string", enum="a"), "parameters.properties.x.enum"),
        (schema(type="integer", default="1"), "the default is refused by the schema"),
        (schema(type="string", enum=["a"], default="b"), "the default is refused"),
        (schema(type="integer", minimum=2, maximum=1), "minimum 2 is above maximum 1"),
        (schema(type="integer", minimum="2"), "parameters.properties.x.minimum"),
        (schema(type="string", pattern="("), "pattern '(' is no regular expression"),
        (schema(type="array", items={"type": "float"}), "parameters.x.items: type 'float' is unknown"),
        (schema(anyOf=[{"type": "str"}]), "parameters.x.anyOf[0]: type 'str' is unknown"),
        (schema(**{"$ref": "https://example.com/x.json"}), "leads out of the schema"),
        ({"type": "object", "properties": []}, "parameters.properties"),
    ],
)
def test_schema_that_is_none_is_found(parameters: dict[str, Any], words: str) -> None:
    """What is wrong with a tool's schema is said with its path and the likely meaning."""
    found = flaws(parameters)
    assert any(flaw.error and words in flaw.text for flaw in found), found


def test_array_without_items_is_a_warning() -> None:
    """An array of anything is allowed, and a model cannot know what to put in it."""
    assert [flaw.error for flaw in flaws(schema(type="array"))] == [False]


@pytest.mark.parametrize(
    "parameters",
    [
        PARAMETERS,
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        schema(type=["string", "null"], default=None),
    ],
)
def test_right_schemas_have_no_flaw(parameters: dict[str, Any]) -> None:
    """Schemas with references, unions and open objects are in order."""
    assert flaws(parameters) == []


@pytest.mark.parametrize(
    ("reference", "words"),
    [("#", "refers to itself without an end"), ("#/$defs/none", "refers to '#/$defs/none', which is not in it")],
)
def test_references_that_lead_nowhere(reference: str, words: str) -> None:
    """A reference to nothing or to itself is told and ends, and nothing is fetched."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"job": {"allOf": [{"$ref": "#/$defs/loop"}]}},
        "$defs": {"loop": {"$ref": "#/$defs/loop" if reference == "#" else reference}},
    }
    found = of(case(tools=[Tool(name="job_runs", description="x", parameters=parameters)]))
    assert [finding.rule for finding in found] == ["refused-value"]
    assert words in found[0].text


def test_nothing_is_fetched_for_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to an address is told as one that leads nowhere, without a look at the address."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **more: pytest.fail("something was fetched"))
    parameters = {"type": "object", "properties": {"job": {"$dynamicRef": "http://127.0.0.1:9/schema.json"}}}
    found = of(case(tools=[Tool(name="job_runs", description="x", parameters=parameters)]))
    assert [finding.rule for finding in found] == ["refused-value"]
    assert "refers to 'http://127.0.0.1:9/schema.json', which is not in it" in found[0].text


def test_deep_schema_is_told() -> None:
    """A schema that a program nested without measure is a flaw and no crash."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        deep = {"type": "array", "items": deep}
    try:
        assert [flaw.text for flaw in flaws(schema(**deep))] == ["the schema is nested too deeply to be checked"]
    finally:
        while "items" in deep:  # else taking it apart recurses as well
            deep = deep.pop("items")


def test_broken_schema_says_nothing_of_values() -> None:
    """Where a schema is none its cases have that one finding, at the first case that offers it."""
    broken = Tool(
        name="job_runs", description="x", parameters={"type": "object", "properties": {"job": {"type": "str"}}}
    )
    found = of(case(tools=[broken]), case(2, tools=[broken, LIST], messages=[USER, past(), result()]))
    assert [(finding.case, finding.rule) for finding in found] == [("a-01", "schema")]


def lint_of(folder: Path, *cases: Case, capsys: pytest.CaptureFixture[str], options: tuple[str, ...] = ()) -> Any:
    lines = []
    for one in cases:
        fields = msgspec.to_builtins(one)
        del fields["origin"]
        lines.append(json.dumps(fields))
    (folder / "cases.jsonl").write_text("\n".join(lines))
    code = entry.main(["toolcalls", "lint", str(folder / "cases.jsonl"), *options])
    return code, capsys.readouterr()


def test_command_tells_findings_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``vram toolcalls lint`` exits with 0 for clean cases and 1 for errors, and sums up what the cases are."""
    code, shown = lint_of(tmp_path, case(), case(2, tools=[RUNS]), capsys=capsys)
    assert code == 0
    assert "2 cases of 1 family" in shown.out
    assert "a drop of 83.4 points at a target of 94%" in shown.out
    assert shown.out.endswith("0 errors, 0 warnings\n")
    code, shown = lint_of(tmp_path, case(), capsys=capsys)
    assert "no drop at a target of 94%: there are too few cases" in shown.out
    code, shown = lint_of(tmp_path, case(), case(2), capsys=capsys)
    assert code == 1
    assert "cases.jsonl:2: error: the same as case 'a-01'" in shown.out
    code, shown = lint_of(tmp_path, case(), case(2, tools=[RUNS], language="xxxx"), capsys=capsys)
    assert code == 0
    assert "0 errors, 1 warning\n" in shown.out


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints the same as one document."""
    code, shown = lint_of(tmp_path, case(), case(2), capsys=capsys, options=("--json",))
    document = json.loads(shown.out)
    assert (code, document["format"], document["cases"], document["families"]) == (
        1,
        "pytest-vram/toolcalls-lint/1",
        2,
        1,
    )
    assert document["findings"][0]["rule"] == "duplicate"
    assert document["categories"] == {"single": 2}


def test_command_refuses_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that cannot be read, and words that mean nothing here, exit with 2 and one sentence."""
    for arguments in (["lint", str(tmp_path / "none.jsonl")], [], ["lint", "--fast"], ["lnt"]):
        assert entry.main(["toolcalls", *arguments]) == 2
        assert "vram" in capsys.readouterr().err


def test_lint_goes_on_after_a_line_that_is_no_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line that cannot be used is an error with its place, and the other lines are checked all the same."""
    lint_of(tmp_path, case(1), case(2, tools=[RUNS], language="xxxx"), case(3), capsys=capsys)
    path = tmp_path / "cases.jsonl"
    good = path.read_text().split("\n")
    broken = ["{", good[0].replace('"single"', '"singel"'), good[0].replace('["sync"]', '"sync"'), "[]", good[0]]
    path.write_text("\n".join([*good, *broken]))
    assert entry.main(["toolcalls", "lint", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, case_schema.schemas()["lint.json"])
    found = [(one["origin"].rpartition(":")[2], one["rule"]) for one in document["findings"]]
    assert found == [(line, "unusable") for line in "45678"] + [("2", "language"), ("3", "duplicate")]
    assert (document["cases"], document["errors"], document["warnings"]) == (3, 6, 1)
    assert entry.main(["toolcalls", "lint", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "cases.jsonl:4: error: the line is not JSON: " in shown
    assert "cases.jsonl:5: error: category 'singel' is unknown: did you mean 'single'? [unusable]" in shown
    assert "cases.jsonl:6: error: expect[0].arguments.job is not a list" in shown
    assert "cases.jsonl:8: error: id 'a-01' is that of" in shown


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with nothing but unusable lines is told line by line, and refused where there are more than a hundred."""
    path = tmp_path / "cases.jsonl"
    path.write_text("x\n" * 100)
    assert entry.main(["toolcalls", "lint", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "0 cases of 0 families" in shown
    assert "100 errors, 0 warnings" in shown
    path.write_text("x\n" * 101)
    assert entry.main(["toolcalls", "lint", str(path)]) == 2
    assert "more than 100 lines are no usable cases; the last that was read: " in capsys.readouterr().err


def test_several_places_are_held_against_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases of several places are one set: an id in two of them is an error."""
    lint_of(tmp_path, case(), capsys=capsys)
    (tmp_path / "more.jsonl").write_text((tmp_path / "cases.jsonl").read_text())
    assert entry.main(["toolcalls", "lint", str(tmp_path / "cases.jsonl"), str(tmp_path / "more.jsonl")]) == 1
    assert "more.jsonl:1: error: id 'a-01' is that of" in capsys.readouterr().out


def test_shipped_cases_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file the shipped cases are checked, and nothing is found in them."""
    assert entry.main(["toolcalls", "lint"]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out

"""Reading cases of tool calls: what is accepted, what is refused and how it is said, and the order of asking."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls import Case, Tool, case_schema, load
from pytest_vram.toolcalls.cases import stratified

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "fixtures" / "toolcalls" / "schema"
LOOK_UP: dict[str, Any] = {
    "description": "Read when a job last ran.",
    "parameters": {"type": "object", "properties": {"job": {"type": "string"}}, "required": ["job"]},
}
TOOLS = {
    "tools": {"job_last_run": LOOK_UP, "job_list": {"description": "List the jobs."}},
    "sets": {"both": ["job_list", "job_last_run"]},
}
USER = {"role": "user", "content": "When did the sync job last run?"}
CALL = {"name": "job_last_run", "arguments": {"job": ["sync"]}}
PAST = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "job_list", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "[]"}


def line(**changes: Any) -> dict[str, Any]:
    """A valid case with other values; ``...`` leaves a key out."""
    found = {
        "id": "a-01",
        "family": "a",
        "category": "single",
        "messages": [USER],
        "tools": ["job_last_run"],
        "expect": [CALL],
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not ...}


def written(folder: Path, *lines: Any, tools: Any = TOOLS) -> Path:
    (folder / "tools.json").write_text(json.dumps(tools), encoding="utf-8")
    path = folder / "cases.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return path


def refusal(folder: Path, *lines: Any, tools: Any = TOOLS) -> str:
    written(folder, *lines, tools=tools)
    with pytest.raises(BadCases) as caught:
        load("cases.jsonl", base=folder)
    return str(caught.value)


VALID = {
    "whole": line(language="pt-BR"),
    "no call": line(expect=[], category="irrelevance"),
    "set": line(tools=["@both"]),
    "bare tool": line(tools=[{"name": "job_last_run", **LOOK_UP}]),
    "openai tool": line(tools=[{"type": "function", "function": {"name": "job_last_run", **LOOK_UP, "strict": True}}]),
    "tool without parameters": line(tools=["job_last_run", {"name": "now"}]),
    "history": line(messages=[USER, PAST, RESULT]),
    "parts": line(messages=[{"role": "user", "content": [{"type": "text", "text": "When?"}]}]),
    "nulls": line(expect=[{"name": "job_last_run", "arguments": None, "omittable": None, "exact": None}]),
    "lists": line(expect=[{**CALL, "omittable": ["job"], "exact": ["job"]}]),
    "empty reply before": line(messages=[USER, {"role": "assistant", "content": ""}, USER]),
}

#: What is wrong → the line, and words of the message.
WRONG: dict[str, tuple[Any, str]] = {
    "no object": ([1], "is a list: each line is one case, an object with id, family"),
    "number": (3, "is a number"),
    "no id": (line(id=...), "has no 'id'"),
    "no expect": (line(expect=...), "has no 'expect': [] says that an answer without a call is right"),
    "blank id": (line(id=" "), "id is empty"),
    "null id": (line(id=None), "id is missing: text belongs there"),
    "unknown key": (line(expcet=[]), "unknown key 'expcet': did you mean 'expect'?"),
    "far key": (line(zzz=1), "unknown key 'zzz': it takes id, family"),
    "category": (line(category="paralel"), "category 'paralel' is unknown: did you mean 'parallel'?"),
    "far category": (line(category="??"), "there are single, choice"),
    "language": (line(language=None), "language is missing"),
    "messages no list": (line(messages="hi"), "messages is text: a list of chat messages belongs there"),
    "no messages": (line(messages=[]), "messages is empty"),
    "message no object": (line(messages=["hi"]), "messages[0] is text: an object belongs there"),
    "role": (line(messages=[{"role": "bot", "content": "x"}]), "messages[0].role 'bot' is unknown"),
    "no role": (line(messages=[{"content": "x"}]), "messages[0].role is missing"),
    "message key": (line(messages=[{**USER, "txt": 1}]), "messages[0] has an unknown key 'txt'"),
    "no content": (line(messages=[{"role": "user"}]), "messages[0].content is missing"),
    "content number": (line(messages=[{"role": "user", "content": 1}]), "messages[0].content is a number"),
    "part": (line(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content[0] is text"),
    "part type": (line(messages=[{"role": "user", "content": [{"text": "x"}]}]), "content[0].type is missing"),
    "user calls": (line(messages=[{**PAST, "role": "user"}]), "only the assistant calls tools, not 'user'"),
    "result without id": (line(messages=[USER, PAST, {"role": "tool", "content": ""}]), "messages[2].tool_call_id is"),
    "past call no list": (line(messages=[{**PAST, "tool_calls": {}}]), "tool_calls is an object"),
    "past call id": (
        line(messages=[{**PAST, "tool_calls": [{"type": "function"}]}]),
        "messages[0].tool_calls[0].id is missing",
    ),
    "past call type": (line(messages=[{**PAST, "tool_calls": [{"id": "c"}]}]), 'type is not "function"'),
    "past arguments": (
        line(
            messages=[
                {**PAST, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "x", "arguments": {}}}]}
            ]
        ),
        "function.arguments is an object: in a request they are JSON written as text",
    ),
    "tools no list": (line(tools="job_last_run"), "tools is text: a list of tools belongs there"),
    "tool number": (line(tools=[1]), "tools[0] is not a tool: give its name"),
    "tool key": (line(tools=[{"name": "x", "params": {}}]), "unknown key 'params': did you mean 'parameters'?"),
    "tool without name": (line(tools=[{"description": "x"}]), "tools[0].name is missing"),
    "parameters": (line(tools=[{"name": "x", "parameters": []}]), "tools[0].parameters is a list"),
    "function type": (line(tools=[{"type": "code", "function": {"name": "x"}}]), 'tools[0].type is not "function"'),
    "expect no list": (line(expect={}), "expect is an object: a list of calls"),
    "call no object": (line(expect=["x"]), "expect[0] is text"),
    "call key": (line(expect=[{**CALL, "args": {}}]), "expect[0] has an unknown key 'args': did you mean 'arguments'?"),
    "call without name": (line(expect=[{"arguments": {}}]), "expect[0].name is missing"),
    "value no list": (
        line(expect=[{"name": "job_last_run", "arguments": {"job": "sync"}}]),
        'expect[0].arguments.job is not a list: give every value that is right, as in ["sync"]',
    ),
    "no value": (line(expect=[{"name": "job_last_run", "arguments": {"job": []}}]), "job is an empty list"),
    "omittable": (line(expect=[{**CALL, "omittable": "job"}]), "expect[0].omittable is text"),
    "exact": (line(expect=[{**CALL, "exact": [1]}]), "expect[0].exact[0] is a number"),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_line_is_read(name: str, tmp_path: Path) -> None:
    """A valid line becomes a case, and the published schema accepts it."""
    path = written(tmp_path, VALID[name])
    found = load(str(path))
    assert [case.id for case in found.cases] == ["a-01"]
    jsonschema.validate(VALID[name], case_schema.schemas()["case.json"])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_line_is_refused(name: str, tmp_path: Path) -> None:
    """A wrong line is refused with file, line, path and what belongs there, and the published schema refuses it too."""
    wrong, words = WRONG[name]
    message = refusal(tmp_path, line(id="good"), wrong)
    assert message.startswith("cases.jsonl:2")
    assert words in message
    assert not jsonschema.Draft202012Validator(case_schema.schemas()["case.json"]).is_valid(wrong)


def test_long_wrong_value_is_not_repeated(tmp_path: Path) -> None:
    """A long value is not printed as the example of what is right."""
    message = refusal(tmp_path, line(expect=[{"name": "job_last_run", "arguments": {"job": "x" * 500}}]))
    assert 'as in ["backup"]' in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": ["job_lst"]}, "cases.jsonl:1: tools[0]: tool 'job_lst' is not defined (did you mean 'job_list'?)"),
        ({"tools": ["@bth"]}, "set 'bth' is not defined (did you mean 'both'?)"),
        ({"tools": ["quite_other"]}, "define it in tools.json or tools/*.json beside the cases"),
        ({"tools": ["job_list", {"name": "job_list"}]}, "tools[1]: another tool of the case is called 'job_list' too"),
        ({"tools": ["job_list"]}, "expect[0].name: tool 'job_last_run' is not one of the case's tools"),
        ({"tools": []}, "it offers none"),
    ],
)
def test_tools_must_be_known(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A tool that is not defined, defined twice or not offered is refused with the nearest name."""
    assert words in refusal(tmp_path, line(**changes))


def test_tool_comes_once(tmp_path: Path) -> None:
    """A tool that is named and in a set is offered once, where it came first."""
    found = load(str(written(tmp_path, line(tools=["job_last_run", "@both"]))))
    assert [tool.name for tool in found.cases[0].tools] == ["job_last_run", "job_list"]
    assert found.cases[0].tools[1].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([], "tools.json is a list"),
        ({"tool": {}}, "tools.json has an unknown key 'tool': did you mean 'tools'?"),
        ({"tools": []}, "tools.json: tools is a list"),
        ({"tools": {"x": {"descripton": "y"}}}, "tools.x has an unknown key 'descripton': did you mean 'description'?"),
        ({"tools": {"x": {"parameters": 1}}}, "tools.x.parameters is a number"),
        ({"tools": {" ": {}}}, "tools. .name is empty"),
        ({"sets": {"s": "x"}}, "sets.s is text"),
        ({"sets": {"s": [1]}}, "sets.s[0] is a number"),
        ({"sets": []}, "tools.json: sets is a list"),
    ],
)
def test_wrong_tool_file_is_refused(tools: Any, words: str, tmp_path: Path) -> None:
    """A wrong file of tools is refused with its path, and its published schema refuses it too."""
    assert words in refusal(tmp_path, line(), tools=tools)
    assert not jsonschema.Draft202012Validator(case_schema.schemas()["tools.json"]).is_valid(tools)


def test_tools_of_several_files(tmp_path: Path) -> None:
    """Files in tools/ are read together; a name in two of them, or a set of unknown tools, is refused."""
    path = written(tmp_path, line())
    (tmp_path / "tools").mkdir()
    more = tmp_path / "tools" / "more.json"
    more.write_text(json.dumps({"sets": {"one": ["job_list"]}}))
    assert len(load(str(path)).cases) == 1
    for content, words in (
        ({"tools": {"job_list": {}}}, "tools.job_list is defined in"),
        ({"sets": {"both": []}}, "sets.both is defined in"),
        ({"sets": {"one": ["job_lits"]}}, "sets.one[0]: tool 'job_lits' is not defined (did you mean 'job_list'?)"),
    ):
        more.write_text(json.dumps(content))
        with pytest.raises(BadCases) as caught:
            load(str(path))
        assert words in str(caught.value)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has no case"),
    "blank": (b"\n \n\r\n", "has no case"),
    "nul": (b"PK\x03\x04\x00\x00", "cases.jsonl:1 holds a NUL byte"),
    "binary": (b"\x80\x81", "cases.jsonl:1 is not UTF-8 at byte 0"),
    "utf-16": ("{}".encode("utf-16"), "is UTF-16 by its first bytes: save it as UTF-8"),
    "not json": (b"{'id': 1}", "cases.jsonl:1 is not JSON"),
    "pretty": (b'{\n "id": 1\n}', "cases.jsonl:1 is not JSON"),
    "nan": (b'{"id": NaN}', "NaN is not a number of JSON"),
    "infinite": (b'{"id": 1e999}', "number 1e999 is too large"),
    "digits": (b"9" * 5000, "cases.jsonl:1 cannot be used"),
    "twice": (b'{"id": "a", "id": "b"}', "key 'id' stands twice in one object"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 200_000, "nested too deeply"),
    "65 levels": (b'{"id": ' + b"[" * 65 + b"]" * 65 + b"}", "at most 64 levels are read"),
    "surrogate": (b'{"id": "\\ud800"}', "half of a surrogate pair"),
    "surrogate key": (b'{"\\udfff": 1}', "half of a surrogate pair"),
    "long line": (b'"' + b"x" * (9 << 20) + b'"', "cases.jsonl:1 is longer than 8 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    """Whatever a file holds, one sentence says what is wrong with it."""
    content, words = HOSTILE[name]
    (tmp_path / "cases.jsonl").write_bytes(content)
    with pytest.raises(BadCases) as caught:
        load("cases.jsonl", base=tmp_path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path: Path) -> None:
    """A UTF-8 file of a Windows editor reads as any other, to the same digest."""
    path = written(tmp_path, line(), line(id="a-02"))
    digest = load(str(path)).digest
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert load(str(path)).digest == digest


def test_places_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without cases, a device, a missing file and an empty name are refused, each with its reason."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, line())
    (tmp_path / "empty").mkdir()
    (tmp_path / "huge.jsonl").touch()
    os.truncate(tmp_path / "huge.jsonl", 1 << 30)
    places = {
        "empty": "folder empty has no *.jsonl file",
        "case.jsonl": "(did you mean 'cases.jsonl'?)",
        "no/such.jsonl": "does not exist",
        "": "the place of the cases is empty",
        "x" * 5000: "cannot be read",
        "a\0b": "there is no case file",
        "shipped:crn": "did you mean 'cron'?",
        "huge.jsonl": "is larger than 64 MiB",
        "~nobody-has-this-name/x": "cannot be used",
    }
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        places |= {"pipe": "pipe is not a file", "/dev/zero": "/dev/zero is not a file"}
    for place, words in places.items():
        with pytest.raises(BadCases) as caught:
            load(place)
        assert words in str(caught.value), place


def test_folder_is_read_whole(tmp_path: Path) -> None:
    """A folder gives the cases of all its files, and an id in two of them is refused with both places."""
    written(tmp_path, line())
    (tmp_path / "more.jsonl").write_text(json.dumps(line(id="b-01")))
    assert [case.id for case in load(str(tmp_path)).cases] == ["a-01", "b-01"]
    (tmp_path / "more.jsonl").write_text(json.dumps(line()))
    with pytest.raises(BadCases, match=r"more.jsonl:1: id 'a-01' is that of .*cases.jsonl:1 too"):
        load(str(tmp_path))


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    """The digest changes with a case's content and not with where or in which order cases are written."""
    one, two = line(), line(id="a-02", messages=[{"role": "user", "content": "last run of sync?"}])
    digest = load(str(written(tmp_path, one, two))).digest
    assert len(digest) == 16
    assert load(str(written(tmp_path, "", two, one))).digest == digest
    assert load(str(written(tmp_path, one, dict(reversed(two.items()))))).digest == digest
    turned = {"tools": {"job_last_run": {**LOOK_UP, "parameters": dict(reversed(LOOK_UP["parameters"].items()))}}}
    assert load(str(written(tmp_path, one, two, tools=turned))).digest == digest
    assert load(str(written(tmp_path, one, line(**{**two, "language": "de"})))).digest != digest


def test_shipped_cases_are_read_out_of_a_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's cases need no files on disk."""
    expected = load("shipped:cron")
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [ROOT / "fixtures" / "__init__.py", *(ROOT / "fixtures" / "toolcalls").rglob("*.json*")]:
            file.write(path, Path("pytest_vram_fixtures") / path.relative_to(ROOT / "fixtures"))
    for name in [name for name in sys.modules if name.split(".")[0] == "pytest_vram_fixtures"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if "__editable__" not in repr(one)])
    monkeypatch.syspath_prepend(str(archive))
    import pytest_vram_fixtures

    assert str(archive) in str(pytest_vram_fixtures.__file__)
    assert load("shipped:cron") == expected
    monkeypatch.delitem(sys.modules, "pytest_vram_fixtures")


def test_schemas_are_published() -> None:
    """The schema files are those of the code; ``case_schema.write_schemas`` brings them up to date."""
    for name, schema in case_schema.schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert json.loads((SCHEMAS / name).read_text(encoding="utf-8")) == schema
    assert {path.name for path in SCHEMAS.iterdir()} == set(case_schema.schemas())


def test_shipped_files_keep_the_schemas() -> None:
    """Every shipped line and file of tools validates against the published schema."""
    folder, published = ROOT / "fixtures" / "toolcalls", case_schema.schemas()
    case, tools = (jsonschema.Draft202012Validator(published[name]) for name in ("case.json", "tools.json"))
    for path in folder.glob("*.jsonl"):
        for text in path.read_text(encoding="utf-8").splitlines():
            case.validate(json.loads(text))
    for path in (folder / "tools").glob("*.json"):
        tools.validate(json.loads(path.read_text(encoding="utf-8")))


def made(number: int, family: str, category: str) -> Case:
    tool = Tool(name="t", description="", parameters={})
    return Case(id=f"{number:04d}", family=family, category=category, messages=[USER], tools=[tool])


def grid() -> list[Case]:
    """Three categories with 4, 2 and 1 families of 3 cases."""
    families = [("single", f"s{n}") for n in range(4)] + [("choice", f"c{n}") for n in range(2)] + [("units", "u0")]
    return [made(3 * n + k, family, category) for n, (category, family) in enumerate(families) for k in range(3)]


@pytest.mark.parametrize("seed", range(5))
def test_order_is_stratified(seed: int) -> None:
    """Categories take turns, and within one every family comes before a second case of any."""
    chosen = stratified(grid(), 9, seed=seed)
    for turn in range(3):
        assert {case.category for case in chosen[3 * turn : 3 * turn + 3]} == {"single", "choice", "units"}
    whole = stratified(grid(), 1000, seed=seed)
    assert sorted(case.id for case in whole) == sorted(case.id for case in grid())
    for category, count in (("single", 4), ("choice", 2)):
        families = [case.family for case in whole if case.category == category]
        assert all(len(set(families[start : start + count])) == count for start in range(0, 3 * count, count))


def test_family_of_two_categories_waits() -> None:
    """A family that another category asked already is taken last."""
    cases = [
        made(1, "shared", "single"),
        made(2, "shared", "choice"),
        made(3, "other", "choice"),
        made(4, "x", "single"),
    ]
    for seed in range(20):
        first_of_both = stratified(cases, 2, seed=seed)
        assert len({case.family for case in first_of_both}) == 2


def test_order_follows_the_seed_alone() -> None:
    """The same seed gives the same order whatever the order of the lines; another seed gives another."""
    assert stratified(grid(), 20, seed=7) == stratified(list(reversed(grid())), 20, seed=7)
    assert stratified(grid(), 20, seed=7) != stratified(grid(), 20, seed=8)
    assert stratified(grid(), 5, seed=7) == stratified(grid(), 20, seed=7)[:5]
    assert stratified(grid(), 0, seed=7) == []


def test_many_cases_are_ordered_in_short() -> None:
    """Twenty thousand cases of two thousand families, all of them in every category, are no trouble."""
    cases = [made(n, str(n % 2000), ("single", "choice", "units")[n // 2000 % 3]) for n in range(20_000)]
    assert len(stratified(cases, 20_000, seed=1)) == 20_000


def test_a_set_is_walked_and_counted() -> None:
    """A set of cases is iterated over and has a length, as its list of cases has."""
    cron = load("shipped:cron")
    assert [case.id for case in cron] == [case.id for case in cron.cases]
    assert len(cron) == len(cron.cases) > 0


def test_several_shipped_files_by_commas() -> None:
    """``shipped:cron,files`` is the cases of both, each once, in that order."""
    both = load("shipped:cron, files,cron")
    assert both.cases == [*load("shipped:cron"), *load("shipped:files")]
    with pytest.raises(BadCases, match="there are no shipped cases 'flies' .did you mean 'files'"):
        load("shipped:cron,flies")
    with pytest.raises(BadCases, match="there are no shipped cases ''"):
        load("shipped:cron,")

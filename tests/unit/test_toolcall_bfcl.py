"""Rows of the function calling leaderboard as cases; the rows here are of its shape and not its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls import bfcl, load

FUNCTION = {
    "name": "disk.free",
    "description": "Read the free space of a disk.",
    "parameters": {
        "type": "dict",
        "properties": {
            "mount": {"type": "string", "description": "Where it is mounted."},
            "below": {"type": "float", "description": "Only when below, in GB.", "optional": True},
            "range": {"type": "tuple", "items": {"type": "float"}},
            "note": {"type": "any"},
            "filter": {"type": "dict", "properties": {"kind": {"type": "string"}, "depth": {"type": "integer"}}},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["mount"],
    },
}


def row(number: int = 0, subject: str = "simple_python", **changes: Any) -> dict[str, Any]:
    question = [[{"role": "user", "content": "How much is free on /srv?"}]]
    return {"id": f"{subject}_{number}", "question": question, "function": [FUNCTION], **changes}


def data(folder: Path, rows: list[Any], answers: dict[str, Any] | None, subject: str = "simple_python") -> str:
    """A folder of data. :param answers: id → ground truth."""
    (folder / "possible_answer").mkdir(exist_ok=True)
    name = f"BFCL_v4_{subject}.json"
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    if answers is not None:
        lines = (json.dumps({"id": key, "ground_truth": value}) for key, value in answers.items())
        (folder / "possible_answer" / name).write_text("\n".join(lines))
    return f"bfcl:{subject}@{folder}"


def expected(folder: Path, arguments: dict[str, Any]) -> Any:
    """The expected call that an answer becomes; ``None`` where the row is left out."""
    cases = load(data(folder, [row()], {"simple_python_0": [{"disk.free": arguments}]})).cases
    return cases[0].expect[0] if cases else None


def test_names_and_types_are_converted(tmp_path: Path) -> None:
    """A function becomes a tool whose name servers take and whose schema is JSON Schema."""
    found = load(data(tmp_path, [row()], {"simple_python_0": [{"disk.free": {"mount": ["/srv"]}}]}))
    case = found.cases[0]
    assert (found.name, case.category, case.id) == (f"bfcl:simple_python@{tmp_path}", "single", "simple_python_0")
    assert case.origin.endswith("BFCL_v4_simple_python.json:1")
    assert case.tools[0].name == case.expect[0].name == "disk_free"
    parameters = case.tools[0].parameters
    jsonschema.Draft202012Validator.check_schema(parameters)
    assert parameters["type"] == "object"
    kinds = {name: schema.get("type") for name, schema in parameters["properties"].items()}
    assert kinds == {
        "mount": "string", "below": "number", "range": "array", "note": None, "filter": "object", "exact": "boolean",
    }  # fmt: skip
    assert parameters["properties"]["range"]["items"] == {"type": "number"}
    assert "optional" not in parameters["properties"]["below"]


@pytest.mark.parametrize(
    ("arguments", "values", "omittable"),
    [
        ({"mount": ["/srv"]}, {"mount": ["/srv"]}, []),
        ({"mount": ["/srv", "srv"], "below": ["", 5, 5.5]}, {"mount": ["/srv", "srv"], "below": [5, 5.5]}, ["below"]),
        ({"mount": ["/srv"], "below": [""]}, {"mount": ["/srv"]}, []),
        ({"mount": ["/srv"], "exact": ["", False]}, {"mount": ["/srv"], "exact": [False]}, ["exact"]),
        ({"mount": ["/srv"], "below": [5, None]}, {"mount": ["/srv"], "below": [5]}, ["below"]),
        ({"mount": ["", "/"]}, {"mount": ["", "/"]}, []),
        ({"mount": ["/"], "range": [[1, 2.5]]}, {"mount": ["/"], "range": [[1, 2.5]]}, []),
        (
            {"mount": ["/"], "filter": [{"kind": ["a", "b"], "depth": ["", 1]}]},
            {
                "mount": ["/"],
                "filter": [{"kind": "a"}, {"kind": "a", "depth": 1}, {"kind": "b"}, {"kind": "b", "depth": 1}],
            },
            [],
        ),
        ({"mount": ["/", 3, "/"]}, {"mount": ["/"]}, []),
    ],
)
def test_answers_are_converted(
    arguments: dict[str, Any], values: dict[str, Any], omittable: list[str], tmp_path: Path
) -> None:
    """Allowed values stay, "" says that an argument may be left out, and objects are spelt out."""
    call = expected(tmp_path, arguments)
    assert (call.arguments, call.omittable) == (values, omittable)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mount": [3]},
        {"below": [5]},
        {"mount": ["/"], "colour": ["red"]},
        {"mount": ["/"], "below": ["much"]},
        {"mount": "/"},
    ],
)
def test_answers_that_break_their_schema_are_left_out(arguments: dict[str, Any], tmp_path: Path) -> None:
    """A row that nobody could answer right is not asked."""
    assert expected(tmp_path, arguments) is None


@pytest.mark.parametrize("broken", [{"type": "sound"}, {"type": "string", "pattern": "("}, 1])
def test_functions_without_a_schema_are_left_out(broken: Any, tmp_path: Path) -> None:
    """A row whose function has no usable schema cannot be answered by it, and breaks nothing."""
    parameters = {"type": "dict", "properties": {"mount": broken}, "required": ["mount"]}
    function = {"name": "disk.free", "description": "", "parameters": parameters}
    place = data(tmp_path, [row(function=[function])], {"simple_python_0": [{"disk.free": {"mount": ["/"]}}]})
    assert load(place).cases == []


def test_nested_answers_have_a_limit(tmp_path: Path) -> None:
    """An answer of very many combinations costs neither time nor memory."""
    many = {"kind": [f"k{n}" for n in range(2000)], "depth": list(range(2000))}
    call = expected(tmp_path, {"mount": ["/"], "filter": [many]})
    assert 0 < len(call.arguments["filter"]) <= 256


def test_denied_rows_are_left_out(tmp_path: Path) -> None:
    """Rows whose published answer is known to be wrong are not asked."""
    rows = [row(number, "parallel") for number in (154, 155)]
    answers = {one["id"]: [{"disk.free": {"mount": ["/"]}}, {"disk.free": {"mount": ["/srv"]}}] for one in rows}
    assert [case.id for case in load(data(tmp_path, rows, answers, "parallel")).cases] == ["parallel_154"]
    assert all(reason and name.rsplit("_", 1)[0] in bfcl.SUBJECTS for name, reason in bfcl.DENIED.items())


def test_irrelevance_has_no_answers(tmp_path: Path) -> None:
    """Where no function fits an answer without a call is right, and there is no file of answers."""
    case = load(data(tmp_path, [row(0, "irrelevance")], None, "irrelevance")).cases[0]
    assert (case.category, case.expect) == ("irrelevance", [])


def test_several_subjects_and_versions(tmp_path: Path) -> None:
    """Subjects are read one after another, each from the newest version of its file."""
    place = data(tmp_path, [row()], {"simple_python_0": [{"disk.free": {"mount": ["/"]}}]})
    data(tmp_path, [row(0, "irrelevance"), row(1, "irrelevance")], None, "irrelevance")
    (tmp_path / "BFCL_v3_irrelevance.json").write_text("not read")
    both = load(place.replace("simple_python@", "simple_python, irrelevance,simple_python@")).cases
    assert [case.id for case in both] == ["simple_python_0", "irrelevance_0", "irrelevance_1"]
    assert both[0].family != both[1].family == both[2].family


def test_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of an installed package are read, and its code is not run."""
    package = tmp_path / "bfcl_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    data(package / "data", [row()], {"simple_python_0": [{"disk.free": {"mount": ["/"]}}]})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load("bfcl:simple_python").cases) == 1
    assert "bfcl_eval" not in sys.modules


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package, and with a folder that has no data, both ways to the data are named."""
    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda name: None)
    for place in ("bfcl:simple_python", f"bfcl:simple_python@{tmp_path}", f"bfcl:simple_python@{tmp_path}/none"):
        with pytest.raises(BadCases) as caught:
            load(place)
        assert "pip install bfcl-eval --no-deps" in str(caught.value)
        assert "bfcl:simple_python@/path/to" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "answers", "words"),
    [
        (["x"], {}, "json:1 is text"),
        ([{"question": []}], {}, "json:1: id is missing"),
        ([row()], {}, "row 'simple_python_0' has no answer in"),
        ([row(question=[[], []])], {"simple_python_0": []}, "question has 2 turns"),
        ([row(question="x")], {"simple_python_0": []}, "question is text"),
        ([row(question=[["x"]])], {"simple_python_0": []}, "question[0][0] is text"),
        ([row(question=[[{"role": "x"}]])], {"simple_python_0": []}, "question[0][0].role 'x' is unknown"),
        ([row(function={})], {"simple_python_0": []}, "function is an object"),
        ([row(function=[{"name": 1, "parameters": {}}])], {"simple_python_0": []}, "function[0].name is a number"),
        ([row()], {"simple_python_0": 1}, "ground_truth is a number"),
        ([row()], {"simple_python_0": [{"a": {}, "b": {}}]}, "ground_truth[0] names 2 functions"),
    ],
)
def test_data_of_another_shape_are_refused(
    rows: list[Any], answers: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Data that are not the leaderboard's are refused with file, line and what is wrong."""
    with pytest.raises(BadCases) as caught:
        load(data(tmp_path, rows, answers))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("simple_pyton", "did you mean 'simple_python'?"),
        ("multi_turn_base", "is not read"),
        ("", "there are simple_python, multiple"),
        ("live_relevance", "is not read"),
    ],
)
def test_unknown_subject_is_refused(wanted: str, words: str) -> None:
    """A subject that is not one decision a row is refused with those that are."""
    with pytest.raises(BadCases) as caught:
        load(f"bfcl:{wanted}")
    assert words in str(caught.value)

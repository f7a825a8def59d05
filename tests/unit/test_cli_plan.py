"""`vram plan` as users meet it: exit codes, sentences, documents."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pytest_vram.cli import main
from pytest_vram.report import schemas
from tests.unit import sizing_models

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of sparse models."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "q4": str(sizing_models.dense_8b(folder / "q4.gguf")),
        "q8": str(sizing_models.dense_8b(folder / "q8.gguf", sizing_models.Q8)),
        "moe": str(sizing_models.moe_30b(folder / "moe.gguf")),
    }


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def document(cli: Cli, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The JSON document, checked against its published schema."""
    code, out, _ = cli("plan", *arguments, "--json")
    found = json.loads(out)
    jsonschema.Draft202012Validator(schemas()["plan.json"]).validate(found)
    return code, found


def test_plans_are_printed_best_first(cli: Cli, models: dict[str, str]) -> None:
    """Each with its figures, what it gives up and a command line that means the same settings."""
    arguments = (models["moe"], "--budget", "8GB", "--minimum-context", "16384", "--device", "RPC0")
    code, out, _ = cli("plan", *arguments)
    assert code == 0
    assert "best first" in out
    assert "gives up: " in out
    code, found = document(cli, *arguments)
    assert code == 0
    plans = found["searches"][0]["plans"]
    assert out.count("llama-server --model") == len(plans)
    for plan in plans:
        assert shlex.join(plan["command"]) in out
        assert plan["confirmed"] is None
        _, estimated, _ = cli("fit", "--json", "--budget", "8GB", *plan["command"])
        again = json.loads(estimated)
        assert again["verdict"]["fits"] == "yes"
        assert again["total_at_most"] == plan["total_at_most"]
        assert again["settings"] == plan["settings"]


def test_several_files_are_chosen_from(cli: Cli, models: dict[str, str]) -> None:
    """Quantisations of one model are one search."""
    _, found = document(cli, models["q8"], models["q4"], "--budget", "8GB", "--minimum-context", "8192")
    assert found["models"] == [models["q8"], models["q4"]]
    assert {plan["model"] for plan in found["searches"][0]["plans"]} == {models["q8"], models["q4"]}


def test_tiers_have_a_row_each(cli: Cli, models: dict[str, str]) -> None:
    """4, 6 and 8 GB, each with its best settings and command line."""
    code, out, _ = cli("plan", models["q4"], "--tiers")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["4GB", "6GB", "8GB"]
    code, found = document(cli, models["q4"], "--tiers", "-ctk", "q8_0", "-ctv", "q8_0")
    assert code == 0
    assert [search["budget"] for search in found["searches"]] == ["4GB", "6GB", "8GB"]
    for search in found["searches"]:
        assert search["plans"][0]["verdict"]["fits"] == "yes"


def test_the_impossible_exits_with_1(cli: Cli, models: dict[str, str]) -> None:
    """It says how many bytes are missing, and which single wish makes it fit."""
    arguments = (models["q4"], "--budget", "6GB", "--minimum-context", "65536", "-ngl", "99", "--device", "RPC0")
    code, out, _ = cli("plan", *arguments)
    assert code == 1
    assert "bytes) over the limit on gpu0" in out
    assert "it would fit with minimum_context" in out
    code, found = document(cli, *arguments)
    impossible = found["searches"][0]["impossible"]
    assert code == 1
    assert impossible["missing"] > 0
    assert {one["wish"] for one in impossible["relaxed"]} == {"minimum_context", "budget"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model is named"),
        (("{q4}",), "add --budget SIZE"),
        (("{q4}", "--budget", "3g"), "ambiguous"),
        (("{q4}", "--budget", "4GB", "--tiers"), "leave --budget out"),
        (("{q4}", "--budget", "4GB", "--slots", "0"), "--slots 0"),
        (("{q4}", "--budget", "4GB", "--slots", "999"), "slots = 999"),
        (("{q4}", "--budget", "4GB", "--minimum-context", "many"), "--minimum-context many"),
        (("{q4}", "--budget", "4GB", "--prefer", "luck"), "speed, quality or context"),
        (("{q4}", "--budget", "4GB", "--host-memory", "8"), "from --host-memory"),
        (("{q4}", "--budget", "4GB", "-c", "4096"), "say minimum_context"),
        (("{q4}", "--budget", "4GB", "--engine", "vllm"), "use estimate with --budget"),
        (("{q4}", "--budget", "4GB", "--ngl", "3"), "did you mean 'n-gpu-layers'"),
        (("nowhere.gguf", "--budget", "4GB"), "nowhere.gguf"),
    ],
)
def test_bad_use_is_one_sentence(cli: Cli, models: dict[str, str], arguments: tuple[str, ...], says: str) -> None:
    """Exit code 2, and one line on the standard error stream."""
    code, out, err = cli("plan", *(word.format(**models) for word in arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err

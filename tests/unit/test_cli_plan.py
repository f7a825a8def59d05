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
    assert "it would fit with --minimum-context" in out
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


def test_plans_come_with_what_must_be_known(cli: Cli, models: dict[str, str]) -> None:
    """The caveats of their figures, once; how little room there is; the reserve in the headline."""
    code, out, _ = cli("plan", models["q4"], "--budget", "8GB", "--reserve", "100MB")
    said = " ".join(out.split())
    assert code == 0
    assert "within 8GB (7,629 MiB) with 100MB (95.37 MiB) kept free, best first, with 4,096 tokens or more" in said
    assert said.count("107 to 555 MiB were reported") == 1
    assert said.count("no --device: one CUDA card is assumed") == 1
    assert "--reserve" in said
    _, out, _ = cli("plan", models["q4"], "--budget", "200GB", "--minimum-context", "500000")
    assert out.startswith("1 way to stay within")
    said = " ".join(out.split())
    assert "is longer than the trained one of 131072" in said
    assert "less than" not in said
    _, out, _ = cli("plan", models["q4"], "--budget", "gpu0=6GB,gpu1=6GB", "--device", "CUDA0,CUDA1")
    figures = [line for line in out.splitlines() if "predicted: " in line]
    assert figures
    assert all(line.index("gpu0") < line.index("gpu1") < line.index("host") for line in figures)


def test_without_a_card_no_layer_is_missed(cli: Cli, models: dict[str, str]) -> None:
    """Everything on the host is what was asked for."""
    code, out, _ = cli("plan", models["q4"], "--budget", "32GB", "--device", "none")
    assert code == 0
    assert "all on the host" in out
    assert "layers on the" not in out
    assert "--n-gpu-layers" not in out


def test_the_minimum_that_was_kept_is_in_the_document(cli: Cli, models: dict[str, str]) -> None:
    """Asked for or not; with --tiers each search has its own."""
    _, found = document(cli, models["q4"], "--budget", "8GB")
    _, given = document(cli, models["q4"], "--budget", "8GB", "--minimum-context", "4096")
    assert found == given
    assert found["wishes"]["minimum_context"] == found["searches"][0]["minimum_context"] == 4096
    _, found = document(cli, models["q4"], "--tiers")
    assert [one["minimum_context"] for one in found["searches"]] == [2048, 4096, 8192]
    for search in found["searches"]:
        assert all(plan["context"] >= search["minimum_context"] for plan in search["plans"])
    _, eight = document(cli, models["q4"], "--budget", "8GB", "--minimum-context", "8192")
    assert eight["searches"][0] == found["searches"][2]


def test_a_limit_for_a_device_that_is_not_there(cli: Cli, models: dict[str, str]) -> None:
    """Exit code 2, and the devices that there are."""
    code, out, err = cli("plan", models["q4"], "--budget", "gpu1=8GB")
    assert (code, out) == (2, "")
    assert "limits gpu1, which this deployment does not have: its devices are gpu0, host" in err

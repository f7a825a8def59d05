"""`vram estimate`, `fit` and `sweep` as users meet them: exit codes, sentences, documents."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_vram.cli import entry, main
from pytest_vram.errors import BackendError, EngineNotFound, EngineRefused
from pytest_vram.report import schemas
from pytest_vram.testing import recipes
from pytest_vram.units import MIB
from tests.unit import sizing_models

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of sparse models."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "q4": str(sizing_models.dense_8b(folder / "q4.gguf")),
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


def document(cli: Cli, *arguments: str, schema: str = "estimate.json") -> tuple[int, dict[str, Any]]:
    """The JSON document of a command, checked against its published schema."""
    code, out, _ = cli(*arguments, "--json")
    found = json.loads(out)
    jsonschema.Draft202012Validator(schemas()[schema]).validate(found)
    return code, found


def test_an_estimate_without_a_budget_holds(cli: Cli, models: dict[str, str]) -> None:
    """Every part of the answer is there, and no verdict."""
    code, out, err = cli("estimate", models["moe"], "-c", "8192", "-ngl", "99", "--device", "CUDA0")
    assert (code, err) == (0, "")
    for part in ("memory breakdown (ledger), MiB", "experts", "mixture of experts: 8 of 128", "cross-check", "notes"):
        assert part in out
    assert "llama-server --model" in out
    assert "--ctx-size 8192" in out
    assert "fits" not in out


@pytest.mark.parametrize(
    ("verb", "budget", "expected"), [("estimate", "8GB", 0), ("fit", "4GB", 1), ("fit", "5.5GiB", 3)]
)
def test_the_exit_code_is_the_verdict(cli: Cli, models: dict[str, str], verb: str, budget: str, expected: int) -> None:
    """0 fits, 1 does not, 3 where the limit lies within the range of the driver's context."""
    arguments = (verb, models["q4"], "--budget", budget, "-c", "8192", "--device", "CUDA0")
    code, out, _ = cli(*arguments)
    assert code == expected
    assert {0: "fits: ", 1: "does not fit: ", 3: "inconclusive: "}[expected] in out
    assert ("turn first: " in out) == (expected != 0)
    code, found = document(cli, *arguments)
    assert code == expected
    assert found["verdict"]["fits"] == {0: "yes", 1: "no", 3: "inconclusive"}[expected]
    assert found["verdict"]["device"] == "gpu0"


def test_a_reserve_counts_against_the_budget(cli: Cli, models: dict[str, str]) -> None:
    """What must stay free is missing from the limit."""
    arguments = ("fit", models["q4"], "--budget", "8GB", "-c", "8192", "--device", "RPC0")
    _, plain = document(cli, *arguments)
    code, kept = document(cli, *arguments, "--reserve", "1GB")
    assert code == 0
    assert kept["verdict"]["spare"] == plain["verdict"]["spare"] - 10**9


def test_the_document_adds_up(cli: Cli, models: dict[str, str]) -> None:
    """Buckets sum to the totals, entries to the buckets, and the settings are in force."""
    _, found = document(cli, "estimate", models["moe"], "-c", "8000", "-ncmoe", "10", "-np", "1", "--device", "CUDA0")
    for buckets, total in ((found["buckets"], found["total"]), (found["at_most"], found["total_at_most"])):
        for device, size in total.items():
            assert sum(row.get(device, 0) for row in buckets.values()) == size
    for bucket, row in found["buckets"].items():
        for device, size in row.items():
            entries = [one for one in found["entries"] if one["bucket"] == bucket and one["device"] == device]
            assert sum(one["bytes"] for one in entries) == size
    assert found["format"] == "pytest-vram/estimate/1"
    assert found["settings"]["ctx_size"] == 8192
    assert found["settings"]["n_cpu_moe"] == 10
    assert found["model"]["experts"] == 128
    assert found["buckets"]["context"] == {"gpu0": 107 * MIB}
    assert found["textbook_kv"] == found["buckets"]["kv"]["gpu0"]
    assert any("8192" in note["text"] for note in found["notes"] if note["kind"] == "rule")


def test_a_pasted_command_line_is_the_same_as_options(cli: Cli, models: dict[str, str]) -> None:
    """The model may come first, last, as -m, and after the program's name."""
    options = ["-c", "4096", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "-t", "8", "--device", "RPC0"]
    ways = [
        [models["q4"], *options],
        [*options, models["q4"]],
        ["llama-server", "-m", models["q4"], *options],
        ["--", "llama-server", *options, "--model", models["q4"]],
    ]
    found = []
    for words in ways:
        code, out, _ = cli("estimate", "--json", *words)
        assert code == 0
        found.append(json.loads(out))
    assert all(one == found[0] for one in found)
    assert found[0]["command"][-2:] == ["--threads", "8"]


def test_names_in_a_file_cannot_command_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """Control characters of other people's text are not printed."""
    recipe = recipes.llama(tokenizer="none")
    named = msgspec.structs.replace(recipe, metadata={**recipe.metadata, "general.name": "evil\x1b[2J\rname"})
    code, out, _ = cli("estimate", str(named.write(tmp_path / "m.gguf")))
    assert code == 0
    assert "\x1b" not in out
    assert "\r" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("estimate",), "no model is named: write `vram estimate MODEL`"),
        (("estimate", "{q4}", "other.gguf"), "one model can be named"),
        (("estimate", "nowhere.gguf"), "nowhere.gguf"),
        (("estimate", "some-name-of-no-store"), "local stores"),
        (("estimate", "{folder}"), "config.json"),
        (("estimate", "{folder}", "--engine", "transformers"), "config.json"),
        (("estimate", "{shards}", "--engine", "transformers"), "index"),
        (("estimate", "{hf}"), "is a Hugging Face folder, and llama-server runs GGUF files"),
        (("estimate", "{q4}", "--engine", "vllm"), "is a GGUF file"),
        (("estimate", "{q4}", "--engine", "magic"), "engine 'magic' is not known"),
        (("estimate", "{text}"), "not a GGUF"),
        (("estimate", "{q4}", "-c", "-5"), "'ctx-size' = '-5'"),
        (("estimate", "{q4}", "-ctv", "q8_0", "-fa", "off"), "needs flash attention"),
        (("estimate", "{q4}", "-ctk", "q9"), "one of f32, f16"),
        (("estimate", "{q4}", "--ctx-sise", "1"), "did you mean 'ctx-size'"),
        (("estimate", "{q4}", "-c"), "has no value"),
        (("estimate", "{q4}", "--budget", "4g"), "ambiguous"),
        (("fit", "{q4}", "--budget", "-1GB"), "'-1GB' is not a size"),
        (("fit", "{q4}", "--budget"), "option '--budget' has no value"),
        (("sweep", "{q4}", "--over", "context", "--values", "-1,0"), "'-1' cannot be a value of context"),
        (("plan", "{q4}", "--budget", "4GB", "--slots", "-1"), "--slots -1: write a whole number from 1 on"),
        (("estimate", "{q4}", "-fa", "maybe"), "'flash-attn' = 'maybe' cannot be used: write on, off or auto"),
        (("estimate", "{q4}", "--kv-unified", "maybe"), "q4.gguf, maybe"),
        (("estimate", "{q4}", "--budget", "gpu=4GB"), "not a device label"),
        (("estimate", "{q4}", "--budget", "4GB", "--reserve", "x"), "from --reserve"),
        (("estimate", "{q4}", "--reserve", "1GB"), "add --budget"),
        (("estimate", "{hf}", "--engine", "transformers", "--exact"), "dry run of llama-server"),
        (("estimate", "{hf}", "--engine", "transformers", "--max-lenght", "9"), "did you mean 'max_length'"),
        (("estimate", "{hf}", "--engine", "transformers", "-c", "9"), "write long names"),
        (("estimate", "{hf}", "--engine", "transformers", "--max-length"), "has no value"),
        (("sweep", "{q4}"), "add --over"),
        (("sweep", "{q4}", "--over", "threads"), "context, parallel, cache-type, n-cpu-moe"),
        (("sweep", "{q4}", "--over", "context", "--seconds", "5"), "--seconds is about measuring: add --measure"),
        (("sweep", "{q4}", "--over", "context", "--vram-device", "cpu"), "--vram-device is about measuring"),
        (("sweep", "{q4}", "--over", "context", "--measure", "--seconds", "0"), "--seconds 0: write how long"),
        (("sweep", "{q4}", "--over", "context", "--measure", "--device", "predicted"), "would measure nothing"),
        (("sweep", "{q4}", "--over", "context", "--measure", "--device"), "write cpu, auto, cuda:0"),
        (("sweep", "{q4}", "--over", "context", "--values", "1,x"), "'x' cannot be a value"),
        (("sweep", "{q4}", "--over", "context", "--values", ""), "--values '' has an empty value"),
        (("sweep", "{q4}", "--over", "context", "--values", "1,,2"), "has an empty value"),
        (("sweep", "{q4}", "--over", "context", "--values", "1," * 256 + "1"), "257 values are too many"),
        (("sweep", "{q4}", "--over", "n-cpu-moe", "--values", "1"), "has no experts"),
        (("sweep", "{q4}", "--over", "parallel", "-c", "2147483647"), "more than the 2147483647 tokens"),
        (("fit", "{q4}", "--budget", "4GB", "--reserve", "5GB"), "a reserve of 5GB (4,768 MiB) leaves nothing"),
        (("plan", "{q4}", "--budget", "4GB", "--reserve", "4GB"), "leaves nothing of the budget '4GB'"),
        (("plan", "{q4}", "--budget", "4GB", "-c", "4096"), "say minimum_context (--minimum-context) instead"),
        (("plan", "{q4}", "--budget", "4GB", "--minimum-context", "9999999999"), "from 1 to 2147483392"),
        (
            ("plan", "{q4}", "--budget", "4GB", "--minimum-context", "2147483647", "--slots", "256"),
            "write a number of tokens for each of 256 slots from 1 to 8388352 (--minimum-context)",
        ),
        (("plan", "{q4}", "--budget", "4GB", "--slots", "999"), "from 1 to 256 (--slots)"),
        (("estimate", "{config}", "--engine", "vllm"), "is a file of a Hugging Face model: name its folder"),
        (("sweep", "{hf}", "--over", "context", "--engine", "transformers"), "sweep predicts settings of llama-server"),
    ],
)  # fmt: skip
def test_bad_use_is_one_sentence(
    cli: Cli, models: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """Exit code 2, one line on the standard error stream, the same in the document, and no traceback."""
    places = {name: tmp_path / name for name in ("folder", "hf", "shards")}
    for place in places.values():
        place.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "torch_dtype": "float16",
    }
    for name in ("hf", "shards"):
        (places[name] / "config.json").write_text(json.dumps(config))
    for number in (1, 2):
        header = b'{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}'
        data = len(header).to_bytes(8, "little") + header + b"\0\0"
        (places["shards"] / f"model-0000{number}-of-00002.safetensors").write_bytes(data)
    (tmp_path / "text.gguf").write_text("hello, this is not a model at all, but it is long enough to be looked at")
    known = {
        **models,
        **{name: str(place) for name, place in places.items()},
        "text": str(tmp_path / "text.gguf"),
        "config": str(places["hf"] / "config.json"),
    }
    words = [word.format(**known) for word in arguments]
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
    assert err.startswith(f"vram {arguments[0]}: ")
    code, out, _ = cli(*words, "--json")
    found = json.loads(out)
    assert (code, found["exit"], found["verb"]) == (2, 2, arguments[0])
    assert says in found["error"]


def test_a_sweep_of_which_nothing_could_be_predicted_is_bad_use(cli: Cli, models: dict[str, str]) -> None:
    """Exit code 2 where the engine refuses each of the values: there is a row for each, and no figure."""
    words = ("sweep", models["q4"], "--over", "context", "--values", "1024", "-ot", "x=Nope")
    code, out, _ = cli(*words)
    assert code == 2
    assert "Nope" in out


def test_a_hugging_face_folder_is_estimated(cli: Cli, tmp_path: Path) -> None:
    """Weights and cache of a model under transformers; what only a run can tell makes the verdict inconclusive."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("estimate", str(tmp_path), "--engine", "transformers", "--max-length", "4096")
    code, found = document(cli, *arguments)
    assert code == 0
    assert found["engine"] == "transformers"
    assert found["buckets"]["kv"]["gpu0"] == 2 * 24 * 8 * 128 * 4096 * 2
    code, found = document(cli, *arguments, "--budget", "1GB")
    assert (code, found["verdict"]["fits"]) == (1, "no")


def test_a_sweep_has_a_row_for_each_value(cli: Cli, models: dict[str, str]) -> None:
    """The same figures in the table and in the document."""
    arguments = (
        "sweep",
        models["q4"],
        "--over",
        "context",
        "--values",
        "4096,8192",
        "--budget",
        "6GB",
        "-np",
        "1",
        "--device",
        "RPC0",
    )
    code, out, _ = cli(*arguments)
    assert code == 0
    rows = out.splitlines()
    assert rows[0] == "predicted over context, MiB; KV cache and compute are those on gpu0"
    assert rows[2].split()[:2] == ["4096", "512.00"]
    assert rows[3].split()[:2] == ["8192", "1,024.00"]
    _, found = document(cli, *arguments, schema="sweep.json")
    assert [point["buckets"]["kv"]["gpu0"] for point in found["points"]] == [512 * MIB, 1024 * MIB]
    assert [point["verdict"]["fits"] for point in found["points"]] == ["yes", "yes"]


@pytest.mark.parametrize("words", [("estimate",), ("fit", "--budget", "4GB"), ("plan", "--budget", "8GB")])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(EngineNotFound, 3), (BackendError, 3), (EngineRefused, 2)],
)
def test_an_engine_that_fails_says_nothing_about_the_budget(
    cli: Cli,
    models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    error: type[BackendError],
    expected: int,
) -> None:
    """Exit code 3, in its own words, and 2 where it refuses the model or a setting: 1 is that it does not fit."""
    from pytest_vram.backends import dry_run

    def none(*_: object, **__: object) -> None:
        raise error("its own words")

    monkeypatch.setattr(dry_run, "exact", none)
    code, _, err = cli(words[0], models["q4"], "--exact", *words[1:])
    assert code == expected
    assert err == f"vram {words[0]}: its own words\n"


@pytest.mark.parametrize("verb", entry.PREDICTING)
def test_help_is_not_taken_for_an_engines_option(cli: Cli, verb: str) -> None:
    """--help and -h print the verb's own options; -hf is the engine's."""
    for word in ("--help", "-h"):
        code, out, _ = cli(verb, word)
        assert code == 0
        assert f"usage: vram {verb} MODEL" in out
    code, out, _ = cli(verb, "-hf", "some/model", "--budget", "1GB", "--over", "context", "x.gguf")
    assert (code, out) == (2, "")


def test_an_unknown_architecture_is_inconclusive(cli: Cli, tmp_path: Path) -> None:
    """What could not be known is said, no budget is promised, and no setting is blamed."""
    recipe = recipes.llama(tokenizer="none")
    metadata = {name.replace("llama.", "newarch."): value for name, value in recipe.metadata.items()}
    new = msgspec.structs.replace(recipe, metadata={**metadata, "general.architecture": "newarch"})
    path = str(new.write(tmp_path / "m.gguf"))
    code, out, _ = cli("fit", path, "--budget", "8GB")
    assert code == 3
    assert "unknown: kv" in out
    assert "turn first" not in out
    code, out, _ = cli("plan", path, "--budget", "8GB")
    assert code == 3
    assert "nothing can be promised" in out
    code, out, _ = cli("fit", path, "--budget", "1KB")
    assert code == 1


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a backend and a budget in its vram.toml, in which the command runs."""
    folder = tmp_path / "project"
    (folder / "below").mkdir(parents=True)
    sizing_models.dense_8b(folder / "m.gguf")
    (folder / "vram.toml").write_text(
        'budget = "8GB"\n'
        '[backend.agent]\nengine = "llama-server"\nmodel = "m.gguf"\n'
        '[backend.agent.options]\nctx-size = 8192\nparallel = 1\ndevice = "CUDA0"\nno-mmap = true\n'
        '[backend.other]\nengine = "command"\nargv = ["x"]\n'
    )
    monkeypatch.chdir(folder / "below")
    monkeypatch.delenv("PYTEST_VRAM_BUDGET", raising=False)
    monkeypatch.delenv("PYTEST_VRAM_CONFIG", raising=False)
    return folder


def test_fit_takes_a_backend_of_the_project(cli: Cli, project: Path) -> None:
    """Its model and options, those of the command line in their place, and the project's budget."""
    code, found = document(cli, "fit", "--backend", "agent")
    assert code == 0
    assert found["settings"]["ctx_size"] == 8192
    assert found["settings"]["mmap"] is False
    assert found["verdict"]["limit"] == 8 * 10**9
    _, plain = document(cli, "fit", str(project / "m.gguf"), "-c", "8192", "-np", "1", "--device", "CUDA0", "--no-mmap")
    assert plain == found
    code, found = document(cli, "estimate", "--backend", "agent", "-c", "4096", "--mmap", "--budget", "1GB")
    assert (code, found["settings"]["ctx_size"], found["settings"]["mmap"]) == (1, 4096, True)
    (project / "second.toml").write_text('[backend.two]\nengine = "llama-server"\nmodel = "m.gguf"\n')
    code, out, _ = cli("fit", "--backend", "two", "--config", "../second.toml")
    assert code == 0
    assert "no verdict: no budget is named" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--backend", "nobody"), "'nobody' is no backend of"),
        (("--backend", "other"), "cannot be predicted"),
        (("--backend", "agent", "--config", "nowhere.toml"), "from --config"),
    ],
)
def test_a_backend_that_cannot_be_sized_is_bad_use(
    cli: Cli, project: Path, arguments: tuple[str, ...], says: str
) -> None:
    """One sentence each."""
    code, out, err = cli("fit", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_fit_is_judged_by_the_budget_in_force(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--budget`, else the environment, else the project's config file; the answer says which."""
    arguments = ("fit", str(project / "m.gguf"), "-c", "8192", "--device", "CUDA0")
    code, out, _ = cli(*arguments)
    assert (code, out.splitlines()[-1]) == (0, f"the budget is that of budget in {project / 'vram.toml'}")
    monkeypatch.setenv("PYTEST_VRAM_BUDGET", "4GB")
    code, out, _ = cli(*arguments)
    assert (code, out.splitlines()[-1]) == (1, "the budget is that of PYTEST_VRAM_BUDGET")
    code, out, _ = cli(*arguments, "--budget", "9GB")
    assert code == 0
    assert "the budget is that of" not in out
    code, out, _ = cli("estimate", *arguments[1:])
    assert code == 0
    assert "fits" not in out


def test_fit_without_any_budget_says_that_there_is_no_verdict(
    cli: Cli, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten option does not look like an answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_VRAM_BUDGET", raising=False)
    code, out, _ = cli("fit", models["q4"], "-c", "4096")
    assert code == 0
    assert out.splitlines()[-1].startswith("no verdict: no budget is named; add --budget")
    _, out, _ = cli("estimate", models["q4"], "-c", "4096")
    assert "no verdict" not in out


def test_the_host_beside_a_card_stands_in_for_nothing(cli: Cli, models: dict[str, str]) -> None:
    """A limit for it is held against what the ledger says of it."""
    code, out, _ = cli("fit", models["q4"], "-c", "8192", "--budget", "host=100MB")
    assert code == 1
    assert "on the host, " in out
    assert "stands in for a card" not in out
    code, out, _ = cli("fit", models["q4"], "-c", "8192", "--budget", "1GB", "--device", "none")
    assert code == 1
    assert "stands in for a card" in out
    code, out, err = cli("fit", models["q4"], "-c", "8192", "--budget", "gpu0=4GB,gpu3=1GB")
    assert (code, out) == (2, "")
    assert "limits gpu3, which this deployment does not have: its devices are gpu0, host" in err


def test_little_room_is_said_to_be_little(cli: Cli, models: dict[str, str]) -> None:
    """Less than 256 MiB to spare on a card names --reserve; more does not, and neither does a host."""
    arguments = ("fit", models["q4"], "-c", "8192", "--device", "RPC0")
    _, found = document(cli, *arguments, "--budget", "80GB")
    most = found["verdict"]["at_most"]
    for room, said in ((255, True), (257, False)):
        _, out, _ = cli(*arguments, "--budget", f"{most + room * MIB}B")
        assert ("--reserve" in out) == said
    _, out, _ = cli("fit", models["q4"], "-c", "8192", "--device", "none", "--budget", "9GB")
    assert "--reserve" not in out


def test_without_a_context_the_engines_own_way_out_is_named(cli: Cli, models: dict[str, str]) -> None:
    """--fit lowers what was not given; what was given, or where --fit is off, nothing is lowered."""
    arguments = ("fit", models["q4"], "--budget", "8GiB", "--device", "CUDA0")
    code, out, _ = cli(*arguments)
    assert code == 1
    assert "down to 4096 tokens (--fit-ctx)" in " ".join(out.split())
    _, out, _ = cli(*arguments, "--fit-ctx", "8192")
    assert "down to 8192 tokens" in " ".join(out.split())
    for words in (("-c", "131072"), ("--fit", "off")):
        _, out, _ = cli(*arguments, *words)
        assert "--fit-ctx" not in out


def test_the_command_line_with_the_first_change_is_printed(cli: Cli, models: dict[str, str]) -> None:
    """It fits, where that change is enough alone."""
    arguments = ("fit", models["moe"], "--budget", "8GB", "-c", "16384", "-np", "1", "-ngl", "99", "--device", "CUDA0")
    code, out, _ = cli(*arguments)
    assert code == 1
    _, found = document(cli, *arguments)
    command = found["verdict"]["first"]["command"]
    assert shlex.join(command) in out
    assert "--n-cpu-moe" in command
    code, _, _ = cli("fit", "--budget", "8GB", *command)
    assert code == 0


def test_a_sweep_says_what_it_counts(cli: Cli, models: dict[str, str]) -> None:
    """KV cache and compute are those of the cards, and what was assumed stands below, once or with its value."""
    code, out, _ = cli("sweep", models["q4"], "--over", "context", "--values", "4096,300000", "--device", "RPC0")
    assert code == 0
    said = " ".join(out.split())
    assert "parallel is not given" in said
    assert "warning (300000): kv: a context of 300032 tokens is longer than the trained one" in said
    _, out, _ = cli("sweep", models["q4"], "--over", "parallel", "-c", "8192", "--values", "1,2")
    assert "ctx-size is kept for each slot" in out
    _, found = document(
        cli, "sweep", models["q4"], "--over", "parallel", "-c", "8192", "--values", "2", schema="sweep.json"
    )
    row = next(line for line in out.splitlines() if line.split()[0] == "2")
    assert row.split()[2] == f"{found['points'][0]['buckets']['compute']['gpu0'] / MIB:,.2f}"


def test_the_drivers_context_is_not_taken_for_tokens(cli: Cli, models: dict[str, str]) -> None:
    """In the breakdown for people its row says whose it is."""
    _, out, _ = cli("estimate", models["q4"], "-c", "8192", "--device", "CUDA0")
    assert "  context (driver)  " in out


def test_transformers_keeps_its_own_option_of_that_name(cli: Cli, tmp_path: Path) -> None:
    """`--backend` quantises its cache there, and names no backend of a config file."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    words = ("--engine", "transformers", "--cache-implementation", "quantized", "--nbits", "4", "--max-length", "2048")
    sizes = {}
    for backend in ("quanto", "hqq"):
        code, found = document(cli, "estimate", str(tmp_path), *words, "--backend", backend)
        assert code == 0
        sizes[backend] = found["settings"]["backend"]
    assert sizes == {"quanto": "quanto", "hqq": "hqq"}


def test_a_sweep_under_a_budget_for_no_device_is_bad_use(cli: Cli, models: dict[str, str]) -> None:
    """As everywhere else."""
    code, out, err = cli("sweep", models["q4"], "--over", "context", "--budget", "gpu3=1GB")
    assert (code, out) == (2, "")
    assert "limits gpu3" in err

"""Every command and example of the page on estimates does what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.backends.growth import Growth, Step
from pytest_vram.cli import main
from pytest_vram.ledger import Entry
from pytest_vram.report import predictions
from pytest_vram.report.measured import MeasuredPoint, MeasuredSweep
from pytest_vram.sizing import plans, serving
from pytest_vram.sizing.prediction import ModelFacts, Turn, Verdict
from tests.unit import sizing_models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "estimate.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^vram (?:estimate|fit|plan|sweep) .*$", TEXT, re.MULTILINE)
SHOWN = re.findall(r"^```\n\$ (vram .*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models that the page speaks of."""
    sizing_models.dense_8b(tmp_path / "llama-8b-q4.gguf")
    small = {"layers": 28, "embedding": 2048, "kv_heads": 8, "feed_forward": 6144}
    types = {"my.gguf": sizing_models.Q4, "my-q4.gguf": sizing_models.Q4, "my-q8.gguf": sizing_models.Q8}
    for name, kind in {**types, "my-q5.gguf": sizing_models.Q8}.items():
        sizing_models.dense(tmp_path / name, types=kind, **small)
    sizing_models.moe_30b(tmp_path / "my-moe.gguf")
    folder = tmp_path / "models" / "my-model"
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    spec = '[backend.agent]\nengine = "llama-server"\nmodel = "my.gguf"\noptions = { ctx-size = 8192 }\n'
    (tmp_path / "vram.toml").write_text(f'budget = "8GB"\n{spec}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PYTEST_VRAM_BUDGET", "PYTEST_VRAM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_work(project: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each gives an answer, and none is bad use."""
    code = main(shlex.split(command, comments=True)[1:])
    out, err = capsys.readouterr()
    assert code in (0, 1, 3), err
    assert err == ""
    assert out


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_output_of_the_page_is_the_output(
    project: Path, command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands between the marks of omission is printed so, line by line."""
    main(shlex.split(command)[1:])
    out = capsys.readouterr().out
    for part in shown.split("…\n"):
        assert part in out


@pytest.mark.parametrize("text", PYTHON)
def test_python_of_the_page_works(project: Path, text: str, tmp_path: Path) -> None:
    """The test that is shown passes for a small model."""
    namespace: dict[str, Any] = {}
    exec(compile(text, "example", "exec"), namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(tmp_path)


@pytest.mark.parametrize(
    ("title", "engine"), [("vLLM", "vllm"), ("SGLang", "sglang"), ("transformers", "transformers")]
)
def test_the_page_lists_every_option_of_other_engines(title: str, engine: str) -> None:
    """The table's names are those that the estimate reads."""
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {title} |"))
    names = set(re.findall(r"`([a-z_]+)`", row))
    assert names == set(serving.engine_options(engine))


@pytest.mark.parametrize(
    ("title", "documents"),
    [
        ("estimate", (predictions.EstimateDocument, predictions.Exact, predictions.Compared, ModelFacts, Verdict, Turn, Entry)),
        ("plan", (predictions.PlanDocument, predictions.SearchRecord, predictions.PlanRecord, predictions.ImpossibleRecord, plans.Wishes, plans.Relaxed)),
        ("sweep", (predictions.SweepDocument, predictions.PointRecord, MeasuredSweep, MeasuredPoint, Growth, Step)),
    ],
)  # fmt: skip
def test_the_page_on_formats_lists_every_field(title: str, documents: tuple[type[msgspec.Struct], ...]) -> None:
    """No field of a document is without a word."""
    text = (PAGE.parent / "formats.md").read_text(encoding="utf-8")
    section = text.split(f"## `vram {title} --json`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    for document in documents:
        missing = {field.encode_name for field in msgspec.structs.fields(document)} - named
        assert not missing, (document.__name__, missing)


def test_the_page_has_examples() -> None:
    """The patterns of this file find them."""
    assert len(COMMANDS) >= 12
    assert SHOWN
    assert PYTHON

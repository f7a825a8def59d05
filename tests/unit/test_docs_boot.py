"""Every command and example of the page on boot logs does what the page says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram import bootlog
from pytest_vram.bootlog.boot import FAILURES, Failure, Peak, PhaseSpan
from pytest_vram.cli import main
from pytest_vram.ledger import Entry
from pytest_vram.report.booted import BootDocument
from tests.unit import sizing_models

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "boot.md").read_text(encoding="utf-8")
LOG = re.findall(r"^```log\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHOWN = re.findall(r"^```\n\$ (vram .*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the log and the model that the page speaks of."""
    (tmp_path / "server.log").write_text(LOG[0], encoding="utf-8")
    sizing_models.dense_8b(tmp_path / "llama-8b-q4.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_output_of_the_page_is_the_output(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands between the marks of omission is printed so, line by line."""
    assert main(shlex.split(command)[1:]) == 1
    out = capsys.readouterr().out
    for part in shown.split("…\n"):
        assert part in out


@pytest.mark.usefixtures("folder")
def test_python_of_the_page_works() -> None:
    """The test that is shown passes for the log that is shown."""
    for text in PYTHON:
        namespace: dict[str, Callable[..., object]] = {}
        exec(compile(text, "example", "exec"), namespace)
        for name, test in namespace.items():
            if name.startswith("test_"):
                test()


def test_failures_and_engines_are_listed() -> None:
    """Every kind of failure stands on the page in the words of the code, and every engine is named."""
    assert [kind for kind, what in FAILURES.items() if f"| `{kind}` | {what} |" not in TEXT] == []
    assert [name for name in ("llama.cpp", "Ollama", "vLLM", "SGLang", "transformers") if name not in TEXT] == []
    assert {"llama-server", "ollama", "vllm", "sglang", "transformers"} <= set(bootlog.engines())


def test_the_page_on_formats_lists_every_field() -> None:
    """No field of the document is without a word."""
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    section = text.split("## `vram boot --json`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    documents: tuple[type[Any], ...] = (BootDocument, Failure, PhaseSpan, Peak, Entry)
    for document in documents:
        missing = {field.encode_name for field in msgspec.structs.fields(document)} - named - {"format"}
        assert not missing, (document.__name__, missing)


def test_the_page_has_examples() -> None:
    """The patterns of this file find them."""
    assert len(SHOWN) >= 2
    assert (len(LOG), len(PYTHON)) == (1, 1)

"""Specs that cannot be predicted: each is a reason, never an exception that would be called a defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_vram.predicting import Predictions
from pytest_vram.readings import Unmeasurable
from pytest_vram.sizing import Estimate
from pytest_vram.spec import BackendSpec
from tests.unit import sizing_models


def spec(folder: Path, model: str = "m.gguf", options: dict[str, Any] | None = None) -> BackendSpec:
    """A backend of llama-server in that folder."""
    return BackendSpec(
        name="x", engine="llama-server", model=model, options=options or {}, base=str(folder), origin="vram.toml"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model; its own name is no UTF-8."""
    folder = tmp_path_factory.mktemp("specs") / "f\udcff"
    folder.mkdir()
    sizing_models.dense_8b(folder / "m.gguf")
    return folder


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("~nosuchuser/m.gguf", {}, "`model` of [backend.x] in vram.toml is '~nosuchuser/m.gguf', and there is no home"),
        ("m.gguf", {"lora": "~nosuchuser/a.gguf"}, "option lora is '~nosuchuser/a.gguf', and there is no home"),
        ("m.gguf", {"lora": ["~nosuchuser/a.gguf"]}, "option lora is"),
        ("m.gguf", {"mmproj": "~nosuchuser/a.gguf"}, "option mmproj is"),
        ("m.gguf", {"model": "z.gguf"}, "option 'model' ([backend.x] in vram.toml) cannot be used: write model ="),
        ("m.gguf", {"engine": "vllm"}, "no option 'engine'"),
        ("m.gguf", {"era": 1}, "no option 'era'"),
        ("m.gguf", {"shape": 1}, "no option 'shape'"),
        ("m.gguf", {"list-devices": True}, "it prints and exits"),
    ],
)
def test_a_spec_that_cannot_be_predicted_is_a_reason(
    folder: Path, model: str, options: dict[str, Any], says: str
) -> None:
    """Homes of nobody, and options that are the spec's own keys or a parameter's name here, are said."""
    found = Predictions().of(spec(folder, model, options))
    assert isinstance(found, Unmeasurable)
    assert says in found.reason


def test_a_folder_that_is_no_utf8_is_predicted(folder: Path) -> None:
    """A project may be in any folder."""
    assert isinstance(Predictions().of(spec(folder)), Estimate)

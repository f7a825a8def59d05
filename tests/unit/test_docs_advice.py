"""The page on advice says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_vram.advice import Advice, advise
from pytest_vram.advice.goal import of_limits
from pytest_vram.advice.knobs import KNOBS, USEFUL_CONTEXT
from pytest_vram.report.advice_lines import advice_lines
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import estimating
from pytest_vram.sizing.verdict import verdict
from pytest_vram.testing import real_shapes
from tests.unit.sizing_models import Q4

PAGE = Path(__file__).resolve().parents[2] / "docs" / "advice.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_example_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    """The advice for the deployment that the page names, line by line."""
    shape = estimating.load(real_shapes.real("Llama-3-8B", types=Q4).write(tmp_path / "model.gguf"))
    limits = parse_budget("8GB")
    options = {"ctx-size": 65536, "parallel": 2, "n-gpu-layers": 99}
    advice = advise(shape, options, lambda made: of_limits(made, verdict(made, limits), limits))
    shown = re.search(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert advice_lines(advice) == shown[1].splitlines()


def test_every_setting_stands_on_the_page_in_its_order() -> None:
    """The table ranks what the code ranks."""
    rows = re.findall(r"^\| (`[^|]*|[^|`]*`?[^|]*) \| [a-z][^|]* \|$", TEXT, re.MULTILINE)
    table = "\n".join(rows)
    places = []
    for knob in KNOBS:
        name = {"cache-8": "q8_0", "cache-4": "q4_0", "override-tensor": "one copy", "spec-type": "no draft model"}.get(
            knob.name, knob.name
        )
        if knob.name in ("mmap", "draft-cache"):  # in the sentences below it
            continue
        assert name in table, knob.name
        places.append(table.index(name))
    assert places == sorted(places)
    assert str(USEFUL_CONTEXT) in TEXT


@pytest.mark.parametrize("name", Advice.__struct_encode_fields__)
def test_every_field_stands_on_the_page_on_formats(name: str) -> None:
    """No field of the JSON is without a word."""
    formats = (PAGE.parent / "formats.md").read_text(encoding="utf-8")
    section = formats.split("\n## Advice\n")[1].split("\n## ")[0]
    assert f"`{name}`" in section

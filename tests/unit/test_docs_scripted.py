"""The examples of scripted backends in the documentation do what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.testing.scripted import FAULTS, Script

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rehearsing.md").read_text(encoding="utf-8")
EXAMPLES = [
    text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "scripted" in text
]


def function(text: str) -> Callable[..., None]:
    """The test of an example."""
    namespace: dict[str, Any] = {}
    exec(compile(text, "example", "exec"), namespace)
    (found,) = (value for name, value in namespace.items() if name.startswith("test_"))
    assert callable(found)
    return found  # type: ignore[no-any-return]


def test_a_gate_is_tried_without_a_server() -> None:
    """The first example passes: a gate fails for a backend that is truly worse."""
    function(EXAMPLES[0])()


def test_a_run_meets_a_scripted_server(tmp_path: Path) -> None:
    """The second example passes: a run is green whole and red where streams break."""
    function(EXAMPLES[1])(tmp_path)


def test_every_field_and_fault_is_named() -> None:
    """The page names each field of a script but its model, and each fault."""
    section = PAGE.partition("## A backend that answers as you say")[2]
    names = {field.name for field in msgspec.structs.fields(Script)} - {"model"}
    assert {name for name in (*names, *FAULTS) if f"`{name}`" not in section} == set()
    assert len(EXAMPLES) == 2

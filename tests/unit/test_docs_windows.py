"""The page about windows: its examples pass, its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.windows import INVARIANTS, WindowSpec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "windows.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=["messages", "own"])
def test_examples_pass(text: str) -> None:
    """Each example is a test that passes."""
    namespace: dict[str, Any] = {}
    exec(compile(text, "example", "exec"), namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    tests += [value().test_window for name, value in namespace.items() if name.startswith("Test")]
    (test,) = tests
    test()


def test_every_invariant_is_in_the_table() -> None:
    """The table has each invariant in its own words, and each setting of the spec is named."""
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)) == INVARIANTS
    settings = {name for name in WindowSpec.__annotations__ if name != "steps_done"}
    assert {name for name in settings if f"`{name}`" not in PAGE} == set()

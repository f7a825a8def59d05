"""The page on leaks says what is so: its example runs, its thresholds and promises are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from pytest_vram.checks.idle_layers import CAP_LAYER, WORKSPACE
from pytest_vram.checks.idle_series import Kind
from pytest_vram.checks.idle_trend import Thresholds

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "leaks.md").read_text(encoding="utf-8")


def test_the_example_holds() -> None:
    """The test that is shown passes."""
    namespace: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "docs/leaks.md", "exec"), namespace)
    shown = [value for name, value in namespace.items() if name.startswith("test_") and callable(value)]
    assert shown
    for function in shown:
        function()


def test_every_kind_and_threshold_is_documented() -> None:
    """The six kinds have a row each, and each threshold its name."""
    assert [kind for kind in get_args(Kind) if f"\n| `{kind}` |" not in TEXT] == []
    assert [name for name in Thresholds.__struct_fields__ if f"`{name}`" not in TEXT] == []
    assert [name for name in ("prompt-cache", "context-checkpoints") if name not in CAP_LAYER or name not in TEXT] == []


def test_figures_of_the_rule_are_those_of_the_code() -> None:
    """Warm-up, blocks, p value, floor and least number of turns as they are by default."""
    rule = Thresholds()
    for said in (
        f"the first {rule.warm_up} turns or {100 * rule.warm_up_share:.0f} %",
        f"Below {rule.minimum} turns",
        f"over {100 * rule.missing:.0f} % of them",
        f"Medians of {rule.blocks} blocks",
        f"p < {rule.p_value}",
        f"growth above {rule.floor / 2**20:.0f} MiB",
        f"a random walk of {rule.wander / 2**20:.0f} MiB a turn",
        f"{WORKSPACE:,} bytes",
    ):
        assert said in " ".join(TEXT.split()), said


def test_the_table_keeps_every_promise() -> None:
    """Each row with a bound has a share that holds it."""
    heads = ["leak", "step", "warming", "flat", "inconclusive"]
    rows = [
        cells
        for line in TEXT.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 8 and cells[1].isdigit()
    ]
    assert len(rows) > 90
    for cells in rows:
        match = re.fullmatch(r"(\w+) (≤|≥) (\d+) %", cells[7])
        if match is None:
            assert cells[7] == ""
            continue
        share, bound = float(cells[2 + heads.index(match[1])]), float(match[3])
        assert share <= bound if match[2] == "≤" else share >= bound, cells

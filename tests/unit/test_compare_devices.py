"""Devices of two sides of a comparison: the same ones are found whatever label a log's order gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pytest_vram import tolerance
from pytest_vram.ledger import BUCKETS, Ledger
from pytest_vram.report.comparison import CompareDocument, compare, loud
from pytest_vram.report.deployments import Deployment, Side, kind_of
from pytest_vram.units import MIB
from tests.unit.compare_kit import printed

Cards = Sequence[tuple[str, int]]


def side(cards: Cards, labels: Mapping[str, str] | None = None) -> Side:
    """A boot log with weights on each card, labelled in the order of the log where no labels are given."""
    named = {name: (labels or {}).get(name, f"gpu{index}") for index, (name, _) in enumerate(cards)}
    ledger = Ledger(
        entries=tuple(printed("weights", size * MIB, named[name]) for name, size in cards),
        devices={label: name for name, label in named.items()},
    )
    deployment = Deployment(
        name="",
        kind="log",
        engine="llama-server",
        ledger=ledger,
        model={"architecture": "llama"},
        devices={label: kind_of(name) for name, label in named.items()},
    )
    return Side(origin="a.log", kind="log", deployments=(deployment,))


def held(before: Side, after: Side) -> CompareDocument:
    """Compared, with no growth allowed."""
    return compare(before, after, tolerances=tolerance.parse("peak", BUCKETS, origin="test"), fail_on="peak")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([("CUDA0", 3000), ("CUDA1", 1000)], [("CUDA1", 1000), ("CUDA0", 3000)]),
        ([("CUDA0", 1), ("CUDA1", 2), ("CUDA2", 3)], [("CUDA2", 3), ("CUDA0", 1), ("CUDA1", 2)]),
        ([("RPC0[127.0.0.1:1]", 5), ("CUDA0", 9)], [("CUDA0", 9), ("RPC0[127.0.0.1:2]", 5)]),
        ([("CUDA0", 700)], [("CUDA1", 700)]),
        ([("GPU0", 1), ("GPU1", 2)], [("CUDA0", 1), ("CUDA1", 2)]),
    ],
    ids=["swapped", "turned", "another port", "one card each", "names of one side only"],
)
def test_the_same_card_is_found_by_the_engines_name(before: Cards, after: Cards) -> None:
    """The same buffers on the same cards are no growth, in whatever order the lines come."""
    document = held(side(before), side(after))
    assert {row.meaning for pair in document.deployments for row in pair.differences} == {"equal"}
    assert document.verdict == "held"
    assert not loud(document)


def test_labels_are_those_of_the_second_side() -> None:
    """Growth of a card is said under the label that the second side gives it."""
    document = held(side([("CUDA0", 3000), ("CUDA1", 1000)]), side([("CUDA1", 1500), ("CUDA0", 3000)]))
    assert {row.device: row.least // MIB for row in document.deployments[0].differences} == {"gpu0": 500, "gpu1": 0}
    assert [one.where for one in document.judged if one.result == "grew"] == ["deployment gpu0"]


def test_a_card_that_only_one_side_has_takes_nobodys_place() -> None:
    """Other sets of cards are said; the card that both have is compared with itself."""
    document = held(side([("CUDA1", 10), ("CUDA2", 20)]), side([("CUDA0", 30), ("CUDA1", 10)]))
    rows = {row.device: (row.before, row.after) for row in document.deployments[0].differences}
    assert rows == {"gpu0": (None, 30 * MIB), "gpu1": (10 * MIB, 10 * MIB), "CUDA2": (20 * MIB, None)}
    assert [change.setting for changes in loud(document).values() for change in changes] == ["devices"]

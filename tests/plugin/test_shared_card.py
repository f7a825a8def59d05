"""Public reports of suites that shared one card, told again on a card of the fake driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_vram.leases.policy import Want, World, decide
from pytest_vram.testing import Card, FakeDriver, FakeDriverUnavailable, fake_nvml
from pytest_vram.units import GIB
from tests.conftest import Inner

#: Each test loads a model of its own: whoever runs `sleep 0.4<number>` holds 1.5 GiB of the card.
MODELS = 4
SUITE = """
import subprocess
import pytest

@pytest.mark.max_vram("1600MiB")
@pytest.mark.parametrize("number", range({models}))
def test_model(number):
    subprocess.run(["sleep", f"0.4{{number}}"], check=True)
"""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """A card of 8 GiB; two of the models fit into the budget."""
    try:
        with fake_nvml([Card(name="NVIDIA GeForce GTX 1650", total=8 * GIB)]) as made:
            for number in range(MODELS):
                made.process(command=f"sleep 0.4{number}", held=GIB * 3 // 2)
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


def most_held(pytester: pytest.Pytester) -> int:
    """The most that all tests held together, by the journal's samples."""
    (journal,) = pytester.path.glob(".vram/runs/*/journal.jsonl")
    lines: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    return max(line["max"] for line in lines if line["kind"] == "sample" and line["device"] == "gpu0")


@pytest.mark.usefixtures("driver")
def test_as_many_workers_as_the_machine_has(pytester: pytest.Pytester, inner: Inner) -> None:
    """`-n auto` on one card, where every worker loaded a model and all tests ran out of memory: with needs they wait
    for each other and never hold more than the card has."""
    pytest.importorskip("xdist")
    pytester.makepyfile(SUITE.format(models=MODELS))
    inner(f"-n{MODELS}", "--vram-device=cuda:0", "--vram-budget=3200MiB").assert_outcomes(passed=MODELS)
    assert most_held(pytester) <= 3 * GIB


@pytest.mark.usefixtures("driver")
def test_the_same_without_leases(pytester: pytest.Pytester, inner: Inner) -> None:
    """Without admission the same suite holds more than the budget, and fails: so the test above shows something."""
    pytest.importorskip("xdist")
    pytester.makepyfile(SUITE.format(models=MODELS))
    result = inner(f"-n{MODELS}", "--vram-device=cuda:0", "--vram-budget=3200MiB", "--vram-leases=off")
    assert result.parseoutcomes()["failed"] > 0
    assert most_held(pytester) > 3 * GIB


@pytest.mark.parametrize(("card", "workers"), [(24 * GIB, 8), (2 * GIB, 1)])
def test_how_many_workers_fit(card: int, workers: int) -> None:
    """At 3 GiB for each, 8 of 12 tests run at once on a card of 24 GiB, and one at a time where not even one fits."""
    wants = [
        Want(str(n), n, frozenset({"card"}), takes={"card": 3 * GIB}, ceiling={"card": card}, competes=True)
        for n in range(12)
    ]
    world = World(held={}, loose={}, leases={}, tests={}, alone=set())
    assert len(decide(wants, world).admitted) == workers

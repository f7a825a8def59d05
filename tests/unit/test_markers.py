"""Markers: their arguments are checked one by one and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pytest_vram
from pytest_vram import markers
from pytest_vram.errors import BadMarker


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "part"),
    [
        ("max_vram", (), {}, "limit"),
        ("max_vram", ("3g",), {}, "ambiguous"),
        ("max_vram", (3,), {}, "3 is not a size"),
        ("max_vram", (True,), {}, "True is not a size"),
        ("max_vram", ("3GB", "4GB"), {}, "too many positional"),
        ("max_vram", ("3GB",), {"over": "peak"}, "over='peak'"),
        ("max_vram", ("3GB",), {"over": ["total"]}, "over="),
        ("max_vram", ("3GB",), {"scope": None}, "scope=None"),
        ("max_vram", ("3GB",), {"phase": 3}, "phase=3"),
        ("max_vram", ("3GB",), {"over": "baseline", "scope": "process"}, "no baseline in scope 'process'"),
        ("max_vram", ("3GB",), {"over": "baseline", "scope": "device"}, "no baseline in scope 'device'"),
        ("max_vram", ("3GB",), {"unknown": 3}, "unknown"),
        ("max_host_memory", ("-1GB",), {}, "'-1GB'"),
        ("serial_only", (3,), {}, "reason=3"),
        ("vram_backend", (), {}, "name"),
        ("vram_backend", ("",), {}, "name=''"),
        ("vram_backend", (None,), {}, "name=None"),
        ("requires_vram", ("8",), {}, "no unit"),
        ("min_tokens_per_second", ("fast",), {}, "rate='fast'"),
        ("min_tokens_per_second", (0,), {}, "rate=0"),
        ("min_tokens_per_second", (float("nan"),), {}, "rate=nan"),
        ("min_tokens_per_second", (float("inf"),), {}, "rate=inf"),
        ("min_tokens_per_second", (True,), {}, "rate=True"),
        ("toolcall_accuracy", (), {}, "target"),
        ("toolcall_accuracy", (94,), {}, "target=94 is not a share: write 0.94"),
        ("toolcall_accuracy", (97.5,), {}, "target=97.5 is not a share: write 0.975"),
        ("toolcall_accuracy", ("0.94",), {}, "target='0.94' is a string and not a number"),
        ("toolcall_accuracy", (True,), {}, "target=True is not a number"),
        ("toolcall_accuracy", (None,), {}, "target=None is not a number"),
        ("toolcall_accuracy", (float("nan"),), {}, "target=nan is not a number"),
        ("toolcall_accuracy", (0,), {}, "target=0 is not a share above 0"),
        ("toolcall_accuracy", (-0.9,), {}, "target=-0.9 is not a share above 0"),
        ("toolcall_accuracy", (940,), {}, "target=940 is not a share above 0"),
        ("toolcall_accuracy", (10**400,), {}, "target=(a number of 1329 bits) is not a number"),
        ("toolcall_accuracy", (-(10**5000),), {}, "bits) is not a number"),
        ("toolcall_accuracy", (0.9,), {"margin": 10**400}, "margin=(a number of 1329 bits) is not a number"),
        ("toolcall_accuracy", (0.9,), {"confidence": 10**400}, "confidence=(a number of 1329 bits) is not a number"),
        ("min_tokens_per_second", (10**400,), {}, "too large"),
        ("idle_rollback", (), {"settle": 10**400}, "is not a number of seconds above 0"),
        ("toolcall_accuracy", (0.94, "cases.jsonl"), {}, "too many positional"),
        ("toolcall_accuracy", (0.94,), {"cases": 3}, "cases=3 is not a place"),
        ("toolcall_accuracy", (0.94,), {"cases": ""}, "cases='' is not a place"),
        ("toolcall_accuracy", (0.94,), {"mode": "exact"}, "mode='exact' is not one of not_below, proven, sprt, point"),
        ("toolcall_accuracy", (1,), {"mode": "sprt"}, "target=1 is beyond mode='sprt'"),
        ("toolcall_accuracy", (0.94,), {"confidence": 95}, "confidence=95 is not between 0.5 and 1"),
        ("toolcall_accuracy", (0.94,), {"confidence": 0.5}, "confidence=0.5 is not between 0.5 and 1"),
        ("toolcall_accuracy", (0.94,), {"confidence": "0.95"}, "confidence='0.95' is a string"),
        ("toolcall_accuracy", (0.94,), {"margin": 5}, "margin=5 is not below 1"),
        ("toolcall_accuracy", (0.94,), {"margin": 0}, "margin=0 is not a share above 0"),
        ("toolcall_accuracy", (0.04,), {"mode": "sprt"}, "margin=0.05 is not below target=0.04"),
        ("toolcall_accuracy", (0.04,), {"baseline": "f16"}, "margin=0.05 is not below target=0.04"),
        ("toolcall_accuracy", (0.94,), {"baseline": 0.9}, "baseline=0.9 is not a place"),
        ("toolcall_accuracy", (0.94,), {"retries": 4}, "retries=4 is not a whole number from 0 to 3"),
        ("toolcall_accuracy", (0.94,), {"retries": True}, "retries=True is not a whole number"),
        ("toolcall_accuracy", (0.94,), {"retries": 1.0}, "retries=1.0 is not a whole number"),
        ("toolcall_accuracy", (0.94,), {"judge": "best"}, "judge='best' is not one of first_try, after_retry"),
        ("toolcall_accuracy", (0.94,), {"judge": "after_retry", "retries": 0}, "has no retry to judge"),
    ],
)
def test_wrong_arguments_name_marker_argument_and_value(
    name: str, args: tuple[object, ...], kwargs: dict[str, object], part: str
) -> None:
    """The message starts with the marker and holds the argument with its value and the accepted form."""
    with pytest.raises(BadMarker) as caught:
        markers.read(name, args, kwargs)
    message = str(caught.value)
    assert message.startswith(f"@{name}: ")
    assert part in message
    assert markers.MARKERS[name].signature in message


@pytest.mark.parametrize(
    ("arguments", "text", "count", "seconds"),
    [({}, "120turns", 120, None), ({"turns": 300}, "300turns", 300, None), ({"hours": 0.5}, "0.5h", None, 1800.0)],
)
def test_a_soak_is_of_turns_or_of_hours(arguments: Any, text: str, count: int | None, seconds: float | None) -> None:
    """Without an amount it is the fewest turns on which a trend is judged; two amounts and nonsense are refused."""
    amount = markers.read("vram_soak", (), arguments)["amount"]
    assert (amount.text, amount.turns, amount.seconds) == (text, count, seconds)
    for wrong in (
        {"turns": 3, "hours": 1},
        {"turns": 0},
        {"turns": True},
        {"turns": 1.5},
        {"hours": 9999},
        {"hours": "8h"},
    ):
        with pytest.raises(BadMarker, match="@vram_soak: "):
            markers.read("vram_soak", (), wrong)


def test_right_arguments_are_read_into_bytes() -> None:
    """Sizes come out in bytes, choices as written."""
    meaning = markers.read("max_vram", ("3GB",), {"over": "baseline", "scope": "backend", "phase": "warm-up"})
    assert meaning == {
        "limit": 3_000_000_000, "text": "3GB", "over": "baseline", "scope": "backend", "phase": "warm-up",
    }  # fmt: skip
    assert markers.read("vram_backend", ("agent",), {"ctx_size": 8192}) == {
        "name": "agent", "overrides": {"ctx_size": 8192},
    }  # fmt: skip
    assert markers.read("min_tokens_per_second", (20,), {}) == {"rate": 20.0}


def test_the_decorators_are_pytests_own_marks() -> None:
    """``pytest_vram.max_vram`` and ``pytest.mark.max_vram`` make the same mark."""
    for name in set(pytest_vram.__all__) - {"inconclusive"}:
        assert getattr(pytest_vram, name)("1GB").mark == getattr(pytest.mark, name)("1GB").mark
    with pytest.raises(AttributeError):
        _ = pytest_vram.no_such_marker


def test_every_marker_of_the_package_is_exported_once_it_is_built() -> None:
    """The exports are exactly the built markers, so none is forgotten and none is promised too early."""
    assert sorted(set(pytest_vram.__all__) - {"inconclusive"}) == sorted(
        name for name, marker in markers.MARKERS.items() if marker.check
    )


def test_arguments_of_toolcall_accuracy_are_read_with_their_defaults(tmp_path: Path) -> None:
    """Places may be paths; a target of 1 is a share."""
    found = markers.read("toolcall_accuracy", (0.94,), {})
    assert found == {
        "target": 0.94,
        "cases": None,
        "mode": "not_below",
        "confidence": 0.95,
        "baseline": None,
        "margin": 0.05,
        "retries": 1,
        "judge": "first_try",
    }
    found = markers.read("toolcall_accuracy", (1,), {"cases": tmp_path, "baseline": "f16", "retries": 3})
    assert (found["target"], found["cases"], found["baseline"], found["retries"]) == (1.0, str(tmp_path), "f16", 3)
    # Where nothing is compared, the margin decides nothing.
    assert markers.read("toolcall_accuracy", (0.02,), {})["target"] == 0.02

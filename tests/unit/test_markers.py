"""Markers: their arguments are checked one by one and refused by name."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["toolcall_accuracy", "idle_rollback", "vram_soak"])
def test_a_marker_that_is_not_built_yet_is_an_error_and_never_a_pass(name: str) -> None:
    """Reserved names of the contract are refused until they work."""
    with pytest.raises(BadMarker, match=f"@{name} is not built yet"):
        markers.read(name, (0.94,), {})


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

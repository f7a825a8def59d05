"""Settings: precedence, and every bad value in every source refused with its place."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram import settings as s
from pytest_vram.errors import BadSetting
from pytest_vram.spec import DeviceSpec, Limits

RANKS = ("command line", "environment", "ini", "config file")
BAD: dict[str, object] = {
    "budget": "3g",
    "device": "gpu7",
    "interval": "soon",
    "missing": "maybe",
    "report": "out.xml",
    "backend": "",
}


def resolve(**ranks: dict[str, object]) -> s.Settings:
    """Settings from the given sources: options, environ, ini, config."""
    environ: Any = {s.variable(name): value for name, value in ranks.get("environ", {}).items()}
    ini = {name: (value, f"vram_{name} in pytest.ini") for name, value in ranks.get("ini", {}).items()}
    found = s.gather(ranks.get("options", {}), environ, ini, ranks.get("config", {}), "/srv/vram.toml")
    return s.resolve(found)


def test_defaults_judge_nothing() -> None:
    """Without any source there is no budget, the device is auto and markers skip where nothing can be measured."""
    settings = resolve()
    assert settings.budget is None
    assert settings.device == (DeviceSpec(kind="auto", text="auto"),)
    assert (settings.missing, settings.interval_ms, settings.reports) == ("skip", 10.0, ())


def test_a_report_may_be_in_a_home() -> None:
    """`~` stands for the home, since no shell expands it behind an equals sign; that of nobody is refused."""
    assert resolve(options={"report": ["~/r.json", "./r.json"]}).reports == (
        str(Path("~/r.json").expanduser()),
        "./r.json",
    )
    with pytest.raises(BadSetting, match="no home folder that '~nosuchuser'.*--vram-report"):
        resolve(options={"report": ["~nosuchuser/r.json"]})


@pytest.mark.parametrize(("high", "low"), list(itertools.combinations(range(4), 2)))
def test_the_higher_rank_wins_and_is_named(high: int, low: int) -> None:
    """Command line, environment, ini, config file: for each pair the first one's value counts."""
    sources = ("options", "environ", "ini", "config")
    settings = resolve(**{sources[high]: {"budget": "1GB"}, sources[low]: {"budget": "2GB"}})
    assert settings.budget == Limits(text="1GB", each=10**9)
    assert settings.ranks["budget"] == RANKS[high]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("options", "--vram-{}"),
        ("environ", "PYTEST_VRAM_{}"),
        ("ini", "vram_{} in pytest.ini"),
        ("config", "{} in /srv/vram.toml"),
    ],
)
def test_a_bad_value_names_itself_and_its_place(name: str, source: str, place: str) -> None:
    """One line: the value, what is accepted, and where the value came from."""
    value = BAD[name]
    if source == "environ" and value == "":  # an empty environment variable is an unset one
        assert resolve(environ={name: value}) == resolve()
        return
    where = place.format(name.upper() if source == "environ" else name)
    with pytest.raises(BadSetting) as caught:
        resolve(**{source: {name: value}})
    message = str(caught.value)
    assert str(value) in message
    assert message.endswith(f"(from {where})")
    assert "\n" not in message


@pytest.mark.parametrize("name", s.NOT_BUILT)
def test_a_setting_that_is_not_built_yet_is_refused(name: str) -> None:
    """A reserved option is never silently ignored."""
    with pytest.raises(BadSetting, match="not built yet"):
        resolve(config={name: "1"})


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("4GB", Limits(text="4GB", each=4 * 10**9)),
        ("gpu0=11GB,gpu1=3GB", Limits(text="gpu0=11GB,gpu1=3GB", by_label={"gpu0": 11 * 10**9, "gpu1": 3 * 10**9})),
        ("sum=14GB", Limits(text="sum=14GB", total=14 * 10**9)),
        ("host=1GiB", Limits(text="host=1GiB", by_label={"host": 1 << 30})),
        ("gpu0 = 1GB, sum = 2GB", Limits(text="gpu0 = 1GB, sum = 2GB", by_label={"gpu0": 10**9}, total=2 * 10**9)),
    ],
)
def test_budgets_for_one_or_several_devices(text: str, limits: Limits) -> None:
    """One size for each device, sizes by label, or a sum."""
    assert s.parse_budget(text) == limits


@pytest.mark.parametrize(
    "text", ["gpu0=3g", "gpu=3GB", "gpu0=1GB,gpu0=2GB", "sum=1GB,sum=2GB", "gpu0=", "=3GB", "gpu0=1GB,", "gpu0=1GB,3GB"]
)
def test_bad_budgets_are_refused(text: str) -> None:
    """Unknown labels, doubles and missing sizes are errors."""
    with pytest.raises(ValueError, match="."):
        s.parse_budget(text)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("cpu", [("cpu", None)]),
        ("AUTO", [("auto", None)]),
        ("rpc:0,rpc:1", [("rpc", 0), ("rpc", 1)]),
        ("rpc", [("rpc", None)]),
        ("cuda:0, vulkan:1", [("cuda", 0), ("vulkan", 1)]),
    ],
)
def test_devices_are_read_in_order(text: str, kinds: list[tuple[str, int | None]]) -> None:
    """Several devices by commas; a bare kind means all of it."""
    assert [(device.kind, device.index) for device in s.parse_device(text)] == kinds


@pytest.mark.parametrize(
    "text", ["", "gpu0", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cpu,rpc:0", "auto,cuda:0", "rpc:0,rpc:0", "rpc,rpc:1", "drm:0", "GPU-1", "rpc:٣", None, 0]
)  # fmt: skip
def test_bad_devices_are_refused(text: object) -> None:
    """Everything that is not a device of the contract is an error that lists them."""
    with pytest.raises(ValueError, match="."):
        s.parse_device(text)


@pytest.mark.parametrize("text", ["GPU-5ca1", "MIG-abc", "gpu-", "GPU-nothex00"])
def test_the_beginning_of_a_uuid_says_how_long_it_must_be(text: str) -> None:
    """A UUID that is cut too short, or is none, is told how much of it is needed and where it is found."""
    with pytest.raises(ValueError, match="at least its first 8 digits") as caught:
        s.parse_device(text)
    assert "vram doctor" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["GPU-5ca1ab1e", "MIG-5ca1ab1e-0000", "MIG-GPU-5ca1ab1e-0000-4000-8000-000000000000/1/0"]
)
def test_uuids_in_full_or_their_beginnings(text: str) -> None:
    """Eight digits are enough; drivers of old name slices by their card."""
    assert [device.name for device in s.parse_device(text)] == [text]


@pytest.mark.parametrize(
    "value", ["1_0", "\uff11\uff10", "0x10", "1e3", "nan", "inf", "-5", "0.5", 10**400, True, None, "60001"]
)
def test_intervals_that_are_none(value: object) -> None:
    """A number of milliseconds in plain digits from 1 to 60000, and nothing that Python reads besides."""
    with pytest.raises(BadSetting, match="milliseconds from 1 to 60000"):
        resolve(config={"interval": value})


@pytest.mark.parametrize(
    ("value", "number"), [("10", 10.0), (" 2.5 ", 2.5), (60_000, 60000.0), (1.5, 1.5), ("+7", 7.0)]
)
def test_intervals(value: object, number: float) -> None:
    """Whole and broken milliseconds."""
    assert resolve(config={"interval": value}).interval_ms == number


@given(st.text(max_size=20))
def test_no_text_makes_the_readers_crash(text: str) -> None:
    """Any text is a budget or a ValueError, a device or a ValueError."""
    for parse in (s.parse_budget, s.parse_device):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)

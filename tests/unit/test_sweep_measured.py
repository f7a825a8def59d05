"""`vram sweep --measure` without an engine: what would be booted, and what is said of what was found."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends.growth import Growth, Step
from pytest_vram.bootlog.boot import Failure
from pytest_vram.cli import entry, sweep_measured
from pytest_vram.cli.output import speaks_unicode
from pytest_vram.errors import BadInput
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.report.measured import MeasuredPoint, MeasuredSweep
from pytest_vram.report.measured_lines import measured_lines
from pytest_vram.report.predictions import PointRecord, SweepDocument
from pytest_vram.sizing import engine_options, estimating, llama_options
from pytest_vram.sizing.options import CURRENT
from pytest_vram.sizing.sweep import OVER
from pytest_vram.units import MIB
from tests.unit import sizing_models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sweep.md"


def options(**given: Any) -> argparse.Namespace:
    plain = {"vram_device": None, "values": None, "budget": None, "reserve": None, "over": "context", "seconds": None}
    return argparse.Namespace(**{**plain, **given})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": sizing_models.dense_8b(folder / "dense.gguf"), "moe": sizing_models.moe_30b(folder / "moe.gguf")}


@pytest.mark.parametrize(
    ("words", "device", "kept"),
    [
        (["m.gguf", "--device", "cpu", "-c", "512"], "cpu", ["m.gguf", "-c", "512"]),
        (["m.gguf", "--device=rpc:0"], "rpc:0", ["m.gguf"]),
        (["m.gguf", "--device", "CUDA0"], None, ["m.gguf", "--device", "CUDA0"]),
        (["m.gguf", "--device", "cuda:0", "--device", "CUDA1"], "cuda:0", ["m.gguf", "--device", "CUDA1"]),
        (["m.gguf"], None, ["m.gguf"]),
    ],
)
def test_a_device_of_the_engine_is_left_to_the_engine(words: list[str], device: str | None, kept: list[str]) -> None:
    """`cuda:0` is where to measure, `CUDA0` what the engine is told."""
    assert sweep_measured._device(options(), words) == (device, kept)


def test_two_devices_to_measure_on_are_one_too_many() -> None:
    """Both spellings may be used, for one device."""
    assert sweep_measured._device(options(vram_device="cpu"), ["--device", "cpu"]) == ("cpu", [])
    with pytest.raises(BadInput, match="name one"):
        sweep_measured._device(options(vram_device="auto"), ["--device", "cpu"])


@pytest.mark.parametrize(
    ("slots", "rounds"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_rounds_double_up_to_the_slots(slots: int, rounds: list[int]) -> None:
    """One request, then twice as many, and as many as there are slots."""
    assert sweep_measured._rounds(slots) == rounds


def test_slots_are_tried_both_ways(models: dict[str, Path]) -> None:
    """With the context of each slot kept, and with one context that they share; one slot is the same in both."""
    shape, given = estimating.load(models["dense"]), llama_options.read({"ctx-size": 2048})
    found = sweep_measured._values(options(over="parallel", values="1,2"), shape, given, CURRENT)
    assert [(value.text, value.way, value.settings, value.rounds) for value in found] == [
        ("1", "context each", {"parallel": 1, "ctx-size": 2048}, [1]),
        ("2", "context each", {"parallel": 2, "ctx-size": 4096}, [1, 2]),
        ("2", "context in all", {"parallel": 2, "ctx-size": 2048}, [1, 2]),
    ]
    each, shared = (value.point.estimate for value in found[1:])
    assert each is not None
    assert shared is not None
    assert each.buckets()["kv"]["gpu0"] == 2 * shared.buckets()["kv"]["gpu0"]


@pytest.mark.parametrize(
    ("over", "model", "texts", "settings"),
    [
        ("context", "dense", ["512", "1024", "2048", "4096", "8192"], {"ctx-size": 512}),
        ("cache-type", "dense", ["f16", "q8_0", "q4_0"], {"cache-type-k": "f16", "cache-type-v": "f16"}),
        ("n-cpu-moe", "moe", ["0", "24", "48"], {"n-cpu-moe": 0}),
    ],
)
def test_few_values_are_tried_where_none_are_given(
    models: dict[str, Path], over: str, model: str, texts: list[str], settings: dict[str, Any]
) -> None:
    """Each boots an engine, so there are at most five; a value sets the engine's own options."""
    shape = estimating.load(models[model])
    found = sweep_measured._values(options(over=over), shape, llama_options.read({}), CURRENT)
    assert [value.text for value in found] == texts
    assert found[0].settings == settings


def figure(mib: float) -> Reading:
    return Reading(bytes=round(mib * MIB), source="nvml-process", scope="backend", device="gpu0", exact=True)


def point(
    value: str, kv: float, serving: float, *, way: str = "", flights: dict[int, float] | None = None, **more: Any
) -> PointRecord:
    steps = [
        Step(name=f"{count} in flight", outcome="served", requests=count, in_flight=count, peak={"gpu0": figure(peak)})
        for count, peak in (flights or {}).items()
    ]
    growth = Growth(steps=tuple(steps), peak={"gpu0": figure(serving)}, growth={"gpu0": figure(3)})
    size = round(kv * MIB)
    fields: dict[str, Any] = {
        "way": way,
        "printed": {"kv": {"gpu0": size}},
        "printed_total": {"gpu0": size + 100 * MIB},
        "boot_peak": {"gpu0": figure(serving - 10)},
        "at_ready": {"gpu0": figure(serving - 12)},
        "growth": growth,
        **more,
    }
    table = {"kv": {"gpu0": size}}
    return PointRecord(
        value=value,
        buckets=table,
        at_most=table,
        total={"gpu0": size + 100 * MIB},
        total_at_most={"gpu0": size + 130 * MIB},
        command=[],
        unknown=[],
        measured=MeasuredPoint(**fields),
    )


def said(over: str, *points: PointRecord) -> str:
    card = DeviceInfo(label="gpu0", kind="nvml", name="a card", capacity=Unmeasurable(reason="t"), source="t")
    about = MeasuredSweep(device="auto", devices=[card], folder="/runs/1", binary="/bin/llama-server")
    lines = measured_lines(SweepDocument(model="m.gguf", over=over, points=list(points), measured=about))
    return " ".join(" ".join(lines).split())


def test_a_cache_that_grows_in_step_and_one_that_does_not() -> None:
    """Four times the context: four times the cache of a dense model, less where layers keep a window."""
    dense = said("context", point("1024", 20, 140), point("4096", 80, 200))
    assert "4 times the context takes 4 times the KV cache (20.00 MiB at 1024, 80.00 MiB at 4096);" in dense
    assert "in step" not in dense
    assert "1024 20.0 20.0 120.0–150.0 120.0 128.0 130.0 140.0 +3.0" in dense
    window = said("context", point("1024", 20, 140), point("4096", 35, 155))
    assert "takes 1.75 times the KV cache (20.00 MiB at 1024, 35.00 MiB at 4096): it does not grow in step" in window


def test_whether_requests_double_it_is_said_by_what_was_measured() -> None:
    """A second slot, and a second request at once, each by its own figures; a claim that holds is said to hold."""
    one = point("1", 20, 140, way="context each", flights={1: 140})
    text = said(
        "parallel",
        one,
        point("2", 40, 165, way="context each", flights={1: 164, 2: 165}),
        point("2", 20, 281, way="context in all", flights={1: 141, 2: 281}),
    )
    assert (
        "2 slots (each has its own context) peak at 1.18 times what one takes (165.0 MiB, and 140.0 MiB): not 2 times"
        in text
    )
    assert (
        "each further request at once takes 1.00 MiB (0.7% of the peak of one): its slot was paid for at boot" in text
    )
    assert (
        "2 slots (they share one context) peak at 2.01 times what one takes (281.0 MiB, and 140.0 MiB): about 2 times"
        in text
    )
    assert (
        "each further request at once takes 140.0 MiB (100.0% of the peak of one): as much as a server of its own"
        in text
    )
    four = said("parallel", one, point("4", 80, 300, way="context each"))
    assert (
        "4 slots (each has its own context) peak at 2.14 times what one takes (300.0 MiB, and 140.0 MiB): not 4 times"
        in four
    )


def test_a_value_that_did_not_boot_is_said_with_its_failure() -> None:
    """Kind, size, bucket and device of the failure, then the server's last sentence; other rows stay."""
    failure = Failure(kind="out_of_memory", certainty="certain", text="t", bucket="kv", device="gpu0", bytes=512 * MIB)
    bad = point("65536", 0, 20, boot_peak={}, growth=None, error="Backend 'sweep' ended.", failure=failure)
    text = said("context", point("512", 10, 130), bad)
    assert "65536 did not boot [out_of_memory, 512.0 MiB of kv on gpu0, certain]: Backend 'sweep' ended." in text
    assert "512 10.0 10.0" in text


def test_a_context_that_the_engine_cut_is_said() -> None:
    """Fewer tokens than asked make a row that is no row of that value."""
    cut = point("8192", 20, 140, settings={"ctx-size": 8192}, facts={"context": 4096})
    assert "context: 8,192 tokens were asked for, and the engine has 4,096" in said("context", cut)


def test_saving_of_experts_is_said_by_layer() -> None:
    """The claim about experts on the CPU is per layer, printed and measured."""
    text = said("n-cpu-moe", point("0", 20, 140), point("4", 20, 100, printed_total={"gpu0": 80 * MIB}))
    assert (
        "4 in place of 0 saves 40.00 MiB by what the engine prints, and 40.00 MiB of the peak while serving: 10.00 MiB for each layer"
        in text
    )


@pytest.mark.parametrize("command", re.findall(r"^vram sweep .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_commands_of_the_page_are_understood(command: str) -> None:
    """Every one that is shown has the options of this version, and names something that can be swept."""
    words = shlex.split(command)[1:]
    parsed, rest = entry._parser().parse_known_args(words)
    assert parsed.measure
    assert parsed.over in OVER
    _, rest = sweep_measured._device(parsed, rest)
    assert "--device" not in rest
    assert all(engine_options.named(word)[0] for word in rest if word.startswith("-"))


@pytest.mark.parametrize(("source", "told"), [("host-hwm", True), ("host-anon", False)])
def test_peaks_with_the_mapped_file_in_them_are_told_from_idle_memory_without(source: str, told: bool) -> None:
    """Side by side the two would read as if memory had been given back."""

    def on_host(mib: float, source: str) -> dict[str, Reading]:
        return {"host": Reading(bytes=round(mib * MIB), source=source, scope="backend", device="host", exact=True)}

    text = said("context", point("512", 11, 160, at_ready=on_host(34, "host-anon"), boot_peak=on_host(153, source)))
    assert ("was not given back" in text) is told


def test_the_newest_log_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    """Digits that are none to `int`, such as a superscript, are not looked at."""
    for number in ("2", "10", "²", "9x"):
        (tmp_path / f"sweep.{number}.log").touch()
    found = sweep_measured._newest_log(tmp_path, "sweep")
    assert found is not None
    assert found.name == "sweep.10.log"


def test_signs_of_the_tables_have_a_spelling_in_ascii() -> None:
    """A terminal without Unicode gets the ranges all the same."""
    import io

    assert not speaks_unicode(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = said("context", point("512", 10, 130))
    assert not {sign for sign in text if not sign.isascii()} - {"–"}

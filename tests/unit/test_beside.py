"""An estimate beside a ledger: on the devices that the engine found, with what was measured, as people read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram import beside, checks, in_force
from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.differences import Beside, Cause, between
from pytest_vram.errors import BadInput
from pytest_vram.keeper.messages import BootPhase, Closed, Stranger
from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.predicting import Predictions, estimate_on
from pytest_vram.readings import Unmeasurable
from pytest_vram.report import BackendRecord, TestRecord
from pytest_vram.report.rests import of_backend, of_test
from pytest_vram.spec import BackendSpec, Limits, as_table
from pytest_vram.units import MIB
from tests.unit import sizing_models
from tests.unit.compare_kit import backend, measured, printed, reading


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dense model."""
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return sizing_models.dense(path, layers=4, embedding=512, kv_heads=2, feed_forward=1024, types=sizing_models.Q8)


def spec(model: Path, **options: Any) -> BackendSpec:
    return BackendSpec(
        name="agent", engine="llama-server", origin="test", base=str(model.parent), model=model.name, options=options
    )


def record(model: Path, ledger: Ledger, facts: dict[str, Any] | None = None, **options: Any) -> BackendRecord:
    """A backend of this model whose engine printed this."""
    made = backend(facts={"context": 2048, **(facts or {})})
    return msgspec.structs.replace(made, spec=as_table(spec(model, **options)), ledger=ledger)


OPTIONS: dict[str, Any] = {"ctx-size": 2048, "parallel": 1, "n-gpu-layers": 99}

# ---------------------------------------------------------------- the estimate


def test_an_estimate_is_made_for_the_devices_that_the_engine_found(model: Path) -> None:
    """Under the labels of the run, whatever the engine calls them, and by the rules of their kind."""
    for names, labels in (
        ({"gpu0": "CUDA0", "host": "CPU"}, {"gpu0", "host"}),
        ({"gpu1": "CUDA0", "gpu0": "CUDA1"}, {"gpu0", "gpu1", "host"}),
        ({"gpu3": "RPC0[127.0.0.1:50052] (stands for a card)"}, {"gpu3", "host"}),
    ):
        made = estimate_on(spec(model, **OPTIONS), command=[], devices=names)
        assert set(made.total()) == labels
        assert ("context" in made.buckets()) is ("CUDA0" in names.values())


def test_what_this_package_put_on_the_command_line_counts(model: Path) -> None:
    """On host memory the server is started with --device none."""
    made = estimate_on(spec(model, **OPTIONS), command=["llama-server", "--device", "none"], devices={"host": "CPU"})
    assert set(made.total()) == {"host"}


def test_an_estimate_follows_the_build(model: Path) -> None:
    """Before November 2025 llama-server had one slot by itself, today it has four."""
    names = {"gpu0": "CUDA0"}
    plain = {"ctx-size": 2048}
    old = estimate_on(spec(model, **plain), command=[], devices=names, facts={"build": "6500 (abcdef)"})
    new = estimate_on(spec(model, **plain), command=[], devices=names, facts={"build": "1 (abcdef)"})
    assert (old.settings["parallel"], new.settings["parallel"]) == (1, 4)


def test_an_estimate_is_made_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one spec on the same devices; on others anew."""
    from pytest_vram import predicting

    asked: list[Any] = []
    made = estimate_on(spec(model, **OPTIONS), command=[], devices={"gpu0": "CUDA0"})
    monkeypatch.setattr(predicting, "estimate_on", lambda *_, **keys: asked.append(keys) or made)
    known = Predictions()
    for _ in range(3):
        assert known.on(spec(model, **OPTIONS), command=[], devices={"gpu0": "CUDA0"}) is made
    known.on(spec(model, **OPTIONS), command=[], devices={"gpu0": "Vulkan0"})
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"engine": "vllm"}, "cannot be predicted"),
        ({"model": "missing.gguf"}, "missing.gguf"),
        ({"model": "broken.gguf"}, "broken.gguf"),
        ({"options": {"nonsense": 3}}, "nonsense"),
    ],
)
def test_where_there_is_no_estimate_the_reason_is_said(model: Path, change: dict[str, Any], part: str) -> None:
    """It breaks no report."""
    (model.parent / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    broken = msgspec.structs.replace(spec(model), **change)
    found = beside.of_backend(msgspec.structs.replace(backend(), spec=as_table(broken)), Predictions())
    assert found.predicted is None
    assert part in found.reason
    table = "\n".join(ledger_table(backend().ledger, beside=found))
    assert "printed by the engine" in table
    assert "not predicted:" in table
    unreadable = beside.of_backend(msgspec.structs.replace(backend(), spec={"name": 3}), Predictions())
    assert "cannot be read back" in unreadable.reason


def test_no_engine_is_predicted_by_another_ones_rules(model: Path) -> None:
    """Nor by those of a path."""
    with pytest.raises(BadInput, match="cannot be predicted"):
        estimate_on(msgspec.structs.replace(spec(model), engine="command"), command=[], devices={})


def test_a_context_that_the_engine_lowered_is_named(model: Path) -> None:
    """The estimate is of what the spec asks for; what the engine has otherwise is a setting that differs."""
    made = estimate_on(spec(model, **OPTIONS), command=[], devices={"gpu0": "CUDA0"})
    half = tuple(
        printed(entry.bucket, entry.bytes // 2 if entry.bucket == "kv" else entry.bytes, entry.device)
        for entry in made.entries
        if entry.bucket != "context"
    )
    ledger = Ledger(entries=half, devices={"gpu0": "CUDA0"})
    found = beside.of_backend(record(model, ledger, {"context": 1024}, **OPTIONS), Predictions())
    assert [(one.setting, one.before, one.after) for one in found.changes if one.setting == "ctx-size"] == [
        ("ctx-size", 2048, 1024)
    ]
    kinds = {(one.bucket, one.device): one.meaning for one in found.differences}
    assert kinds["kv", "gpu0"] == "setting"
    assert kinds["weights", "gpu0"] in ("equal", "rounding")
    assert kinds["context", "gpu0"] == "context"


# ---------------------------------------------------------------- what is known of a rest


def meanings(found: dict[str, list[Cause]], label: str = "gpu0") -> dict[str, tuple[int, int]]:
    return {cause.meaning: (cause.least, cause.most) for cause in found.get(label, [])}


def test_a_peak_above_a_ready_server_is_growth() -> None:
    """Unless its boot reached it: then it was given back before the server was ready."""
    total = 5012 * MIB
    late = meanings(of_backend(backend(base=150 * MIB, ready=total - 70 * MIB, boot=total - 60 * MIB)))
    assert late == {"context": (150 * MIB, 150 * MIB), "growth": (70 * MIB, 70 * MIB)}
    early = meanings(of_backend(backend(ready=total - 70 * MIB, boot=total)))
    assert early == {"boot": (70 * MIB, 70 * MIB)}


def test_figures_that_count_other_bytes_are_no_growth() -> None:
    """A peak with file pages is not above the anonymous memory of a ready server."""
    one = backend(ready=1000 * MIB, boot=1000 * MIB, source="rpc-hwm")
    assert "growth" in meanings(of_backend(one))
    other = msgspec.structs.replace(
        one,
        peak={"host": reading(2000 * MIB, "host", "host-hwm")},
        at_ready={"host": reading(1000 * MIB, "host", "host-anon")},
        boot_peak={"host": reading(1500 * MIB, "host", "host-hwm")},
    )
    assert of_backend(other) == {"host": []}
    holes = msgspec.structs.replace(one, at_ready={"gpu0": Unmeasurable(reason="lost")})
    assert "growth" not in meanings(of_backend(holes))


def test_a_hosts_own_program_is_told_without_the_file_that_it_looked_into() -> None:
    """Its first phase may have read a file; the proportional share at its end has not."""
    start = BootPhase(
        name="start",
        start=0,
        end=1,
        peak={"host": reading(500 * MIB, "host", "host-hwm")},
        pss=reading(40 * MIB, "host", "host-pss"),
    )
    one = msgspec.structs.replace(backend(), phases=[start], peak={"host": reading(900 * MIB, "host", "host-hwm")})
    assert meanings(of_backend(one), "host") == {"context": (0, 40 * MIB)}


def test_others_in_the_figure_of_a_test_are_foreign() -> None:
    """pytest itself, and strangers only where a whole device was read."""
    stranger = Stranger(pid=7, name="game", device="gpu0", held=300 * MIB, grew=80 * MIB)
    test = TestRecord(
        nodeid="t",
        outcome="failed",
        seconds=1.0,
        own={"gpu0": reading(5012 * MIB)},
        process={"gpu0": reading(90 * MIB)},
        strangers=[stranger],
    )
    assert meanings(of_test(test, [backend()])) == {"foreign": (0, 90 * MIB)}
    delta = msgspec.structs.replace(test, own={"gpu0": reading(5012 * MIB, source="device-delta")}, process={})
    assert meanings(of_test(delta, [backend()])) == {"foreign": (0, 80 * MIB)}


# ---------------------------------------------------------------- for people

LEDGER = measured((printed("weights", 1000 * MIB), printed("kv", 600 * MIB)), reading(1650 * MIB, source="drm-fdinfo"))


def estimated() -> Beside:
    """An estimate whose cache is smaller than what was printed."""
    from pytest_vram.differences import Change, between

    predicted = Ledger(
        entries=(
            Entry(bucket="weights", device="gpu0", bytes=1000 * MIB, source="estimate"),
            Entry(bucket="kv", device="gpu0", bytes=512 * MIB, source="estimate"),
        )
    )
    changes = (Change(setting="ctx-size", before=4096, after=4800, buckets=("kv",)),)
    return Beside(predicted=predicted, differences=between(predicted, LEDGER, changes=changes), changes=changes)


def test_the_table_has_three_columns() -> None:
    """Predicted, printed and measured, each where there is one, and a line for each difference with a meaning."""
    lines = ledger_table(LEDGER, beside=estimated())
    assert lines[0].split() == ["memory", "breakdown", "(ledger),", "MiB,", "gpu0", "predicted", "printed", "measured"]
    table = [line.split() for line in lines[1:6]]
    assert table == [
        ["weights", "1,000.00", "1,000.00"],
        ["kv", "512.00", "600.00"],
        ["sum", "1,512.00", "1,600.00"],
        ["unattributed", "+50.00"],
        ["total", "measured", "1,650.00"],
    ]
    text = "\n".join(lines)
    assert "gpu0 kv +88.00: setting (ctx-size 4,096 → 4,800)" in text
    assert "unattributed +49.98: unknown" in text
    assert all(len(line) <= 80 for line in lines)


def stayed(bucket: Bucket, size: int) -> Entry:
    """What a probe found to stay, as it is in a ledger."""
    return Entry(bucket=bucket, device="gpu0", bytes=size, source="nvml-process", detail="growth while serving: near")


@pytest.mark.parametrize("with_estimate", [True, False])
def test_what_stayed_after_requests_is_in_no_printed_figure(with_estimate: bool) -> None:
    """It has a row of its own, and the measured total is the sum of what was printed, what stayed and the rest."""
    entries = (printed("weights", 100 * MIB), printed("kv", 22 * MIB), stayed("kv", 24 * MIB), stayed("other", 3 * MIB))
    ledger = measured(entries, reading(155 * MIB))
    predicted = Ledger(
        entries=(
            Entry(bucket="weights", device="gpu0", bytes=100 * MIB, source="estimate"),
            Entry(bucket="kv", device="gpu0", bytes=22 * MIB, source="estimate"),
        )
    )
    told = Beside(predicted=predicted, differences=between(predicted, ledger))
    table = {
        " ".join(words[: len(words) - len(cells)]): cells
        for line in ledger_table(ledger, beside=told if with_estimate else None)
        if line.startswith("  ") and (words := line.split()) and (cells := [w for w in words if w[-1:].isdigit()])
    }
    first = "sum" if with_estimate else "printed by the engine"
    assert [table[name][-1] for name in ("kv", first, "stayed after requests", "unattributed", "total measured")] == [
        "22.00",
        "122.00",
        "+27.00",
        "+6.00",
        "155.00",
    ]
    assert "other" not in table


def test_a_limit_that_does_not_hold_names_what_grew() -> None:
    """The bucket, how much against the estimate, and why; it is asked for then only."""
    closed = Closed(t0=0, t1=1, run={"gpu0": reading(1650 * MIB)}, own={"gpu0": reading(1650 * MIB)})
    asked: list[int] = []

    def made() -> Beside:
        asked.append(1)
        return estimated()

    def judged(limit: int) -> Any:
        return checks.judge_peak(
            closed,
            check="max_vram",
            limits=Limits(text="x", each=limit),
            limit_from="@max_vram",
            ledger=LEDGER,
            beside=made,
        )

    assert judged(1700 * MIB) is None
    assert asked == []
    finding = judged(1600 * MIB)
    assert asked == [1]
    assert "grew" in finding.text
    assert "kv, by 88.00 MiB against the estimate (setting:" in " ".join(finding.text.split())


@pytest.mark.parametrize(
    ("engine", "facts", "found"),
    [
        (
            "llama-server",
            {"context": 4096, "slots": 2, "flash_attention": "enabled"},
            {"ctx-size": 4096, "parallel": 2, "flash-attn": "on"},
        ),
        ("llama-server", {"layers": 32, "layers_offloaded": 33}, {"layers-on-gpu": 32}),
        ("llama-server", {"layers": 32, "layers_offloaded": 10}, {"layers-on-gpu": 9}),
        ("llama-server", {"layers": 32, "layers_offloaded": 33, "layers_on_device_real": 0}, {"layers-on-gpu": 0}),
        ("vllm", {"context": 4096, "memory_share": 0.9}, {"max-model-len": 4096, "gpu-memory-utilization": 0.9}),
        ("sglang", {"context": 4096}, {"context-length": 4096}),
        ("transformers", {"context": 4096}, {"max-length": 4096}),
    ],
)
def test_settings_have_the_engines_own_names(engine: str, facts: dict[str, Any], found: dict[str, Any]) -> None:
    """What a log says of a setting is compared with the option that sets it."""
    assert in_force.of_facts(engine, facts) == found


def test_what_a_log_says_goes_before_what_was_asked() -> None:
    """And options that decide no memory are no settings."""
    options = {
        "ctx-size": 8192,
        "n-gpu-layers": 999,
        "mlock": True,
        "port": 1,
        "log-file": "x",
        "override-tensor": ["a=CPU", "b=CPU"],
    }
    found = in_force.of_options(options, {"ctx-size": 4096, "layers-on-gpu": 12})
    assert found == {"ctx-size": 4096, "layers-on-gpu": 12, "mlock": True, "override-tensor": "a=CPU,b=CPU"}

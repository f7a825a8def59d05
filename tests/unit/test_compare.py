"""Two runs, logs and estimates compared: what is matched, which settings are named, what is judged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_vram import tolerance
from pytest_vram.ledger import BUCKETS
from pytest_vram.readings import Unmeasurable
from pytest_vram.report import RunReport
from pytest_vram.report.comparison import CompareDocument, compare, loud
from pytest_vram.report.comparison_lines import compare_lines
from pytest_vram.report.deployments import kind_of, of_run
from pytest_vram.units import MIB
from tests.unit.compare_kit import attempt_at, backend, card, reading, run_of


def compared(before: RunReport, after: RunReport, fail_on: str | None = None) -> CompareDocument:
    """Two runs, held against an expression where one is given."""
    limits = tolerance.parse(fail_on, BUCKETS, origin="test") if fail_on else ()
    return compare(of_run(before, "a.json"), of_run(after, "b.json"), tolerances=limits, fail_on=fail_on)


def only(document: CompareDocument) -> Any:
    """The only pair of deployments."""
    (pair,) = document.deployments
    return pair


def changes(document: CompareDocument) -> dict[str, tuple[Any, Any]]:
    """Setting → before and after."""
    return {one.setting: (one.before, one.after) for one in only(document).changes}


def test_a_run_does_not_differ_from_itself() -> None:
    """Every bucket is equal, nothing is listed."""
    document = compared(run_of(backend()), run_of(backend()))
    assert {row.meaning for row in only(document).differences} == {"equal"}
    assert only(document).changes == []
    assert [(total.least, total.basis_before) for total in only(document).totals] == [(0, "measured")]


def test_the_bucket_that_grew_is_named_with_its_setting() -> None:
    """Twice the context: the cache grew, by what may be, and the rest did not."""
    before = run_of(backend(options={"ctx-size": 4096}))
    after = run_of(backend(kv=1024 * MIB, context=8192, options={"ctx-size": 8192}))
    document = compared(before, after)
    rows = {row.bucket: row for row in only(document).differences}
    assert (rows["kv"].least, rows["kv"].meaning) == (512 * MIB, "setting")
    assert "ctx-size 4,096 → 8,192" in rows["kv"].text
    assert rows["weights"].meaning == rows["unattributed"].meaning == "equal"
    assert changes(document) == {"ctx-size": (4096, 8192)}
    text = "\n".join(compare_lines(document))
    assert "kv" in text
    assert "+512.00" in text


@pytest.mark.parametrize(
    ("shrunk", "rest", "said"), [(84, 201.22, False), (84, 260, True), (0, 200.5, False), (0, 201.22, True)]
)
def test_noise_is_not_what_grew_most(shrunk: int, rest: float, said: bool) -> None:
    """Beside 84 MiB that a deployment is smaller, 1.22 MiB of what nobody explains are not the first thing to say."""
    after = run_of(backend(kv=(512 - shrunk) * MIB, rest=int(rest * MIB)))
    assert any(line.startswith("grew most") for line in compare_lines(compared(run_of(backend()), after))) is said


def test_runs_of_one_command_are_of_one_model() -> None:
    """A server of any kind may say nothing of its model: the spec does."""
    silent = [backend(facts=dict.fromkeys(("architecture", "layers", "parameters"))) for _ in range(2)]
    assert compared(run_of(silent[0]), run_of(silent[1]), "peak").verdict == "undecided"
    told = [msgspec.structs.replace(one, spec={**one.spec, "argv": ["serve", "m"]}) for one in silent]
    assert compared(run_of(told[0]), run_of(told[1]), "peak").verdict == "held"


def test_a_quantisation_is_a_setting_and_another_model_is_none() -> None:
    """One compares along the quantisation; figures of two models differ anyway, which is said first."""
    half = run_of(backend(weights=15000 * MIB, facts={"quantization": "F16"}))
    document = compared(half, run_of(backend()))
    assert {row.bucket: row.meaning for row in only(document).differences}["weights"] == "setting"
    assert not loud(document)
    other = run_of(backend(facts={"layers": 36, "parameters": 4020000000}))
    document = compared(half, other)
    assert [change.setting for change in loud(document)["agent"]] == ["layers", "parameters"]
    assert any(line.startswith("NOT ALIKE") for line in compare_lines(document))


@pytest.mark.parametrize(("printed", "same"), [(8030000000, True), (8030261248, True), (8100000000, False)])
def test_parameters_are_equal_within_the_printed_digits(printed: int, same: bool) -> None:
    """A log says 8.03 B, a file 8,030,261,248."""
    document = compared(run_of(backend()), run_of(backend(facts={"parameters": printed})))
    assert bool(loud(document)) is not same


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (("Q4_K - Medium", "Q4_K_M"), True),
        (("Q4_K - Small", "Q4_K - Medium"), False),
        (("F16", "f16"), True),
    ],
)
def test_a_quantisation_has_two_spellings(names: tuple[str, str], same: bool) -> None:
    """That of the log and that of the file."""
    first, second = (run_of(backend(facts={"quantization": name})) for name in names)
    assert ("quantization" not in changes(compared(first, second))) is same


def test_ports_of_a_software_gpu_are_no_other_device() -> None:
    """Its endpoint is another in every run; another card is another device."""
    runs = [run_of(backend(), devices=(card(f"RPC0[127.0.0.1:{port}]", "rpc"),)) for port in (40001, 40002)]
    assert not loud(compared(*runs))
    cards = [
        run_of(backend(), devices=(card(name),)) for name in ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4060")
    ]
    assert [change.setting for change in loud(compared(*cards))["agent"]] == ["device gpu0"]


def test_options_that_one_spec_does_not_give_are_listed() -> None:
    """A setting is a difference where only one of the two has it, unless the log says what it was in both."""
    first = run_of(backend(options={"n-cpu-moe": 6, "mlock": True, "port": 8080}))
    second = run_of(backend(options={"mlock": False, "ctx-size": 4096}))
    assert changes(compared(first, second)) == {"n-cpu-moe": (6, None), "mlock": (True, False)}


def test_what_one_log_does_not_say_is_not_known() -> None:
    """An older build prints fewer settings: that is no difference of settings."""
    first, second = backend(), backend()
    fewer = {name: value for name, value in second.facts.items() if name not in ("slots", "cache_type_k", "layers")}
    second = msgspec.structs.replace(second, facts=fewer)
    for pair in ((first, second), (second, first)):
        document = compared(run_of(pair[0]), run_of(pair[1]))
        assert changes(document) == {}
        assert not loud(document)


def test_a_driver_decides_its_context_only() -> None:
    """It is listed, and explains no cache."""
    first = run_of(backend(), versions={"nvidia-driver": "550.1", "pytest": "8.4"})
    second = run_of(backend(kv=600 * MIB), versions={"nvidia-driver": "560.2", "pytest": "9.0"})
    document = compared(first, second)
    assert changes(document) == {"nvidia-driver": ("550.1", "560.2")}
    assert {row.bucket: row.meaning for row in only(document).differences}["kv"] == "unknown"
    assert [(one.setting, one.before, one.after) for one in document.changes] == [("pytest", "8.4", "9.0")]


def test_growth_that_both_runs_measured_is_compared() -> None:
    """One grew by 50 MiB above a ready server, the other by 250: the difference is growth while serving."""
    runs = [
        run_of(backend(rest=(200 + grew) * MIB, ready=5012 * MIB, boot=5012 * MIB, base=150 * MIB))
        for grew in (50, 250)
    ]
    (row,) = [row for row in only(compared(*runs)).differences if row.bucket == "unattributed"]
    assert (row.meaning, row.least) == ("growth", 200 * MIB)


def test_deployments_are_matched_by_name_and_settings() -> None:
    """Two of one name are matched by their settings where they can be, else in their order; others stand alone."""
    small, large = backend(options={"ctx-size": 4096}), backend(options={"ctx-size": 8192}, context=8192)
    other = backend(name="embedder")
    document = compared(run_of(small, large, other), run_of(large, small, backend(name="judge")))
    assert [(pair.name, [change.setting for change in pair.changes]) for pair in document.deployments] == [
        ("agent", []),
        ("agent", []),
    ]
    assert document.only_before == ["backend embedder"]
    assert document.only_after == ["backend judge"]
    one = compared(run_of(backend(name="old")), run_of(backend(name="new")))
    assert only(one).name == "new"


def test_of_several_generations_the_highest_counts() -> None:
    """A restart is the same deployment once more."""
    document = compared(run_of(backend(), backend(rest=900 * MIB)), run_of(backend()))
    assert only(document).totals[0].least == -700 * MIB


# ---------------------------------------------------------------- tests of both runs


def test_tests_that_differ_are_listed() -> None:
    """Another outcome first, then peaks, and those that only one run has."""
    names = ["t::same", "t::broke", "t::grew", "t::gone"]
    before = run_of(backend(), tests=tuple(attempt_at(name, reading(1000 * MIB), "passed") for name in names))
    after = run_of(
        backend(),
        tests=(
            attempt_at("t::same", reading(1000 * MIB), "passed"),
            attempt_at("t::broke", reading(1000 * MIB), "failed"),
            attempt_at("t::grew", reading(1300 * MIB), "passed"),
            attempt_at("t::new", reading(1000 * MIB), "passed"),
        ),
    )
    document = compared(before, after)
    assert document.only_before == ["t::gone"]
    assert document.only_after == ["t::new"]
    text = "\n".join(compare_lines(document))
    assert "tests: 3 in both, 1 with the same outcome and peak" in text
    assert text.index("t::broke: passed → failed") < text.index("t::grew")
    assert "+300.00" in text


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("rest", "fail_on", "verdict"),
    [
        (200, "peak", "held"),
        (201, "peak", "grew"),
        (201, "peak:5%", "held"),
        (455, "peak:5%+4MiB", "grew"),
        (454, "peak:5%+4MiB", "held"),
        (100, "peak", "held"),
        (900, "kv:0%", "held"),
        (900, "unattributed:600MiB", "grew"),
        (900, "lora", "undecided"),
    ],
)
def test_growth_beyond_a_tolerance_is_found(rest: int, fail_on: str, verdict: str) -> None:
    """Of the total, or of one bucket; what neither has cannot be judged."""
    document = compared(run_of(backend()), run_of(backend(rest=rest * MIB)), fail_on)
    assert document.verdict == verdict
    assert fail_on in compare_lines(document)[-1] or any(fail_on in line for line in compare_lines(document))


def test_peaks_of_tests_are_judged_too() -> None:
    """A test may grow where its backend did not."""
    first = run_of(backend(), tests=(attempt_at("t", reading(1000), "passed"),))
    second = run_of(backend(), tests=(attempt_at("t", reading(1100), "passed"),))
    document = compared(first, second, "peak:5%")
    assert document.verdict == "grew"
    assert [(one.where, one.result) for one in document.judged] == [("agent gpu0", "held"), ("t gpu0", "grew")]


@pytest.mark.parametrize(
    ("before", "after", "result"),
    [
        (reading(1000), Unmeasurable(reason="the card was lost"), "undecided"),
        (reading(1000), Unmeasurable(reason="the card was lost", at_least=2000), "grew"),
        (Unmeasurable(reason="no device"), reading(1000), "undecided"),
        (reading(1000), reading(900, missed="nobody looked for 9 s"), "undecided"),
        (reading(1000, missed="nobody looked for 9 s"), reading(2000), "undecided"),
        (reading(1000, at_most=1200), reading(1100), "undecided"),
    ],
)
def test_what_is_not_known_is_not_judged(before: Any, after: Any, result: str) -> None:
    """A hole decides nothing, except where even its lower end is too much."""
    first, second = (run_of(backend(), tests=(attempt_at("t", figure, "passed"),)) for figure in (before, after))
    judged = [one for one in compared(first, second, "peak:5%").judged if one.where.startswith("t ")]
    assert [one.result for one in judged] == [result]
    assert bool(judged[0].reason) is (result == "undecided")


def test_a_total_that_was_printed_does_not_judge_one_that_was_measured() -> None:
    """The engine prints buffers alone: the driver's context would be growth."""
    record = backend()
    printed = msgspec.structs.replace(
        record, ledger=msgspec.structs.replace(record.ledger, entries=record.ledger.entries[:-1], measured={}), peak={}
    )
    for pair in ((printed, record), (record, printed)):
        (judged,) = compared(run_of(pair[0]), run_of(pair[1]), "peak").judged
        assert judged.result == "undecided"
        assert "do not contain the same" in judged.reason


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CUDA0", "CUDA"),
        ("a CUDA card", "CUDA"),
        ("RPC0[127.0.0.1:50052]", "RPC"),
        ("Vulkan0", "Vulkan"),
        ("CPU", ""),
        ("", ""),
    ],
)
def test_kinds_of_devices_are_told_by_their_names(name: str, kind: str) -> None:
    """Of an engine's log and of an estimate."""
    assert kind_of(name) == kind

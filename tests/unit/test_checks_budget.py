"""Peaks against limits: exact boundaries, intervals, several devices, and what a reader is told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.checks import OWN, is_apart, judge_peak, own_of, scope_of, tightest
from pytest_vram.keeper.messages import Closed, Share
from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import Limits

MIB = 1 << 20
GIB = 1 << 30
LIMIT = 100 * MIB


def reading(low: int, high: int | None = None, device: str = "gpu0", exact: bool = True) -> Reading:
    return Reading(bytes=low, at_most=high, source="rpc-hwm", scope="run", device=device, exact=exact)


def window(figure: Measured | None = None, **more: object) -> Closed:
    run = {"gpu0": figure} if figure is not None else {}
    return Closed(t0=0, t1=1, **{"run": run, **more})  # type: ignore[arg-type]


def verdict(closed: Closed, limits: Limits | None = None, **more: object) -> str | None:
    found = judge_peak(
        closed,
        check="max_vram",
        limits=limits or Limits(text="100MiB", each=LIMIT),
        limit_from="@max_vram",
        **more,  # type: ignore[arg-type]
    )
    return None if found is None else found.verdict


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (LIMIT, None, None),
        (LIMIT + 1, None, "failed"),
        (0, None, None),
        (LIMIT - 1, LIMIT, None),
        (LIMIT, LIMIT + 1, "inconclusive"),
        (LIMIT + 1, LIMIT + 2, "failed"),
        (0, LIMIT + 1, "inconclusive"),
    ],
)
def test_boundaries(low: int, high: int | None, expected: str | None) -> None:
    """The limit holds when the upper end is within it, fails when the lower end is over it, else is undecided."""
    assert verdict(window(reading(low, high))) == expected


@given(low=st.integers(0, 1 << 40), width=st.integers(0, 1 << 40), limit=st.integers(1, 1 << 41))
def test_interval_rule(low: int, width: int, limit: int) -> None:
    """For every interval and limit the verdict follows the rule, so no value within the interval contradicts it."""
    found = verdict(window(reading(low, low + width)), Limits(text="x", each=limit))
    assert found == ("failed" if low > limit else "inconclusive" if low + width > limit else None)


def test_unmeasurable_never_passes() -> None:
    """A figure that could not be measured is inconclusive, with its reason."""
    closed = window(Unmeasurable(reason="the driver does not say"))
    found = judge_peak(closed, check="c", limits=Limits(text="x", each=LIMIT), limit_from="here")
    assert found is not None
    assert found.verdict == "inconclusive"
    assert "the driver does not say" in found.text


def test_nothing_measured_never_passes() -> None:
    """A window without any figure is inconclusive for every kind of limit."""
    for limits in (
        Limits(text="x", each=LIMIT),
        Limits(text="x", by_label={"gpu0": LIMIT}),
        Limits(text="x", total=LIMIT),
    ):
        assert verdict(window(), limits) == "inconclusive"


def test_label_that_is_not_there() -> None:
    """A limit for a device that was not measured is inconclusive and names those that were."""
    limits = Limits(text="x", by_label={"gpu7": LIMIT})
    found = judge_peak(window(reading(1)), check="c", limits=limits, limit_from="here")
    assert found is not None
    assert (found.verdict, found.device) == ("inconclusive", "gpu7")
    assert "measured devices: gpu0" in found.text


def test_device_without_a_limit() -> None:
    """A device without a limit of its own is not judged."""
    assert verdict(window(reading(GIB)), Limits(text="x", by_label={"gpu1": GIB}, total=2 * GIB)) == "inconclusive"
    both = window(run={"gpu0": reading(GIB), "gpu1": reading(1, device="gpu1")})
    assert verdict(both, Limits(text="x", by_label={"gpu1": GIB})) is None


def test_trouble_is_no_pass() -> None:
    """A window whose measurement had trouble does not pass, and still fails when it is over."""
    assert verdict(window(reading(1), trouble=["the probe stalled"])) == "inconclusive"
    assert verdict(window(reading(LIMIT + 1), trouble=["the probe stalled"])) == "failed"


@pytest.mark.parametrize(("second", "expected"), [(40 * MIB, None), (40 * MIB + 1, "failed")])
def test_sum_over_devices(second: int, expected: str | None) -> None:
    """`sum=` holds the peaks of all devices together against one limit."""
    closed = window(run={"gpu0": reading(60 * MIB), "gpu1": reading(second, device="gpu1")})
    assert verdict(closed, Limits(text="sum=100MiB", total=LIMIT)) == expected


def test_sum_with_a_hole() -> None:
    """A sum in which one device could not be measured is inconclusive."""
    closed = window(run={"gpu0": reading(1), "gpu1": Unmeasurable(reason="gone")})
    assert verdict(closed, Limits(text="x", total=LIMIT)) == "inconclusive"


def test_gravest_comes_first() -> None:
    """With several devices amiss the finding is about the one furthest over, and its text has them all."""
    closed = window(
        run={
            "gpu0": Unmeasurable(reason="gone"),
            "gpu1": reading(LIMIT + 1, device="gpu1"),
            "gpu2": reading(2 * LIMIT, device="gpu2"),
        }
    )
    found = judge_peak(closed, check="c", limits=Limits(text="x", each=LIMIT), limit_from="here")
    assert found is not None
    assert (found.verdict, found.device) == ("failed", "gpu2")
    assert all(word in found.text for word in ("gone", "gpu1", "gpu2"))


@pytest.mark.parametrize("scope", ["run", "backend", "process", "device"])
def test_scopes(scope: str) -> None:
    """Each scope judges its own table."""
    tables = {
        name: {"gpu0": reading(LIMIT + 1 if name == scope else 1)} for name in ("run", "backend", "process", "device")
    }
    assert verdict(window(**tables), scope=scope) == "failed"
    tables[scope] = {"gpu0": reading(1)}
    assert verdict(window(**tables), scope=scope) is None


@pytest.mark.parametrize(
    ("peak", "base", "expected"),
    [
        (reading(150 * MIB), reading(50 * MIB), None),
        (reading(150 * MIB + 1), reading(50 * MIB), "failed"),
        (reading(150 * MIB), reading(50 * MIB, 60 * MIB), None),
        (reading(155 * MIB), reading(50 * MIB, 60 * MIB), "inconclusive"),
        (reading(10), reading(GIB), None),
        (reading(10), Unmeasurable(reason="no"), "inconclusive"),
        (reading(10), None, "inconclusive"),
    ],
)
def test_over_baseline(peak: Reading, base: Measured | None, expected: str | None) -> None:
    """`over="baseline"` judges the rise, with both intervals combined."""
    baseline = {} if base is None else {"gpu0": base}
    assert verdict(window(peak, baseline=baseline), over="baseline") == expected


def test_baseline_of_other_scopes() -> None:
    """A scope without a baseline is inconclusive and says what to use; a fresh backend starts from nothing."""
    closed = window(process={"gpu0": reading(1)}, backend={"gpu0": reading(LIMIT + 1)})
    found = judge_peak(
        closed, check="c", limits=Limits(text="x", each=LIMIT), limit_from="h", scope="process", over="baseline"
    )
    assert found is not None
    assert "over='total'" in found.text
    assert verdict(closed, scope="backend", over="baseline") == "failed"


def test_phase() -> None:
    """A limit of a phase judges that phase alone; a phase that did not occur is inconclusive."""
    closed = window(reading(GIB), phases={"warm-up": {"gpu0": reading(1)}})
    assert verdict(closed, phase="warm-up") is None
    found = judge_peak(closed, check="c", limits=Limits(text="x", each=LIMIT), limit_from="h", phase="decode")
    assert found is not None
    assert found.verdict == "inconclusive"
    assert "phases seen: warm-up" in found.text


def test_unknown_scope() -> None:
    """A scope that does not exist is a programming error."""
    with pytest.raises(ValueError, match="not a scope"):
        verdict(window(reading(1)), scope="galaxy")


LEDGER = Ledger(
    entries=(
        Entry(bucket="weights", device="gpu0", bytes=60 * MIB, source="engine-log"),
        Entry(bucket="kv", device="gpu0", bytes=90 * MIB, source="engine-log"),
        Entry(bucket="weights", device="host", bytes=20 * MIB, source="engine-log"),
    ),
    devices={"gpu0": "RPC0[127.0.0.1:50052]", "host": "CPU"},
)


def test_failing_text() -> None:
    """A failure says peak, limit and its place, source, largest bucket, holders, overlap, boot and the whole ledger."""
    figure = reading(152 * MIB)
    closed = window(
        figure,
        boot=True,
        overlapped=["test_b.py::b"],
        shares=[Share(pid=77, name="ggml-rpc-server", device="gpu0", bytes=150 * MIB, backend="agent")],
    )
    found = judge_peak(
        closed,
        check="vram_budget",
        limits=Limits(text="100MB", each=100 * 10**6),
        limit_from="--vram-budget on the command line",
        ledger=LEDGER.against({"gpu0": figure}),
    )
    assert found is not None
    assert (found.check, found.limit, found.limit_from) == ("vram_budget", 10**8, "--vram-budget on the command line")
    assert found.measured == figure
    for words in (
        "152.0 MiB",
        "100MB (95.37 MiB)",
        "--vram-budget on the command line",
        "rpc-hwm; exact",
        "kv with 90.00 MiB",
        "ggml-rpc-server (PID 77, backend agent) 150.0 MiB",
        "test_b.py::b",
        "while the backend started",
        "memory breakdown (ledger)",
        "RPC0[127.0.0.1:50052]",
        "+2.00",
    ):
        assert words in found.text, words


@pytest.mark.parametrize("bucket", ["weights", "experts", "kv", "compute", "recurrent"])
def test_the_largest_bucket_says_what_changes_it(bucket: Bucket) -> None:
    """Every bucket that a setting of the engine decides names the setting."""
    figure = reading(152 * MIB)
    entry = Entry(bucket=bucket, device="gpu0", bytes=150 * MIB, source="engine-log")
    found = judge_peak(
        window(figure),
        check="c",
        limits=Limits(text="100MB", each=100 * 10**6),
        limit_from="here",
        ledger=Ledger(entries=(entry,)).against({"gpu0": figure}),
    )
    assert found is not None
    assert f"{bucket} with 150.0 MiB" in found.text
    assert "changed by" in found.text


def test_card_hint() -> None:
    """A peak between 4GB and 4GiB hints at the unit."""
    found = judge_peak(
        window(reading(4 * 10**9 + 1)), check="c", limits=Limits(text="4GB", each=4 * 10**9), limit_from="h"
    )
    assert found is not None
    assert "write 4GiB if you mean the card" in " ".join(found.text.split())


def test_host_stands_in() -> None:
    """A peak of host memory says that it stands in for VRAM."""
    closed = window(run={"host": reading(LIMIT + 1, device="host")})
    found = judge_peak(closed, check="c", limits=Limits(text="x", each=LIMIT), limit_from="h")
    assert found is not None
    assert "host memory stands in for VRAM" in found.text


def test_undecided_says_what_settles_it() -> None:
    """An undecided interval names both ends and what would settle it."""
    found = judge_peak(
        window(reading(90 * MIB, 110 * MIB)), check="c", limits=Limits(text="x", each=LIMIT), limit_from="h"
    )
    assert found is not None
    assert "between 90.00 MiB and 110.0 MiB" in found.text
    assert "what settles it" in found.text


BUDGET, MARKER = "--vram-budget", "@max_vram"


@pytest.mark.parametrize(
    ("budget", "marker", "each", "check", "place"),
    [
        (4 * GIB, 3 * GIB, 3 * GIB, "max_vram", MARKER),
        (3 * GIB, 4 * GIB, 3 * GIB, "vram_budget", BUDGET),
        (3 * GIB, 3 * GIB, 3 * GIB, "max_vram", MARKER),
        (3 * GIB, None, 3 * GIB, "vram_budget", BUDGET),
        (None, 3 * GIB, 3 * GIB, "max_vram", MARKER),
    ],
)
def test_tightest(budget: int | None, marker: int | None, each: int, check: str, place: str) -> None:
    """The smaller of budget and marker holds, and is named."""
    limits, found_check, found_place = tightest(
        Limits(text="b", each=budget) if budget else None,
        BUDGET,
        Limits(text="m", each=marker) if marker else None,
        MARKER,
        labels=["gpu0"],
    )
    assert (limits.of("gpu0"), limits.of("gpu1"), found_check, found_place) == (each, each, check, place)


def test_tightest_by_device() -> None:
    """Where each is the smaller on some device, the place says which holds where."""
    budget = Limits(text="gpu0=11GiB,gpu1=3GiB", by_label={"gpu0": 11 * GIB, "gpu1": 3 * GIB})
    limits, check, place = tightest(budget, BUDGET, Limits(text="4GiB", each=4 * GIB), MARKER, labels=["gpu0", "gpu1"])
    assert (limits.of("gpu0"), limits.of("gpu1")) == (4 * GIB, 3 * GIB)
    assert check == "max_vram"
    assert place == f"gpu0: {MARKER}; gpu1: {BUDGET}"


def test_tightest_keeps_a_sum() -> None:
    """A budget for the sum holds beside a marker's limit per device."""
    limits, _, place = tightest(
        Limits(text="sum=5GiB", total=5 * GIB), BUDGET, Limits(text="4GiB", each=4 * GIB), MARKER, labels=["gpu0"]
    )
    assert (limits.of("gpu0"), limits.total) == (4 * GIB, 5 * GIB)
    assert place == f"gpu0: {MARKER}; sum: {BUDGET}"


def test_tightest_of_nothing() -> None:
    """Neither a budget nor a marker is a programming error."""
    with pytest.raises(ValueError, match="neither"):
        tightest(None, BUDGET, None, MARKER)


def test_host_memory_stands_in_only_where_it_stands_alone() -> None:
    """Beside a card, the host's column is host memory and stands in for nothing."""
    from pytest_vram.checks import ledger_table
    from pytest_vram.ledger import Ledger

    def figure(label: str) -> Reading:
        return Reading(bytes=1 << 20, source="s", scope="run", device=label, exact=True)

    alone = "\n".join(ledger_table(Ledger(measured={"host": figure("host")}).against({"host": figure("host")})))
    beside = "\n".join(ledger_table(Ledger().against({"gpu0": figure("gpu0"), "host": figure("host")})))
    assert "stands in for VRAM" in alone
    assert "stands in for VRAM" not in beside


def beside(own: Measured, run: Measured, **more: object) -> Closed:
    return Closed(t0=0, t1=1, **{"run": {"gpu0": run}, "own": {"gpu0": own}, **more})  # type: ignore[arg-type]


def test_own_and_run() -> None:
    """A test's own memory within its limit holds though the run's is over it, and the other way round it fails."""
    own, run = msgspec.structs.replace(reading(60 * MIB), scope=OWN), reading(120 * MIB)
    assert verdict(beside(own, run), scope=OWN) is None
    assert verdict(beside(own, run), scope="run") == "failed"
    found = judge_peak(
        beside(own, run), check="c", limits=Limits(text="x", each=50 * MIB), limit_from="here", scope=OWN
    )
    assert found is not None
    assert found.text.startswith(
        "The peak of this test (its own processes and backends) is 60.00 MiB, 10.00 MiB over the limit"
    )
    words = " ".join(found.text.split())
    assert "left out what other tests held at the same time in other workers and in backends of theirs" in words
    assert "the peak of the whole run is 120.0 MiB" in words


def test_own_is_the_run_where_nobody_else_was() -> None:
    """Without a figure of its own, or with the same one, a test's part of the run is the run."""
    alone = window(reading(60 * MIB))
    assert own_of(alone) == alone.run
    assert not is_apart(alone)
    assert not is_apart(beside(reading(1, 2), reading(1, 2)))
    assert (scope_of(alone, "run"), scope_of(alone, "backend")) == ("run", "backend")
    apart = beside(reading(1), reading(1, 2))
    assert is_apart(apart)
    assert (scope_of(apart, "run"), scope_of(apart, "process")) == (OWN, "process")


def test_own_that_could_not_be_measured() -> None:
    """What is known at least of the run is not held against a test of which less is known."""
    gone = Unmeasurable(reason="gone", at_least=10 * MIB)
    closed = beside(gone, msgspec.structs.replace(gone, at_least=500 * MIB))
    assert is_apart(closed)
    assert verdict(closed, scope=scope_of(closed, "run")) == "inconclusive"


@pytest.mark.parametrize("scope", ["run", "backend"])
def test_a_rise_before_the_baseline_moved_counts(scope: str) -> None:
    """The largest rise counts, whether it was over the last baseline or over one before."""
    table = {"gpu0": reading(344 * MIB)}
    figures: dict[str, object] = {"run": table, "backend": table, "baseline": table, "baseline_backend": table}
    assert verdict(window(**figures), scope=scope, over="baseline") is None
    figures |= {"risen" if scope == "run" else "risen_backend": {"gpu0": reading(LIMIT + 1)}}
    assert verdict(window(**figures), scope=scope, over="baseline") == "failed"


def test_a_sum_says_what_it_is() -> None:
    """A sum of peaks is not called a peak: it need not have been held at any time; one device's is one."""
    limits = Limits(text="sum=100MiB", total=LIMIT)
    both = window(run={"gpu0": reading(60 * MIB), "gpu1": reading(60 * MIB, device="gpu1")})
    found = judge_peak(both, check="c", limits=limits, limit_from="here")
    assert found is not None
    assert found.text.startswith(
        "The sum of the peaks of this run on gpu0 and gpu1, which need not have fallen at the same moment, is 120.0 MiB"
    )
    assert "peak of this run" not in found.text
    alone = judge_peak(window(reading(120 * MIB)), check="c", limits=limits, limit_from="here")
    assert alone is not None
    assert alone.text.startswith("The peak of this run is 120.0 MiB")
    rises = window(**dict.fromkeys(("run", "risen"), both.run), baseline=both.run)  # type: ignore[arg-type]
    risen = judge_peak(rises, check="c", limits=limits, limit_from="here", over="baseline")
    assert risen is not None
    assert risen.text.startswith("The sum of the rises over the baseline of this run on gpu0 and gpu1, which")

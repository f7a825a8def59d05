"""Two ledgers beside each other: each difference has its meaning, and none beyond a rule's bound is explained."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.differences import MEANINGS, Cause, Change, Difference, between, grown
from pytest_vram.ledger import Entry, Ledger
from pytest_vram.units import MIB
from tests.unit.compare_kit import DIGIT, measured, predicted, printed, reading


def one(found: tuple[Difference, ...], bucket: str, device: str = "gpu0") -> Difference:
    """The only difference of a bucket on a device."""
    rows = [row for row in found if (row.bucket, row.device) == (bucket, device)]
    assert len(rows) == 1, rows
    return rows[0]


def meanings(found: tuple[Difference, ...], bucket: str = "unattributed") -> dict[str, int]:
    """Meaning → bytes of the parts of a bucket."""
    return {row.meaning: row.least for row in found if row.bucket == bucket}


def test_equal_figures_are_equal() -> None:
    """The same number of bytes needs no explanation."""
    found = between(Ledger(entries=(predicted("kv", 100),)), Ledger(entries=(printed("kv", 100),)))
    assert one(found, "kv").meaning == "equal"


@pytest.mark.parametrize(
    ("size", "meaning"), [(DIGIT, "rounding"), (DIGIT + 1, "unknown"), (-DIGIT, "rounding"), (-DIGIT - 1, "unknown")]
)
def test_the_printed_digits_bound_rounding(size: int, meaning: str) -> None:
    """Half of the last printed digit is expected, one byte more is not."""
    before = Ledger(entries=(predicted("compute", 64 * MIB),))
    found = between(before, Ledger(entries=(printed("compute", 64 * MIB + size),)))
    assert one(found, "compute").meaning == meaning
    assert one(found, "compute").least == size


def test_a_figure_in_the_range_of_an_estimate_is_no_difference() -> None:
    """Both ends count; outside of them the distance to the nearer end must be explained."""
    before = Ledger(entries=(predicted("weights", 100 * MIB, "host", at_most=200 * MIB),))
    inside = one(between(before, Ledger(entries=(printed("weights", 150 * MIB, "host"),))), "weights", "host")
    assert (inside.meaning, inside.least, inside.most) == ("range", -50 * MIB, 50 * MIB)
    outside = one(between(before, Ledger(entries=(printed("weights", 201 * MIB, "host"),))), "weights", "host")
    assert (outside.meaning, outside.least) == ("unknown", MIB)


def test_experts_among_the_weights_of_a_log_are_compared_with_both() -> None:
    """llama.cpp prints one model buffer: the estimate's experts are in it."""
    before = Ledger(entries=(predicted("weights", 100), predicted("experts", 900)))
    found = between(before, Ledger(entries=(printed("weights", 1000),)))
    assert [row.bucket for row in found] == ["weights"]
    assert one(found, "weights").before == 1000


def test_experts_of_two_estimates_stay_apart() -> None:
    """A dense model has none, and that is a difference."""
    before = Ledger(entries=(predicted("weights", 100), predicted("experts", 900)))
    found = between(before, Ledger(entries=(predicted("weights", 100),)))
    assert one(found, "experts").after is None
    assert one(found, "experts").meaning == "unknown"


def test_recurrent_state_in_the_cache_of_a_dry_run_is_compared_with_both() -> None:
    """The table of a dry run has one column for cache and state, a boot log has two kinds of lines."""
    before = Ledger(entries=(predicted("kv", 70), predicted("recurrent", 30)))
    dry = Entry(bucket="kv", device="gpu0", bytes=100, source="dry-run")
    assert one(between(before, Ledger(entries=(dry,))), "kv").meaning == "equal"
    boot = Ledger(entries=(printed("kv", 70), printed("recurrent", 30)))
    assert [row.meaning for row in between(before, boot)] == ["equal", "equal"]


# ---------------------------------------------------------------- settings


def change(setting: str, before: Any, after: Any, *buckets: Any) -> Change:
    return Change(setting=setting, before=before, after=after, buckets=buckets)


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [(1.0, "equal"), (1.5, "setting"), (2.0, "setting"), (2.07, "unknown"), (0.9, "unknown")],
)
def test_twice_the_context_explains_at_most_twice_the_cache(factor: float, meaning: str) -> None:
    """A window keeps a cache from growing, nothing makes it grow faster than the context, and nothing makes it shrink."""
    before = Ledger(entries=(printed("kv", 512 * MIB),))
    after = Ledger(entries=(printed("kv", int(512 * MIB * factor)),))
    found = between(before, after, changes=[change("ctx-size", 8192, 16384, "kv")])
    assert one(found, "kv").meaning == meaning


@pytest.mark.parametrize(
    ("slots", "cells", "meaning"),
    [(1, 256, "setting"), (1, 300, "unknown"), (4, 1024, "setting"), (4, 1100, "unknown")],
)
def test_a_longer_context_may_be_rounded_up_to_a_block_of_each_slot(slots: int, cells: int, meaning: str) -> None:
    """256 cells for each slot beyond what is in proportion, and no more."""
    before = Ledger(entries=(printed("kv", 512 * MIB),))
    after = Ledger(entries=(printed("kv", 512 * MIB * (16384 + cells) // 8192),))
    found = between(before, after, changes=[change("ctx-size", 8192, 16384, "kv")], context=16384, slots=slots)
    assert one(found, "kv").meaning == meaning


@pytest.mark.parametrize(
    ("types", "factor", "meaning"),
    [
        (("q8_0", "q8_0"), 34 / 64, "setting"),
        (("q8_0", "q8_0"), 0.5, "unknown"),
        (("q4_0", "q8_0"), (18 + 34) / 128, "setting"),
        (("q8_0", None), (34 + 64) / 128, "setting"),
        (("q8_0", None), 0.5, "unknown"),
        (("turbo3", None), 0.1, "setting"),
    ],
)
def test_types_of_the_cache_explain_their_bytes(types: tuple[str, str | None], factor: float, meaning: str) -> None:
    """34 bytes of q8_0 stand for 64 of f16; of a type that is not known nothing is known."""
    names = ("cache-type-k", "cache-type-v")
    changes = [change(name, "f16", kind, "kv") for name, kind in zip(names, types, strict=True) if kind]
    before = Ledger(entries=(printed("kv", 512 * MIB),))
    found = between(before, Ledger(entries=(printed("kv", int(512 * MIB * factor)),)), changes=changes)
    assert one(found, "kv").meaning == meaning
    assert ("and yet" in one(found, "kv").text) is (meaning == "unknown")


def test_a_setting_of_another_bucket_explains_nothing() -> None:
    """A larger ubatch does not make weights grow."""
    before, after = Ledger(entries=(printed("weights", 100 * MIB),)), Ledger(entries=(printed("weights", 110 * MIB),))
    found = between(before, after, changes=[change("ubatch-size", 512, 1024, "compute")])
    assert one(found, "weights").meaning == "unknown"


@pytest.mark.parametrize(("device", "way"), [("gpu0", -1), ("host", 1)])
def test_experts_on_the_processor_leave_the_card(device: str, way: int) -> None:
    """What goes the wrong way is not what --n-cpu-moe does."""
    moved = [change("n-cpu-moe", 0, 6, "weights")]
    before = Ledger(entries=(printed("weights", 1000 * MIB, device),))
    for step, meaning in ((way, "setting"), (-way, "unknown")):
        after = Ledger(entries=(printed("weights", (1000 + 100 * step) * MIB, device),))
        assert one(between(before, after, changes=moved), "weights", device).meaning == meaning


def test_blocks_of_cells_bound_padding() -> None:
    """A cache that is larger by a block of 256 cells for each slot is padded; by more it is not known why."""
    before = Ledger(entries=(predicted("kv", 1000 * MIB),))
    block = 1010 * MIB * 256 * 2 // 40960
    for size, meaning in ((10 * MIB, "padding"), (20 * MIB, "unknown")):
        after = Ledger(entries=(Entry(bucket="kv", device="gpu0", bytes=1000 * MIB + size, source="engine-log"),))
        found = one(between(before, after, context=40960, slots=2), "kv")
        assert (found.meaning, found.least) == (meaning, size), block


# ---------------------------------------------------------------- the rest of a measured total

BUFFERS = (printed("weights", 1000 * MIB), printed("kv", 100 * MIB))
ESTIMATE = Ledger(entries=(predicted("weights", 1000 * MIB), predicted("kv", 100 * MIB)))


def test_a_drivers_context_in_the_range_of_the_estimate_is_a_context() -> None:
    """Nobody prints it: the rest that was measured stands for it."""
    expected = Ledger(entries=(*ESTIMATE.entries, predicted("context", 107 * MIB, at_most=555 * MIB)))
    for rest, meaning in ((300, "context"), (555, "context"), (556 + 4, "padding"), (600, "unknown")):
        found = between(expected, measured(BUFFERS, reading((1100 + rest) * MIB)))
        assert meaning in meanings(found), rest
        assert not any(row.bucket == "context" for row in found)


def test_a_context_that_was_measured_is_compared_by_itself() -> None:
    """What the engine held before it loaded anything is its context, and leaves the rest."""
    expected = Ledger(entries=(*ESTIMATE.entries, predicted("context", 107 * MIB, at_most=555 * MIB)))
    base = Cause(meaning="context", least=300 * MIB, most=300 * MIB, text="before it loaded anything")
    found = between(expected, measured(BUFFERS, reading(1500 * MIB)), causes={"gpu0": [base]})
    assert one(found, "context").meaning == "range"
    assert one(found, "context").after == 300 * MIB
    assert meanings(found) == {"padding": 4 * MIB, "rounding": 2 * DIGIT, "unknown": 96 * MIB - 2 * DIGIT}


def test_growth_that_was_measured_is_growth_and_no_more() -> None:
    """Of 200 MiB beside the buffers 150 were seen to come after the boot: the others are not known."""
    grew = Cause(meaning="growth", least=150 * MIB, most=150 * MIB, text="above what was held when ready")
    found = between(ESTIMATE, measured(BUFFERS, reading(1300 * MIB, source="drm-fdinfo")), causes={"gpu0": [grew]})
    parts = meanings(found)
    assert parts["growth"] == 150 * MIB
    assert parts["unknown"] == 50 * MIB - 2 * 4096 - 2 * DIGIT
    most = grown(found)
    assert most is not None
    assert most.meaning == "growth"


def test_pages_that_were_not_touched_make_a_total_smaller() -> None:
    """A software device counts pages once they are written: the cache may be missing, the weights may not."""
    for held, meaning in ((1100 - 60, "pages"), (1000 - 1, "unknown")):
        found = between(ESTIMATE, measured(BUFFERS, reading(held * MIB, source="rpc-hwm")))
        assert meaning in meanings(found), held
    driver = between(ESTIMATE, measured(BUFFERS, reading(1040 * MIB)))
    assert set(meanings(driver)) == {"rounding", "unknown"}


def test_a_mapped_file_is_counted_where_it_was_read() -> None:
    """On the way to a card the host's pages of the file are its process's, as many as went there."""
    buffers = (printed("weights", 800 * MIB), printed("weights", 50 * MIB, "host", "CPU_Mapped model buffer"))
    for held, meaning in ((10, "pages"), (850, "pages"), (900, "unknown")):
        ledger = measured(buffers, reading(held * MIB, "host", "host-hwm"))
        before = Ledger(entries=(predicted("weights", 800 * MIB), predicted("weights", 50 * MIB, "host")))
        found = between(before, ledger)
        named = {row.meaning for row in found if row.bucket == "unattributed" and row.device == "host"}
        assert meaning in named, held


def test_two_measured_runs_are_not_explained_by_how_a_source_counts() -> None:
    """It counts in the same way in both: what was measured of each is all that explains."""
    first, second = (measured(BUFFERS, reading(size * MIB, source="rpc-hwm")) for size in (1090, 1050))
    assert meanings(between(first, second)) == {"unknown": -40 * MIB}
    grew = [Cause(meaning="growth", least=size * MIB, most=size * MIB, text="") for size in (60, 20)]
    found = between(first, second, causes_before={"gpu0": grew[:1]}, causes={"gpu0": grew[1:]})
    assert meanings(found) == {"growth": -40 * MIB}


def test_what_a_probe_found_to_stay_is_growth() -> None:
    """Its lines in a ledger were measured."""
    serving = Entry(
        bucket="other", device="gpu0", bytes=30 * MIB, source="nvml-process", detail="growth while serving: full ubatch"
    )
    after = measured((*BUFFERS, serving), reading(1130 * MIB))
    assert one(between(ESTIMATE, after), "other").meaning == "growth"


def test_a_total_alone_is_compared_with_a_total() -> None:
    """An engine that prints nothing leaves no bucket to compare."""
    found = between(ESTIMATE, Ledger().against({"gpu0": reading(1500 * MIB)}))
    assert [(row.bucket, row.least, row.meaning) for row in found] == [("unattributed", 400 * MIB, "unknown")]


def test_a_reading_that_is_an_interval_is_one() -> None:
    """Its upper end counts as well."""
    found = between(ESTIMATE, measured(BUFFERS, reading(1090 * MIB, source="drm-fdinfo", at_most=1200 * MIB)))
    assert sum(row.least for row in found) == -10 * MIB
    assert sum(row.most for row in found) == 100 * MIB
    assert meanings(found).keys() == {"range"}


def test_the_largest_growth_leaves_out_what_is_expected() -> None:
    """Weights in a range, digits and the engine's own context are no growth."""
    before = Ledger(entries=(predicted("weights", 0, at_most=900 * MIB), predicted("kv", 100 * MIB)))
    base = Cause(meaning="context", least=500 * MIB, most=500 * MIB, text="")
    after = measured((printed("weights", 800 * MIB), printed("kv", 120 * MIB)), reading(1420 * MIB))
    found = grown(between(before, after, causes={"gpu0": [base]}))
    assert found is not None
    assert (found.bucket, found.least) == ("kv", 20 * MIB)
    assert grown(between(ESTIMATE, ESTIMATE)) is None


def test_growth_that_is_only_possible_is_no_largest_growth() -> None:
    """A range that begins at nothing, where the other side has none, may be nothing."""
    after = Ledger(entries=(*ESTIMATE.entries, predicted("projector", 0, at_most=900 * MIB)))
    found = between(ESTIMATE, after)
    assert (one(found, "projector").meaning, one(found, "projector").most) == ("unknown", 900 * MIB)
    assert grown(found) is None


def test_every_meaning_is_said() -> None:
    """A reader of the JSON finds what each word means."""
    assert all(MEANINGS.values())


def test_what_was_known_of_the_first_total_is_missing_in_the_second() -> None:
    """Beside a log, which has no measured total: others held up to 80 MiB before, of which 50 were there."""
    others = Cause(meaning="foreign", least=0, most=80 * MIB, text="the test's own process")
    before = measured(BUFFERS, reading(1150 * MIB, source="drm-fdinfo"))
    found = between(before, Ledger(entries=BUFFERS), causes_before={"gpu0": [others]})
    assert meanings(found) == {"foreign": -50 * MIB}

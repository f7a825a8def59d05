"""The log of a dry run: which lines are figures of the model that was asked for, and which are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog.dry_run import Amount, DryRunLog, Trial, total

MIB = 1 << 20
BEGIN = """
0.00.005.124 I cmn  common_init_: fitting params to device memory ...
0.00.005.133 I common_params_fit_impl: getting device memory data for initial parameters:
0.00.011.383 I llama_model_loader: loaded meta data with 21 key-value pairs and 723 tensors from m (version GGUF V3)
0.00.011.384 I llama_prepare_model_devices: using device RPC0 (127.0.0.1:50951) (unknown id) - 24105 MiB free
0.00.012.000 I print_info: no_alloc              = 1
0.00.012.984 I load_tensors: loading model tensors, this can take a while... (load_mode = none)
0.00.018.926 I load_tensors: RPC0[127.0.0.1:50951] model buffer size =     0.00 MiB
0.00.019.165 I llama_context: n_ctx         = 8192
"""
CACHE = """
0.00.019.540 I llama_kv_cache: RPC0[127.0.0.1:50951] KV buffer size =     0.00 MiB
0.00.019.547 I llama_kv_cache: size = {size} MiB (  {cells} cells,  {layers} layers,  1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB
"""
COMPUTE = """
0.00.118.258 I sched_reserve: RPC0[127.0.0.1:50951] compute buffer size =   300.00 MiB
0.00.118.259 I sched_reserve: RPC0[127.0.0.1:50951] compute buffer size =   208.01 MiB
0.00.118.285 I sched_reserve:        CPU compute buffer size =    40.01 MiB
"""
TABLE = """
0.00.119.548 I common_memory_breakdown_print: | memory breakdown [MiB]     | total    free     self   model   context   compute    unaccounted |
0.00.119.553 I common_memory_breakdown_print: |   - RPC0 (127.0.0.1:50951) | 24105 = 24105 + ({self} = {model} + {context} +     208) +      -17395 |
0.00.119.554 I common_memory_breakdown_print: |   - Host                   |                     41 =     1 +       0 +      40                |
"""
REPACK = """
0.00.119.555 I common_memory_breakdown_print: |   - CPU_REPACK             |                   5049 =  5049 +       0 +       0                |
"""
END = """
0.00.120.358 I common_params_fit_impl: projected to use 17395 MiB of device memory vs. 24105 MiB of free device memory
0.00.120.359 I common_params_fit_impl: will leave 6709 >= 1024 MiB of free device memory, no changes needed
"""
DRAFT = """
0.00.119.900 I common_params_fit_impl: getting device memory data for the extra model at a context size of 8192:
0.00.119.910 I sched_reserve: RPC0[127.0.0.1:50951] compute buffer size =   777.77 MiB
"""


def table(model: int = 16067, context: int = 1120) -> str:
    """The table with these figures on the device."""
    return TABLE.format(self=model + context + 208, model=model, context=context)


def read(text: str) -> Trial:
    """The trial of a log."""
    log = DryRunLog()
    for line in text.split("\n"):
        log.feed(line)
    return log.trial()


def test_decimals_replace_what_they_agree_with() -> None:
    """The last reserve and the caches' sum stand for the table's whole MiB; rows without a buffer have none."""
    caches = CACHE.format(size="1000.25", cells=8192, layers=60) + CACHE.format(size="120.50", cells=1024, layers=20)
    trial = read(BEGIN + caches + COMPUTE + table() + REPACK + END)
    device, host, repack = trial.rows
    assert device.compute == Amount(bytes=round(208.01 * MIB), resolution=5243)
    assert device.context == Amount(bytes=round(1120.75 * MIB), resolution=2 * 5243)
    assert device.model == Amount(bytes=16067 * MIB, at_most=16068 * MIB - 1)
    assert host.context == Amount(bytes=0)
    assert host.compute == Amount(bytes=round(40.01 * MIB), resolution=5243)
    assert (repack.label, repack.compute) == ("host", Amount(bytes=0))
    assert (trial.fits, trial.projected, trial.decided) == (True, 17395 * MIB, True)
    facts = trial.facts
    assert (facts["context"], facts["kv_cells"], facts["kv_cells_sliding"], facts["kv_layers"]) == (
        8192,
        8192,
        1024,
        80,
    )
    assert trial.devices == {"gpu0": "RPC0[127.0.0.1:50951]", "host": "CPU"}


def test_decimals_that_contradict_the_table_are_left_out() -> None:
    """Where lines before the table do not add up to it, the table is what counts."""
    trial = read(BEGIN + CACHE.format(size="900.00", cells=8192, layers=80) + table() + END)
    assert trial.rows[0].context == Amount(bytes=1120 * MIB, at_most=1121 * MIB - 1)
    assert trial.rows[0].compute.at_most == 209 * MIB - 1


@pytest.mark.parametrize(
    "cells",
    [
        "abc =   abc +       abc +      abc                |",
        " -5 =   -5 +       -5 +      -5                |",
        f"{'9' * 400} =   {'9' * 400} +       0 +      0                |",
        "41 MiB: 1 of weights, 40 of compute |",
    ],
    ids=["letters", "negative", "too long", "another form"],
)
def test_a_line_of_the_table_that_cannot_be_read_is_kept(cells: str) -> None:
    """What such a line says is missing from the rows, so that the trial says that there was one."""
    prefix = "0.00.119.555 I common_memory_breakdown_print: |   - Host                   |                     "
    trial = read(BEGIN + TABLE.splitlines()[1] + "\n" + prefix + cells + "\n" + END)
    assert trial.unread.startswith("common_memory_breakdown_print: |   - Host") or "- Host" in trial.unread
    assert len(trial.unread) <= 1000
    assert read(BEGIN + table() + REPACK + END).unread == ""


def test_a_table_without_an_end_is_not_kept() -> None:
    """A log of nothing but rows takes the memory and time of a table that a machine could have."""
    row = TABLE.splitlines()[3]
    trial = read(BEGIN + table() + "\n".join([row] * 20_000) + END)
    assert len(trial.rows) <= 256
    assert trial.unread


def test_only_the_first_parameters_count() -> None:
    """What fit tries after it saw that the parameters do not fit is not read."""
    said = (
        "0.00.120.359 I common_params_fit_impl: cannot meet free memory target of 1024 MiB, need to reduce by 5 MiB\n"
    )
    trial = read(BEGIN + table() + said + table(model=5, context=5) + END)
    assert trial.fits is False
    assert trial.rows[0].model.bytes == 16067 * MIB
    assert trial.projected is None


def test_a_context_that_is_resolved_first_is_the_one_that_counts() -> None:
    """Without a context, and a cache of its own for each slot, the engine sizes twice: the second time is right."""
    again = "0.00.119.600 I fit: context size unset and KV cache not unified -> using 524288 for 4 sequences:\n"
    caches = CACHE.format(size="1120.00", cells=8192, layers=80), CACHE.format(size="4480.00", cells=32768, layers=80)
    trial = read(BEGIN + caches[0] + table() + again + caches[1] + table(context=4480) + END)
    assert trial.rows[0].context == Amount(bytes=4480 * MIB, resolution=5243)
    assert trial.facts["kv_cells"] == 32768


@pytest.mark.parametrize("first", [True, False], ids=["before fit", "after the model"])
def test_a_draft_model_is_kept_apart(first: bool) -> None:
    """The trial of a draft model, before fit or within it, changes no figure of the model."""
    draft = table(model=90, context=45)
    before = "0.00.001.000 I print_info: no_alloc              = 1\n0.00.002.000 I load: loading model tensors, x\n"
    main = BEGIN + COMPUTE + table()
    trial = read(before + draft + main + END if first else main + DRAFT + draft + END)
    assert trial.rows[0].model.bytes == 16067 * MIB
    assert trial.rows[0].compute.bytes == round(208.01 * MIB)
    assert (trial.draft[0].model.bytes, trial.draft[0].context.bytes) == (90 * MIB, 45 * MIB)


def test_what_the_server_sets_aside_is_read() -> None:
    """The projector's memory, which fit's table does not have, is in a line of the server's own."""
    line = "0.00.003.000 D srv  load_model: [mtmd] adding 812.50 MiB to fit_params_target for device RPC0\n"
    trial = read(line + BEGIN + table() + END)
    assert trial.extras == (("projector", "gpu0", Amount(bytes=round(812.5 * MIB), resolution=5243)),)


def test_a_load_without_a_trial_is_noticed() -> None:
    """A server that loads tensors with neither fit nor a trial has to be stopped; one in its trial has not."""
    log = DryRunLog()
    log.feed("0.00.012.000 I print_info: no_alloc              = 0")
    log.feed("0.00.012.984 I load_tensors: loading model tensors, this can take a while... (mmap = true)")
    assert log.loading
    trial = DryRunLog()
    for line in BEGIN.split("\n"):
        trial.feed(line)
    assert (trial.loading, trial.opened, trial.decided) == (False, True, False)


def test_the_engine_s_own_words_of_refusal_are_kept() -> None:
    """The first sentence that says what is wrong, not the ones that follow from it."""
    trial = read(
        BEGIN
        + "0.00.013.000 E llama_model_load: error loading model: unknown model architecture: 'x'\n"
        + "0.00.013.001 E llama_model_load_from_file_impl: failed to load model\n"
        + "0.00.013.002 E fit: encountered an error while trying to fit params to free device memory: failed to load\n"
    )
    assert trial.rows == ()
    assert trial.decided
    assert trial.refusal is not None
    assert "unknown model architecture: 'x'" in trial.refusal


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.booleans()), max_size=6))
def test_a_sum_holds_every_sum_of_what_it_is_made_of(parts: list[tuple[int, int, bool]]) -> None:
    """Both ends of a total are the sums of the ends."""
    amounts = [Amount(bytes=b, at_most=b + r) if cut else Amount(bytes=b, resolution=r) for b, r, cut in parts]
    whole = total(amounts)
    assert whole.holds(sum(amount.low for amount in amounts))
    assert whole.holds(sum(amount.high for amount in amounts)) or all(not cut for *_, cut in parts)


@settings(max_examples=200)
@given(st.data())
def test_no_log_breaks_it(data: st.DataObject) -> None:
    """Lines in any order, cut anywhere or of any characters, are read without an exception."""
    lines = (BEGIN + CACHE + COMPUTE + TABLE + REPACK + DRAFT + END).split("\n")
    strange = st.one_of(st.sampled_from(lines), st.text(max_size=60))
    log = DryRunLog()
    for line in data.draw(st.lists(strange, max_size=25)):
        cut = data.draw(st.integers(0, max(1, len(line))))
        log.feed(line[cut:] if data.draw(st.booleans()) else line)
    log.trial()

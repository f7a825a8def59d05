"""Samples of memory as people take them by hand: which figure is whose, of when, and what is no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog.samples import Samples, Series, read_samples
from pytest_vram.errors import BadInput

MIB = 1 << 20
AT = 1796077485.0  # 2026-11-30 22:24:45 UTC
CSV = """timestamp, index, name, uuid, memory.used [MiB], memory.total [MiB]
2026/11/30 22:24:45.250, 0, NVIDIA GeForce RTX 3050, GPU-0a, 12 MiB, 8192 MiB
2026/11/30 22:24:45.253, 1, NVIDIA GeForce RTX 3050, GPU-0b, [N/A], 8192 MiB
2026/11/30 22:24:46.250, 0, NVIDIA GeForce RTX 3050, GPU-0a, 1234 MiB, 8192 MiB
2026/11/30 22:24:46.253, 1, NVIDIA GeForce RTX 3050, GPU-0b, 7 MiB, 8192 MiB
"""


def held(series: Series) -> list[int | None]:
    """Its figures in MiB."""
    return [None if value is None else value // MIB for value in series.values]


def only(samples: Samples) -> Series:
    (series,) = samples.series
    return series


def test_csv_of_two_cards() -> None:
    """Every card has its own series, with its name, size and times; a word in place of a figure is a hole."""
    first, second = read_samples(CSV).series
    assert (first.index, first.uuid, first.name, first.total) == ("0", "GPU-0a", "NVIDIA GeForce RTX 3050", 8192 * MIB)
    assert (held(first), first.times, first.clock) == ([12, 1234], (AT + 0.25, AT + 1.25), "local")
    assert (held(second), second.interval) == ([None, 7], 1.0)
    assert any("1 of 4 samples have no figure" in note for note in read_samples(CSV).notes)


@pytest.mark.parametrize(
    "content",
    [
        CSV.encode("utf-16"),
        CSV.replace("\n", "\r\n").encode(),
        CSV.replace("\n", "\r\n").encode("utf-16-le"),
        (CSV + CSV.splitlines()[0]).encode(),
        (CSV + "2026/11/30 22:24:47.250, 0, NVIDIA Ge").encode(),
        CSV.replace("memory.used [MiB]", "memory.used").encode(),
        CSV.replace(" MiB", "").encode(),
        ("\n" + CSV.replace("\n2026", "\n\n2026")).encode(),
    ],
    ids=["utf-16", "crlf", "powershell", "header-again", "torn", "own-header", "nounits", "blank-lines"],
)
def test_csv_however_it_was_kept(content: bytes, tmp_path: Path) -> None:
    """Encodings, line ends, headers that come again and a torn end change nothing."""
    path = tmp_path / "gpu.csv"
    path.write_bytes(content)
    assert [held(one) for one in read_samples(path).series] == [[12, 1234], [None, 7]]


@pytest.mark.parametrize(
    ("text", "figures", "times"),
    [
        ("12 MiB\n[Not Supported]\n13 MiB\n", [12, None, 13], ()),
        ("memory.used [MiB]\n12 MiB\n[Unknown Error]\n", [12, None], ()),
        ("12\n13\n", [12, 13], ()),
        ("2026/11/30 22:24:45.000, 12 MiB\n2026/11/30 22:24:46.000, 14 MiB\n", [12, 14], (AT, AT + 1)),
        ("Mon Nov 30 22:24:45 UTC 2026\n12 MiB\nMon Nov 30 22:24:46 UTC 2026\n13 MiB\n", [12, 13], (AT, AT + 1)),
        ("Mon Nov 30 10:24:45 PM UTC 2026\n12\nMon Nov 30 10:24:46 PM UTC 2026\n13\n", [12, 13], (AT, AT + 1)),
        ("30 Nov 2026 22:24:45 GMT\n12\n30 Nov 2026 22:24:46 GMT\n13\n", [12, 13], (AT, AT + 1)),
        ("2026-11-30T23:24:45+01:00\n12 MiB\n2026-11-30T23:24:46+01:00\n13 MiB\n", [12, 13], (AT, AT + 1)),
        ("1796077485\n12\n1796077486\n13\n", [12, 13], (AT, AT + 1)),
        ("1796077485.5 12\n1796077486.5 13\n", [12, 13], (AT + 0.5, AT + 1.5)),
        ("1796077485500,12 MiB\n1796077486500,13 MiB\n", [12, 13], (AT + 0.5, AT + 1.5)),
        ("Mon Nov 30 22:24:45 UTC 2026\n12 MiB\n13 MiB\n14 MiB\n", [12, 13, 14], ()),
    ],
)
def test_one_column(text: str, figures: list[int | None], times: tuple[float, ...]) -> None:
    """A lone column is the figure; its time is that of the line of ``date`` before it, or there is none."""
    series = only(read_samples(text))
    assert (held(series), series.times) == (figures, times)
    assert series.interval == (1.0 if times else None)


def test_two_cards_without_numbers() -> None:
    """Several figures for each line of ``date`` are several cards, in their order."""
    text = "".join(f"Mon Nov 30 22:24:{45 + n} UTC 2026\n{10 + n} MiB\n{20 + n} MiB\n" for n in range(3))
    first, second = read_samples(text).series
    assert (held(first), held(second), first.index, second.index) == ([10, 11, 12], [20, 21, 22], "0", "1")


@pytest.mark.parametrize(
    "text",
    [
        "0, 12 MiB, 8192 MiB\n0, 13 MiB, 8192 MiB\n",
        "0, 12\n0, 13\n",
        "timestamp, memory.free [MiB]\n2026/11/30 22:24:45.000, 12 MiB\n",
    ],
)
def test_columns_that_cannot_be_told(text: str) -> None:
    """Two numbers without a header may be anything, so that nothing is guessed."""
    with pytest.raises(BadInput, match="memory.used"):
        read_samples(text)


def test_numbered_cards_without_a_header() -> None:
    """A column that counts from 0 beside one of MiB is the number of the card."""
    assert [held(one) for one in read_samples("0, 12 MiB\n1, 13 MiB\n0, 14 MiB\n").series] == [[12, 14], [13]]


def test_lists_and_tables() -> None:
    """``nvidia-smi dmon`` with and without dates, the table that ``watch`` repeats, and ``rocm-smi`` are read."""
    plain = "# gpu   fb  bar1\n# Idx   MB   MB\n    0  12  1\n    1   -  2\n# gpu   fb  bar1\n# Idx   MB   MB\n    0  13  1\n"
    first, second = read_samples(plain).series
    assert (held(first), held(second)) == ([12, 13], [None])
    dated = (
        "#Date       Time        gpu     fb\n#YYYYMMDD   HH:MM:SS    Idx     MB\n 20261130   22:24:45      0    12\n"
    )
    assert only(read_samples(dated)).times == (AT,)
    table = (
        "Mon Nov 30 22:24:45 2026\n+------+\n"
        "|   0  NVIDIA GeForce RTX 3050 ...    Off | 00000000:01:00.0 Off |                  N/A |\n"
        "| N/A   45C    P8     4W /  60W |   1234MiB /  4096MiB |      0%      Default |\n"
        "|    0   N/A  N/A      1234      C   ./llama-server                 1200MiB |\n"
    )
    series = only(read_samples(table + table.replace("24:45", "24:46")))
    assert (held(series), series.times, series.total) == ([1234, 1234], (AT, AT + 1), 4096 * MIB)
    rocm = f"device,VRAM Total Memory (B),VRAM Total Used Memory (B)\ncard0,{8 << 30},{5 * MIB}\n"
    series = only(read_samples(rocm))
    assert (held(series), series.total, series.index) == ([5], 8 << 30, "card0")


def test_time_of_day_over_midnight() -> None:
    """Times without a day go on after midnight."""
    text = "time, memory.used [MiB]\n23:59:59, 12 MiB\n00:00:01, 13 MiB\n"
    series = only(read_samples(text))
    assert (series.interval, series.clock) == (2.0, "relative")


def test_processes() -> None:
    """Of figures by process each has its own series, and one can be asked for by number or name."""
    text = "pid, process_name, used_gpu_memory [MiB]\n7, /usr/bin/Xorg, 40 MiB\n9, /opt/llama-server, 12 MiB\n"
    assert [(one.pid, one.scope) for one in read_samples(text).series] == [("7", "process"), ("9", "process")]
    assert held(only(read_samples(text, process="llama-server"))) == [12]
    assert held(only(read_samples(text, process=7))) == [40]
    with pytest.raises(BadInput, match="no sample in the text is of process 'vllm'"):
        read_samples(text, process="vllm")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x01\x02\x03\x04", "is not a text"),
        (b"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "holds no samples"),
        (b"load_tensors: hello\nfoo, bar\n" * 20, "holds no samples"),
        (b"memory.used [MiB]\n[N/A]\n[N/A]\n", "no sample in .* has a figure"),
        (b'{"v":1,"t":1,"kind":"run","wall":1.0}\n', "measured nothing"),
        (b'{"v":1,"t":1,"kind":"sample","device":3}\n', "cannot be used"),
        (b'{"v":9}\n', "not a line of journal format"),
    ],
)
def test_what_is_no_sample_is_one_message(content: bytes, words: str, tmp_path: Path) -> None:
    """Other files are refused in a sentence."""
    path = tmp_path / "gpu.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words) as found:
        read_samples(path)
    assert "\n" not in str(found.value)


def test_journal(tmp_path: Path) -> None:
    """The journal of a run gives its blocks of samples, and the phases of each boot with their figures."""
    peak = {"host": {"kind": "reading", "bytes": 9, "source": "host-hwm", "scope": "backend", "device": "host"}}
    peak["host"]["exact"] = True
    second = 10**9
    lines = [
        {"t": 0, "kind": "run", "wall": AT},
        {"t": 1, "kind": "backend", "state": "starting", "name": "a", "generation": 2, "log": "a.2.log"},
        {"t": 2 * second, "kind": "sample", "device": "host", "t0": second, "min": 1, "max": 5, "last": 5, "count": 2},
        {
            "t": 2,
            "kind": "phase",
            "backend": "a",
            "generation": 2,
            "name": "kv",
            "before": {"name": "weights", "start": second, "end": 2 * second, "peak": peak},
        },
    ]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines) + '{"v":1,"t"')
    samples = read_samples(tmp_path)
    series = only(samples)
    assert (series.values, series.times, series.since, series.index) == ((5,), (AT + 2,), (AT + 1,), "host")
    (boot,) = samples.boots
    (phase,) = boot.phases
    assert (boot.log, phase.name, phase.start, phase.peak["host"].bytes) == ("a.2.log", "weights", AT + 1, 9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_never_raises_anything_else(data: st.DataObject) -> None:
    """Whatever is cut, doubled or overwritten, samples are read, each with one time or none, or refused."""
    text = CSV * 2
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.text(max_size=20)) + text[data.draw(st.integers(at, len(text))) :]
    try:
        found = read_samples(damaged + "\n")
    except BadInput:
        return
    for series in found.series:
        assert len(series.times) in (0, len(series.values))
        assert all(value is None or value >= 0 for value in series.values)


def stamped(*rows: tuple[int, int], total: int | None = None) -> str:
    """CSV of (second, MiB) pairs."""
    head = "timestamp, index, memory.used [MiB]" + (", memory.total [MiB]" if total else "")
    lines = [f"2026/07/07 10:00:{at:02d}.000, 0, {used} MiB" + (f", {total} MiB" if total else "") for at, used in rows]
    return "\n".join([head, *lines]) + "\n"


def test_samples_in_another_order() -> None:
    """Samples from the last to the first, or in parts, are sorted; of parts that overlap only the order is known."""
    true = [(at, 100 + at) for at in range(9)]
    for rows in (true[::-1], true[5:] + true[:5]):
        samples = read_samples(stamped(*rows))
        (series,) = samples.series
        assert [value // MIB for value in series.values if value is not None] == [used for _, used in true]
        assert series.interval == 1.0
        assert samples.notes
    samples = read_samples(stamped(*true, *((at, 900) for at in range(9))))
    (series,) = samples.series
    assert (series.clock, series.times, series.interval) == (None, (), None)
    assert "go back" in samples.notes[0]


def test_more_than_the_device_has_is_no_figure() -> None:
    """A figure that is larger than the card is a hole with a note."""
    samples = read_samples(stamped((1, 100), (2, 999_999_999), (3, 300), total=24_576))
    assert samples.series[0].values == (100 * MIB, None, 300 * MIB)
    assert any("larger than the device" in note for note in samples.notes)


@pytest.mark.parametrize("size", [-1, 10**18])
def test_block_of_a_journal_that_no_device_holds(tmp_path: Path, size: int) -> None:
    """A journal with a figure below nothing, or beyond any device, is refused in one sentence."""
    lines = [{"t": 0, "kind": "run", "wall": 1.0}, {"t": 1, "kind": "sample", "device": "gpu0", "max": size}]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines))
    with pytest.raises(BadInput, match="cannot be used"):
        read_samples(path)

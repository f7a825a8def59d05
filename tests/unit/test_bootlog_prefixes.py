"""What stands before an engine's words in a line is taken off, in any nesting, and its clock and process are kept."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import prefixes
from pytest_vram.bootlog.lines import LONGEST, Axis, Line, split


def at(*moment: int, micros: int = 0) -> float:
    return datetime(*moment, tzinfo=UTC).timestamp() + micros / 1e6  # type: ignore[misc, arg-type]


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day by which years are found."""
    monkeypatch.setattr(prefixes, "now", lambda: datetime(2026, 11, 30, 12, tzinfo=UTC))


WORDS = "load_tensors:  CUDA0 model buffer size = 1.00 MiB"
OWN = f"0.00.026.362 I {WORDS}"

#: Prefix → what is known after it: time, clock, level, process, kind.
ONE = {
    "": (None, None, None, None, None),
    "12.34.567.890 W ": (754.56789, "start", "W", None, "llama.cpp"),
    "Oct 13 12:00:01 host ollama[123]: ": (at(2026, 10, 13, 12, 0, 1), "epoch", None, "ollama[123]", "journal"),
    "Dec  3 12:00:01 my-host.local llama-server[7]: ": (at(2025, 12, 3, 12, 0, 1), "epoch", None, "llama-server[7]", "journal"),
    "Oct 13 12:00:01.250000 host vllm.service[9]: ": (at(2026, 10, 13, 12, 0, 1, micros=250_000), "epoch", None, "vllm.service[9]", "journal"),
    "2026-10-13T12:00:01+0200 host ollama[123]: ": (at(2026, 10, 13, 10, 0, 1), "epoch", None, "ollama[123]", "journal"),
    "Tue 2026-10-13 12:00:01 CEST host ollama[5]: ": (at(2026, 10, 13, 12, 0, 1), "epoch", None, "ollama[5]", "journal"),
    "Oct 13 12:00:01 host kernel: [12345.678901] ": (at(2026, 10, 13, 12, 0, 1), "epoch", None, "kernel", "kernel"),
    "[12345.678901] ": (None, None, None, "kernel", "kernel"),
    "[Mon Nov 30 11:24:45 2026] ": (at(2026, 11, 30, 11, 24, 45), "epoch", None, "kernel", "kernel"),
    "server-1  | ": (None, None, None, "server-1", "compose"),
    "2026-01-02T03:04:05.678901Z stderr F ": (at(2026, 1, 2, 3, 4, 5, micros=678_901), "epoch", None, None, "container"),
    "2026-01-02T03:04:05.678901Z 00O+": (at(2026, 1, 2, 3, 4, 5, micros=678_901), "epoch", None, None, "container"),
    "2026-01-01T00:00:00.0000000Z ": (at(2026, 1, 1), "epoch", None, None, "time"),
    "2026-01-01 00:00:00,500 - vllm.engine - INFO - ": (at(2026, 1, 1, micros=500_000), "epoch", None, None, "time"),
    "2026-01-01T00:00:00.5-03:30  WARN ": (at(2026, 1, 1, 3, 30, micros=500_000), "epoch", None, None, "time"),
    "job\tRun the tests\t2026-01-01T00:00:00.0000000Z ": (at(2026, 1, 1), "epoch", None, None, "time"),
    "2023/12/01 12:00:00 llama.go:300: ": (at(2023, 12, 1, 12), "epoch", None, None, "go"),
    "5:32AM DBG GRPC(llama-2-7b.gguf-127.0.0.1:43735): stderr ": (None, None, None, "llama-2-7b.gguf-127.0.0.1:43735", "localai"),
    "[41234] ": (None, None, None, "41234", "child"),
    "[rank1]: ": (None, None, None, "rank1", "rank"),
    "[pod/vllm-0/server] ": (None, None, None, "pod/vllm-0/server", "pod"),
    "[2026-06-08 12:00:00 DP1 TP0] ": (at(2026, 6, 8, 12), "epoch", None, "DP1 TP0", "brackets"),
    "[2026-06-08 12:00:00] ": (at(2026, 6, 8, 12), "epoch", None, None, "brackets"),
    "(EngineCore_DP0 pid=123) ": (None, None, None, "EngineCore_DP0 pid=123", "worker"),
    "(VllmWorker rank=0 pid=1) ": (None, None, None, "VllmWorker rank=0 pid=1", "worker"),
    "(RayWorkerWrapper pid=9, ip=10.0.0.2) ": (None, None, None, "RayWorkerWrapper pid=9, ip=10.0.0.2", "worker"),
    "INFO 11-29 10:00:00 [v1/worker/gpu_worker.py:123] ": (at(2026, 11, 29, 10), "epoch", "I", None, "vllm"),
    "WARNING 12-21 10:00:00 gpu_worker.py:123] ": (at(2025, 12, 21, 10), "epoch", "W", None, "vllm"),
    "ERROR 11-29 10:00:00.125 [core.py:700] ": (at(2026, 11, 29, 10, micros=125_000), "epoch", "E", None, "vllm"),
    "INFO:     ": (None, None, "I", None, "uvicorn"),
    "[W1121 10:00:00.250000000 Allocator.cpp:12] ": (at(2026, 11, 21, 10, micros=250_000), "epoch", "W", None, "glog"),
    "time=2025-10-22T10:00:00.500+02:00 level=INFO source=ggml.go:12 ": (at(2025, 10, 22, 8, micros=500_000), "epoch", "I", None, "slog"),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ONE, ids=repr)
def test_each_prefix(prefix: str) -> None:
    """Each prefix comes off, with what it says; colours and line ends do not hide it."""
    told = (WORDS, *ONE[prefix][0:1], ONE[prefix][2], ONE[prefix][1], *ONE[prefix][3:])
    assert split(prefix + WORDS)[: len(told)] == told
    assert split(f"\x1b[36m{prefix}\x1b[0m{WORDS}\r\n").text == WORDS


@pytest.mark.parametrize(
    ("line", "time", "process"),
    [
        ('{"log":"%s\\n","stream":"stderr","time":"2026-01-02T03:04:05.5Z"}', at(2026, 1, 2, 3, 4, 5, micros=500_000), None),
        ('{"log":"%s","stream":"stdout"}', None, None),
        ('{"MESSAGE":"%s","__REALTIME_TIMESTAMP":"1700000000250000","_PID":"12"}', 1_700_000_000.25, "pid 12"),
        ('Mar 17 21:06:59 DEBUG GRPC stderr id="m-127.0.0.1:36785" line="%s"', at(2026, 3, 17, 21, 6, 59), None),
    ],
)  # fmt: skip
def test_lines_inside_of_others(line: str, time: float | None, process: str | None) -> None:
    """A line that is a value in a line of JSON, or between quotation marks, is the line."""
    found = split(line % WORDS)
    assert (found.text, found.time, found.process) == (WORDS, time, process)
    inside = split(line % OWN)
    assert (inside.text, inside.level, inside.prefix) == (WORDS, "I", "llama.cpp")


def test_quotation_marks_inside_are_unescaped() -> None:
    """LocalAI escapes the quotation marks of the line that it carries."""
    line = r'Mar 17 21:06:59 DEBUG GRPC stderr id="m" line="print_info: general.name = \"my \\ model\""'
    assert split(line).text == 'print_info: general.name = "my \\ model"'


WRAPPERS = [prefix for prefix in ONE if prefix and ONE[prefix][2] is None and "kernel" not in str(ONE[prefix])]


@pytest.mark.parametrize("outer", WRAPPERS, ids=repr)
def test_prefixes_nest(outer: str) -> None:
    """A wrapper's prefix before any other one comes off too, and the level is the engine's."""
    for inner in ONE:
        found = split(outer + inner + WORDS)
        assert (found.text, found.level) == (WORDS, ONE[inner][2]), inner


def test_best_time_wins() -> None:
    """A whole date with its zone wins over one without year or zone, and each of them over seconds since the start."""
    docker = "2026-01-02T03:04:05Z "
    assert split(f"{docker}INFO 11-29 10:00:00 [a.py:1] x").time == at(2026, 1, 2, 3, 4, 5)
    assert split(f"{docker}[2026-06-08 12:00:00] x").time == at(2026, 1, 2, 3, 4, 5)
    assert split(f"{docker}0.00.026.362 I x")[1:4] == (at(2026, 1, 2, 3, 4, 5), "I", "epoch")
    assert split("Oct 13 12:00:01 h a[1]: [2026-06-08 12:00:00] x").time == at(2026, 6, 8, 12)
    assert split("Oct 13 12:00:01 h a[1]: 0.00.026.362 I x").clock == "epoch"
    assert split("server-1 | 0.00.026.362 I x").clock == "start"


@pytest.mark.parametrize(
    ("written", "year"), [("11-30 23:00:00", 2026), ("12-01 10:00:00", 2026), ("12-02 10:00:00", 2025), ("01-01 00:00:00", 2026)]
)  # fmt: skip
def test_year_that_is_not_written(written: str, year: int) -> None:
    """A time without a year is of the latest one in which it is not in the future; a zone may be a day ahead."""
    found = split(f"INFO {written} [a.py:1] x").time
    assert found is not None
    assert datetime.fromtimestamp(found, UTC).year == year


@pytest.mark.parametrize(
    "prefix", ["Feb 30 12:00:00 h a[1]: ", "2026-13-01T00:00:00Z ", "0000-01-01 00:00:00 ", "[2026-01-01 25:00:00] "]
)
def test_no_such_moment(prefix: str) -> None:
    """A date that no calendar has is no time, and no crash."""
    found = split(prefix + WORDS)
    assert (found.text, found.time, found.clock) == (WORDS, None, None)


@pytest.mark.parametrize(
    "line",
    [
        "something: [foo] bar",
        "{broken",
        '{"log":12}',
        '{"log":"half',
        '{"timestamp":1,"level":"INFO","message":"model loaded"}',
        "| memory breakdown [MiB] | total   free    self |",
        "error: invalid argument: --foo",
        "CUDA error: out of memory",
        "system_info: n_threads = 4 | AVX = 1 |",
        "2026-01-01T00:00:00Zx",
        "time=never level=INFO x",
        "INFO hello",
        "[] x",
    ],
)  # fmt: skip
def test_what_is_no_prefix_stays(line: str) -> None:
    """A line whose beginning is no prefix that is known keeps it."""
    assert split(line) == Line(line)


def test_axis_keeps_to_one_clock() -> None:
    """Times of the clock that the log begins with are its times; those of others are left out."""
    axis = Axis()
    assert axis.time(split("no time")) is None
    assert axis.clock is None
    assert axis.time(split("2026-01-01T00:00:10Z x")) == at(2026, 1, 1, 0, 0, 10)
    assert axis.time(split("0.00.026.362 I x")) is None
    assert axis.time(split("2026-01-01T00:00:11Z 0.00.026.362 I x")) == at(2026, 1, 1, 0, 0, 11)
    assert axis.clock == "epoch"


def test_lines_of_any_length() -> None:
    """Of a long line the beginning is kept, of a long line of JSON that of the line inside."""
    assert split("x" * 100_000).text == "x" * LONGEST
    assert split('{"log":"' + "x" * 100_000 + '"}').text == "x" * LONGEST
    huge = split('{"log":"' + "x" * 10_000_000 + '"}').text
    assert huge.startswith('{"log":"xxx')
    assert len(huge) == LONGEST


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([*ONE, '{"log":"', '"}', "\\", '"', "\0", "\udc80", "é", "[", "(", "2026-", " "]), max_size=9
    )
)
def test_any_beginning(parts: list[str]) -> None:
    """Any mixture of prefixes can be split."""
    assert split("".join(parts) + WORDS).text is not None

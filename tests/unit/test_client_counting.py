"""Token counts and rates of answers: what is believed, and what is doubted."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.backends.counting import counts, most_asked
from pytest_vram.backends.reply import Collector, choice_of
from pytest_vram.backends.words import said
from pytest_vram.checks import judge_rate
from pytest_vram.errors import RequestFailed


def answer(out: object, rate: object = None, **timings: object) -> dict[str, Any]:
    if rate is not None:
        timings["predicted_per_second"] = rate
    return {"usage": {"prompt_tokens": 7, "completion_tokens": out}, "timings": timings}


def test_one_token_has_no_rate() -> None:
    """A rate needs two tokens: a server's figure for one is a division by almost nothing."""
    assert counts(answer(1, 1e3), 1.0, None).rate is None
    assert counts(answer(4), 2.0, None).rate == 2.0


@pytest.mark.parametrize(
    ("told", "latency", "most", "words"),
    [
        (answer(1_000_000), 0.2, 4, "the server says 1000000 generated tokens where at most 4 were asked for"),
        (answer(5, 50.0), 0.2, 4, "5 generated tokens where at most 4"),
        (answer(-100), 0.2, 4, "the server says -100 generated tokens"),
        (answer(10**400), 0.2, None, "the server says 2**1328 or more generated tokens"),
        (answer(4, 1e308), 0.2, 4, "1e+308 tokens/s is more than any hardware decodes"),
        (answer(4, float("inf")), 0.2, 4, "inf tokens/s is more than"),
        (answer(4, 10**400), 0.2, 4, "inf tokens/s is more than"),
        (answer(100_000), 0.2, None, "5e+05 tokens/s is more than"),
        (answer(4, 100_000.1), 1e-9, 4, "more than any hardware"),
        (answer(100, 50_000.0), 5.0, None, "5e+04 tokens/s would be 0.002 s for 100 tokens, but the answer took 5 s"),
    ],
)
def test_figure_that_cannot_be_true_is_no_rate(
    told: dict[str, Any], latency: float, most: int | None, words: str
) -> None:
    """Impossible counts and rates are absent with the reason, so that a floor is undecided instead of held."""
    found = counts(told, latency, None, most=most)
    assert (found.rate, found.rate_from) == (None, None)
    assert words in (found.doubt or "")
    assert found.tokens_out in (None, told["usage"]["completion_tokens"])
    assert found.tokens_in == 7
    finding = judge_rate([found.rate], 20.0, limit_from="t", doubts=[found.doubt])
    assert finding is not None
    assert finding.verdict == "inconclusive"
    assert words in finding.text
    assert "made no requests" not in finding.text


@pytest.mark.parametrize(
    ("told", "latency", "most", "rate"),
    [
        (answer(4, 50.0), 0.001, 4, 50.0),  # too slow for its latency: makes nothing pass, so it is left alone
        (answer(4, 1e5), 1e-3, 4, 1e5),
        (answer(16, 50.0), 300.0, None, 50.0),  # most of it was a queue, a model that was loaded, or a prompt
        (answer(2, 400.0, prompt_ms=59_990.0), 60.0, None, 400.0),
        (answer(4), 0.5, 4, 8.0),
        (answer(4, float("nan")), 0.5, 4, 8.0),
        (answer(4, "fast"), 0.5, 4, 8.0),
        (answer(4, True), 0.5, 4, 8.0),
    ],
)
def test_figure_that_may_be_true_is_believed(
    told: dict[str, Any], latency: float, most: int | None, rate: float
) -> None:
    """Rates at the bounds, behind long prompts and queues, and answers without a usable timing have no doubt."""
    found = counts(told, latency, None, most=most)
    assert (found.rate, found.doubt) == (rate, None)


def test_stream_that_came_at_once_times_nothing() -> None:
    """A stream that a proxy kept back until its end has the rate of its latency, not that of its last instant."""
    told = answer(100)
    paced = counts(told, 2.0, 1.0, arrivals=100)
    assert (paced.rate, paced.rate_from) == (99.0, "stream")
    kept = counts(told, 2.0, 1.999, arrivals=3)
    assert (kept.rate, kept.rate_from) == (50.0, "latency")
    assert counts(answer(2), 2.0, 1.0, arrivals=2).rate_from == "stream"


def test_arrivals_are_chunks_with_text() -> None:
    """The collector counts how many times generated text came, however many pieces came together."""
    collector = Collector(backend="a", path="POST /", status=200, content_type="text/event-stream")
    piece = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    for number, chunk in enumerate([piece * 3, b"data: {}\n", piece[:9], piece[9:], b"data: [DONE]\n"]):
        collector.feed(chunk, float(number))
    assert (collector.first, collector.arrivals) == (0.0, 2)
    assert choice_of(collector.decoded()) == ("aaaa", {"role": "assistant", "content": "aaaa"}, None)


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({}, None),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_completion_tokens": 8, "max_tokens": 4}, 8),
        ({"n_predict": 5, "n": 3}, 15),
    ],
)
def test_limit_of_a_request(body: dict[str, object], most: int | None) -> None:
    """The limit is the largest that the request sets, for each of its choices."""
    assert most_asked(body) == most


def test_words_of_a_server_are_one_printable_line() -> None:
    """Colours go, line ends become spaces, what cannot be shown becomes ?, and the end of a long text is cut."""
    assert said(b"\x1b[1;31mno\x1b[0m\r\n\tway\x00\xc2\x9b\xff") == "no way??�"
    assert said("\x1b]0;title\x07a\u202eb\ud800") == "a?b?"
    assert said("x" * 300) == "x" * 300
    assert said("x" * 301) == "x" * 299 + "…"
    assert said(b" " * 99_999) == "…"


KEYS = [
    "choices",
    "delta",
    "message",
    "content",
    "tool_calls",
    "function",
    "index",
    "usage",
    "timings",
    "error",
    "completion_tokens",
    "predicted_per_second",
    "prompt_ms",
    "finish_reason",
    "text",
    "arguments",
]
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(junk, max_size=4), st.booleans())
def test_any_answer_is_read_or_refused(pieces: list[Any], stream: bool) -> None:
    """Whatever JSON a server sends is an answer with writable figures or a RequestFailed, never another error."""
    collector = Collector(
        backend="a", path="POST /", status=200, content_type="text/event-stream" if stream else "application/json"
    )
    lines = [f"data: {json.dumps(piece)}\n" for piece in pieces] if stream else [json.dumps(pieces[:1])]
    try:
        for line in [*lines, "data: [DONE]\n"] if stream else lines:
            collector.feed(line.encode(), 0.1)
        found = collector.decoded()
    except RequestFailed as error:
        assert str(error).isprintable()
        return
    if isinstance(found, list) and found:
        found = found[0]
    if isinstance(found, dict):
        choice_of(found)
        msgspec.json.encode(counts(found, 0.5, collector.first, arrivals=collector.arrivals))

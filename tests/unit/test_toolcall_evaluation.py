"""Cases are asked; whose failure is whose, what is retried, and when no more is asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends.client import Target, VramClient
from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.reply import Collector, Guard, Reply
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout
from pytest_vram.spec import BackendSpec, Sampling, ToolCalling
from pytest_vram.toolcalls.asking import guard_of
from pytest_vram.toolcalls.cases import Case, CaseSet, ExpectedCall, Tool
from pytest_vram.toolcalls.evaluation import evaluate
from pytest_vram.toolcalls.results import CaseResult, Results

PING = Tool(
    name="ping_host",
    description="Pings a host.",
    parameters={
        "type": "object",
        "properties": {"host": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["host"],
    },
)
Said = Mapping[str, Any] | Exception


def case(number: int, expect: list[ExpectedCall] | None = None) -> Case:
    return Case(
        id=f"ping-{number:02}",
        family=f"f{number}",
        category="single",
        messages=[{"role": "user", "content": f"Ping host{number}."}],
        tools=[PING],
        expect=[ExpectedCall(name="ping_host", arguments={"host": ["db"]})] if expect is None else expect,
    )


def cases(count: int = 1) -> CaseSet:
    return CaseSet(name="own", cases=[case(number) for number in range(count)], digest="0" * 16)


def called(arguments: Any, name: str = "ping_host", **message: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **message,
    }


RIGHT = called({"host": "db"})


class Scripted:
    """Answers what it is told to, the last again and again; keeps what it was asked."""

    def __init__(self, *said: Said, finish: str = "stop") -> None:
        self.said = list(said)
        self.finish = finish
        self.asked: list[dict[str, Any]] = []

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **body: Any) -> Reply:
        self.asked.append({"messages": [dict(message) for message in messages], "max_tokens": max_tokens, **body})
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        content = said.get("content")
        record = RequestRecord(id="1", backend="b", path="/", result="ok", t=0, latency=0.5, status=200)
        raw = {"model": "/models/tiny.gguf", "system_fingerprint": "b1-abc"}
        return Reply(
            text=content if isinstance(content, str) else "",
            message=dict(said),
            finish_reason=self.finish,
            tokens_in=10,
            tokens_out=3,
            record=record,
            raw=raw,
        )


class Live(Scripted):
    """A server that can be looked at."""

    def __init__(self, *said: Said, looks: Sequence[Exception | None] = (None,)) -> None:
        super().__init__(*said)
        self.looks = list(looks)

    def get(self, path: str) -> Any:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if look is not None:
            raise look
        return {}


def run(client: Any, count: int = 1, *, protocol: str = "tools", set_: CaseSet | None = None, **more: Any) -> Results:
    slept: list[float] = more.pop("slept", [])
    calling = ToolCalling(protocol=protocol)
    return evaluate(client, set_ or cases(count), sampling=Sampling(), calling=calling, sleep=slept.append, **more)


def only(results: Results) -> CaseResult:
    (result,) = results.results
    return result


def failed(status: int | None, message: str, retry_after: str | None = None) -> RequestFailed:
    body = json.dumps({"error": {"message": message}})
    return RequestFailed(
        f"backend 'b' answered HTTP {status}: {message}", status=status, body=body, retry_after=retry_after
    )


def test_a_right_answer_is_right_with_its_figures() -> None:
    """Latency, tokens, calls and own time are kept; nothing is retried."""
    result = only(run(client := Scripted(RIGHT)))
    first = result.first
    assert (first.outcome, first.kind, first.kinds, result.retries) == ("right", "valid", (), [])
    assert (first.latency, first.tokens_in, first.tokens_out, first.status) == (0.5, 10, 3, 200)
    assert first.calls[0].arguments == {"host": "db"}
    assert 0 <= first.own_seconds < 1
    assert result.expect == [{"name": "ping_host", "arguments": {"host": ["db"]}}]
    assert result.request is None
    assert len(client.asked) == 1
    assert client.asked[0]["max_tokens"] == 512


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (called('{"host": "db"'), "missing_bracket"),
        (called({"hsot": "db"}), "misspelt_field"),
        (called({"host": "db"}, "ping_hots"), "near_miss_tool"),
        (called({"host": "db"}, "launch"), "invented_tool"),
        ({"role": "assistant", "content": '{"name": "ping_host", "arguments": {"host": "db"}}'}, "call_in_text"),
        ({"role": "assistant", "content": ""}, "empty"),
        ({}, "empty"),
    ],
)  # fmt: skip
def test_what_a_runtime_would_know_is_told_once(message: dict[str, Any], kind: str) -> None:
    """The second answer counts after the retry; the first stays what it is."""
    result = only(run(client := Scripted(message, RIGHT)))
    assert (result.first.outcome, result.first.kind) == ("wrong", kind)
    assert [answer.outcome for answer in result.retries] == ["right"]
    assert result.last.outcome == "right"
    assert result.request is not None
    assert result.request["messages"] == case(0).messages
    assert len(client.asked) == 2


@pytest.mark.parametrize(
    ("message", "expect", "kind"),
    [
        (called({"host": "web"}), None, "wrong_value"),
        ({"role": "assistant", "content": "I will not."}, None, "no_call"),
        (RIGHT, [], "irrelevant_call"),
        ({**RIGHT, "tool_calls": RIGHT["tool_calls"] * 2}, None, "extra_call"),
    ],
)
def test_what_only_the_case_knows_is_not_told(message: dict[str, Any], expect: Any, kind: str) -> None:
    """A well-formed answer that is not the right one gets no second try."""
    set_ = CaseSet(name="own", cases=[case(0, expect)], digest="0")
    result = only(run(client := Scripted(message, RIGHT), set_=set_))
    assert (result.first.kind, result.retries, len(client.asked)) == (kind, [], 1)


def test_the_history_of_a_retry_has_no_malformed_arguments() -> None:
    """They become an empty object, and the text of them is in the tool's result; the right answer is not."""
    bad = called('{"host": "web", "times": 3')
    bad["tool_calls"] = [*bad["tool_calls"], *called({"host": "mail"})["tool_calls"], {"function": 3}, "junk"]
    run(client := Scripted(bad, RIGHT))
    _, assistant, *results = client.asked[1]["messages"]
    arguments = [call["function"]["arguments"] for call in assistant["tool_calls"]]
    assert arguments == ["{}", '{"host": "mail"}', "{}"]
    assert [message["role"] for message in results] == ["tool"] * 3
    assert [message["tool_call_id"] for message in results] == [call["id"] for call in assistant["tool_calls"]]
    assert '{"host": "web", "times": 3' in results[0]["content"]
    assert "db" not in json.dumps(client.asked[1])


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
def test_in_the_text_protocols_the_answer_goes_back_as_it_was(protocol: str) -> None:
    """And what is wrong with it is said by the user; of a long one both ends are kept."""
    text = '{"calls": [{"name": "ping_host", "arguments": {"host": "' + "x" * 9000 + '"}}'
    right = {"role": "assistant", "content": '{"calls": [{"name": "ping_host", "arguments": {"host": "db"}}]}'}
    result = only(run(client := Scripted({"role": "assistant", "content": text}, right), protocol=protocol))
    assert (result.first.outcome, result.last.outcome) == ("wrong", "right")
    *_, assistant, user = client.asked[1]["messages"]
    assert (assistant["role"], user["role"]) == ("assistant", "user")
    assert assistant["content"].startswith('{"calls"')
    assert assistant["content"].endswith('"}}')
    assert len(assistant["content"]) < 4100
    assert len(result.first.raw) <= 4000
    assert result.first.raw_length == len(text)


def test_as_many_retries_as_asked_and_each_sees_all_before_it() -> None:
    """Two failures and a right answer, with two retries; with none there is none."""
    bad = called("{")
    result = only(run(client := Scripted(bad, bad, RIGHT), retries=2))
    assert [answer.outcome for answer in result.retries] == ["wrong", "right"]
    assert [len(body["messages"]) for body in client.asked] == [1, 3, 5]
    assert only(run(Scripted(bad, RIGHT), retries=0)).retries == []


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (500, "The model produced output that does not match the expected peg-native format"),
        (500, "Failed to parse input at pos 184: <tool_call>{"),
        (500, "error parsing tool call: raw='{\"host\": ', err=unexpected end of JSON input"),
        (500, "Invalid diff: now finding less tool calls!"),
        (200, "error parsing tool call: raw='x', err=invalid character"),
        (400, "Failed to parse fc related info to json format!"),
    ],
)
def test_an_answer_that_the_server_could_not_parse_is_the_models_failure(status: int, message: str) -> None:
    """Each engine says so in its own words, some of them in the middle of a stream; it is retried."""
    result = only(run(client := Scripted(failed(status, message), RIGHT)))
    assert (result.first.outcome, result.first.kind, result.first.status) == ("wrong", "server_parse_error", status)
    assert message.split(":")[0] in result.first.detail
    assert result.last.outcome == "right"
    assert [one["role"] for one in client.asked[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Failed to parse tool call arguments as JSON: unexpected end of input"),
        (500, "Failed to parse tool call arguments as JSON: unexpected end of input"),
        (500, "Jinja Exception: Conversation roles must alternate user/assistant"),
        (400, "Unterminated string starting at: line 1 column 9"),
        (422, "messages: field required"),
    ],
)
def test_a_refused_history_is_a_failed_retry_and_the_first_answer_stands(status: int, message: str) -> None:
    """It is asked no third time."""
    result = only(run(client := Scripted(called("{"), failed(status, message)), retries=3))
    assert (result.first.kind, [answer.kind for answer in result.retries]) == ("missing_bracket", ["history_rejected"])
    assert result.last.outcome == "wrong"
    assert len(client.asked) == 2


@pytest.mark.parametrize(
    "error",
    [
        failed(400, "Failed to parse tool call arguments as JSON: unexpected end of input"),
        failed(400, "tools param requires --jinja flag"),
        failed(401, "Invalid API Key"),
        failed(404, "no such model"),
        failed(500, "Failed to parse tools: type must be string"),
        failed(500, "CUDA error: out of memory"),
        failed(502, "bad gateway"),
        failed(200, "the answer is not JSON: it is empty"),
        failed(200, "the stream ended in the middle of the answer"),
        failed(None, "could not be sent"),
        RequestTimeout("backend 'b' did not answer within 1 s"),
    ],
)
def test_what_is_no_answer_of_the_model_is_no_failure_of_it(error: Exception) -> None:
    """It is counted as infrastructure trouble with its words, retried by nobody, and in no rate."""
    results = run(client := Scripted(error))
    first = only(results).first
    assert (first.outcome, first.kind, first.kinds) == ("infrastructure", "", ())
    assert first.detail == str(error)
    assert results.counted() == []
    assert len(client.asked) == 1


def test_a_context_that_is_too_long_with_the_retry_is_no_rejected_history() -> None:
    """The window is a setting of the deployment."""
    error = failed(400, "the request exceeds the available context size, try increasing it")
    assert only(run(Scripted(called("{"), error))).last.outcome == "infrastructure"


@pytest.mark.parametrize(
    ("told", "waits"),
    [(None, [1.0, 2.0, 4.0]), ("7", [7.0, 7.0, 7.0]), ("-3", [0.0, 0.0, 0.0]), ("junk", [1.0, 2.0, 4.0]), ("3600", []),
     ("nan", []), ("Thu, 01 Jan 1970 00:00:00 GMT", [0.0, 0.0, 0.0]), ("Fri, 31 Dec 9999 23:59:59 GMT", [])],
)  # fmt: skip
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_three_times(status: int, told: str | None, waits: list[float]) -> None:
    """As long as it says, but not for more than a minute; then it is infrastructure trouble."""
    slept: list[float] = []
    results = run(client := Scripted(failed(status, "busy", told)), slept=slept)
    assert (only(results).first.outcome, slept, len(client.asked)) == ("infrastructure", waits, len(waits) + 1)


def test_a_server_that_was_busy_once_answers_as_if_it_had_not_been() -> None:
    """The case is right."""
    assert only(run(Scripted(failed(429, "busy"), RIGHT))).first.outcome == "right"


def test_a_lost_connection_to_a_living_server_is_one_case() -> None:
    """It is looked at; one that answers anything lives."""
    for look in (None, failed(404, "no such path"), RequestTimeout("slow")):
        results = run(Live(BackendDied("lost"), RIGHT, looks=[look]), 2)
        assert [result.first.outcome for result in results.results] == ["infrastructure", "right"]


def test_a_server_that_comes_back_within_a_moment_lives() -> None:
    """It is looked at three times."""
    slept: list[float] = []
    looks = [BackendDied("refused"), BackendDied("refused"), None]
    assert len(run(Live(BackendDied("lost"), RIGHT, looks=looks), 2, slept=slept).results) == 2
    assert len(slept) == 2


def test_a_server_that_is_gone_ends_the_run_after_its_case_was_told() -> None:
    """No verdict can be had; what was answered before is not lost on who listens."""
    told: list[tuple[str, int]] = []
    client = Live(RIGHT, BackendDied("lost"), looks=[BackendDied("refused")])
    with pytest.raises(BackendDied):
        run(client, 4, told=lambda result, planned: told.append((result.first.outcome, planned)))
    assert told == [("right", 4), ("infrastructure", 4)]


def test_a_client_that_cannot_look_gives_up_at_the_third_lost_connection_in_a_row() -> None:
    """One in between that is answered begins the count anew."""
    lost = BackendDied("lost")
    assert len(run(Scripted(lost, lost, RIGHT, lost, lost, RIGHT), 6).results) == 6
    with pytest.raises(BackendDied):
        run(client := Scripted(RIGHT, lost), 9)
    assert len(client.asked) == 4


@pytest.mark.parametrize("host", ["db<|im_end|>", "web<|im_end|>", "web", "db", "<|im_end|>", 7])
@pytest.mark.parametrize("expected", ["db", "web", "mail"])
def test_what_is_told_does_not_hang_on_the_right_call(host: Any, expected: str) -> None:
    """Whichever call is right: the same retry with the same words, or none at all."""
    answer = called({"host": host})
    told = []
    for right in (expected, "nothing that any answer has"):
        wanted = [ExpectedCall(name="ping_host", arguments={"host": [right]})]
        client = Scripted(answer)
        result = only(run(client, set_=CaseSet(name="own", cases=[case(0, wanted)], digest="0" * 16)))
        if result.first.outcome == "wrong":
            told.append([request["messages"] for request in client.asked[1:]])
    assert all(one == told[0] for one in told)
    assert expected == "db" or "right" not in json.dumps(told)


def test_five_cases_in_a_row_without_an_answer_are_enough() -> None:
    """The rest of three hundred would only wait for their time-outs; the results say so."""
    results = run(client := Scripted(RequestTimeout("nothing within 300 s")), 30)
    assert (len(client.asked), len(results.results), results.planned) == (5, 5, 30)
    assert results.stopped == "the last 5 cases got no answer that could be judged: the other 25 were not asked"
    assert results.notes == [f"{results.stopped}; the last error was: nothing within 300 s"]
    assert (results.decided, results.due) == (False, 30)


def test_enough_is_asked_after_each_case_and_its_reason_is_kept() -> None:
    """Sequential stopping; the number planned stays."""

    def three(results: Sequence[CaseResult]) -> str | None:
        return "decided" if len(results) == 3 else None

    results = run(Scripted(RIGHT), 9, enough=three)
    assert (len(results.results), results.planned, results.stopped) == (3, 9, "decided")
    assert (results.decided, results.due) == (True, 3)


def test_a_seed_decides_the_order_and_a_limit_how_many() -> None:
    """The same seed asks the same cases."""
    asked = [[result.id for result in run(Scripted(RIGHT), 20, limit=6, seed=seed).results] for seed in (1, 1, 2)]
    assert len(asked[0]) == 6
    assert asked[0] == asked[1] != asked[2]


def test_the_fingerprint_has_what_must_be_the_same(tmp_path: Path) -> None:
    """Model with its file, engine, build, options, protocol, sampling, cases, and what the caller adds."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(3_000_000))
    spec = BackendSpec(
        name="agent",
        engine="llama-server",
        origin="x",
        base=str(tmp_path),
        model="m.gguf",
        options={"ctx-size": 512},
        api_key="hush",
    )
    results = run(Scripted(RIGHT), spec=spec, fingerprint={"engine_build": 7})
    found = results.fingerprint
    assert (results.backend, results.settings["options"]) == ("agent", {"ctx-size": 512})
    assert (found["model"], found["model_size"], len(found["model_digest"])) == ("m.gguf", 3_000_004, 16)
    assert (found["served_model"], found["build"], found["engine_build"]) == ("tiny.gguf", "b1-abc", 7)
    assert (found["protocol"], found["sampling"]["temperature"], found["digest"]) == ("tools", 0.0, "0" * 16)
    assert "hush" not in str(results)


def streamed(guard: Guard, pieces: int, piece: Callable[[int], Mapping[str, Any]]) -> None:
    collector = Collector(backend="b", path="POST /", status=200, content_type="text/event-stream", guard=guard)
    for number in range(pieces):
        event = {"choices": [{"index": 0, "delta": piece(number)}]}
        collector.feed(b"data: " + json.dumps(event).encode() + b"\n\n", 0.0)


def feed(collector: Collector, times: int, chunk: bytes) -> None:
    for _ in range(times):
        collector.feed(chunk, 0.0)


def test_a_stream_without_end_is_ended_by_its_guard() -> None:
    """Long before its bytes would fill the memory, and what it said is kept in part."""
    guard = guard_of(16)
    with pytest.raises(RequestFailed, match="did not end"):
        streamed(guard, 10_000, lambda number: {"content": "la "})
    assert guard.pieces == 4 * 16 + 65
    assert guard.text.startswith("la la ")
    assert guard.taken < 20_000


def test_every_answer_within_its_limit_passes_the_guard() -> None:
    """A piece a token, arguments one by one, and a preamble."""
    guard = guard_of(512)
    streamed(guard, 512, lambda number: {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 20}}]})
    assert not guard.stopped
    assert len(guard.text) == 512 * 20


def test_a_body_without_end_is_ended_by_its_size() -> None:
    """Also where it is no stream."""
    guard = guard_of(16)
    collector = Collector(backend="b", path="POST /", status=200, content_type="application/json", guard=guard)
    with pytest.raises(RequestFailed, match="did not end"):
        feed(collector, 10_000, b'{"choices": [{"message": {"content": "' + b"x" * 60_000)
    assert guard.taken < 1_300_000
    assert len(guard.text) <= Guard.KEPT


def test_one_event_without_end_did_not_end() -> None:
    """A stream whose only event grows and grows is no answer that was never begun."""
    guard = guard_of(16)
    collector = Collector(backend="b", path="POST /", status=200, content_type="text/event-stream", guard=guard)
    with pytest.raises(RequestFailed, match="did not end"):
        feed(collector, 10_000, b'data: {"choices": [{"delta": {"content": "' + b"x" * 60_000)
    assert '"content"' in guard.text
    assert len(guard.text) <= Guard.KEPT

    class Growing(VramClient):
        def chat(self, messages: Any, *, guard: Guard | None = None, **body: Any) -> Reply:
            assert guard is not None
            guard.stopped = "the answer did not end: it was stopped after 3 MiB"
            guard.keep('data: {"choices": [{"delta": {"content": "la la')
            raise RequestFailed("the answer did not end", status=200)

    first = only(run(Growing(Target(name="b", url="http://127.0.0.1:1")), retries=0)).first
    assert (first.outcome, first.kind) == ("wrong", "runaway")


class Slow(VramClient):
    """Brings some pieces and is then out of time."""

    def __init__(self, pieces: int, text: str) -> None:
        super().__init__(Target(name="b", url="http://127.0.0.1:1"))
        self.pieces, self.text = pieces, text

    def chat(self, messages: Any, *, guard: Guard | None = None, **body: Any) -> Reply:
        assert guard is not None
        for _ in range(self.pieces):
            guard.generated(self.text)
        raise RequestTimeout("backend 'b' did not answer within 1 s")


@pytest.mark.parametrize(
    ("pieces", "text", "outcome", "kind"),
    [
        (0, "", "infrastructure", ""),
        (5, "so far so good, ", "infrastructure", ""),
        (513, "x", "wrong", "runaway"),
        (500, "\t\t\t\t", "wrong", "runaway"),
    ],
)
def test_a_timeout_while_text_came_is_a_runaway_only_where_it_does_not_end(
    pieces: int, text: str, outcome: str, kind: str
) -> None:
    """A slow machine is no failure of the model; more pieces than tokens, or nothing but repetition, is."""
    first = only(run(Slow(pieces, text), retries=0)).first
    assert (first.outcome, first.kind) == (outcome, kind)


def test_an_unknown_protocol_is_an_error_of_the_caller() -> None:
    """The spec file refuses it before."""
    with pytest.raises(ValueError, match="'chatty' is no protocol"):
        run(Scripted(RIGHT), protocol="chatty")

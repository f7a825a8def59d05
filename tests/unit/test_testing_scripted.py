"""The scripted backend without a connection: its true accuracy, its defects, its faults."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BackendDied, BadInput, RequestFailed, RequestTimeout
from pytest_vram.testing.scripted import (
    FAULTS,
    WRONG_KINDS,
    Answerer,
    Fault,
    Script,
    ScriptedClient,
    answer,
    defects,
    drawing,
)
from pytest_vram.testing.scripted.script import encoded, read_script
from pytest_vram.testing.scripted.shapes import ScriptedReply, chunks, pieces
from pytest_vram.toolcalls import CaseSet
from pytest_vram.toolcalls.scoring import match
from tests.unit import scripted_kit as kit


def calls_of(reply: ScriptedReply) -> list[tuple[str | None, Any]]:
    """The calls that an answer makes, read by the letter; raises where they are no JSON."""
    if reply.protocol == "tools":
        listed = reply.message.get("tool_calls", [])
        return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in listed]
    text = json.loads(reply.message["content"])
    return [(one["name"], one["arguments"]) for one in text["calls"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", kit.PROTOCOLS)
def test_right_answers_are_right(protocol: str, stream: bool) -> None:
    """With a true accuracy of 1 every case is recognised, and scoring finds nothing wrong with its answer."""
    cases = kit.cases(50)
    answerer = Answerer(Script(accuracy=1.0), cases)
    for case, body in zip(cases.cases, kit.bodies(cases, protocol, stream=stream), strict=True):
        reply = answerer.answer(body)
        assert (reply.case, reply.right, reply.kind, reply.protocol) == (case.id, True, "valid", protocol)
        assert match(calls_of(reply), case.expect, case.tools).defects == ()
    assert (answerer.asked, answerer.unknown) == (50, 0)


@pytest.mark.parametrize("kind", [kind for kind in WRONG_KINDS if kind in defects.calls.WRONG or kind == "extra_call"])
@pytest.mark.parametrize("protocol", kit.PROTOCOLS)
def test_wrong_calls_are_wrong_in_their_way(protocol: str, kind: str) -> None:
    """Well-formed calls that are to be wrong in one way are found wrong in this way."""
    cases = kit.cases(50)
    answerer = Answerer(Script(accuracy=0.0, defects={kind: 1.0}), cases)
    seen: Counter[str] = Counter()
    for case, body in zip(cases.cases, kit.bodies(cases, protocol), strict=True):
        reply = answerer.answer(body)
        seen[reply.kind] += 1
        assert reply.right is False
        found = match(calls_of(reply), case.expect, case.tools).defects
        assert reply.kind in {defect.kind for defect in found}, (reply, found)
    assert seen == {kind: 40, "irrelevant_call": 10}


@pytest.mark.parametrize("kind", defects.GARBLED)
@pytest.mark.parametrize("protocol", ["tools", "few_shot"])
def test_garbled_calls_are_no_json(protocol: str, kind: str) -> None:
    """A defect of the text leaves no well-formed calls, whichever it is."""
    cases = kit.cases(50)
    answerer = Answerer(Script(accuracy=0.0, defects={kind: 1.0}), cases)
    garbled = 0
    for body in kit.bodies(cases, protocol):
        reply = answerer.answer(body)
        if reply.kind == kind:
            garbled += 1
            if kind in ("duplicate_key", "non_finite_number"):  # which Python takes
                calls_of(reply)
            elif kind == "double_encoded":
                assert any(isinstance(arguments, str) for _, arguments in calls_of(reply))
            else:
                with pytest.raises(ValueError):
                    calls_of(reply)
    assert garbled >= 15


def test_answers_depend_on_nothing_but_the_script() -> None:
    """The same seed gives each case the same answer in any order, by any answerer, and another seed gives others."""
    cases = kit.cases(100)
    script = Script(accuracy=0.5)
    listed = kit.bodies(cases)
    first = Answerer(script, cases)
    expected = [first.answer(body) for body in listed]
    second = Answerer(script, cases)
    for index, body in kit.shuffled(listed, seed=3):
        assert second.answer(body) == expected[index]
        assert second.answer(body) == expected[index]
    other = Answerer(msgspec.structs.replace(script, seed=1), cases)
    assert [other.answer(body).right for body in listed] != [reply.right for reply in expected]


@pytest.mark.parametrize("icc", [0.0, 0.3])
@pytest.mark.parametrize("accuracy", [0.5, 0.94])
def test_accuracy_is_the_true_one(accuracy: float, icc: float) -> None:
    """Over 20,000 draws the share that is right is the script's accuracy, within five standard errors."""
    script = Script(accuracy=accuracy, icc=icc, seed=5)
    size, families = 5, 4000
    right = sum(drawing.is_right(script, f"{f}-{c}", str(f), 0) for f in range(families) for c in range(size))
    effect = 1 + (size - 1) * icc
    error = math.sqrt(accuracy * (1 - accuracy) * effect / (size * families))
    assert abs(right / (size * families) - accuracy) < 5 * error


@pytest.mark.parametrize("icc", [0.0, 0.1, 0.5, 1.0])
def test_families_succeed_together(icc: float) -> None:
    """Two cases of a family correlate by the script's ``icc``."""
    script = Script(accuracy=0.8, icc=icc, seed=2)
    families = 8000
    pairs = [tuple(drawing.is_right(script, f"{f}-{c}", str(f), 0) for c in (0, 1)) for f in range(families)]
    both = sum(one and other for one, other in pairs) / families
    correlation = (both - 0.8**2) / (0.8 * 0.2)
    assert abs(correlation - icc) < 0.08


def test_wobble_is_what_a_second_run_changes() -> None:
    """Two draws of one script differ in the share of cases that is drawn anew and comes out otherwise."""
    script = Script(accuracy=0.5, wobble=0.2)
    again = msgspec.structs.replace(script, draw=1)
    changed = sum(
        drawing.is_right(script, str(number), "f", 0) != drawing.is_right(again, str(number), "f", 0)
        for number in range(10_000)
    )
    # Either draw may be the new one, and half of the new outcomes are the old ones.
    assert abs(changed / 10_000 - (1 - 0.8**2) * 0.5) < 0.02


def test_a_worse_backend_loses_cases_of_the_better_one() -> None:
    """At one seed, what a backend of lower accuracy gets right is what the better one gets right as well."""
    better, worse = Script(accuracy=0.9), Script(accuracy=0.6)
    for number in range(500):
        assert drawing.is_right(better, str(number), "f", 0) >= drawing.is_right(worse, str(number), "f", 0)


def test_a_retry_is_recognised_by_its_history() -> None:
    """A request with an answer and its error behind it is a retry of the case, right as often as ``recovery`` says."""
    cases = kit.cases(400)
    answerer = Answerer(Script(accuracy=0.0, recovery=0.7), cases)
    replies = [answerer.answer(kit.retried(body)) for body in kit.bodies(cases)]
    assert {reply.turn for reply in replies} == {1}
    assert 0.6 < sum(bool(reply.right) for reply in replies) / 400 < 0.8
    assert answerer.answer(kit.retried(kit.retried(kit.bodies(cases)[0]))).turn == 2


@pytest.mark.parametrize("protocol", kit.PROTOCOLS)
def test_a_case_that_goes_on_where_another_ends_is_its_own(protocol: str) -> None:
    """A case whose conversation begins with the whole of another case is not taken for a retry of that."""
    short = kit.cases(1).cases[0]
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "restart_job", "arguments": '{"job": "a", "now": true}'},
    }
    more = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "restarted"},
    ]
    longer = msgspec.structs.replace(short, id="longer", messages=[*short.messages, *more])
    cases = CaseSet(name="two", cases=[short, longer], digest="0" * 16)
    answerer = Answerer(Script(), cases)
    replies = [answerer.answer(body) for body in kit.bodies(cases, protocol)]
    assert [(reply.case, reply.turn) for reply in replies] == [(short.id, 0), ("longer", 0)]


def test_streaming_alone_may_break_answers() -> None:
    """With ``streamed_right`` of 0 every streamed answer has its defect, and the same request unstreamed has none."""
    cases = kit.cases(20)
    answerer = Answerer(Script(streamed_right=0.0, streamed_defect="unterminated_string"), cases)
    for body in kit.bodies(cases):
        whole, streamed = answerer.answer(body), answerer.answer({**body, "stream": True})
        assert whole.right is True
        assert streamed.right is False
        assert streamed.kind in ("unterminated_string", "no_call", "irrelevant_call")


def test_pieces_of_a_stream_add_up() -> None:
    """Names, arguments and text of a streamed answer are those of the whole one, with usage in the last piece."""
    cases = kit.cases(5)
    answerer = Answerer(Script(), cases)
    for body in kit.bodies(cases):
        reply = answerer.answer(body)
        made = list(chunks(reply, usage=True))
        deltas = [piece["choices"][0]["delta"] for piece in made[:-1]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == (reply.message["content"] or "")
        for index, call in enumerate(reply.message.get("tool_calls", [])):
            parts = [part for delta in deltas for part in delta.get("tool_calls", []) if part["index"] == index]
            whole = "".join(part["function"].get("arguments", "") for part in parts)
            assert (parts[0]["id"], parts[0]["function"]["name"]) == (call["id"], call["function"]["name"])
            assert whole == call["function"]["arguments"]
        assert made[-2]["choices"][0]["finish_reason"] == reply.finish_reason
        assert made[-1]["usage"]["completion_tokens"] == reply.tokens_out


@pytest.mark.parametrize("text", ["", "plain words", '{"a": "ü 漢字 \\n", "b": [1, 2.5]}', " \n\t ", "x" * 1000])
def test_pieces_lose_nothing(text: str) -> None:
    """Any text is the sum of its pieces."""
    assert "".join(pieces(text)) == text


def test_requests_of_others_are_known_by_what_they_say() -> None:
    """A request with another system prompt and more fields is known by its user message, a stranger's is not."""
    cases = kit.cases(10)
    answerer = Answerer(Script(), cases)
    body = kit.bodies(cases)[3]
    changed = [{"role": "system", "content": "Another prompt."}, body["messages"][1]]
    assert answerer.answer({**body, "messages": changed, "top_p": 0.5}).case == "case-0003"
    stranger = answerer.answer({"messages": [{"role": "user", "content": "Good morning"}]})
    assert (stranger.case, stranger.right) == (None, None)
    assert answerer.unknown == 1


@pytest.mark.parametrize(
    "messages", [None, 5, [], ["text"], [{}], [{"role": "user"}], [{"role": "user", "content": [1]}]]
)
def test_odd_messages_are_nobodys_case(messages: object) -> None:
    """Whatever stands in ``messages``, the answer is that no case was asked."""
    assert answer(Script(), kit.cases(3), {"messages": messages}).case is None


def test_faults_strike_where_they_are_told() -> None:
    """By number, by case, by turn, by share, and as often as told."""
    cases = kit.cases(100)
    listed = kit.bodies(cases)
    faults = [
        Fault(kind="http_503", requests=[0]),
        Fault(kind="http_429", cases=["case-0002"], times=1, retry_after=0.5),
        Fault(kind="http_400_history", turn="retry", share=1.0),
    ]
    answerer = Answerer(Script(faults=faults), cases)
    assert [answerer.answer(listed[index]).status for index in (0, 0, 2, 2)] == [503, 200, 429, 200]
    assert answerer.answer(kit.retried(listed[1])).status == 400
    assert answerer.faults == {"http_503": 1, "http_429": 1, "http_400_history": 1}
    some = Answerer(Script(faults=[Fault(kind="http_500", share=0.3)]), cases)
    struck = [some.answer(body).status == 500 for body in listed]
    assert struck == [some.answer(body).status == 500 for body in listed]
    assert 15 <= sum(struck) <= 45


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_without_a_connection_end_as_the_client_reports_them(kind: str) -> None:
    """In this process, a fault is an error of the client, but for the answers that a client can read."""
    cases = kit.cases(5)
    client = ScriptedClient(Script(faults=[Fault(kind=kind, share=1.0)]), cases)  # type: ignore[arg-type]
    body = kit.bodies(cases)[0]
    if kind in ("empty_content", "wrong_content_type"):
        assert client.chat(**body).finish_reason in ("stop", "tool_calls")
    elif kind in ("endless", "huge"):
        assert len(client.chat(**body).text) >= 20_000_000
    else:
        with pytest.raises((RequestFailed, RequestTimeout, BackendDied)):
            client.chat(**body)
    if kind.startswith("dies"):
        with pytest.raises(BackendDied):
            client.get("/health")
    else:
        assert client.get("/v1/models")["data"][0]["id"] == "scripted"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"accuracy": 1.5}, "accuracy of a script is 1.5"),
        ({"icc": -0.1}, "icc of a script is -0.1"),
        ({"recovery": float("nan")}, "recovery of a script is nan"),
        ({"defects": {"missing_braket": 1.0}}, "'missing_braket' is no kind"),
        ({"defects": {"arguments_as_object": 1.0}}, "'arguments_as_object' is no kind"),
        ({"defects": {}}, "`defects` of a script"),
        ({"defects": {"empty": 0.0}}, "`defects` of a script"),
        ({"tokens_per_second": 0.0}, "`tokens_per_second` of a script"),
        ({"latency": -1.0}, "`latency` of a script"),
        ({"hold": -1}, "`hold`"),
    ],
)
def test_scripts_that_make_no_sense_are_refused(values: dict[str, Any], words: str) -> None:
    """Shares outside of 0 to 1, unknown kinds and no weights are one sentence."""
    with pytest.raises(BadInput) as caught:
        Script(**values)
    assert words in str(caught.value)


def test_scripts_are_json(tmp_path: Path) -> None:
    """A script survives a file; a file that is none is one sentence with its path."""
    script = Script(accuracy=0.9, faults=[Fault(kind="huge", requests=[1], size=5)], defects={"empty": 1.0})
    path = tmp_path / "script.json"
    path.write_bytes(encoded(script))
    assert read_script(path) == script
    path.write_text('{"accuracy": "much"}')
    with pytest.raises(BadInput, match="script.json is none"):
        read_script(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_script(tmp_path / "missing.json")

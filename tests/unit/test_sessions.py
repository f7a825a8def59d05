"""Conversations, sessions and recall without a server: a scripted client stands in for one."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_vram import sessions
from pytest_vram.backends.base import Properties
from pytest_vram.errors import BackendDied, BadInput, RequestFailed
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.sessions import Conversation, Session, Turn, conversation_schema, load, recall, table
from pytest_vram.sessions.gauge import NoGauge, Peaks, Rest
from pytest_vram.spec import BackendSpec
from pytest_vram.testing.scripted import Fault, Script, ScriptedClient
from pytest_vram.toolcalls import Case
from pytest_vram.toolcalls.lint import lint
from pytest_vram.units import MIB

ROOT = Path(__file__).parents[2]
SHIPPED = [load(name) for name in sessions.shipped()]


class Scripted:
    """A backend whose client answers by a script, in this process."""

    name = "scripted"

    def __init__(self, script: Script | None = None, cases: list[Case] | None = None) -> None:
        known = cases if cases is not None else [case for one in SHIPPED for case in one.cases()]
        self.client = ScriptedClient(script if script is not None else Script(), known)
        self.spec = BackendSpec(name="scripted", engine="command", origin="", base="")
        self.generation = 1

    def properties(self) -> Properties:
        return Properties()

    def restart(self) -> None:
        self.generation += 1


class Gauge:
    """Idle memory that grows by 1 MiB a turn."""

    def __init__(self) -> None:
        self.turns = 0

    def begin(self) -> object:
        self.turns += 1
        return self.turns

    def end(self, begun: object) -> Peaks:
        return Peaks(peak={"gpu0": self._reading(500)})

    def idle(self, settle: float) -> Rest:
        if self.turns == 3:
            return Rest(idle={"gpu0": Unmeasurable(reason="memory was still changing after 2 s")})
        return Rest(idle={"gpu0": self._reading(100)})

    def _reading(self, amount: int) -> Reading:
        size = (amount + self.turns) * MIB
        return Reading(bytes=size, source="nvml-process", scope="backend", device="gpu0", exact=False)


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize("conversation", SHIPPED, ids=lambda one: one.name)
def test_a_conversation_of_this_package_ramps_and_has_no_faults(conversation: Conversation) -> None:
    """Lengths go from short to long and repeat, every decision passes the linter of cases, and the schema holds."""
    assert [turn.length for turn in conversation.turns] == ["short", "medium", "long"] * 2
    sizes = [len(turn.user) + sum(map(len, turn.results)) for turn in conversation.turns]
    assert sizes[0] < sizes[1] < sizes[2] > 1500
    assert sizes[3] < sizes[4] < sizes[5] > 1500
    assert all(turn.answer for turn in conversation.turns)
    assert conversation.summary
    assert conversation.largest == 5
    assert [found for found in lint(conversation.cases()) if found.level == "error"] == []
    schema = conversation_schema.schemas()["conversation.json"]
    written = json.loads((ROOT / f"fixtures/conversations/{conversation.name}.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, schema)


def test_the_published_schema_is_up_to_date() -> None:
    """The file that editors read is the one that this version writes."""
    path = ROOT / "fixtures/conversations/schema/conversation.json"
    assert json.loads(path.read_text(encoding="utf-8")) == conversation_schema.schemas()["conversation.json"]


MINIMAL: dict[str, Any] = {
    "name": "mine",
    "tools": ["service_status"],
    "turns": [
        {
            "user": {"text": "Look:", "lines": ["{n} a", "{n} b"], "count": 3, "after": "end"},
            "expect": [{"name": "service_status", "arguments": {"host": ["web-3"], "service": ["cache"]}}],
            "results": ["active"],
        }
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    """A file with some keys of its only turn changed."""
    return {**MINIMAL, "turns": [{**MINIMAL["turns"][0], **changes}]}


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    """Lines are repeated with their numbers, names of tools are those of the package, or those beside the file."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MINIMAL), encoding="utf-8")
    found = load(path)
    assert found.turns[0].user == "Look:\n1 a\n2 b\n3 a\nend"
    assert [tool.name for tool in found.tools] == ["service_status"]
    assert load("mine.json", base=tmp_path).digest == found.digest
    own = {"tools": {"service_status": {"description": "own", "parameters": {"type": "object"}}}}
    (tmp_path / "tools.json").write_text(json.dumps(own), encoding="utf-8")
    assert load(path).tools[0].description == "own"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list"),
        ("\0", "is not JSON"),
        (b"\xff\xfe{", "UTF-16"),
        (b"\xff{}", "is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ({"turns": []}, "has no 'name'"),
        ({"name": "x", "turns": []}, "turns has 0"),
        ({"name": "x\n", "turns": [{"user": "a"}]}, "name is not a name"),
        ({"name": "x", "turns": [{"user": "a"}] * 3000}, "turns has 3000"),
        ({"name": "x", "turns": [{"user": "a"}], "turn": 1}, "unknown key 'turn': did you mean 'turns'"),
        ({"name": "x", "turns": ["a"]}, "turns[0] is text"),
        (changed(length="tiny"), "write one of short, medium, long"),
        (changed(output_cap=0), "output_cap is 0"),
        (changed(output_cap=True), "output_cap is True"),
        (changed(results=[]), "`expect` has 1 and `results` 0: each call has one result"),
        (changed(expect=[{"name": "service_stat"}]), "did you mean 'service_status'?"),
        (changed(expect=[{"name": "service_status", "arguments": {"host": "web-3"}}]), "is not a list"),
        (
            changed(expect=[{"name": "service_status", "arguments": {"hots": ["x"]}}]),
            "service_status has no argument 'hots' (did you mean 'host'?)",
        ),
        (changed(user={"lines": ["{n} ok", "{m} hit"], "count": 2}), "lines has {m}, which is no placeholder"),
        (changed(user={"lines": [], "count": 1}), "lines is empty"),
        (changed(user={"lines": ["x" * 1000], "count": 20_000}), "more than 4 MiB"),
        (changed(user={"lines": ["x"], "count": 10**9}), "count is 1000000000"),
        ({**MINIMAL, "tools": ["no_such_tool"]}, "no_such_tool"),
        ({**MINIMAL, "tools": ["service_status", "service_status"]}, "tools has 'service_status' twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_sentence(tmp_path: Path, content: Any, message: str) -> None:
    """What is wrong is named with its place; nothing of the file is shown raw."""
    path = tmp_path / "bad.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        load(path)
    assert message in str(caught.value)
    assert "bad.json" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("named", ["", "no-such", 7, None, "a\0b", "/dev/null", "/"])
def test_a_name_that_is_none_is_told(named: Any) -> None:
    """Names that are neither a file nor a conversation of the package are refused, with those that there are."""
    with pytest.raises(BadInput):
        load(named)


# ---------------------------------------------------------------- sessions


def test_every_turn_is_recorded_and_judged() -> None:
    """Cycles begin anew with prompts of the same lengths; several conversations are run in turn; the warm-up is no
    turn and has the longest prompt."""
    session = Session(Scripted(), SHIPPED[:2], gauge=Gauge())
    warm = session.warm_up()
    turns = session.run(24)
    assert [turn.number for turn in turns] == list(range(1, 25))
    assert [turn.phase for turn in turns] == [*range(12)] * 2
    assert [turn.cycle for turn in turns] == [1] * 12 + [2] * 12
    assert {turn.conversation for turn in turns[:6]} == {SHIPPED[0].name}
    assert [turn.tokens_in for turn in turns[:12]] == [turn.tokens_in for turn in turns[12:]]
    assert warm.tokens_in == max(turn.tokens_in or 0 for turn in turns)
    assert [turn.calls_right for turn in turns[:6]] == [1, 1, 1, 1, 1, 0]
    assert all(turn.kinds == [] and turn.repeated == 0 for turn in turns)
    assert turns[0].peak["gpu0"] != turns[1].peak["gpu0"]
    assert len(session.warm_ups) == 1


def test_wrong_calls_are_told_by_kind_and_repeats_are_counted() -> None:
    """What a model calls does not change what it is asked next; an identical call that is not wanted is repeated."""
    wrong = Session(Scripted(Script(accuracy=0.0, defects={"missing_bracket": 1})), SHIPPED[0])
    right = Session(Scripted(), SHIPPED[0])
    assert [turn.tokens_in for turn in wrong.run()] == [turn.tokens_in for turn in right.run()]
    assert wrong.turns[0].kinds == ["missing_bracket"]
    assert wrong.turns[0].calls_right == 0
    again = Session(Scripted(Script(accuracy=0.0, defects={"irrelevant_call": 1})), SHIPPED[1])
    again.run(12)
    assert sum(turn.repeated for turn in again.turns) > 0


def test_messages_leave_before_the_context_overflows() -> None:
    """In a conversation that goes on, evictions and the summary are events, and prompts stay under the limit."""
    session = Session(Scripted(), SHIPPED[0], context=2600, carry=True)
    session.run(14)
    events = [event for turn in session for event in turn.events]
    assert events.count("summarised") == 1
    assert any(event.startswith("evicted ") for event in events)
    assert all((turn.tokens_in or 0) <= 2600 - (turn.output_cap or 0) for turn in session)
    with pytest.raises(BadInput, match="raise the context"):
        Session(Scripted(), SHIPPED[0], context=100).turn()


def test_a_context_that_is_too_small_is_told_in_the_sessions_words() -> None:
    """Which turn of which conversation, what was given, and what of it is not for the prompt."""
    said = "turn 1 of conversation 'cron-check' does not fit into the context of 300 tokens (`context`), of which an"
    session = Session(Scripted(), load("cron-check"), context=300, carry=True)
    with pytest.raises(BadInput, match=re.escape(said)) as raised:
        session.run(2)
    assert type(raised.value) is BadInput


@pytest.mark.parametrize("turns", [0, -3, 1.5, "x", True])
def test_a_number_of_turns_that_is_none_is_told(turns: Any) -> None:
    """A session of no turns would pass any test."""
    with pytest.raises(BadInput, match=r"turns=.* of a session: write a whole number, 1 or more"):
        Session(Scripted(), SHIPPED[0]).run(turns)


def test_tokens_of_an_answer_without_a_count_are_not_known() -> None:
    """What is left of a turn's answers is not its count; the context is that of the last request."""
    session = Session(Scripted(Script(faults=[Fault(kind="http_500_parse", requests=[2])])), load("cron-check"))
    whole, cut = session.run(2)
    assert whole.tokens_out
    assert cut.tokens_out is None
    assert cut.kinds == ["server_parse_error"]
    assert (cut.context or 0) > (cut.tokens_in or 0) > 0


def test_a_session_is_for_one_thread_at_a_time() -> None:
    """The second one is told, and its turn is not taken."""
    session: Session

    class Meeting(Gauge):
        def end(self, begun: object) -> Peaks:
            with pytest.raises(BadInput, match="by another thread: give each thread its own session"):
                pool.submit(session.turn).result()
            return super().end(begun)

    session = Session(Scripted(), SHIPPED[0], gauge=Meeting())
    with ThreadPoolExecutor(1) as pool:
        session.run(2)
    assert [turn.number for turn in session] == [1, 2]


def test_a_restart_begins_a_segment_and_trouble_is_kept() -> None:
    """The turn after a restart says so; a refused request and a lost server are results, and raised by ``turn``."""
    backend = Scripted(Script(faults=[Fault(kind="http_500", requests=[2]), Fault(kind="dies", requests=[4])]))
    session = Session(backend, SHIPPED[0])
    session.turn()
    session.restart()
    with pytest.raises(RequestFailed):
        session.turn()
    assert (session.turns[1].result, session.turns[1].segment, session.turns[1].events) == ("error", 2, ["restarted"])
    with pytest.raises(BackendDied):
        session.run(2)
    assert session.turns[-1].result == "lost"
    assert session.turns[-1].idle == {}
    assert "server lost" in "\n".join(session.table())


def test_a_resumed_session_asks_what_the_first_one_would_have() -> None:
    """From any turn on, prompts are those of a session that was not interrupted."""
    whole = Session(Scripted(), SHIPPED[0])
    whole.run(9)
    for start in (2, 5, 7):
        later = Session(Scripted(), SHIPPED[0], start=start)
        found = later.run(9 - start + 1)
        assert [(one.number, one.tokens_in) for one in found] == [
            (one.number, one.tokens_in) for one in whole.turns[start - 1 :]
        ]


@pytest.mark.parametrize(
    "bad",
    [
        {"settle": -1},
        {"settle": "2"},
        {"context": 0},
        {"context": True},
        {"carry": 1},
        {"summary": "x"},
        {"forced": None},
    ],
)
def test_arguments_of_a_session_are_checked(bad: dict[str, Any]) -> None:
    """Values that cannot be used are told before anything is asked."""
    with pytest.raises(BadInput):
        Session(Scripted(), SHIPPED[0], **bad)
    with pytest.raises(BadInput):
        Session(Scripted(), [])


# ---------------------------------------------------------------- the table


def test_the_table_keeps_to_its_width_and_says_what_is_missing() -> None:
    """80 columns; figures that could not be read are marked and explained; of many turns the telling ones are shown."""
    session = Session(Scripted(Script(accuracy=0.0)), SHIPPED[0], gauge=Gauge(), context=2600, carry=True)
    session.run(14)
    lines = session.table()
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(lines).count("?") >= 2
    assert any("still changing" in line for line in lines)
    many = [msgspec.structs.replace(session.turns[0], number=number) for number in range(1, 100_001)]
    assert 40 < len(table.lines(many)) < 90
    assert any("are not shown" in line for line in table.lines(many))
    assert table.lines([]) == ["no turn was taken"]
    hostile = Turn(number=1, conversation="x", cycle=1, phase=0, events=["\x1b[2J"], error="\x1b]0;x")
    many[50_000] = msgspec.structs.replace(many[50_000], result="error", error="timed out\nafter " + "30 s " * 30)
    shown = table.lines(many)
    assert any(line.startswith("50001 ") for line in shown)
    assert any("request failed" in line for line in shown)
    (place,) = [place for place, line in enumerate(shown) if line.startswith("turn 50001: timed out")]
    assert shown[place + 1].startswith("  ")
    assert "the next turn is slower" in " ".join(" ".join(shown).split())
    assert str(session) == "\n".join(lines)
    assert repr(Session(Scripted(), SHIPPED[0])).endswith("0 turns, segment 1>")
    assert "\x1b" not in "".join(table.lines([hostile], unmeasured=NoGauge("no device").reason))


# ---------------------------------------------------------------- recall


def test_a_summary_makes_facts_usable_and_ends_reading_again() -> None:
    """A model that uses what its prompt holds recalls everything with a summary, and reads every file again without."""
    with_summary, without = recall.ask(Scripted(cases=[]), context=3000)
    assert (with_summary.count("recalled"), without.count("recalled")) == (30, 0)
    assert (with_summary.count("read_again"), without.count("read_again")) == (0, 30)
    assert with_summary.forgotten == without.forgotten == 30
    verdict = recall.judge(with_summary, without)
    assert verdict.outcome == "passed"
    assert verdict.low is not None
    assert verdict.low > 0.9
    assert verdict.read_again == (1.0, 0.0)
    assert verdict.p_value is not None
    assert verdict.p_value < 1e-6


@pytest.mark.parametrize(
    ("share", "count", "outcome"), [(0.0, 30, "failed"), (0.5, 30, "failed"), (1.0, 10, "inconclusive")]
)
def test_recall_is_judged_by_its_bounds(share: float, count: int, outcome: str) -> None:
    """A model that does not use its summary fails; too few facts prove nothing."""
    arms = recall.ask(Scripted(Script(recall=share), cases=[]), context=3000, count=count)
    assert recall.judge(*arms).outcome == outcome


def test_recall_needs_a_context_that_is_known_and_large_enough() -> None:
    """What cannot be asked is told: no context, no room, no facts."""
    with pytest.raises(BadInput, match="give `context`"):
        recall.ask(Scripted(cases=[]))
    for context in (50, 500):
        with pytest.raises(BadInput):
            recall.ask(Scripted(cases=[]), context=context)
    for context in ("4k", 0, True):
        with pytest.raises(BadInput, match="of a recall check: write a number of tokens"):
            recall.ask(Scripted(cases=[]), context=context)  # type: ignore[arg-type]  # what a test may pass
    with pytest.raises(BadInput, match="None is no arm of a recall check"):
        recall.judge(None, None)  # type: ignore[arg-type]  # what a test may pass
    for count in (0, 1000, True):
        with pytest.raises(BadInput):
            recall.ask(Scripted(cases=[]), context=3000, count=count)
    facts = recall.facts(200)
    assert len({fact.label for fact in facts}) == len({fact.path for fact in facts}) == 200

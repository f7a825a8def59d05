"""Cases asked over real HTTP of a server with every fault: counted where it belongs, none hangs, none passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from pytest_vram.backends.client import Target, VramClient
from pytest_vram.errors import BackendDied
from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.testing.scripted import (
    FAULTS,
    Answerer,
    Fault,
    Script,
    ScriptedClient,
    ScriptedServer,
    scripted_backend,
    serving,
)
from pytest_vram.toolcalls import CaseResult, Results
from pytest_vram.toolcalls.evaluation import evaluate
from pytest_vram.toolcalls.verdict import judge
from tests.unit import scripted_kit as kit

#: Seconds of a request; only what is silent takes them. Where nothing is answered at all, they may be few.
TIMEOUT, SHORT = 1.0, 0.2
#: Bytes that a server may get rid of before it notices that nobody reads on: those that are read, and what two
#: sockets of loopback hold.
READ = 16_000_000
#: The struck case, which has one call with arguments.
STRUCK = "case-0010"
KILLING = ("dies", "dies_midway")
#: Fault → what becomes of a case that meets it at each request: outcome and kind.
WRONG, LOST = "wrong", ("infrastructure", "")
COUNTED: dict[str, tuple[str, str]] = {
    "http_500_parse": (WRONG, "server_parse_error"),
    "empty_content": (WRONG, "empty"),
    "endless": (WRONG, "runaway"),
    "huge": (WRONG, "runaway"),
    "http_400_history": LOST,  # at a first request, whose history is the case's: no answer of the model
    "http_500_history": LOST,
    "http_429": LOST,
    "http_500": LOST,
    "http_503": LOST,
    "disconnect": LOST,
    "disconnect_midway": LOST,
    "silent": LOST,
    "empty_body": LOST,
    "empty_choices": LOST,
    "invalid_utf8": LOST,
    "not_json": LOST,
}


class Asked(NamedTuple):
    """Results, the waits that busy servers asked for, and the server."""

    results: Results
    waits: list[float]
    server: ScriptedServer

    def of(self, case: str) -> CaseResult:
        return next(result for result in self.results.results if result.id == case)


@contextmanager
def served(script: Script, count: int = 20, timeout: float = TIMEOUT) -> Iterator[tuple[VramClient, ScriptedServer]]:
    """A client of a server in this process."""
    with serving(Answerer(script, kit.cases(count))) as server:
        yield VramClient(Target(name="scripted", url=server.url, timeout=timeout)), server


def ask(script: Script, count: int = 20, *, retries: int = 1, timeout: float = TIMEOUT, **calling: Any) -> Asked:
    """All cases, asked of this script."""
    waits: list[float] = []
    with served(script, count, timeout) as (client, server):
        results = evaluate(
            client,
            kit.cases(count, family_size=1),
            sampling=Sampling(max_tokens=256),
            calling=ToolCalling(**calling),
            retries=retries,
            sleep=waits.append,
        )
    return Asked(results, waits, server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", COUNTED)
def test_a_fault_is_counted_where_it_belongs_and_touches_no_other_case(kind: str, stream: bool) -> None:
    """One case of twenty meets the fault: it is the model's failure or none, and the other nineteen are right."""
    fault = Fault(kind=kind, cases=[STRUCK])  # type: ignore[arg-type]
    asked = ask(Script(faults=[fault], recovery=0.0), stream=stream)
    first = asked.of(STRUCK).first
    assert (first.outcome, first.kind) == COUNTED[kind], first
    assert first.detail
    assert [result.id for result in asked.results.results if result.first.outcome != "right"] == [STRUCK]
    assert len(asked.results.results) == 20
    assert asked.of(STRUCK).last.outcome != "right"
    verdict = judge(asked.results, target=0.5)
    assert (verdict.n, verdict.right) == (20 if COUNTED[kind] != LOST else 19, 19)
    assert verdict.completion == (1.0 if COUNTED[kind] != LOST else 0.95)


@pytest.mark.parametrize("kind", [*COUNTED, "wrong_content_type"])
def test_without_a_connection_the_same_is_counted(kind: str) -> None:
    """The scripted client of this process ends in the outcome and the kind that the real client reports over HTTP."""
    cases = kit.cases(20)
    script = Script(faults=[Fault(kind=kind, cases=[STRUCK])], recovery=0.0)  # type: ignore[arg-type]
    results = evaluate(
        ScriptedClient(script, cases),
        cases,
        sampling=Sampling(),
        calling=ToolCalling(),
        sleep=lambda seconds: None,
    )
    (struck,) = (result.first for result in results.results if result.id == STRUCK)
    assert (struck.outcome, struck.kind) == COUNTED.get(kind, ("right", "valid"))
    assert sum(result.first.outcome == "right" for result in results.results) >= 19


@pytest.mark.parametrize(
    ("kind", "stream"),
    [(kind, stream) for kind in COUNTED for stream in (False, True) if not stream or COUNTED[kind] != LOST],
)
def test_no_fault_of_every_case_passes(kind: str, stream: bool) -> None:
    """Where every request meets the fault, the verdict is failed or refused, however low the target is."""
    faults = [Fault(kind=kind, share=1.0, size=5_000_000)]  # type: ignore[arg-type]
    timeout = SHORT if kind == "silent" else TIMEOUT
    asked = ask(Script(faults=faults), 10, stream=stream, retries=0, timeout=timeout)
    verdict = judge(asked.results, target=0.5)
    assert verdict.outcome == ("error" if COUNTED[kind] == LOST else "failed"), verdict
    assert verdict.right == 0
    few = judge(msgspec.structs.replace(asked.results, results=asked.results.results[:2], planned=2), target=0.5)
    assert few.outcome != "passed", few  # so few that no rate could be found too low
    if COUNTED[kind] == LOST:
        assert len(asked.results.results) < 10  # five without an answer, and the rest is not waited for
        assert asked.results.stopped


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["endless", "huge"])
def test_answers_without_end_are_not_read_to_it(kind: str, stream: bool) -> None:
    """A server that never stops, or has 20 MB to say, gets rid of a bounded part of it, and a bounded text is kept."""
    fault = Fault(kind=kind, cases=[STRUCK], turn="first")  # type: ignore[arg-type]
    asked = ask(Script(faults=[fault], recovery=1.0), stream=stream)
    assert 0 < asked.server.written[kind] < READ
    result = asked.of(STRUCK)
    assert result.first.kind == "runaway"
    assert len(result.first.raw) <= 4100
    assert result.last.outcome == "right"


@pytest.mark.parametrize("kind", ["http_400_history", "http_500_history"])
def test_a_refused_history_is_the_retrys_failure(kind: str) -> None:
    """The first answer stands with its own kind, the retry is rejected, and no further one is sent."""
    fault = Fault(kind=kind, share=1.0, turn="retry")  # type: ignore[arg-type]
    script = Script(accuracy=0.0, defects={"missing_bracket": 1.0}, recovery=1.0, faults=[fault])
    asked = ask(script, retries=2)
    struck = asked.of(STRUCK)
    assert (struck.first.outcome, struck.first.kind) == ("wrong", "missing_bracket")
    assert [(answer.outcome, answer.kind) for answer in struck.retries] == [("wrong", "history_rejected")]
    assert {answer.kind for result in asked.results.results for answer in result.retries} == {"history_rejected"}
    assert judge(asked.results, target=0.5, judge="after_retry").outcome == "failed"


@pytest.mark.parametrize("kind", ["http_429", "http_503"])
def test_a_busy_server_is_asked_again_after_the_time_that_it_says(kind: str) -> None:
    """Two refusals and then an answer: it counts, and the waits are those of the header."""
    fault = Fault(kind=kind, cases=[STRUCK], times=2, retry_after=0.25)  # type: ignore[arg-type]
    asked = ask(Script(faults=[fault]))
    assert asked.of(STRUCK).first.outcome == "right"
    assert asked.waits == [0.25, 0.25]


def test_a_busy_server_is_not_waited_for_without_end() -> None:
    """One that stays busy, or asks for an hour, costs that case only, after a bounded number of bounded waits."""
    without = ask(Script(faults=[Fault(kind="http_429", cases=[STRUCK])]))
    assert without.of(STRUCK).first.outcome == "infrastructure"
    assert without.of(STRUCK).first.status == 429
    assert 0 < len(without.waits) <= 5
    hour = ask(Script(faults=[Fault(kind="http_429", cases=[STRUCK], retry_after=3600.0)]))
    assert hour.of(STRUCK).first.outcome == "infrastructure"
    assert sum(hour.waits) <= 60.0


@pytest.mark.parametrize(("stream", "expected"), [(False, ("right", "valid")), (True, LOST)])
def test_a_wrong_content_type(stream: bool, expected: tuple[str, str]) -> None:
    """JSON under another type is read all the same; a stream that does not say so cannot be told from a page."""
    asked = ask(Script(faults=[Fault(kind="wrong_content_type", cases=[STRUCK])]), stream=stream)
    first = asked.of(STRUCK).first
    assert (first.outcome, first.kind) == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KILLING)
def test_a_server_that_dies_ends_the_run(kind: str, stream: bool) -> None:
    """With the server gone there is no verdict: the run is an error, and the case that met it was told of."""
    told: list[CaseResult] = []
    script = Script(faults=[Fault(kind=kind, requests=[7])])  # type: ignore[arg-type]
    with scripted_backend(script) as backend, pytest.raises(BackendDied):
        evaluate(
            VramClient(Target(name="scripted", url=backend.url, timeout=TIMEOUT)),
            kit.cases(20),
            sampling=Sampling(),
            calling=ToolCalling(stream=stream),
            told=lambda result, planned: told.append(result),
            sleep=lambda seconds: None,
        )
    assert len(told) == 8
    assert told[-1].first.outcome == "infrastructure"
    assert backend.process.returncode not in (None, 0)


def test_every_fault_is_tested_here() -> None:
    """A fault that is new must say where it is counted."""
    assert set(FAULTS) == {*COUNTED, *KILLING, "wrong_content_type"}

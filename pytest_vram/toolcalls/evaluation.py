"""Asking a backend the cases: one retry, what counts as the model's failure, and when no more are asked.

The first answer to each case is diagnosed and scored. Where a runtime would know that something is wrong with it, it
is given back with what is wrong, ``retries`` times at most (:mod:`pytest_vram.toolcalls.retrying`). What is no answer
of the model (:mod:`pytest_vram.toolcalls.asking`) is counted as infrastructure trouble and in no rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args

import msgspec

from pytest_vram.errors import BackendDied
from pytest_vram.spec import BackendSpec, Sampling, ToolCalling, as_table
from pytest_vram.toolcalls import answers, biases, contexts, fingerprints, retrying
from pytest_vram.toolcalls.asking import Asker, Heard, ask
from pytest_vram.toolcalls.cases import Case, CaseSet, stratified
from pytest_vram.toolcalls.diagnosis import Diagnosis, diagnose
from pytest_vram.toolcalls.protocols import request_of
from pytest_vram.toolcalls.results import Answer, CaseResult, Protocol, Results

__all__ = ["Asker", "evaluate", "request_of"]

#: Cases in a row without an answer, after which the rest is not asked.
GIVING_UP = 5
#: Lost connections in a row, of a client that cannot tell whether the server lives, after which it is held to be gone.
_GONE = 3
#: Wrong cases whose request is kept, and characters of one.
_REQUESTS, _REQUEST_SIZE = 25, 32_000


def evaluate(
    client: Asker,
    cases: CaseSet,
    *,
    sampling: Sampling,
    calling: ToolCalling,
    retries: int = 1,
    seed: int = 0,
    limit: int | None = None,
    enough: Callable[[Sequence[CaseResult]], str | None] = lambda results: None,
    told: Callable[[CaseResult, int], None] = lambda result, planned: None,
    backend: str | None = None,
    spec: BackendSpec | None = None,
    fingerprint: Mapping[str, Any] = {},
    sleep: Callable[[float], None] = time.sleep,
    kept: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Ask the cases one after another, in a stratified order that the seed decides.

    :param limit: ask that many of the cases, stratified. :param enough: says after each case why no more are needed
        (sequential stopping); ``None``: go on.
    :param told: of each result, with the number planned, in order; also of one that ended with the server.
    :param backend: name of the backend in the results; else that of ``spec`` or of the client's target.
    :param spec: what runs, for the settings and the fingerprint. :param fingerprint: more of it, such as facts of the
        boot. :param sleep: waits where a busy server asks for it.
    :param kept: given the results so far, where asking ends with the server or a Ctrl-C.
    :raises BackendDied: the server is gone: no verdict can be had. :raises BadSpec: ``logit_bias`` that cannot be used.
    """
    protocol = _protocol(calling)
    chosen = stratified(cases.cases, len(cases.cases) if limit is None else limit, seed=seed)
    target = getattr(client, "target", None)
    name = backend or (spec.name if spec is not None else None) or getattr(target, "name", None) or "backend"
    bias = biases.of_tools(client, calling.logit_bias, chosen, where=f"[backend.{name}.toolcalls]")
    run = _Run(client, sampling, calling, protocol, bias, retries, sleep)
    started, began = datetime.now(UTC), time.perf_counter()
    results: list[CaseResult] = []
    stopped: str | None = None
    decided = False
    notes: list[str] = []

    def found() -> Results:
        return Results(
            backend=name,
            protocol=protocol,
            stream=calling.stream,
            cases=cases.name,
            digest=cases.digest,
            seed=seed,
            planned=len(chosen),
            results=results,
            settings=as_table(spec) if spec is not None else {},
            sampling={key: value for key, value in _all_of(sampling).items() if value not in (None, {})},
            fingerprint=fingerprints.of_run(
                cases, sampling, calling, retries=retries, spec=spec, model=run.model, build=run.build, more=fingerprint
            ),
            retries=retries,
            stopped=stopped,
            decided=decided,
            started=started.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - began,
            notes=notes,
        )

    silent = lost = 0
    try:
        for case in chosen:
            result, death = run.case(case)
            results.append(result)
            told(result, len(chosen))
            lost = lost + 1 if death is not None else 0
            if death is not None and (not run.unsure or lost >= _GONE):
                raise death
            # A server that refuses a request as too long is there, and answers the shorter ones.
            silent = silent + 1 if result.first.outcome == "infrastructure" and not result.first.unfit else 0
            if silent >= GIVING_UP and len(results) < len(chosen):
                rest = len(chosen) - len(results)
                stopped = f"the last {silent} cases got no answer that could be judged: the other {rest} were not asked"
                notes.append(f"{stopped}; the last error was: {result.first.detail}")
                break
            reason = enough(results)
            if reason is not None:
                stopped, decided = reason, True
                break
    except (KeyboardInterrupt, BackendDied) as error:
        stopped = "the server died" if isinstance(error, BackendDied) else "interrupted"
        kept(found())
        raise
    return found()


def _all_of(sampling: Sampling) -> dict[str, Any]:
    """Its fields, also those that have their defaults: defaults may change, and results are compared later."""
    return {name: msgspec.to_builtins(getattr(sampling, name)) for name in Sampling.__struct_fields__}


def _protocol(calling: ToolCalling) -> Protocol:
    for known in get_args(Protocol):
        if calling.protocol == known:
            return known  # type: ignore[no-any-return]  # read from a file
    raise ValueError(f"{calling.protocol!r} is no protocol: {', '.join(get_args(Protocol))}")


class _Judged(NamedTuple):
    answer: Answer
    heard: Heard
    found: Diagnosis | None


class _Run:
    """The cases of one evaluation."""

    def __init__(
        self,
        client: Asker,
        sampling: Sampling,
        calling: ToolCalling,
        protocol: Protocol,
        bias: Mapping[str, float],
        retries: int,
        sleep: Callable[[float], None],
    ) -> None:
        """:ivar unsure: the client could not tell whether a server that closed a connection lives."""
        self.model: str | None = None
        self.build: str | None = None
        self.unsure = False
        self._client = client
        self._sampling = sampling
        self._calling = calling
        self._protocol = protocol
        self._bias = dict(bias)
        self._retries = retries
        self._sleep = sleep
        self._requests = 0
        self._looked = False
        self._context: int | None = None

    def case(self, case: Case) -> tuple[CaseResult, BackendDied | None]:
        """Ask one case, with its retries; the error where the server is gone."""
        clock = time.thread_time()
        messages, body = request_of(case, sampling=self._sampling, calling=self._calling)
        if self._bias:
            body["logit_bias"] = self._bias
        first = self._turn(case, messages, body, time.thread_time() - clock)
        retried: list[Answer] = []
        latest = first
        history = messages
        while latest.heard.lost is None and len(retried) < self._retries and latest.answer.outcome == "wrong":
            clock = time.thread_time()
            wrong = self._known_wrong(case, latest)
            if wrong is None:
                break
            history = retrying.continued(history, latest.heard.message, wrong, case.tools, self._protocol)
            latest = self._turn(case, history, body, time.thread_time() - clock, retry=True)
            retried.append(latest.answer)
        request = None
        if first.answer.outcome == "wrong" and self._requests < _REQUESTS:
            self._requests += 1
            request = _bounded({"messages": messages, **body})
        result = CaseResult(
            id=case.id,
            family=case.family,
            category=case.category,
            language=case.language,
            first=first.answer,
            retries=retried,
            expect=[msgspec.to_builtins(one) for one in case.expect],
            request=request,
        )
        return result, latest.heard.lost

    def _turn(
        self, case: Case, messages: list[dict[str, Any]], body: Mapping[str, Any], own: float, *, retry: bool = False
    ) -> _Judged:
        heard = ask(self._client, messages, body, retry=retry, sleep=self._sleep)
        clock = time.thread_time()
        self.model, self.build = self.model or heard.model, self.build or heard.build
        self.unsure = heard.unsure
        found = None
        if heard.message is not None:
            found = diagnose(
                heard.message,
                case.tools,
                expected=case.expect,
                finish_reason=heard.finish_reason,
                protocol=self._protocol,
            )
        elif heard.unfinished and self._ran_away(case, heard):
            detail = f"the answer did not end in the time of the request and only repeats itself ({heard.detail})"
            heard = heard._replace(kind="runaway", detail=detail)
        if found is not None and "truncated" in found.kinds and (short := self._cut_by_context(heard)) is not None:
            heard, found = short, None
        answer = answers.judged(heard, found, 0.0)
        own += time.thread_time() - clock
        return _Judged(msgspec.structs.replace(answer, own_seconds=own), heard, found)

    def _known_wrong(self, case: Case, judged: _Judged) -> Diagnosis | None:
        """What a runtime would tell the model of a wrong answer; ``None``: nothing."""
        heard = judged.heard
        if heard.message is not None:
            # Diagnosed anew, as a runtime would, which knows no right call: neither the retry nor what is told of it
            # may rest on one.
            found = diagnose(heard.message, case.tools, finish_reason=heard.finish_reason, protocol=self._protocol)
            return found if retrying.worth_it(found) else None
        if heard.kind == "history_rejected":
            return None  # the next one would be longer, and refused as well
        return retrying.unread(heard.kind, heard.detail, heard.text)

    def _cut_by_context(self, heard: Heard) -> Heard | None:
        """The answer as one that does not fit, where it ends at the end of the context and not at its limit."""
        most = self._sampling.max_tokens
        if heard.tokens_in is None or heard.tokens_out is None or heard.tokens_out >= most:
            return None
        if not self._looked:
            self._looked, self._context = True, contexts.of_server(self._client)
        # Engines stop a token or two before the end.
        if self._context is None or heard.tokens_in + heard.tokens_out < self._context - 4:
            return None
        detail = contexts.Unfit(heard.tokens_in, self._context).sentence(most)
        return heard._replace(message=None, unfit=True, detail=f"{detail}; the answer was cut at its end")

    def _ran_away(self, case: Case, heard: Heard) -> bool:
        """Whether what came of an answer that was not finished in time only repeats itself."""
        return diagnose(heard.text, case.tools, protocol=self._protocol).kind == "runaway"


def _bounded(request: dict[str, Any]) -> dict[str, Any] | None:
    kept: dict[str, Any] = answers.writable(request)
    return kept if len(json.dumps(kept)) <= _REQUEST_SIZE else None

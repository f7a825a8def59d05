"""Requests that are longer than the server's context: nobody's answer, and a sentence that says what to set."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import RequestFailed
from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls import contexts
from pytest_vram.toolcalls.evaluation import evaluate
from pytest_vram.toolcalls.results import Results
from pytest_vram.toolcalls.verdict import judge
from tests.unit.test_toolcall_evaluation import RIGHT, Live, Scripted, called, cases, failed, only, run

LLAMA = RequestFailed(
    "backend 'b' answered HTTP 400",
    status=400,
    body=json.dumps(
        {
            "error": {
                "code": 400,
                "message": "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9000,
                "n_ctx": 4096,
            }
        }
    ),
)


@pytest.mark.parametrize(
    ("words", "prompt", "context"),
    [
        (LLAMA.body, 9000, 4096),
        ("the request exceeds the available context size. try increasing the context size", None, None),
        ("Context size has been exceeded.", None, None),
        ("Input prompt is too big compared to KV size. Please try increasing KV size.", None, None),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 9512 tokens (9000 in the"
            " messages, 512 in the completion).",
            9000,
            4096,
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your request has 9000 input tokens.",
            9000,
            4096,
        ),
        ("The decoder prompt (length 9000) is longer than the maximum model length of 4096.", 9000, 4096),
        ("The prompt (total length 9000) is too long to fit into the model (context length 4096).", 9000, 4096),
        ("The input (9000 tokens) is longer than the model's context length (4096 tokens).", 9000, 4096),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of"
            " 9512 tokens: 9000 tokens from the input messages and 512 tokens for the completion.",
            9000,
            4096,
        ),
        ("Requested tokens (9000) exceed context window of 4096", 9000, 4096),
        ("Context length 9000 is greater than max_seq_len 4096.", 9000, 4096),
        ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9000 `inputs` tokens", 9000, 4096),
        ("Prompt length (9000) exceeds maximum input length (4096).", 9000, 4096),
    ],
)
def test_the_words_of_each_engine_are_read(words: str, prompt: int | None, context: int | None) -> None:
    """Tokens of the prompt and of the context, where they are told."""
    assert contexts.refused(words) == (prompt, context)


@pytest.mark.parametrize(
    "words",
    [
        "Failed to parse messages: unterminated string",
        "the arguments exceed the schema",
        "input (900 tokens) is too large to process. increase the physical batch size (current batch size: 512)",
        "Rate limit exceeded",
        "no such context",
    ],
)
def test_other_errors_are_none_of_them(words: str) -> None:
    """Not every limit is that of the context."""
    assert contexts.refused(words) is None


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_a_request_that_is_too_long_is_no_failure_of_the_model(status: int) -> None:
    """At the first request and at the retry; the sentence has both figures."""
    error = RequestFailed("backend 'b' answered an error", status=status, body=LLAMA.body)
    first = only(run(Scripted(error))).first
    assert (first.outcome, first.kind, first.unfit, first.tokens_in) == ("infrastructure", "", True, 9000)
    assert first.detail.startswith(
        "the request does not fit the context: the prompt has 9,000 tokens, the context 4,096"
    )
    retried = only(run(Scripted(called('{"host": "db"'), error)))
    assert (retried.first.kind, retried.last.outcome, retried.last.unfit) == ("missing_bracket", "infrastructure", True)


def test_a_prompt_that_leaves_no_room_for_the_answer() -> None:
    """It is smaller than the context, and the sentence says what is too much."""
    sentence = contexts.Unfit(4000, 4096).sentence(512)
    assert sentence == (
        "the request does not fit the context: the prompt has 4,000 tokens, the answer may have 512, the context 4,096"
    )
    assert (
        contexts.Unfit(None, 4096).sentence(512) == "the request does not fit the context: the context has 4,096 tokens"
    )


class Small(Live):
    """A server that tells its context."""

    def get(self, path: str) -> Any:
        if path == "/props":
            return {"default_generation_settings": {"n_ctx": self.context}}
        raise failed(404, "no such path")

    context = 16


def test_an_answer_that_the_context_cut_is_none() -> None:
    """It ends as if it had reached its limit, which it has not; with room left in the context it is the model's."""
    cut = called('{"host": "d')
    client = Small(cut)
    client.finish = "length"  # 10 tokens and 3
    first = only(run(client, retries=0)).first
    assert (first.outcome, first.unfit, first.tokens_in) == ("infrastructure", True, 10)
    assert first.detail.endswith("the context 16; the answer was cut at its end")
    client.context = 4096
    assert only(run(client, retries=0)).first.kind == "truncated"
    assert only(run(Scripted(cut, finish="length"), retries=0)).first.kind == "truncated"
    client.context, client.finish = 16, "stop"
    assert only(run(client, retries=0)).first.outcome == "wrong"


def test_all_cases_are_asked_of_a_server_that_refuses_long_ones() -> None:
    """It lives, and its refusals take no time: the other cases are not given up."""
    results = run(client := Scripted(*[LLAMA] * 8, RIGHT), 20)
    assert (len(client.asked), results.stopped) == (20, None)


def asked(refused: int, count: int, engine: str | None = None, max_tokens: int = 512) -> Results:
    found = evaluate(
        Scripted(*[LLAMA] * refused, RIGHT),
        cases(count),
        sampling=Sampling(max_tokens=max_tokens),
        calling=ToolCalling(),
        sleep=lambda seconds: None,
    )
    return msgspec.structs.replace(found, settings={"engine": engine} if engine else {})


def test_many_of_them_and_the_verdict_is_refused_with_the_setting() -> None:
    """The size is that of the longest prompt and an answer; the setting is the engine's."""
    verdict = judge(asked(6, 40, "llama-server"), target=0.5)
    assert (verdict.outcome, verdict.n) == ("error", 34)
    assert verdict.text == (
        "6 of 40 cases have no answer that can be judged: longer than the context (6). 85 % were answered, and a "
        "verdict takes 95 %: give the server a context of at least 9,512 tokens (9,000 of the longest prompt and 512 of "
        "an answer): `ctx-size`, which its slots share, and ask again."
    )
    assert "`--max-model-len` of vLLM" in judge(asked(6, 40), target=0.5).text


def test_few_of_them_are_said_beside_the_verdict() -> None:
    """No silent loss of the long cases."""
    verdict = judge(asked(2, 40, "vllm", 64), target=0.5)
    assert (verdict.outcome, verdict.n) == ("passed", 38)
    assert verdict.warnings[-1] == (
        "2 cases are longer than the context and are not judged: give the server a context of at least 9,064 tokens "
        "(9,000 of the longest prompt and 64 of an answer): `max-model-len`."
    )

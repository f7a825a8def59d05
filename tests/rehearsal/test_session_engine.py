"""Sessions on a real llama-server: turns with tools, a window that evicts, idle memory that comes back, recall."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_vram.backends import store
from tests.conftest import Inner
from tests.plugin.session_kit import records

pytestmark = pytest.mark.engine
CONVERSATION: dict[str, Any] = {
    "name": "restart-check",
    "system": "You look after one service.",
    "summary": "Host web-3, service cache, checked twice.",
    "tools": ["service_status"],
    "turns": [
        {
            "user": "Is the cache on web-3 up?",
            "output_cap": 16,
            "expect": [{"name": "service_status", "arguments": {"host": ["web-3"], "service": ["cache"]}}],
            "results": ["active since 09:12"],
            "answer": "Yes, since 09:12.",
        },
        {
            "user": {"text": "What is unusual?", "lines": ["09:{n} hit", "09:{n} miss"], "count": 16},
            "length": "long",
            "output_cap": 16,
            "answer": "Every second request misses.",
        },
    ],
}


def test_a_session_on_a_real_server(pytester: pytest.Pytester, inner: Inner) -> None:
    """Tokens come from the server, prompts of one phase are as long in each cycle, messages leave before a small
    context overflows, idle memory is back after it, and a small model's recall is judged."""
    model = store.find_model()
    assert model is not None, "run `vram demo` once: it fetches the model"
    options = "ctx-size = 1024, parallel = 1, device = 'none', threads = 1, cache-ram = 0, ctx-checkpoints = 0"
    (pytester.path / "vram.toml").write_text(
        f"default = 'agent'\n[backend.agent]\nengine = 'llama-server'\nmodel = '{model}'\noptions = {{ {options} }}\n",
        encoding="utf-8",
    )
    (pytester.path / "restart.json").write_text(json.dumps(CONVERSATION), encoding="utf-8")
    pytester.makepyfile(
        """
        from pytest_vram import idle_rollback
        from pytest_vram.sessions import recall

        @idle_rollback("48MiB", settle=3)
        def test_cycles(vram_session):
            session = vram_session("restart.json")
            assert session.context_size == 1024
            session.warm_up()
            session.run(4)
            turns = session.turns
            assert turns[0].tokens_in == turns[2].tokens_in and turns[1].tokens_in == turns[3].tokens_in
            assert all(turn.result == "ok" and turn.tokens_out <= 2 * turn.output_cap for turn in turns)
            assert turns[1].tokens_in > turns[0].tokens_in and turns[1].tokens_per_second > 0

        def test_goes_on_until_messages_leave(vram_session):
            session = vram_session("restart.json", carry=True, context=420)
            while not any(event.startswith("evicted") for turn in session for event in turn.events):
                assert session.turn().number < 8
            assert max(turn.tokens_in for turn in session) + 16 <= 420

        def test_recall(vram_backend):
            arms = recall.ask(vram_backend, context=480, count=1)
            assert [arm.forgotten for arm in arms] == [1, 1]
            assert recall.judge(*arms).outcome in ("inconclusive", "failed")
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=report.json", "-rA", "--durations=5")
    result.assert_outcomes(passed=3)
    found = records(pytester.path)["test_cycles"]
    assert found["idle"]["after"]["host"]["kind"] == "reading"
    assert [turn["context_size"] for turn in found["turns"]] == [1024] * 4
    assert all(turn["idle"]["host"]["source"] == "host-anon" for turn in found["turns"])

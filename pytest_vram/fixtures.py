"""The fixtures. They delegate to :mod:`pytest_vram.run`, which is imported on use.

The plugin imports this module at load, so it imports nothing but pytest; the rest follows when a fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram.stash import ACCURACY, RUN

if TYPE_CHECKING:
    from pytest_vram.accuracy import ToolcallResult
    from pytest_vram.backends import AsyncVramClient, Pool, RunningBackend, VramClient
    from pytest_vram.meter import Meter
    from pytest_vram.run import Run
    from pytest_vram.session_fixture import Sessions
    from pytest_vram.sizing import Estimate
    from pytest_vram.soaking import SoakResult


def run_of(config: pytest.Config) -> Run:
    """The run of this session, activated now where nothing has asked for it before."""
    if RUN not in config.stash:
        from pytest_vram.activity import activate

        activate(config)
    return config.stash[RUN]


@pytest.fixture
def vram(request: pytest.FixtureRequest) -> Meter:
    """The meter of this test: ``peak``, ``now()``, ``idle()``, ``phase(name)``, ``readings``; figures in bytes."""
    from pytest_vram.outcomes import told

    with told():
        return run_of(request.config).meter()


@pytest.fixture
def vram_backends(request: pytest.FixtureRequest) -> Pool:
    """The backends of this run: ``spec(name, **overrides)`` and ``acquire(spec)``, for tests that need several."""
    from pytest_vram.outcomes import told

    run = run_of(request.config)
    with told():
        run.meter()  # a backend is used within a window, so that its memory can be told apart
        return run.pool


@pytest.fixture
def vram_backend(request: pytest.FixtureRequest, vram_backends: Pool) -> RunningBackend:
    """The running backend of this test: the one of its ``vram_backend`` marker, else the default one."""
    from pytest_vram.outcomes import told

    run = run_of(request.config)
    plan = run.attempt.plan if run.attempt else None
    with told():
        return run.backend(plan.backend if plan else None, plan.overrides if plan else {})


@pytest.fixture
def vram_client(vram_backend: RunningBackend) -> VramClient:
    """An OpenAI-compatible client of this test's backend; one request at a time, 300 s timeout."""
    return vram_backend.client


@pytest.fixture
def vram_async_client(vram_backend: RunningBackend) -> AsyncVramClient:
    """The asynchronous client of this test's backend."""
    return vram_backend.async_client


@pytest.fixture
def vram_estimate(request: pytest.FixtureRequest) -> Estimate:
    """The predicted memory breakdown of this test's backend, from its spec and the model's header; nothing is started.

    The backend is the one of the test's ``vram_backend`` marker, else the default one.
    """
    from pytest_vram.outcomes import told
    from pytest_vram.predicting import estimate_of

    run = run_of(request.config)
    plan = run.attempt.plan if run.attempt else None
    with told():
        return estimate_of(run.pool.spec(plan.backend if plan else None, **(plan.overrides if plan else {})))


@pytest.fixture
def vram_session(request: pytest.FixtureRequest, vram_backend: RunningBackend) -> Sessions:
    """Begins a conversation of many turns on this test's backend: ``vram_session("cron-check")``, a JSON file …

    Every turn stands in the report, with tokens, rates, the peak within it and idle memory after it.
    """
    from pytest_vram.outcomes import told
    from pytest_vram.session_fixture import Sessions

    run = run_of(request.config)
    with told():
        run.meter()
        assert run.attempt is not None
        return Sessions(run, run.attempt, vram_backend, request.node.path.parent)


@pytest.fixture
def vram_toolcalls(request: pytest.FixtureRequest) -> ToolcallResult:
    """What became of this test's ``toolcall_accuracy`` cases: ``rate``, ``verdict``, ``kinds``, ``case(id)``.

    They are asked in the set-up of the test, whether it uses this fixture or not.
    """
    from pytest_vram.errors import BadMarker
    from pytest_vram.outcomes import told

    run = run_of(request.config)
    with told():
        attempt = run.attempt
        if attempt is None or attempt.wanted is None:
            raise BadMarker(
                "the vram_toolcalls fixture holds what became of a test's cases, and this test asks for none: mark it"
                " with @toolcall_accuracy(0.94)"
            )
        run.meter()  # the cases are asked within a window, so that their memory is this test's
        return request.config.stash[ACCURACY].result(attempt, attempt.wanted)


@pytest.fixture
def vram_soak(request: pytest.FixtureRequest) -> SoakResult:
    """What became of this test's soak: ``verdict``, ``turns``, ``folder``, ``document``.

    It is run in the set-up of a test that is marked with ``vram_soak``, whether it uses this fixture or not.
    """
    from pytest_vram.errors import BadMarker
    from pytest_vram.outcomes import inconclusive, told
    from pytest_vram.soak_hooks import of_config

    run = run_of(request.config)
    with told():
        attempt = run.attempt
        if attempt is None or attempt.plan.soak is None:
            raise BadMarker(
                "the vram_soak fixture holds what became of a test's soak, and this test has none: mark it with"
                " @vram_soak(turns=300)"
            )
        if not run.measurable:
            inconclusive(f"@vram_soak: {run.why_unmeasurable()}")
        run.meter()  # within a window, so that its memory is this test's
        return of_config(request.config, run).result(attempt)

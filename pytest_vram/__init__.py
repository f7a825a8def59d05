"""pytest-vram: budgets for the GPU memory of LLM deployments, checked by pytest.

The decorators below and ``pytest.mark.*`` are the same objects::

    from pytest_vram import max_vram

    @max_vram("3GB")
    def test_summary(vram_client): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "idle_rollback",
    "inconclusive",
    "max_host_memory",
    "max_vram",
    "min_tokens_per_second",
    "requires_vram",
    "serial_only",
    "toolcall_accuracy",
    "vram_backend",
    "vram_soak",
]

if TYPE_CHECKING:
    import os
    from typing import Literal

    import pytest

    from pytest_vram.outcomes import inconclusive as inconclusive

    #: Give the test the device for itself; bare, or called with a reason.
    serial_only: pytest.MarkDecorator

    def max_vram(
        limit: str,
        *,
        over: Literal["total", "baseline"] = "total",
        scope: Literal["run", "backend", "process", "device"] = "run",
        phase: str | None = None,
    ) -> pytest.MarkDecorator:
        """Fail the test when its peak memory is over ``limit``, such as ``"3GB"``."""

    def max_host_memory(limit: str) -> pytest.MarkDecorator:
        """Fail the test when the host memory of its backend's processes peaks over ``limit``."""

    def vram_backend(name: str, **overrides: object) -> pytest.MarkDecorator:
        """Run the test against the backend of this name in the config file."""

    def requires_vram(size: str) -> pytest.MarkDecorator:
        """Skip the test where the device is smaller than ``size``."""

    def min_tokens_per_second(rate: float) -> pytest.MarkDecorator:
        """Fail the test when the median decode rate of its requests is below ``rate``."""

    def idle_rollback(tolerance: str = "64MiB", settle: float = 5.0) -> pytest.MarkDecorator:
        """Fail the test when idle memory is not back within ``tolerance`` after its teardown."""

    def vram_soak(turns: int | None = None, hours: float | None = None) -> pytest.MarkDecorator:
        """Run conversations for so many turns or hours, and fail the test when memory, speed or calls do not last.

        They are run in the set-up; the ``vram_soak`` fixture holds what they showed.
        """

    def toolcall_accuracy(
        target: float,
        *,
        cases: str | os.PathLike[str] | None = None,
        mode: Literal["not_below", "proven", "sprt", "point"] = "not_below",
        confidence: float = 0.95,
        baseline: str | os.PathLike[str] | None = None,
        margin: float = 0.05,
        retries: int = 1,
        judge: Literal["first_try", "after_retry"] = "first_try",
    ) -> pytest.MarkDecorator:
        """Fail the test when the share of tool calls that are right is below ``target``, such as ``0.94``.

        The cases are asked in the set-up; the ``vram_toolcalls`` fixture holds what became of them.
        """


def __getattr__(name: str) -> Any:
    # On use, so that importing this package (as the plugin does at every pytest start) imports nothing else.
    if name == "inconclusive":
        from pytest_vram.outcomes import inconclusive

        return inconclusive
    if name in __all__:
        import pytest

        return getattr(pytest.mark, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""pytest-vram: budgets for the GPU memory of LLM deployments, checked by pytest.

The decorators below and ``pytest.mark.*`` are the same objects::

    from pytest_vram import max_vram

    @max_vram("3GB")
    def test_summary(vram_client): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "inconclusive",
    "max_host_memory",
    "max_vram",
    "min_tokens_per_second",
    "requires_vram",
    "serial_only",
    "vram_backend",
]

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # On use, so that importing this package (as the plugin does at every pytest start) imports nothing else.
    if name == "inconclusive":
        from pytest_vram.outcomes import inconclusive

        return inconclusive
    if name in __all__:
        import pytest

        return getattr(pytest.mark, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

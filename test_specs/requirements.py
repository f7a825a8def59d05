"""What a spec may need of a deployment, and the skips that say what was missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram import inconclusive
from pytest_vram.backends.base import CAPABILITIES
from pytest_vram.errors import BackendError

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend
    from pytest_vram.checks import Finding


def need(backend: RunningBackend, *capabilities: str) -> None:
    """Skip the test unless the deployment has all of these capabilities."""
    missing = backend.missing(*capabilities)
    if missing:
        what = "; ".join(f"{name} ({CAPABILITIES[name]})" for name in missing)
        pytest.skip(f"backend {backend.name!r} (engine {backend.spec.engine}) does not have: {what}")


def asked(backend: RunningBackend, fact: str) -> int:
    """A number that the config file asks for; skips the test where it leaves it to the engine."""
    value = backend.asked.get(fact)
    if not isinstance(value, int) or isinstance(value, bool):
        what = fact.replace("_", " ")
        if not backend.spec.options:
            pytest.skip(
                f"what {what} was asked for is not known: backend {backend.name!r} ({backend.engine}) has no options"
            )
        pytest.skip(f"the options of backend {backend.name!r} do not set the {what}")
    return value


def context_per_slot(backend: RunningBackend) -> int:
    """The context that one request may fill, as the config file asks for it; skips where it does not."""
    slots = backend.asked.get("slots")
    shared = backend.boot.facts.get("kv_unified") is True
    return asked(backend, "context") // (slots if isinstance(slots, int) and slots > 0 and not shared else 1)


def on_host_only(backends: Pool) -> bool:
    """Whether host memory stands in for VRAM in this run, so that no device takes layers."""
    devices = backends.context.devices
    return bool(devices) and all(device.kind == "cpu" for device in devices)


def need_measurements(backends: Pool, what: str) -> None:
    """Skip the test in a run that holds estimates against the limits: there ``what`` cannot be judged."""
    if backends.context.predicted:
        pytest.skip(f"nothing is measured in this run (--vram-device=predicted), so {what} cannot be judged")


def hold(finding: Finding | None) -> None:
    """End the test as a check found: it holds, it does not, or the evidence does not decide, which never passes.

    :raises BackendError: there was trouble with the deployment: an error of the test, and no verdict on it.
    """
    if finding is None:
        return
    if finding.verdict == "failed":
        pytest.fail(finding.text, pytrace=False)
    if finding.verdict == "error":
        raise BackendError(finding.text)
    inconclusive(finding.text)

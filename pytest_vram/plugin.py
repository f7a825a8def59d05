"""The pytest plugin: options, markers, fixtures, and the decision whether to take part at all.

Every pytest run in the user's environment imports this file, so it and what it imports at load use the standard
library only, and a run that uses nothing of it gets no hook per test, no process and no output. What a run that
does use it needs is in :mod:`pytest_vram.activity`, imported then.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.fixtures import (
    vram,
    vram_async_client,
    vram_backend,
    vram_backends,
    vram_client,
    vram_estimate,
    vram_session,
    vram_soak,
    vram_toolcalls,
)
from pytest_vram.markers import FIXTURES, MARKERS
from pytest_vram.stash import RUN

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

__all__ = [
    "vram",
    "vram_async_client",
    "vram_backend",
    "vram_backends",
    "vram_client",
    "vram_estimate",
    "vram_session",
    "vram_soak",
    "vram_toolcalls",
]

#: Setting → (metavar, help). Checked by :mod:`pytest_vram.settings`, which a run without any of them never imports.
OPTIONS: dict[str, tuple[str, str]] = {
    "budget": ("SIZE", "memory ceiling for every test, such as 4GB, gpu0=11GB,gpu1=3GB or sum=14GB"),
    "reserve": ("SIZE", "room that must stay free on the card: peak and reserve together must fit it"),
    "emulate": ("SIZE", "play a smaller card: the rest of the device is occupied for the run"),
    "backend": ("NAME", "backend from the config file (default: its `default`, else the built-in demo)"),
    "config": ("FILE", "config file (default: vram.toml, else [tool.vram] in pyproject.toml)"),
    "device": (
        "SPEC",
        "what to measure: auto, cpu (host memory), rpc:0, several joined by commas; predicted: nothing",
    ),
    "interval": ("MS", "sampling interval in milliseconds where the source is not exact (default 10)"),
    "missing": ("{skip,fail}", "what a VRAM marker does where nothing can be measured (default skip)"),
    "report": ("PATH", "write a report; the suffix decides: .json; may be given several times"),
    "save": ("NAME", "save a baseline (not built yet)"),
    "compare": ("NAME", "compare with a baseline (not built yet)"),
    "fail_on": ("EXPR", "tolerance of a comparison (not built yet)"),
    "soak": ("AMOUNT", "how long tests with the marker vram_soak run, such as 300turns, 8h (8hours) or 20m (20min)"),
    "soak_dir": ("DIR", "where soaks keep their journals (default .vram/soaks)"),
    "leases": ("{on,off}", "admission between tests, workers and runs on this machine (default on)"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and their ini keys; defaults are None, so that no rank hides another."""
    group = parser.getgroup("vram", "GPU memory of LLM deployments")
    for name, (metavar, help_) in OPTIONS.items():
        option = "--vram-" + name.replace("_", "-")
        more: dict[str, Any] = {}
        if name == "report":
            more = {"action": "append"}
        elif name in ("save", "compare"):
            more = {"nargs": "?", "const": ""}
        group.addoption(option, dest=f"vram_{name}", metavar=metavar, default=None, help=help_, **more)
        if name == "report":
            parser.addini(f"vram_{name}", help_, type="linelist", default=None)
        else:
            parser.addini(f"vram_{name}", help_, type="string", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and take part where a setting, a config file or the controller asks for it."""
    for marker in MARKERS.values():
        config.addinivalue_line("markers", f"{marker.signature}: {marker.what}")
    if hasattr(config, "workerinput"):
        if config.workerinput.get("vram"):
            from pytest_vram.activity import activate

            activate(config)
    elif _asked(config):
        from pytest_vram.activity import activate

        activate(config)


def _asked(config: pytest.Config) -> bool:
    if any(getattr(config.option, f"vram_{name}", None) is not None for name in OPTIONS):
        return True
    if any(os.environ.get(f"PYTEST_VRAM_{name.upper()}") for name in OPTIONS):
        return True
    if any(_ini_is_set(config, f"vram_{name}") for name in OPTIONS):
        return True
    if os.path.lexists(config.rootpath / "vram.toml"):
        return True
    try:
        project = (config.rootpath / "pyproject.toml").read_bytes()
    except OSError:
        return False
    # The second form: pytest 8 ignores [tool.pytest] in silence, and a budget there must not be off unnoticed.
    return b"tool.vram" in project or (b"[tool.pytest]" in project and b"vram_" in project)


def _ini_is_set(config: pytest.Config, name: str) -> bool:
    try:
        return bool(config.getini(name))
    except TypeError:  # of a wrong type in [tool.pytest]: set all the same, and refused with a message later
        return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take part where a test carries one of our markers or uses one of our fixtures."""
    if RUN in config.stash:
        return
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if any(marker.name in MARKERS for marker in item.iter_markers()) or not FIXTURES.isdisjoint(fixtures):
            from pytest_vram.activity import activate

            activate(config)
            break


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell an xdist worker which run it belongs to, and make the controller ready for what its workers report."""
    from pytest_vram.activity import introduce

    introduce(node)

"""What the tests of the plugin share: an inner pytest that is free of the outer one's settings."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_vram.backends import store

# Resolved once, here: the test kit for plugins gives each test a home folder of its own, in which no engine would be
# found.
os.environ.setdefault("PYTEST_VRAM_CACHE", str(store.cache_folder()))

# Who runs these tests in the background may have both ignored, which every child would inherit.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGHUP", None), signal.SIG_DFL),
):
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

Inner = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settings in the environment of whoever runs these tests must not reach them, nor other runs on this machine."""
    for name in list(os.environ):
        if name.startswith("PYTEST_VRAM_") and name not in ("PYTEST_VRAM_CACHE", "PYTEST_VRAM_RPC"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_VRAM_LEASE_FOLDER", str(tmp_path_factory.getbasetemp() / "leases"))


@pytest.fixture
def inner(pytester: pytest.Pytester) -> Iterator[Inner]:
    """Run pytest in a process of its own, with warnings as errors; afterwards nothing of that run may be alive."""
    runs: list[Path] = []

    def run(*arguments: str) -> pytest.RunResult:
        result = pytester.runpytest_subprocess("-Werror", "-p", "no:cacheprovider", *arguments, timeout=120)
        runs.append(pytester.path)
        text = result.stdout.str() + result.stderr.str()
        assert "INTERNALERROR" not in text
        assert "Traceback" not in result.stderr.str()
        return result

    yield run
    for folder in runs:
        for one in (folder / ".vram" / "runs").glob("*"):
            assert ours(one.name) == []


def ours(run: str) -> list[int]:
    """PIDs of processes whose environment carries this run's marker."""
    marker = f"PYTEST_VRAM_RUN={run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def shell() -> dict[str, str]:
    """The environment of a user's shell: nothing of this pytest, but that leases are apart from those of other runs."""
    kept = ("PYTEST_VRAM_LEASE_FOLDER",)
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") or name in kept}


def plain(text: str) -> str:
    """The text without colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)

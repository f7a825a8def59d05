"""A model that was to be locked in memory and could not be is found, on a real server without the right to."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary
from pytest_vram.checks import judge_applied, judge_locked
from pytest_vram.testing import write_llama

pytestmark = pytest.mark.engine
Start = Callable[..., Any]
#: Takes the right to lock memory away, from root as well, and becomes the server.
WRAPPER = """#!{python} -S
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK
os.execv({binary!r}, [{binary!r}, *sys.argv[1:]])
"""


@pytest.fixture
def unprivileged(tmp_path: Path) -> str:
    """A llama-server that may lock nothing."""
    real = next(place.path for place in binary.places() if place.usable and place.path is not None)
    path = tmp_path / "llama-server"
    path.write_text(WRAPPER.format(python=sys.executable, binary=os.fspath(real)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_lock_that_failed_is_a_setting_not_applied(
    rehearse: Start, spec: Start, tmp_path: Path, unprivileged: str
) -> None:
    """With RLIMIT_MEMLOCK of 0 the boot log's warning makes `mlock` a setting that did not take effect."""
    write_llama(tmp_path / "tiny.gguf")
    options = {"ctx-size": 512, "parallel": 1, "mlock": True}
    run = rehearse(spec("tiny.gguf", binary=unprivileged, options=options))
    backend = run.pool.acquire(run.pool.spec())
    boot = backend.boot
    assert backend.asked["mlock"] is True
    assert boot.facts["mlock"] is False
    assert any("failed to mlock" in text for text in boot.warnings)
    for finding in (
        judge_locked(backend.asked, boot.facts, warnings=boot.warnings),
        judge_applied(backend.asked, boot.facts, warnings=boot.warnings),
    ):
        assert finding is not None
        assert finding.verdict == "failed"
        assert "Asked for, but not in effect: mlock" in finding.text
        assert "RLIMIT_MEMLOCK" in finding.text
    backend.stop()


def test_no_wish_no_finding(rehearse: Start, spec: Start, tmp_path: Path, unprivileged: str) -> None:
    """Without `mlock` nothing is asked for, and nothing is found."""
    write_llama(tmp_path / "tiny.gguf")
    run = rehearse(spec("tiny.gguf", binary=unprivileged, options={"ctx-size": 512, "parallel": 1}))
    backend = run.pool.acquire(run.pool.spec())
    assert "mlock" not in backend.asked
    assert judge_locked(backend.asked, backend.boot.facts) is None
    backend.stop()

"""A measured sweep that is interrupted ends everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_vram.testing import Shape, write_llama
from tests.conftest import ours

pytestmark = pytest.mark.engine

COMMAND = [sys.executable, "-c", "import sys; from pytest_vram.cli import main; sys.exit(main())", "sweep", "--measure"]
GONE = 3.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_sweep_leaves_no_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a prompt gives exit code 130, no traceback, and neither server nor keeper; so does a
    kill, within three seconds."""
    write_llama(tmp_path / "tiny.gguf", Shape(layers=6, embedding=512, context=16384))
    words = ("tiny.gguf", "--over", "context", "--values", "16384,8192", "-np", "1", "-t", "1", "--device", "cpu")
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        runs = tmp_path / ".vram" / "runs"
        while not any("new prompt" in log.read_text(errors="replace") for log in runs.glob("*/sweep.1.log")):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline, "no prompt was sent"
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(30) == code
        (run,) = [folder.name for folder in runs.iterdir()]
        deadline = time.monotonic() + GONE
        while ours(run) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ours(run) == []
        assert "Traceback" not in (tmp_path / "said").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()

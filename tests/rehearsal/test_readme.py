"""The README's failing example is what a run prints today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.backends import store

README = Path(__file__).resolve().parents[2] / "README.md"


def shape(line: str) -> str:
    """A line without its figures and spacing, which differ from run to run."""
    return " ".join(re.sub(r"[+-]?\d[\d,.]*", "N", line).split())


@pytest.mark.engine
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are owned on Linux only")
def test_failing_example_is_real(tmp_path: Path) -> None:
    """Each line of the example stands in the output of its command, figures aside."""
    if store.find_model() is None:
        pytest.skip("the demo model is not in the cache, and tests fetch nothing: run `vram demo` once")
    block = re.search(r"```\n\$ ci/demo (?P<arguments>[^\n]*)\n(?P<text>.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert block is not None
    code = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "demo", *block["arguments"].split(), "-p", "no:cacheprovider"]
    # On CI pytest prints the lines of its short summary in full; the example shows them as a person sees them.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment["COLUMNS"] = "80"
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    printed = {shape(line) for line in done.stdout.splitlines()}
    shown = [line for line in block["text"].splitlines() if line.strip() and line != "…"]
    assert [line for line in shown if shape(line) not in printed] == []

"""What the plugin costs a project that does not use it: import time beyond pytest's own, and the start of pytest.

Runs, interleaved, and prints medians as JSON::

    python ci/bench/import_cost.py [ROUNDS]

- ``plugin_ms``: cumulative time of ``import pytest_vram.plugin`` after ``import pytest``, as ``-X importtime`` reports
  it. (pytest itself loads plugins through ``importlib.import_module``, which ``-X importtime`` does not list.)
- ``start_with_ms`` and ``start_without_ms``: wall-clock time of a whole ``pytest --version --version``, which loads
  every installed plugin, with this one and with ``-p no:vram``; ``start_ratio`` is the first over the second.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

PLUGIN = re.compile(r"^import time:\s+\d+ \|\s+(\d+) \| pytest_vram\.plugin$", re.MULTILINE)


def run(*arguments: str) -> tuple[float, str]:
    """Run this interpreter from an empty folder; gives milliseconds of wall-clock time and its standard error."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    with tempfile.TemporaryDirectory() as empty:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return (time.perf_counter() - start) * 1000, done.stderr


def plugin_ms() -> float:
    """Cumulative import time of the plugin, in milliseconds."""
    _, report = run("-X", "importtime", "-c", "import pytest; import pytest_vram.plugin")
    found = PLUGIN.search(report)
    if found is None:
        sys.exit("the import of pytest_vram.plugin was not reported: is pytest-vram installed in this environment?")
    return int(found[1]) / 1000


def main(rounds: int) -> dict[str, object]:
    """Medians over ``rounds`` interleaved rounds."""
    start = ("-m", "pytest", "--version", "--version")
    run(*start)  # fills the caches of byte code and of the file system
    plugin_ms()
    rows = [(plugin_ms(), run(*start)[0], run(*start, "-p", "no:vram")[0]) for _ in range(rounds)]
    own, with_plugin, without = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "rounds": rounds,
        "python": platform.python_version(),
        "plugin_ms": round(own, 2),
        "start_with_ms": round(with_plugin, 1),
        "start_without_ms": round(without, 1),
        "start_ratio": round(with_plugin / without, 3),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9), indent=2))

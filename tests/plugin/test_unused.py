"""A run that uses nothing of the plugin pays nothing that it could notice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import Inner

HEAVY = (
    "msgspec",
    "httpx",
    "psutil",
    "pynvml",
    "rich",
    "jsonschema",
    "tomllib",
    "pytest_vram.run",
    "pytest_vram.settings",
)


def test_nothing_heavy_is_imported(pytester: pytest.Pytester, inner: Inner) -> None:
    """Neither third-party packages nor the rooms of this one are imported."""
    pytester.makepyfile(
        f"""
        import sys, threading

        def test_it(pytestconfig):
            assert "pytest_vram.plugin" in sys.modules
            assert [name for name in {HEAVY!r} if name in sys.modules] == []
            assert threading.active_count() == 1
            assert not pytestconfig.pluginmanager.has_plugin("vram-activity")
        """
    )
    result = inner("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:anyio")
    result.assert_outcomes(passed=1)


def test_no_hook_of_ours_runs_for_a_test(pytester: pytest.Pytester, inner: Inner) -> None:
    """No implementation of a per-test hook belongs to this package."""
    pytester.makepyfile(
        """
        def test_it(pytestconfig):
            for name in dir(pytestconfig.hook):
                if not name.startswith("pytest_runtest") and name != "pytest_report_teststatus":
                    continue
                for implementation in getattr(pytestconfig.hook, name).get_hookimpls():
                    assert "pytest_vram" not in getattr(implementation.function, "__module__", "")
        """
    )
    inner().assert_outcomes(passed=1)


HIDDEN = """
import builtins, io, os, sys

class Hide:
    names = {"fcntl", "resource", "pwd", "grp", "termios", "posix_ipc"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in Hide.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
real = io.open
def hidden(file, *args, **kwargs):
    if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
    return real(file, *args, **kwargs)
builtins.open = io.open = hidden
for name in ("getuid", "pidfd_open", "fork", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
import pytest
sys.platform = "not-linux"
raise SystemExit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("arguments", [[], ["--vram-report=out.json"]])
def test_the_plugin_works_without_fcntl_and_proc(pytester: pytest.Pytester, arguments: list[str]) -> None:
    """As on Windows: import, options, markers; a marker is skipped with the reason, and nothing crashes."""
    pytester.makepyfile(
        """
        from pytest_vram import max_vram

        @max_vram("3GB")
        def test_marked(): pass

        def test_plain(): pass
        """
    )
    command = [
        sys.executable,
        "-c",
        HIDDEN,
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "--capture=sys",
        "--vram-device=cpu",
        *arguments,
    ]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

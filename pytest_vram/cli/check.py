"""``vram check``: the shipped regression suite against the deployment of the project in the working directory."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from pytest_vram.cli import project
from pytest_vram.cli.output import BAD_USE, FAILS, HOLDS, INCONCLUSIVE, INTERRUPTED, Answer, refusal
from pytest_vram.errors import BadInput
from pytest_vram.report.records import RunReport
from pytest_vram.summary import Collector

SUITE = "pytest_vram_specs"
_KEY = re.compile(rf"(?:{SUITE}\.)?(?P<module>test_\w+)(?:\.py)?(?:::(?P<test>.+))?")
# What a project may set for its own tests and what must not reach the suite.
_NEUTRAL = (
    "python_files=test_*.py",
    "python_functions=test_*",
    "python_classes=Test*",
    "addopts=",
    "filterwarnings=",
    "usefixtures=",
    "norecursedirs=__pycache__",
)
_NEUTRAL_SINCE_9 = ("strict=false", "strict_config=false", "strict_markers=false")


class _Watcher:
    """A pytest plugin of this process: keeps the chosen tests, and remembers what the exit code does not say."""

    def __init__(self, chosen: list[tuple[str, str]]) -> None:
        self.chosen = chosen
        self.report: RunReport | None = None
        self.only_collected = False
        self.interrupted = False
        self.said = ""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests whose keys were given, all where none was."""
        if not self.chosen:
            return
        kept = [item for item in items if any(_is(item, module, test) for module, test in self.chosen)]
        dropped = [item for item in items if item not in kept]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell Ctrl-C from `pytest.exit`, which calls this hook as well."""
        self.interrupted = isinstance(excinfo.value, KeyboardInterrupt)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Take the run's report, where one was made."""
        self.only_collected = bool(config.getoption("collectonly", default=False))
        collector = config.pluginmanager.get_plugin(Collector.NAME)
        if isinstance(collector, Collector):
            self.report = collector.report


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Run the suite; exit code 0 when it holds, 1 when it does not, 3 when nothing was measured."""
    extra = [f"--vram-backend={options.backend}"] if options.backend is not None else []
    return check([*extra, *rest], as_json=options.json)


def check(arguments: list[str], *, as_json: bool) -> Answer:
    """Run the suite with these pytest arguments in this process.

    In this process, so that whatever ends the command also ends the run: the run's servers die with it.

    :raises BadInput: when the suite is not installed.
    """
    here = project.find(Path.cwd())
    chosen, others = _chosen(arguments)
    folder = suite_folder()
    neutral = _NEUTRAL + (_NEUTRAL_SINCE_9 if int(pytest.__version__.split(".")[0]) >= 9 else ())
    command = [
        *project.pytest_arguments(here),
        # The project's own conftest.py belongs to its own tests, also where the suite lies in a folder below it.
        f"--confcutdir={folder}",
        *(part for setting in neutral for part in ("-o", setting)),
        # This package is imported before pytest rewrites assertions; it has none to rewrite.
        "-W",
        "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning",
        "-rfEs",  # what was skipped was not proved, and a person must see it; a -r of the user's own comes later
        # The folder, not its files: pytest names a test outside the root by its path below the argument. Before the
        # user's own arguments, so that an option without its value does not take it for one.
        str(folder),
        *others,
    ]
    os.environ.pop("PYTEST_ADDOPTS", None)
    watcher = _Watcher(chosen)
    with _standard_output_elsewhere() if as_json else contextlib.nullcontext(), _heard() as errors:
        code = int(pytest.main(command, plugins=[watcher]))
    said = [line.removeprefix("ERROR: ") for line in errors.getvalue().split("\n") if line.startswith("ERROR: ")]
    watcher.said = " ".join(said)
    return _answer(code, watcher)


def suite_folder() -> Path:
    """The folder of the installed suite; the same modules in a checkout, an editable install and a wheel.

    :raises BadInput: when the package is missing.
    """
    found = importlib.util.find_spec(SUITE)
    if found is None or not found.submodule_search_locations:
        raise BadInput(f"package {SUITE}, the suite, is not installed: install pytest-vram again")
    return Path(next(iter(found.submodule_search_locations))).resolve()


def _chosen(arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off keys of the suite's tests, such as ``pytest_vram_specs.test_idle::test_…``, as (module, test)."""
    modules = {path.stem for path in suite_folder().glob("test_*.py")}
    chosen: list[tuple[str, str]] = []
    others: list[str] = []
    for argument in arguments:
        match = _KEY.fullmatch(argument)
        if match is not None and match["module"] in modules:
            chosen.append((match["module"], match["test"] or ""))
        else:
            others.append(argument)
    return chosen, others


def _is(item: pytest.Item, module: str, test: str) -> bool:
    return item.path.stem == module and test in ("", item.name)


def _answer(code: int, watcher: _Watcher) -> Answer:
    report = watcher.report
    if watcher.interrupted:
        mapped = INTERRUPTED
    elif code == pytest.ExitCode.OK:
        mapped = HOLDS if watcher.only_collected or _held(report) else INCONCLUSIVE
    elif code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERNAL_ERROR):
        mapped = FAILS
    else:
        mapped = BAD_USE
    if report is None:
        message = "no test was run" if mapped == HOLDS else watcher.said or "pytest ended without a report"
        return refusal(message, code=mapped, verb="check")
    return Answer(code=mapped, document=report)


def _held(report: RunReport | None) -> bool:
    """Whether the tests that passed prove anything: not where nothing was measured or one could not decide."""
    return report is not None and report.run.verdict == "passed"


class _Both(io.StringIO):
    """Keeps what is written to the standard error stream, and writes it there too."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _heard() -> Iterator[io.StringIO]:
    """What pytest says of a usage error: it goes to the standard error stream, and nowhere else."""
    kept = sys.stderr
    sys.stderr = both = _Both(kept)
    try:
        yield both
    finally:
        sys.stderr = kept


@contextlib.contextmanager
def _standard_output_elsewhere() -> Iterator[None]:
    """Send what pytest and its children print to the standard error stream, by descriptor."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

"""The wheel: what is in it, and that it works where nothing else of this project is."""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import shell

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"pytest_vram": "pytest_vram", "fixtures": "pytest_vram_fixtures", "test_specs": "pytest_vram_specs"}
SUITE_TEST = re.compile(r"(test_\w+)\.py::(\w+)")


def tree() -> list[str]:
    """Every file of the packages, as git knows or would add it, under its installed name."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.splitlines()
    files = []
    for name in listed:
        folder, _, rest = name.partition("/")
        if (ROOT / name).is_file():
            files.append(f"{PACKAGES[folder]}/{rest}")
    return sorted(files)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once from a copy of the tree, so that no build leaves anything in it."""
    source = tmp_path_factory.mktemp("source")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that has the wheel, and the dependencies of this one by a path file."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.strip()
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Path files in a folder that a path file adds are not read, so the editable install of this tree stays out.
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin"


def run(command: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, free of this test run's own settings."""
    kept = shell()
    cache = os.environ.get("PYTEST_VRAM_CACHE")
    if cache:
        kept["PYTEST_VRAM_CACHE"] = cache
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_wheel_holds_the_tree(wheel: Path) -> None:
    """Every file of the three packages is in the wheel, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
    assert names == tree()
    assert "pytest_vram/py.typed" in names
    assert "pytest_vram_fixtures/profiles/demo.toml" in names


def test_wheel_describes_itself(wheel: Path) -> None:
    """The wheel registers the plugin and the command, asks for Python 3.11 and carries the licence."""
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(info))
        points = configparser.ConfigParser()
        points.read_string(archive.read(info.replace("METADATA", "entry_points.txt")).decode())
        names = archive.namelist()
    assert points["pytest11"]["vram"] == "pytest_vram.plugin"
    assert points["console_scripts"]["vram"] == "pytest_vram.cli:main"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert "Framework :: Pytest" in metadata.get_all("Classifier", [])
    assert any(name.endswith("LICENSE") for name in names)


def test_command_works_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """The installed command runs where there is no project, and its modules are the wheel's."""
    done = run([installed / "vram", "doctor", "--json"], tmp_path)
    document = json.loads(done.stdout)
    assert document["format"] == "pytest-vram/doctor/1"
    assert document["config"]["valid"] is True
    where = run([installed / "python", "-c", "import pytest_vram; print(pytest_vram.__file__)"], tmp_path)
    assert where.stdout.startswith(str(installed.parent))


@pytest.mark.parametrize("inside", [False, True], ids=["environment elsewhere", "environment in the project"])
def test_suite_is_the_same_from_wheel_and_checkout(installed: Path, tmp_path: Path, inside: bool) -> None:
    """`vram check` finds the same tests from a wheel, in a project with settings of its own, as from the checkout."""
    project = installed.parent.parent if inside else tmp_path
    (project / "pytest.ini").write_text(
        "[pytest]\npython_files = check_*.py\npython_functions = prove_*\naddopts = --no-such-option\n"
        "usefixtures = no_such_fixture\nfilterwarnings = error::no_such_module.Warning\n",
        encoding="utf-8",
    )
    (project / "conftest.py").write_text("raise RuntimeError('this project needs a database')\n", encoding="utf-8")
    command = [installed / "vram", "check", "--collect-only", "-q"]
    elsewhere = run(command, project, PYTEST_ADDOPTS="--another-unknown-option")
    assert elsewhere.returncode == 0, elsewhere.stdout + elsewhere.stderr
    here = run([sys.executable, "-m", "pytest", "--collect-only", "-q", "test_specs"], ROOT)
    assert here.returncode == 0, here.stdout + here.stderr
    found = SUITE_TEST.findall(elsewhere.stdout)
    assert len(found) >= 10
    assert found == SUITE_TEST.findall(here.stdout)


@pytest.mark.engine
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are owned on Linux only")
def test_verdicts_are_the_same_from_wheel_and_checkout(installed: Path, tmp_path: Path) -> None:
    """The report of a run against a real server has the same keys and outcomes from a wheel as from the checkout."""
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = check_*.py\n", encoding="utf-8")
    common = ["--vram-device=cpu", "--vram-backend=demo", "--vram-budget=4GB", "-p", "no:cacheprovider"]
    chosen = ["-k", "test_boot or test_applied or short"]
    elsewhere = run([installed / "vram", "check", "--json", *common, *chosen], tmp_path)
    assert elsewhere.returncode == 0, elsewhere.stderr
    report = tmp_path / "checkout.json"
    here = run(
        [sys.executable, "-m", "pytest", "test_specs", *common, *chosen, f"--vram-report={report}"],
        ROOT,
    )
    assert here.returncode == 0, here.stdout + here.stderr
    first, second = (
        {test["nodeid"]: test["outcome"] for test in json.loads(text)["tests"]}
        for text in (elsewhere.stdout, report.read_text(encoding="utf-8"))
    )
    assert first == second
    assert "pytest_vram_specs.test_requests::test_short_chat_is_answered" in first


def test_selected_keys_and_usage_errors(installed: Path, tmp_path: Path) -> None:
    """A key from a report selects that test; what pytest cannot use ends with code 2 and no traceback."""
    key = "pytest_vram_specs.test_serial::test_two_callers_take_turns"
    one = run([installed / "vram", "check", "--collect-only", "-q", key], tmp_path)
    assert SUITE_TEST.findall(one.stdout) == [("test_serial", "test_two_callers_take_turns")]
    for wrong in (["--vram-budget=3g"], ["--no-such-option"], ["-k", "matches_nothing"], ["--backend", "nobody"]):
        done = run([installed / "vram", "check", *wrong], tmp_path)
        assert done.returncode == 2, (wrong, done.stdout, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr


CHILD = """
import subprocess, sys

CHILD = '''
import time
block = bytearray(300_000_000)
for start in range(0, len(block), 4096):
    block[start] = 1
time.sleep(0.05)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
'''

def test_child():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    with open("mark", "w") as stream:
        stream.write(done.stdout)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_unrelated_project_is_judged(installed: Path, tmp_path: Path) -> None:
    """In a project that knows nothing of the plugin a child that holds 300 MB fails 200 MB and passes 1 GB.

    The reported peak is within 2 % of what the child reads of itself before it exits.
    """
    (tmp_path / "test_child.py").write_text(CHILD, encoding="utf-8")
    pytest_command = [installed / "python", "-m", "pytest", "--vram-device=cpu", "-p", "no:cacheprovider"]
    over = run([*pytest_command, "--vram-budget=200MB"], tmp_path)
    assert over.returncode == 1, over.stdout + over.stderr
    assert "200MB" in over.stdout
    under = run([*pytest_command, "--vram-budget=1GB", "--vram-report=out.json"], tmp_path)
    assert under.returncode == 0, under.stdout + under.stderr
    test = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["tests"][0]
    own = int((tmp_path / "mark").read_text(encoding="ascii")) * 1024
    assert test["peak"]["host"]["bytes"] == pytest.approx(own, rel=0.02)

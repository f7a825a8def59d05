"""The workflow of a nightly soak: its own steps, run by a shell in a project with a scripted backend."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_vram.testing.scripted import Script, backend_table

WORKFLOW = Path(__file__).parents[2] / "ci" / "workflows" / "nightly-soak.yml"


def step(name: str) -> str:
    """The script of a step."""
    text = WORKFLOW.read_text(encoding="utf-8").partition(f"- name: {name}\n")[2].partition("\n      - ")[0]
    assert "run: |" in text
    return textwrap.dedent(text.partition("run: |\n")[2])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout, with the command where the first steps of the workflow install it."""
    (tmp_path / "vram.toml").write_text(backend_table(Script(), tmp_path, name="agent"), encoding="utf-8")
    command = tmp_path / ".venv" / "bin" / "vram"
    command.parent.mkdir(parents=True)
    code = "import sys; from pytest_vram.cli import main; sys.exit(main())"
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{code}' \"$@\" --vram-device=cpu\n", encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def night(project: Path, run: int, amount: str = "4turns") -> tuple[int, str]:
    """One attempt of the job: its exit code, and what it adds to the summary."""
    summary = project / "summary.md"
    summary.unlink(missing_ok=True)
    home = project / "home"
    home.mkdir(exist_ok=True)
    given = {"HOME": str(home), "GITHUB_REPOSITORY": "some/one", "GITHUB_RUN_ID": str(run), "AMOUNT": amount}
    environment = {**os.environ, **given, "GITHUB_STEP_SUMMARY": str(summary)}
    codes = []
    for name in ("Soak", "Report"):
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(name)]
        codes.append(subprocess.run(command, cwd=project, env=environment, check=False, timeout=120).returncode)
    assert codes[1] == 0
    return codes[0], summary.read_text(encoding="utf-8")


def test_a_night_has_its_own_report_and_goes_on_when_its_job_is_run_again(project: Path) -> None:
    """The verdict's code is the job's; a second attempt asks what is missing, another night begins anew."""
    code, said = night(project, 1)
    assert code == 3
    assert "soak agent: INCONCLUSIVE: after 4 turns" in said
    code, said = night(project, 1, "6turns")
    assert code == 3
    assert "ran        6 turns of 6turns" in said
    assert "taken up 1 time" in said
    code, said = night(project, 2)
    assert "ran        4 turns of 4turns" in said
    assert "taken up" not in said
    assert sorted(path.name for path in (project / "home/soaks/some/one").iterdir()) == ["1", "2"]


def test_a_night_without_a_server_shows_no_report_of_another(project: Path) -> None:
    """The summary says why there is none, of a first attempt and of a second one."""
    assert night(project, 1)[0] == 3
    text = (project / "vram.toml").read_text(encoding="utf-8")
    (project / "vram.toml").write_text(text.replace("pytest_vram.testing.scripted", "no_such_module"), encoding="utf-8")
    for run in (1, 2):
        code, said = night(project, run)
        assert code in (2, 3)
        assert "soak agent" not in said
        assert '"error": ' in said
    command = project / ".venv" / "bin" / "vram"
    command.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    code, said = night(project, 3)
    assert code == 137
    assert "cut short and has no report" in said

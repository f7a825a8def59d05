"""Where a command finds the project that it is run in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_vram.cli import project
from pytest_vram.errors import BadInput


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.ini", ""),
        (".pytest.ini", ""),
        ("pytest.toml", ""),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
        ("pyproject.toml", "[tool.pytest]\n"),
        ("tox.ini", "[pytest]\n"),
        ("setup.cfg", "[tool:pytest]\n"),
    ],
)
def test_ini_file_is_found_from_a_folder_below(tmp_path: Path, name: str, text: str) -> None:
    """Whatever file configures pytest marks the root, also from a folder below it."""
    (tmp_path / name).write_text(text)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found = project.find(below)
    assert found == project.Project(root=tmp_path.resolve(), ini=tmp_path.resolve() / name)


@pytest.mark.parametrize(
    ("name", "text"), [("pyproject.toml", "[project]\n"), ("tox.ini", "[tox]\n"), ("vram.toml", "")]
)
def test_file_without_pytest_settings_is_no_ini_file(tmp_path: Path, name: str, text: str) -> None:
    """A file that does not configure pytest is not handed to it."""
    (tmp_path / name).write_text(text)
    assert project.find(tmp_path).ini is None


def test_nearest_file_wins(tmp_path: Path) -> None:
    """Of two files on the way up the nearer one counts, as in pytest."""
    (tmp_path / "pytest.ini").write_text("")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "tox.ini").write_text("[pytest]\n")
    assert project.find(inner).ini == inner.resolve() / "tox.ini"


def test_config_file_marks_the_root(tmp_path: Path) -> None:
    """Without any pytest file the folder that holds vram.toml is the root."""
    (tmp_path / "vram.toml").write_text("")
    below = tmp_path / "sub"
    below.mkdir()
    assert project.find(below).root == tmp_path.resolve()


def test_broken_pyproject_is_one_sentence(tmp_path: Path) -> None:
    """A pyproject.toml that is not TOML is named, with its line."""
    (tmp_path / "pyproject.toml").write_text("[tool\n")
    with pytest.raises(BadInput, match=r"pyproject\.toml is not valid TOML: .*line 1"):
        project.find(tmp_path)


def test_project_without_ini_gets_an_empty_one(tmp_path: Path) -> None:
    """Without an ini file pytest is told so: else it would take one from around the installed suite."""
    (tmp_path / "vram.toml").write_text("")
    arguments = project.pytest_arguments(project.find(tmp_path))
    assert arguments == ["-c", os.devnull, f"--rootdir={tmp_path.resolve()}"]

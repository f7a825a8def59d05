"""The project that a command is run in: its root folder and the file that configures pytest.

pytest looks for both from the *files that it is given*, which for the shipped suite lie in ``site-packages``, so the
command looks for them from the working directory and hands them over.
"""

from __future__ import annotations

import configparser
import os
import tomllib
from pathlib import Path

import msgspec

from pytest_vram.errors import BadInput

#: In pytest's order. Files of the first group configure pytest even when they are empty.
_ALWAYS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")
_SECTIONS = {"tox.ini": "pytest", "setup.cfg": "tool:pytest"}
_ROOTS = ("vram.toml", "pyproject.toml", "setup.py", ".git")


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Where a command runs. :ivar ini: pytest's configuration file, ``None`` where the project has none."""

    root: Path
    ini: Path | None


def find(folder: Path) -> Project:
    """The project around ``folder``: the nearest folder upwards that configures pytest, else that looks like a root.

    :raises BadInput: when a ``pyproject.toml`` on the way is not valid TOML.
    """
    folder = folder.resolve()
    for parent in (folder, *folder.parents):
        ini = _ini(parent)
        if ini is not None:
            return Project(root=parent, ini=ini)
    for parent in (folder, *folder.parents):
        if any((parent / name).exists() for name in _ROOTS):
            return Project(root=parent, ini=None)
    return Project(root=folder, ini=None)


def pytest_arguments(project: Project) -> list[str]:
    """The arguments that give pytest this project."""
    return ["-c", str(project.ini or os.devnull), f"--rootdir={project.root}"]


def _ini(folder: Path) -> Path | None:
    for name in _ALWAYS:
        if (folder / name).is_file():
            return folder / name
    path = folder / "pyproject.toml"
    if path.is_file():
        try:
            tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} is not valid TOML: {error}") from None
        if isinstance(tool, dict) and "pytest" in tool:
            return path
    for name, section in _SECTIONS.items():
        path = folder / name
        if path.is_file():
            parser = configparser.ConfigParser(interpolation=None, strict=False)
            try:
                parser.read_string(path.read_text(encoding="utf-8"))
            except (configparser.Error, UnicodeDecodeError):
                continue  # not ours to judge: pytest itself passes such a file over
            if parser.has_section(section):
                return path
    return None

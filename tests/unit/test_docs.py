"""The examples in the README and the documentation are true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_vram import journal, markers, settings, specfile
from pytest_vram.cli import entry

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#:]+)\)")


def blocks(language: str) -> list[object]:
    """Every fenced block of this language, named by its page."""
    return [
        pytest.param(match["text"], id=f"{page.name}-{number}")
        for page in PAGES
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if match["language"] == language
    ]


@pytest.mark.parametrize("text", blocks("toml"))
def test_config_file_of_the_docs_is_accepted(text: str, tmp_path: Path) -> None:
    """Every config file that is shown can be used as it stands."""
    path = tmp_path / "vram.toml"
    path.write_text(text, encoding="utf-8")
    spec = specfile.read(path)
    values = {
        name: settings.Origin(value=value, rank="config file", place="docs") for name, value in spec.values.items()
    }
    settings.resolve(values)
    assert spec.path == str(path)
    assert len(spec.backends) > 1


@pytest.mark.parametrize("text", blocks("python"))
def test_tests_of_the_docs_have_valid_markers(text: str) -> None:
    """Every test that is shown can be imported, and its markers are accepted."""
    namespace: dict[str, Callable[..., object]] = {}
    exec(compile(text, "example", "exec"), namespace)
    functions = [value for name, value in namespace.items() if name.startswith(("test_", "Test"))]
    assert functions
    for function in functions:
        for mark in getattr(function, "pytestmark", []):
            markers.read(mark.name, mark.args, mark.kwargs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that is there."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / match["target"]).exists(), f"{page.name} links to {match['target']}, which is not there"


def test_every_setting_and_marker_is_documented() -> None:
    """No option and no marker is missing from its page."""
    shown = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert [name for name in settings.NAMES if settings.flag(name) not in shown] == []
    assert [name for name in settings.BUILT if settings.variable(name) not in shown] == []
    for page in ("README.md", "docs/markers.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in markers.MARKERS if f"`{name}" not in text] == [], page


def test_every_journal_kind_is_documented() -> None:
    """The table of journal lines has each kind, in the words of the code."""
    shown = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert [kind for kind, what in journal.KINDS.items() if f"| `{kind}` | {what} |" not in shown] == []


def test_every_profile_is_valid_and_documented() -> None:
    """Every profile that ships makes a backend, and getting started lists it."""
    shown = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    names = specfile.profiles()
    assert {"demo", "moe-13b", "agents-a1"} <= set(names)
    for name in names:
        assert specfile.backend("x", {"profile": name}, origin="test", base=".").engine
        assert f"`{name}`" in shown


def test_commands_that_are_not_built_are_not_promised() -> None:
    """A verb of a later version stands in the documentation only beside the words "not built yet"."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for paragraph in re.split(r"\n\s*\n|^- ", text, flags=re.MULTILINE):
            for verb in entry.NOT_BUILT:
                if f"vram {verb}" in paragraph:
                    assert "not built yet" in " ".join(paragraph.split()), f"{page.name} promises `vram {verb}`"

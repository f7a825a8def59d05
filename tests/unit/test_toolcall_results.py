"""Results files: what is kept of answers, and what is read, written, refused and left as it is."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls import answers
from pytest_vram.toolcalls import results as stored
from tests.unit.test_toolcall_evaluation import RIGHT, Scripted, called, only, run


@pytest.mark.parametrize(
    "arguments",
    ["[" * 1_000_000, '{"host": ' * 100_000, '{"host": "' + "x" * 2_000_000, "\ud800", '{"host": 1' + "0" * 100_000 + "}",
     json.dumps({f"k{i}": i for i in range(20_000)}), '{"host": NaN}'],
)  # fmt: skip
def test_whatever_a_model_writes_can_be_kept_and_read_again(arguments: str, tmp_path: Path) -> None:
    """A results file stays small, is valid, and nothing raises."""
    results = run(Scripted(called(arguments), RIGHT))
    assert only(results).first.outcome == "wrong"
    stored.save(results, path := tmp_path / "r.json")
    assert path.stat().st_size < 100_000
    assert stored.read(path) == results


def test_what_is_kept_is_what_json_can_say() -> None:
    """Deep values are cut, numbers that are none and large ones become text, halves of pairs are written out."""
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert len(json.dumps(answers.writable(deep))) < 100
    odd = {"a": float("inf"), "b": 1 << 70, "c": "\ud800", "d": (1, None, True), "e": {3}}
    assert answers.writable(odd) == {
        "a": "inf",
        "b": "a number of 71 bits",
        "c": "\\ud800",
        "d": [1, None, True],
        "e": "{3}",
    }


def test_results_come_back_as_they_were_saved(tmp_path: Path) -> None:
    """Saving replaces a file in one step and leaves nothing else behind."""
    results = run(Scripted(called("{"), RIGHT), 3)
    path = tmp_path / "new" / "r.json"
    for _ in range(2):
        stored.save(results, path)
    assert stored.read(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is no results file"),
        (b"\xff\xfe", "is no results file"),
        (b"[" * 100_000, "is no results file"),
        (b"{}", "is no results file"),
        (b'{"format": "pytest-vram/run/1"}', "has format 'pytest-vram/run/1'; this version of pytest-vram reads"),
        (b'{"format": "pytest-vram/toolcalls/1", "results": 3}', "with something wrong in it"),
    ],
)
def test_a_file_that_is_no_results_file_is_one_sentence(content: bytes, part: str, tmp_path: Path) -> None:
    """It names the file and what is wrong."""
    (path := tmp_path / "r.json").write_bytes(content)
    with pytest.raises(BadCases, match=part) as caught:
        stored.read(path)
    assert str(path) in str(caught.value)


def test_a_torn_results_file_is_told(tmp_path: Path) -> None:
    """Cut anywhere it is refused, never read in part."""
    stored.save(run(Scripted(RIGHT)), path := tmp_path / "r.json")
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:end])
        with pytest.raises(BadCases):
            stored.read(path)


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    """A missing file, a folder, a place that is a file."""
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "nowhere.json", tmp_path, tmp_path / "file" / "x", "a\0b"):
        with pytest.raises(BadCases, match="results file"):
            stored.read(bad)
    with pytest.raises(BadCases, match="cannot be written"):
        stored.save(run(Scripted(RIGHT)), tmp_path / "file" / "x")


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    """A named pipe would be waited for, and a device has no end; both are still there afterwards."""
    os.mkfifo(pipe := tmp_path / "pipe")
    link = tmp_path / "link"
    link.symlink_to(pipe)
    results = run(Scripted(RIGHT))
    for place in (pipe, link):
        with pytest.raises(BadCases, match="no file"):
            stored.read(place)
        for write in (stored.check_place, lambda path: stored.save(results, path)):
            with pytest.raises(BadCases, match="it is no file; name a file"):
                write(place)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_device_that_takes_everything_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not replaced by a file, and nothing else is made."""
    place = tmp_path / "device"
    place.write_text("")
    kind = os.stat_result((stat.S_IFCHR | 0o666, *place.stat()[1:]))
    monkeypatch.setattr(stored, "_status", lambda path: kind)
    inode = place.stat().st_ino
    stored.check_place(place)
    stored.save(run(Scripted(RIGHT)), place)
    assert place.stat().st_ino == inode
    assert place.stat().st_size > 100
    assert list(tmp_path.iterdir()) == [place]


def test_the_target_of_a_link_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    """A link to where results are kept stays one; its name may be as long as names can be."""
    target, link = tmp_path / "kept" / ("r" * 250), tmp_path / "latest.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    results = run(Scripted(RIGHT))
    stored.check_place(link)
    assert target.read_text() == "old"
    stored.save(results, link)
    assert link.is_symlink()
    assert stored.read(target) == results
    assert list(target.parent.iterdir()) == [target]


def test_a_results_file_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when it is too large."""
    monkeypatch.setattr(stored, "LARGEST", 1 << 20)
    (path := tmp_path / "r.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(BadCases, match="larger than 1 MiB"):
        stored.read(path)

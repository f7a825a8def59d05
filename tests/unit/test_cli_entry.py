"""The command's arguments, exit codes and JSON: one document or nothing on standard output."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from pytest_vram.cli import entry, main
from pytest_vram.cli.output import Answer
from pytest_vram.errors import BackendError, BadSpec, EngineNotFound


def fake_verb(monkeypatch: pytest.MonkeyPatch, outcome: Answer | BaseException) -> None:
    """Make `vram check` end in this answer or error."""

    def run(options: object, rest: list[str]) -> Answer:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.ModuleType("fake_verb")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(entry.VERBS, "check", ("fake_verb", "a fake"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadSpec("the file is wrong"), 2),
        (EngineNotFound("no engine"), 1),
        (BackendError("it broke"), 1),
        (PermissionError(13, "Permission denied", "/somewhere"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_error_becomes_a_sentence_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    """Every expected error ends in one line on the standard error stream and its exit code, never a traceback."""
    fake_verb(monkeypatch, error)
    assert main(["check"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    if str(error) and not isinstance(error, OSError):
        assert err == f"vram check: {error}\n"


def test_error_with_json_is_a_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is a document too, with the code that the process ends with."""
    fake_verb(monkeypatch, BadSpec("the file is wrong"))
    assert main(["check", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document == {"format": "pytest-vram/error/1", "verb": "check", "error": "the file is wrong", "exit": 2}


@pytest.mark.parametrize("verb", sorted(entry.NOT_BUILT))
def test_verb_of_a_later_version_says_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A verb that is documented and not built is refused with code 2 and the list of what is built."""
    assert main([verb, "something", "--flag"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "not built yet" in err
    assert ", ".join(sorted(entry.VERBS)) in err


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], [], ["doctor", "extra"], ["doctor", "--jso"]])
def test_bad_use_is_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be parsed is exit code 2 with a line of help, and nothing on standard output."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "vram" in err


def test_help_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every verb, those to come included."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in (*entry.VERBS, *entry.NOT_BUILT):
        assert verb in out


def test_pytest_arguments_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not the command's own goes to pytest in its order, and all of it after a lone `--`."""
    seen: list[list[str]] = []

    def run(options: object, rest: list[str]) -> Answer:
        seen.append(rest)
        return Answer(code=0, document={})

    module = types.ModuleType("fake_verb")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(entry.VERBS, "check", ("fake_verb", "a fake"))
    assert main(["check", "--vram-budget=1GB", "-k", "idle or boot", "-v", "--backend", "x", "--", "--json"]) == 0
    assert seen == [["--vram-budget=1GB", "-k", "idle or boot", "-v", "--json"]]


def test_answer_lines_and_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer is shown as its lines, or with --json as its document alone; the code is the same."""
    fake_verb(monkeypatch, Answer(code=3, document={"a": 1}, lines=("one", "two")))
    assert main(["check"]) == 3
    assert capsys.readouterr().out == "one\ntwo\n"
    assert main(["check", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"a": 1}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a full device is a file on Linux only")
@pytest.mark.parametrize("where", ["closed", "full"])
def test_output_that_cannot_be_written_is_no_traceback(tmp_path: Path, where: str) -> None:
    """A closed standard output is no fault; a full disk is one line on the standard error stream."""
    import subprocess

    code = "import sys; from pytest_vram.cli import main; sys.exit(main(['doctor']))"
    to = ">&-" if where == "closed" else ">/dev/full"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {to}', sys.executable, code],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if where == "full":
        assert done.returncode == 1
        assert "the output could not be written" in done.stderr


def test_reader_that_went_away_is_no_traceback(tmp_path: Path) -> None:
    """A closed pipe behind the command, as with `| head -1`, ends it without a traceback."""
    import subprocess

    code = "import sys; from pytest_vram.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(30)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("arguments", [["bogus", "--json"], ["doctor", "--reap=yes", "--json"]])
def test_bad_arguments_are_a_document_too(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """With --json an argument that cannot be used is said on standard output as well, with exit code 2."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert json.loads(captured.out)["exit"] == 2
    assert captured.err.strip()

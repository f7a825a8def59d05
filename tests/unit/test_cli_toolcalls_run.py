"""``vram toolcalls run`` as users meet it: exit codes, sentences, the document, and what is left after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.cli import main
from pytest_vram.report import schemas
from pytest_vram.testing.scripted import Answerer, Fault, Script, scripted_backend, serving
from pytest_vram.toolcalls import load
from pytest_vram.toolcalls.results import read
from tests.plugin.toolcall_kit import write_cases

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in a folder with cases and without a config file: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    write_cases(tmp_path, 60)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["toolcalls", "run", "--cases", "cases.jsonl", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@contextmanager
def answering(script: Script) -> Iterator[str]:
    """The URL of a server that answers the cases of the present folder."""
    with serving(Answerer(script, load("cases.jsonl", base=Path.cwd()))) as server:
        yield server.url


def document(cli: Cli, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The JSON document, checked against its published schema."""
    code, out, _ = cli(*arguments, "--json")
    found = json.loads(out)
    jsonschema.validate(found, schemas()["toolcalls.json"])
    return code, found


@pytest.mark.parametrize(
    ("accuracy", "judged", "code", "outcome"),
    [
        (1.0, (), 0, None),
        (0.0, (), 0, None),
        (1.0, ("--target", "0.94"), 0, "passed"),
        (0.5, ("--target", "0.94"), 1, "failed"),
        (1.0, ("--target", "0.999", "--mode", "proven"), 3, "inconclusive"),
        (0.5, ("--target", "0.94", "--mode", "sprt"), 1, "failed"),
    ],
)
def test_the_exit_code_is_the_verdict(
    cli: Cli, accuracy: float, judged: tuple[str, ...], code: int, outcome: str | None
) -> None:
    """Without a target the rate is printed and nothing is judged; a sequential test stops early."""
    with answering(Script(accuracy=accuracy)) as url:
        found, answer = document(cli, "--url", url, "--retries", "0", "--output", "out.json", *judged)
    assert found == code
    assert (answer["verdict"] or {}).get("outcome") == outcome
    assert answer["asked"]["file"].endswith("out.json")
    results = read("out.json")
    assert len(results.results) == answer["asked"]["n"]
    assert (len(results.results) < 60) is ("sprt" in judged)
    jsonschema.validate(json.loads(Path("out.json").read_text()), schemas()["toolcalls-results.json"])


def test_few_answers_are_undecided_and_no_server_is_no_verdict(cli: Cli) -> None:
    """Neither is a failure of the model: exit code 3."""
    with answering(Script(faults=[Fault(kind="disconnect", share=0.4)])) as url:
        code, answer = document(cli, "--url", url, "--target", "0.5", "--limit", "20", "--retries", "0")
    assert code == 3
    assert answer["verdict"]["outcome"] == "error"
    with answering(Script(faults=[Fault(kind="http_500", requests=list(range(30, 60)))])) as url:
        code, answer = document(cli, "--url", url, "--retries", "0")
    assert (code, answer["verdict"], answer["asked"]["n"]) == (3, None, 30)
    code, out, err = cli("--url", "http://127.0.0.1:9", "--target", "0.5")
    assert (code, out) == (3, "")
    assert err.startswith("vram toolcalls: ")
    assert "Traceback" not in err


def test_earlier_results_are_compared_case_by_case(cli: Cli) -> None:
    """With a target and without one: the comparison decides over the exit code."""
    with answering(Script()) as url:
        assert cli("--url", url, "--output", "before.json")[0] == 0
    with answering(Script(accuracy=0.6)) as url:
        code, out, _ = cli("--url", url, "--baseline", "before.json")
        assert code == 1
        assert "Compared with scripted on 60 cases" in out
        assert "Right before and wrong now: case-" in out
        assert "baseline" in out
        assert cli("--url", url, "--baseline", "before.json", "--target", "0.2")[0] == 1
        _, part = document(cli, "--url", url, "--baseline", "before.json", "--limit", "20")
        assert part["baseline"]["n"] == part["asked"]["n"] == part["paired"]["pairs"] == 20
        assert any("20 of the 60 cases that scripted answered are compared" in note for note in part["paired"]["notes"])
        write_cases(Path(), 50, "fewer.jsonl")
        code, _, err = cli("--url", url, "--cases", "fewer.jsonl", "--baseline", "before.json")
        assert code == 2
        assert "has results of other cases" in err


def test_ctrl_c_keeps_what_was_answered(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers until then are in the file, and the exit code says that it was interrupted."""
    from pytest_vram.cli import toolcalls_run

    once = toolcalls_run.Live.__call__

    def until_seven(self: toolcalls_run.Live, result: Any, planned: int) -> None:
        once(self, result, planned)
        if len(self.results) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(toolcalls_run.Live, "__call__", until_seven)
    with answering(Script()) as url:
        code, out, err = cli("--url", url, "--output", "kept.json")
    assert (code, out) == (130, "")
    assert "7 of 60 cases were answered, and are in" in err
    kept = read("kept.json")
    assert (len(kept.results), kept.planned, kept.stopped) == (7, 60, "interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_keeps_what_was_answered(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """CI sends SIGTERM, a closed terminal SIGHUP; afterwards the signals do what they did before."""
    from pytest_vram.cli import toolcalls_run

    once = toolcalls_run.Live.__call__

    def until_seven(self: toolcalls_run.Live, result: Any, planned: int) -> None:
        once(self, result, planned)
        if len(self.results) == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(toolcalls_run.Live, "__call__", until_seven)
    before = signal.getsignal(number)
    with answering(Script()) as url:
        code, _, err = cli("--url", url, "--output", "kept.json")
    assert code == 130
    assert "interrupted: 7 of 60 cases were answered, and are in" in err
    assert read("kept.json").stopped == "interrupted"
    assert signal.getsignal(number) == before


def test_an_interrupt_while_the_command_is_imported_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, whenever it comes."""
    from pytest_vram.cli import entry

    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "main", interrupted)
    assert main(["toolcalls"]) == 130


def test_a_server_that_dies_leaves_what_was_answered(cli: Cli) -> None:
    """The sentence says how many, and where; it was lost while a case was asked, and not while it was looked at."""
    script = Script(faults=[Fault(kind="dies", requests=[7])])
    with scripted_backend(script, cases=str(Path("cases.jsonl").resolve())) as server:
        code, out, err = cli("--url", server.url, "--output", "kept.json", "--target", "0.5")
    assert (code, out) == (3, "")
    assert "during POST /v1/chat/completions" in err
    assert "Before, 7 of 60 cases were answered, and are in" in err
    kept = read("kept.json")
    assert (kept.stopped, len(kept.counted()), kept.decided) == ("the server died", 7, False)
    assert kept.fingerprint["digest"] == kept.digest
    assert kept.sampling["temperature"] == 0.0


@pytest.mark.parametrize("kind", ["pipe", "long", "folder"])
def test_a_place_that_takes_no_results_is_told_before_anything_is_asked(cli: Cli, kind: str) -> None:
    """What is there and is no file is left as it is."""
    place = Path("place")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place = Path("x" * 400)
    with answering(Script()) as url:
        code, out, err = cli("--url", url, "--output", str(place))
    assert (code, out) == (2, "")
    assert "--output " in err
    assert "of 60" not in err
    if kind == "pipe":
        assert stat.S_ISFIFO(place.stat().st_mode)


@pytest.mark.parametrize("key", ["ключ", "\udcff", "secret\nkey", " secret"])
def test_a_key_that_no_header_can_carry_is_bad_use(cli: Cli, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """The sentence names the variable and not the key."""
    monkeypatch.setenv("OWN_KEY", key)
    code, out, err = cli("--url", "http://127.0.0.1:9", "--api-key-env", "OWN_KEY")
    assert (code, out) == (2, "")
    assert "--api-key-env OWN_KEY: the variable holds" in err
    assert "secret" not in err
    assert key not in err


@pytest.mark.parametrize("mode", ["not_below", "proven", "sprt", "point"])
def test_a_server_that_falls_silent_passes_nothing(cli: Cli, mode: str) -> None:
    """All that were answered are right, and a sixth was not asked any more."""
    faults = [Fault(kind="http_500", requests=list(range(45, 60)))]
    with answering(Script(faults=faults)) as url:
        code, answer = document(
            cli, "--url", url, "--target", "0.94", "--mode", mode, "--retries", "0", "--margin", "0.01"
        )
    assert code == 3
    assert answer["verdict"]["outcome"] == "error"
    assert answer["verdict"]["completion"] == 0.75
    assert "not asked (10)" in answer["verdict"]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "94"), "target=94 is not a share: write 0.94"),
        (("--target", "high"), "--target 'high' is not a number"),
        (("--target", "nan"), "target=nan is not a number"),
        (("--mode", "proven"), "--mode without --target judges nothing"),
        (("--confidence", "0.9"), "--confidence without --target judges nothing"),
        (("--target", "0.9", "--mode", "sometimes"), "mode='sometimes' is not one of"),
        (("--target", "0.9", "--judge", "after_retry", "--retries", "0"), "has no retry to judge"),
        (("--retries", "4"), "--retries '4' is not a whole number from 0 to 3"),
        (("--limit", "0"), "--limit '0' is not a whole number from 1"),
        (("--seed", "-1"), "--seed '-1' is not a whole number from 0"),
        (("--protocol", "grammar"), "toolcalls.protocol = 'grammar' is none of 'tools'"),
        (("--aa",), "--aa asks the baseline a second time"),
        (("--baseline", "nowhere.json"), "is neither a backend of the config file nor a results file"),
        (("--baseline", "cases.jsonl"), "cases.jsonl"),
        (("--cases", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--output", "no/such/folder/x.json"), "--output no/such/folder/x.json"),
        (("--backend", "nobody"), "--backend and --url are two servers"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "--api-key-env NO_SUCH_VARIABLE"),
        (("--frobnicate",), "does not take '--frobnicate'"),
    ],
)
def test_bad_use_is_one_sentence_before_anything_is_asked(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    """Exit code 2, and the server is not asked a case."""
    with answering(Script()) as url:
        code, out, err = cli("--url", url, *arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert not list(Path().glob("toolcalls-*.json"))


def test_what_belongs_to_a_url_is_refused_without_one(cli: Cli) -> None:
    """And a backend that the project has not is named with those it has."""
    code, _, err = cli("--model", "x")
    assert code == 2
    assert "--model belongs to --url" in err
    code, _, err = cli("--backend", "nobody")
    assert code == 2
    assert "'nobody'" in err

"""``vram soak`` as users meet it: amounts, folders, exit codes, the document, and what stands in its folder."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from pytest_vram.cli import entry, main, soak
from pytest_vram.report import schemas
from pytest_vram.sessions.soak_lines import GROUPS, logfmt
from pytest_vram.settings import parse_soak
from pytest_vram.spec import Amount
from pytest_vram.testing.scripted import Fault, Script, backend_table
from pytest_vram.testing.scripted.script import FaultKind

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in a project with a scripted backend: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    Path("vram.toml").write_text(backend_table(Script(), tmp_path, name="agent"), encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["soak", "--vram-device=cpu", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("12",), "'12' is not the amount of a soak: write 300turns, 8h or 20m"),
        (("3turns", "--hours", "2"), "AMOUNT and --hours are two amounts of one soak: write one"),
        (("-1h",), "'-1h' is not the amount of a soak: write 300turns, 8h or 20m"),
        (("--turns", "0"), "'0turns' is not the amount of a soak"),
        (("--hours", "many"), "'manyh' is not the amount of a soak"),
        (("3turns", "--backend", "other"), "'other' is not in the spec file"),
        (("3turns", "--resume"), "no soak of 'agent' was begun in"),
        (("3turns", "--resume", "--dir", "here"), "no soak was begun in"),
        (("3turns", "--budget", "3g"), "`3g` is ambiguous"),
        (("3turns", "--target", "94"), "--target '94' is not a share"),
        (("3turns", "--conversation", "cron-chekc"), "cron-check"),
        (("3turns", "--host-budget", "much"), "from --host-budget"),
        (("3turns", "--vram-device", "predicted"), "a soak measures"),
        (("3turns", "--vram-device", "cuda:0", "--backend", "other"), "'other' is not in the spec file"),
        (("3turns", "--vram-device", "cuda:0", "--conversation", "cron-chekc"), "cron-check"),
        (("3turns", "--vram-device", "cuda:0", "--target", "94"), "--target '94' is not a share"),
        (("12", "--vram-device", "cuda:0"), "(8hours and 20min are the same)"),
        (("3turns", "--frequently"), "does not take '--frequently'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    """One sentence, exit code 2, no folder."""
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path(".vram").exists()


@pytest.mark.parametrize(
    ("text", "turns", "seconds"),
    [
        ("1turn", 1, None),
        ("300 turns", 300, None),
        ("8hours", None, 28_800),
        ("1.5 hour", None, 5_400),
        ("20 min", None, 1_200),
        ("1minute", None, 60),
        ("90minutes", None, 5_400),
    ],
)
def test_amounts_have_the_units_that_the_page_on_settings_lists(
    text: str, turns: int | None, seconds: float | None
) -> None:
    """Written out or short, with or without a space."""
    amount = parse_soak(text)
    assert (amount.turns, amount.seconds) == (turns, seconds)


def test_a_soak_leaves_a_report_a_log_and_a_journal_that_can_be_made_longer(cli: Cli) -> None:
    """Few turns are inconclusive (3); the document is as published; ``--resume`` asks the missing turns only."""
    code, out, err = cli("4turns", "--budget", "2GB")
    assert code == 3
    assert "soak agent: INCONCLUSIVE: after 4 turns" in out
    assert "A pass holds for these conversations" not in out  # it is none
    assert "no target was given to hold them against" in " ".join(out.split())
    assert "turn=4/4" in err
    assert "fewer than 120 turns decide nothing about idle memory and throughput" in err
    assert "warming up with the longest prompt before turn 1" in err
    folder = Path(".vram/soaks/agent/1")
    assert (folder / "report.txt").read_text(encoding="utf-8").startswith("soak agent: INCONCLUSIVE")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["group"] for row in rows} == set(GROUPS)
    assert [row["turn"] for row in rows if row["group"] == "brain.step"] == [1, 2, 3, 4]
    lines = (folder / "log.logfmt").read_text(encoding="utf-8").splitlines()
    assert lines == [logfmt(row) for row in rows]

    code, _, err = cli("4turns", "--budget", "2GB", "--dir", str(folder))
    assert code == 2
    assert "has a soak already: go on with it with --resume" in err
    code, _, err = cli("6turns", "--budget", "3GB", "--resume")
    assert code == 2
    assert "gates.limit.each was 2000000000 and is 3000000000" in err
    assert "soak of agent:" not in err  # nothing was begun
    code, out, err = cli("6turns", "--budget", "2GB", "--resume", "--json", "--quiet")
    assert code == 3
    document = json.loads(out)
    jsonschema.validate(document, schemas()["soak.json"])
    assert (document["turn_count"], document["segment_count"], document["processes"]) == (6, 2, 2)
    assert [turn["number"] for turn in document["turns"]] == [1, 2, 3, 4, 5, 6]

    journal = folder / "soak.jsonl"
    os.truncate(journal, journal.stat().st_size - 20)  # the line of its end, which a kill has torn
    for _ in range(2):
        code, out, err = cli("6turns", "--budget", "2GB", "--resume", "--quiet")
        assert code == 3
        assert "nothing is left to do: a larger amount makes it longer" in err
        assert "without its end was dropped from the journal" in " ".join(out.split())
    journal.unlink()
    code, _, err = cli("6turns", "--budget", "2GB", "--resume")
    assert code == 2
    assert "soak.jsonl was removed or emptied" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--retention", "0"), "--retention '0' is not a share above 0"),
        (("--retention", "nan"), "--retention 'nan' is not a share above 0"),
        (("--retention", "80"), "--retention '80' is not a share above 0"),
        (("--target", "94"), "--target '94' is not a share above 0"),
        (("--budget", "3g"), "(from --budget)"),
    ],
)
def test_a_share_or_a_size_that_is_none_is_told(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """One sentence that names the option as it is written here, and exit code 2."""
    code, out, err = cli("3turns", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("kind", "each", "said"),
    [
        ("http_500_parse", 1, "answered HTTP 500 to POST"),
        ("http_500_parse", 2, "answered HTTP 500 to POST"),
        ("empty_content", 1, "the answer has neither text nor a call"),
        ("endless", 1, "the answer did not end"),
    ],
)
def test_a_server_that_generates_nothing_to_be_read_does_not_pass(
    cli: Cli, kind: FaultKind, each: int, said: str
) -> None:
    """It answers every request, and no turn was answered: inconclusive, and that after a few turns."""
    script = Script(faults=[Fault(kind=kind, requests=list(range(0, 400, each)))])
    Path("vram.toml").write_text(backend_table(script, Path.cwd(), name="agent"), encoding="utf-8")
    code, out, err = cli("130turns")
    assert code == 3
    text = " ".join(out.split())
    assert "INCONCLUSIVE: no turn was answered any more, after 5 turns" in text
    assert "5 of 5 turns have an answer that is empty or that nobody could read, the first because: " in text
    assert said in text
    assert "result=nothing" in err
    rows = map(json.loads, Path(".vram/soaks/agent/1/log.jsonl").read_text(encoding="utf-8").splitlines())
    assert {row["result"] for row in rows if row["group"] == "brain.step"} == {"nothing"}


def test_a_journal_that_lacks_what_its_report_has_is_refused(cli: Cli) -> None:
    """Cut at the end of a line it looks whole; the log and the report beside it know more."""
    assert cli("6turns", "--budget", "10MB")[0] == 1
    folder = Path(".vram/soaks/agent/1")
    journal = folder / "soak.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["kind"] for line in lines] == ["session", "segment", "turn", "end"]
    for kept, lacks in ((3, "its end (budget)"), (2, "turn 1"), (1, "turn 1")):
        journal.write_bytes(b"".join(lines[:kept]))
        code, out, err = cli("6turns", "--budget", "10MB", "--resume")
        assert (code, out) == (2, "")
        assert f"the log or the report beside it has {lacks}" in err
        assert journal.read_bytes() == b"".join(lines[:kept])
    (folder / "report.json").unlink()
    assert cli("6turns", "--budget", "10MB", "--resume")[0] == 2  # the log knows it, too
    (folder / "log.jsonl").write_bytes(b"\x00" * 100)
    (folder / "report.json").write_text("{", encoding="utf-8")
    assert cli("6turns", "--budget", "10MB", "--resume")[0] == 1  # nothing that can be read does: it is asked anew
    (folder / "manifest.json").unlink()
    journal.unlink()
    code, _, err = cli("6turns", "--budget", "10MB", "--dir", str(folder))
    assert code == 2
    assert "has the log of a soak and no turns of it" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", ""), "--backend is empty"),
        (("--dir", ""), "--dir is empty"),
        (("--conversation", "/dev/null"), "/dev/null is not a file: a conversation is one JSON object"),
    ],
)
def test_an_empty_name_is_no_default(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """What was left empty by a script is told, and nothing is soaked in its place."""
    code, out, err = cli("3turns", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not Path(".vram").exists()


def test_the_command_that_goes_on_holds_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are absolute in it; a shipped conversation keeps its name."""
    monkeypatch.chdir(tmp_path)
    arguments = ["soak", "3turns", "--config", "a b.toml", "--conversation", "cron-check", "--conversation", "own.json"]
    options, _ = entry._parser().parse_known_args(arguments)
    words = shlex.split(soak._again(options, Amount(text="3turns", turns=3), tmp_path / "soak"))
    assert words[words.index("--config") + 1] == str(tmp_path / "a b.toml")
    assert [words[at + 1] for at, word in enumerate(words) if word == "--conversation"] == [
        "cron-check",
        str(tmp_path / "own.json"),
    ]


def test_a_peak_over_the_budget_fails(cli: Cli) -> None:
    """Exit code 1 after the turn that broke it, and again when somebody tries to go on."""
    code, out, _ = cli("50turns", "--budget", "10MB")
    assert code == 1
    assert "FAILED: after 1 turn: the peak of host was" in out
    assert "over 10MB" in out
    # A backend whose settings nobody knows has no advice, which is said.
    assert "no advice: " in out
    assert "soaked     command; " in out
    assert cli("50turns", "--budget", "10MB", "--resume")[0] == 1

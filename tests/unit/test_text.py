"""Other people's text on a terminal and in documents: file names, names in model files, and homes of nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.cli import main
from pytest_vram.errors import BadInput, BadModel
from pytest_vram.paths import expanded
from pytest_vram.text import encodable, printable
from tests.unit import sizing_models

ODD = "zz\x1b[31m\n\u202e\udcff.gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose file name is no UTF-8, and holds a colour and a line end."""
    return sizing_models.dense_8b(tmp_path_factory.mktemp("odd") / ODD)


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_one_line_that_can_be_written(text: str) -> None:
    """Whatever a name holds, what is shown of it has no control characters and encodes."""
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


@given(
    st.recursive(
        st.text(st.characters(codec=None)) | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec=None)), inner),
    )
)
def test_any_value_can_be_made_encodable(value: object) -> None:
    """Every text of a document, keys included, encodes afterwards."""
    json.dumps(encodable(value), ensure_ascii=False).encode()


def test_a_model_error_has_no_raw_control_characters() -> None:
    """Names inside of files reach no terminal as they are, whoever prints the message."""
    assert str(BadModel(f"{ODD} is odd")) == r"zz\x1b[31m\n\u202e\udcff.gguf is odd"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_an_odd_file_name_is_shown_escaped(
    model: Path, capsys: pytest.CaptureFixture[str], as_json: bool, missing: bool
) -> None:
    """The answer and the refusal, for people and as a document, are written whole and command no terminal."""
    path = model.with_name(f"{ODD[:-6]}x.gguf") if missing else model
    code = main(["estimate", str(path), "-c", "4096", *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert code == (2 if missing else 0)
    for line in (out + err).splitlines():
        assert line.isprintable()
    if as_json:
        json.loads(out)
    if missing:
        assert err.count("\n") == 1
        assert r"near it are zz\x1b[31m\n\u202e\udcff.gguf" in err


def run_vram(words: list[str], redirect: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell of its own, with its streams as ``redirect`` says."""
    code = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "$@" {redirect}', sys.executable, code, *words],
        capture_output=True, text=True, errors="surrogateescape", timeout=60, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
@pytest.mark.parametrize("words", [[], ["--json"], ["--help"]])
def test_any_encoding_of_the_terminal_will_do(model: Path, environment: dict[str, str], words: list[str]) -> None:
    """What the encoding has no sign for is written otherwise; ranges stay readable, documents the same."""
    environment = {"PYTHONIOENCODING": "", **environment}
    done = run_vram(["fit", str(model), "-c", "4096", "--budget", "16GB", *words], **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    if words == ["--json"]:
        json.loads(done.stdout)
    elif not words:
        assert "107.00-555.00" in done.stdout


def test_a_closed_error_stream_leaves_the_document_alone(model: Path) -> None:
    """With standard error closed, standard output is the document and nothing else."""
    done = run_vram(["estimate", str(model.with_name("nope.gguf")), "--json"], "2>&-")
    assert json.loads(done.stdout)["exit"] == 2
    assert run_vram(["bogus", "--json"], "2>&-").stdout.startswith("{")


def test_a_reader_that_went_away_changes_no_verdict(model: Path) -> None:
    """`vram fit … | head -1` ends with the verdict's code: only 1 means that the model does not fit."""
    done = run_vram(["fit", str(model), "-c", "4096", "--budget", "16GB"], '| true; exit "${PIPESTATUS[0]}"')
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a full device is a file on Linux only")
def test_a_prediction_that_cannot_be_written_is_no_verdict(model: Path) -> None:
    """A full disk is one sentence and code 3."""
    done = run_vram(["fit", str(model), "-c", "4096", "--budget", "16GB"], ">/dev/full")
    assert done.returncode == 3
    assert done.stderr.startswith("vram: the output could not be written")


def test_a_home_of_nobody_is_one_sentence() -> None:
    """`~name` of no user names where it was written and what to write."""
    with pytest.raises(BadInput, match="HF_HOME is '~nosuchuser/x'.*write the whole path"):
        expanded("~nosuchuser/x", "HF_HOME")


@pytest.mark.parametrize(
    "variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"]
)
def test_a_store_at_the_home_of_nobody_is_one_sentence(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable of a store that cannot be expanded is the user's input: exit code 2, and its name."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "~nosuchuser/x")
    assert main(["estimate", "org/name"]) == 2
    assert f"{variable} is '~nosuchuser/x'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--lora", "--lora-scaled", "--mmproj", "--model-draft"])
def test_an_option_at_the_home_of_nobody_is_one_sentence(
    option: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of options are expanded as the model's is, and refused as it is."""
    value = "~nosuchuser/x.gguf" + (":1" if option == "--lora-scaled" else "")
    assert main(["estimate", str(model), option, value]) == 2
    assert "'~nosuchuser/x.gguf', and there is no home folder" in capsys.readouterr().err


def test_sentences_are_wrapped_for_a_narrow_terminal(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes keep to the width of the terminal; a wide one changes nothing."""
    longest = {}
    for columns in ("40", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["estimate", str(model), "-c", "4096"]) == 0
        notes = capsys.readouterr().out.partition("\nnotes\n")[2].partition("\n\n")[0].splitlines()
        longest[columns] = max(len(line) for line in notes)
    assert longest["40"] <= 40
    assert 40 < longest["80"] == longest["200"] <= 80


@pytest.mark.parametrize("device", ["predicted", "cpu"])
def test_a_project_in_a_folder_that_is_no_utf8_is_no_defect(tmp_path: Path, device: str) -> None:
    """Predictions are made and reported there; measuring, which needs the path in JSON, says what to do."""
    project = tmp_path / "p\udcff"
    project.mkdir()
    sizing_models.dense_8b(project / "m.gguf")
    spec = (
        'default = "x"\n[backend.x]\nengine = "llama-server"\nmodel = "m.gguf"\n[backend.x.options]\nctx-size = 4096\n'
    )
    (project / "vram.toml").write_text(spec)
    test = "import pytest\n\n@pytest.mark.vram_backend('x')\n@pytest.mark.max_vram('16GB')\ndef test_it(): pass\n"
    (project / "test_it.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--vram-device={device}", "--vram-report=r.json"],
        cwd=project, capture_output=True, text=True, errors="surrogateescape", timeout=60, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "defect" not in said
    assert "UnicodeEncodeError" not in said
    json.loads((project / "r.json").read_bytes())
    if device == "predicted":
        assert done.returncode == 0
    else:
        assert "give the folder a name in UTF-8" in said

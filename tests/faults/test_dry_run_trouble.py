"""A dry run that goes wrong: one sentence each, within its time, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_vram.backends import confined
from pytest_vram.backends import dry_run as module
from pytest_vram.backends.dry_run import dry_run
from pytest_vram.bootlog.dry_run import Amount
from pytest_vram.errors import BackendError, EngineNotFound

HELP = """
-m,    --model FNAME                    model path to load
-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory
-lv,   --verbosity N                    verbosity threshold
-c,    --ctx-size N                     size of the prompt context
"""
TABLE = """
0.00.001.000 I cmn  common_init_: fitting params to device memory ...
0.00.001.100 I common_params_fit_impl: getting device memory data for initial parameters:
0.00.002.000 I llama_model_loader: loaded meta data with 21 key-value pairs and 3 tensors from x (version GGUF V3)
0.00.003.000 I common_memory_breakdown_print: | memory breakdown [MiB] | total   free     self   model   context   compute    unaccounted |
0.00.003.001 I common_memory_breakdown_print: |   - CUDA0 (RTX 4060)   |  8188 = 8000 + (2593 =  1781 +     512 +     300) +       -2405 |
0.00.003.002 I common_memory_breakdown_print: |   - Host               |                  217 =   170 +       0 +      47                |
0.00.004.000 I common_params_fit_impl: projected to use 2593 MiB of device memory vs. 8000 MiB of free device memory
"""

Fake = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Something that begins as a GGUF file does."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    return path


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Makes a program that has llama-server's help, and does what is asked with anything else."""

    def make(body: str, help_: str = HELP) -> Path:
        path = tmp_path / f"engine-{len(list(tmp_path.iterdir()))}"
        (tmp_path / "help").write_text(help_)
        (tmp_path / "table").write_text(TABLE)
        script = f'#!/bin/sh\ncd "{tmp_path}"\nif [ "$1" = --help ]; then cat help; exit 0; fi\n{body}\n'
        path.write_text(script)
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of other runs on this machine are not ours."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def links() -> list[Path]:
    """Folders of links that are there now."""
    return list(Path(tempfile.gettempdir()).glob("vram-dry-run-*"))


def gone(pid: int) -> bool:
    """Wait until a process is no more, or a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def test_it_is_killed_with_its_children_as_soon_as_the_table_is_there(fake: Fake, model: Path, tmp_path: Path) -> None:
    """A server that goes on after its table, with a child that holds its output open, is ended; the figures are read."""
    engine = fake(
        "sleep 300 & echo $! >child; cat table; echo '0.00.004.001 I x: will leave 5407 >= 1024 MiB of free device"
        " memory, no changes needed'; sleep 300"
    )
    dry = dry_run(engine, model, {"ctx-size": 512})
    assert dry.fits is True
    assert dry.of("gpu0", "model").bytes == 1781 << 20
    assert dry.of("gpu0", "compute").at_most == (301 << 20) - 1
    assert (dry.of("host", "compute").bytes, dry.trial.projected) == (47 << 20, 2593 << 20)
    assert dry.trial.devices["gpu0"] == "CUDA0"
    assert (dry.rows[0].total, dry.rows[0].free) == (8188 << 20, 8000 << 20)
    assert gone(int((tmp_path / "child").read_text()))
    assert links() == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("sleep 300", "printed no memory table .* within 0.5 s and was stopped; its last words: none"),
        ("cat table | head -4; sleep 300", "printed no memory table .* within 0.5 s"),
        ("cat /dev/zero", "printed no memory table .* within 0.5 s"),
        ("head -c 300000 /dev/urandom; exit 3", r"ended \(exit code 3\) before printing its memory table"),
        ("kill -ILL $$", r"ended \(killed by SIGILL: this build uses CPU instructions that this machine lacks\)"),
        ("kill -KILL $$", r"ended \(killed by SIGKILL"),
        ("cat table | head -5; kill -SEGV $$", r"ended \(killed by SIGSEGV: a crash\)"),
        ("echo 'error: invalid argument: --fit'; exit 1", "refused a dry run of .*: error: invalid argument: --fit"),
        ("echo 'load: loading model tensors, this can take a while'; sleep 300", "began to load .* was stopped"),
        (
            "echo 'x: fitting params to device memory ...'; echo 'W x: failed to fit params to free device memory:"
            " llama_params_fit is not implemented for SPLIT_MODE_TENSOR, abort'; sleep 300",
            "refused a dry run .* not implemented for SPLIT_MODE_TENSOR",
        ),
    ],
    ids=[
        "hangs",
        "hangs after half",
        "nothing but zeros",
        "garbage",
        "SIGILL",
        "killed",
        "crash",
        "option",
        "loads",
        "gives up",
    ],
)
def test_trouble_is_one_sentence(fake: Fake, model: Path, body: str, sentence: str) -> None:
    """However the engine ends without a table, the error says how, on one line, and no link is left."""
    with pytest.raises(BackendError, match=sentence) as caught:
        dry_run(fake(body), model, {}, timeout=0.5 if "within 0.5 s" in sentence else 60)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert links() == []


def test_a_table_that_cannot_be_read_whole_is_no_table(fake: Fake, model: Path) -> None:
    """Where one line is of another form, the others are no figures of the model."""
    with pytest.raises(BackendError, match="with a line that cannot be read: .*Host"):
        dry_run(fake("sed 's/217 =   170/two/' table; sleep 300"), model, {}, timeout=1)


def test_help_that_hangs_leaves_nothing(
    fake: Fake, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script whose --help hangs is ended with its children."""
    monkeypatch.setattr(module.flags, "HELP_TIMEOUT", 0.7)
    engine = fake("exit 1")
    engine.write_text(f"#!/bin/sh\nsh -c 'echo $$ >{tmp_path}/pid; exec sleep 300'\n")
    with pytest.raises(EngineNotFound, match="did not answer"):
        dry_run(engine, model, {})
    assert gone(int((tmp_path / "pid").read_text()))


def test_figures_far_below_the_rules_are_doubted() -> None:
    """A table of zeros, or of less than half of what the rules count, is not taken at its word."""

    def one(rule: int, engine: int) -> module.Comparison:
        printed = Amount(bytes=engine << 20, at_most=((engine + 1) << 20) - 1)
        return module.Comparison(group="kv", device="host", rule=rule << 20, rule_at_most=rule << 20, engine=printed)

    assert module.contradicted([one(4, 0)]) == {"kv"}
    assert module.contradicted([one(1000, 400)]) == {"kv"}
    for agreeing in (one(4, 4), one(1, 0), one(2, 0), one(1000, 600), one(4, 400)):
        assert module.contradicted([agreeing]) == frozenset()


def test_an_engine_without_a_dry_run_is_not_even_started(fake: Fake, model: Path, tmp_path: Path) -> None:
    """A build without --fit, and a program that is no llama-server, are refused by what their help says."""
    old = fake("touch started", HELP.replace("fit", "fat"))
    with pytest.raises(BackendError, match="no option --fit, so it does no dry run: use a build of llama.cpp from"):
        dry_run(old, model, {})
    with pytest.raises(EngineNotFound, match="not a llama-server"):
        dry_run(fake("touch started", "hello"), model, {})
    assert not (tmp_path / "started").exists()
    with pytest.raises(EngineNotFound, match="cannot be used"):
        dry_run(tmp_path / "none", model, {})


def test_no_place_for_its_links_is_said(fake: Fake, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary folder can be made there is no run, and the folder is named."""

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    engine = fake("touch started")
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", full)
    with pytest.raises(BackendError, match="temporary links to the model, in .*: No space left on device"):
        dry_run(engine, model, {})
    assert not (model.parent / "started").exists()


def test_an_engine_that_cannot_be_started_is_said(fake: Fake, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no process left for it, that is the message."""
    engine = fake("exit 0")
    module.flags.help_of(engine)
    with pytest.raises(BackendError, match="could not be started for a dry run: No such file"):
        dry_run(engine, model, {}, folder=model.parent / "nowhere")

    def refused(*args: object, **kwargs: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(confined.subprocess, "Popen", refused)
    with pytest.raises(BackendError, match="could not be started for a dry run: Resource temporarily unavailable"):
        dry_run(engine, model, {})


# What an engine may be: itself, or a script around it, with a child in a session of its own.
SHAPES = {
    "itself": "echo $$ >pid; exec sleep 300",
    "a wrapper": "sh -c 'echo $$ >pid; exec sleep 300'; exit 1",
    "a session of its own": "setsid sh -c 'echo $$ >pid; exec sleep 300' & wait",
    "forked twice": "(setsid sh -c 'echo $$ >pid; exec sleep 300' &) ; sleep 300",
    "deaf": "trap '' TERM HUP INT; sh -c 'echo $$ >pid; exec sleep 300'; sleep 300",
}


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda s: s.name)
def test_it_dies_with_its_parent(fake: Fake, model: Path, tmp_path: Path, body: str, number: signal.Signals) -> None:
    """A command that is ended in the middle of a dry run leaves no engine and no links behind, whatever ended it."""
    engine = fake(body)
    # Who runs these tests in the background may have both signals ignored, which a child inherits.
    program = textwrap.dedent(f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        from pathlib import Path
        from pytest_vram.backends.dry_run import dry_run
        dry_run(Path({str(engine)!r}), Path({str(model)!r}), {{}})
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
        stderr=subprocess.DEVNULL,
    )
    await_text(tmp_path / "pid", process)
    process.send_signal(number)
    process.wait(30)
    assert gone(int((tmp_path / "pid").read_text()))
    deadline = time.monotonic() + 10
    while links() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert links() == []


def await_text(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program has written a line."""
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_nothing_is_left_after_its_end(fake: Fake, model: Path, tmp_path: Path, body: str) -> None:
    """What the engine started ends with the dry run, also what has left its session."""
    with pytest.raises(BackendError, match="no memory table"):
        dry_run(fake(body), model, {}, timeout=0.7)
    assert gone(int((tmp_path / "pid").read_text()))
    assert links() == []


def test_links_of_a_run_that_could_not_tidy_up_are_removed(fake: Fake, model: Path) -> None:
    """Where a guard was killed too, its folder goes with the next run; folders in use, or new, stay."""
    temporary = Path(tempfile.gettempdir())
    for name in ("old", "used", "new"):
        (temporary / f"vram-dry-run-{name}").mkdir()
        (temporary / f"vram-dry-run-{name}" / "model.gguf").symlink_to(model)
        if name != "new":
            os.utime(temporary / f"vram-dry-run-{name}", (0, 0))
    with module._held(temporary / "vram-dry-run-used"), pytest.raises(BackendError):
        dry_run(fake("exit 1"), model, {})
    assert sorted(path.name for path in links()) == ["vram-dry-run-new", "vram-dry-run-used"]
    assert model.exists()


def test_an_interrupt_ends_it(fake: Fake, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle kills the engine before it goes on."""
    engine = fake("echo $$ >pid; cat table; sleep 300")

    class Interrupted(module.DryRunLog):
        def feed(self, raw: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "DryRunLog", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        dry_run(engine, model, {})
    assert gone(int((tmp_path / "pid").read_text()))
    assert links() == []

"""Options of a spec against the binary's own help."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import flags
from pytest_vram.errors import BadSpec, EngineNotFound

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
--cpu-strict <0|1>                      use strict CPU placement (default: 0)
--swa-full                              use full-size SWA cache (default: false)
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
--no-host                               bypass host buffer allowing extra buffers to be used
--mmap, --no-mmap                       whether to memory-map model. (default: enabled)
--eager                                 load everything at once (default: enabled)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
-dev,  --device <dev1,dev2,..>          comma-separated list of devices to use for offloading
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM, either an exact number,
                                        'auto', or 'all' (default: auto)
--lora-init FNAME                       a path, may be given multiple times
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
"""
OLD_HELP = """\
usage: ./server [options]

  -h, --help            show this help message and exit
  -c N, --ctx-size N    size of the prompt context (default: 512)
  --mlock               force system to keep model in RAM
  -m FNAME, --model FNAME
                        model path
"""
KNOWN = flags.parse("/opt/llama-server", HELP)


def argv(options: dict[str, object]) -> list[str]:
    return flags.to_argv(options, KNOWN, origin="here", refused={"model": "write model ="})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ctx-size": 4096}, ["--ctx-size", "4096"]),
        ({"gpu-layers": "all"}, ["--gpu-layers", "all"]),
        ({"flash-attn": True}, ["--flash-attn", "on"]),
        ({"flash-attn": "auto"}, ["--flash-attn", "auto"]),
        ({"cpu-strict": False}, ["--cpu-strict", "0"]),
        ({"swa-full": True}, ["--swa-full"]),
        ({"swa-full": False}, []),
        ({"kv-offload": False}, ["--no-kv-offload"]),
        ({"no-kv-offload": True}, ["--no-kv-offload"]),
        ({"no-mmap": False}, ["--mmap"]),
        ({"no-host": True}, ["--no-host"]),
        ({"device": ["RPC0", "RPC1"]}, ["--device", "RPC0,RPC1"]),
        ({"override-tensor": ["a=CPU", "b=CPU"]}, ["--override-tensor", "a=CPU,b=CPU"]),
        ({"lora-init": ["a", "b"]}, ["--lora-init", "a", "--lora-init", "b"]),
    ],
)
def test_options_become_the_flags_that_the_help_describes(options: dict[str, object], expected: list[str]) -> None:
    """Values, switches, negative forms and lists are written as the binary's help says."""
    assert argv(options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ctx-sise": 1}, "did you mean 'ctx-size'"),
        ({"ngl": 1}, "'n-gpu-layers'"),
        ({"--ctx-size": 1}, "'ctx-size'"),
        ({"ctx_size": 1}, "'ctx-size'"),
        ({"model": "x"}, "write model ="),
        ({"swa-full": "yes"}, "write true or false"),
        ({"ctx-size": True}, "takes a value"),
        ({"eager": False}, "no way to switch it off"),
        ({"draft": 3}, "use --spec-draft-n-max"),
        ({"device": []}, "empty list"),
        ({"ctx-size": [1, 2]}, "takes one value"),
        ({"gpu-layers": 1, "n-gpu-layers": 2}, "the same as 'gpu-layers'"),
    ],
)
def test_option_that_the_binary_would_refuse_is_refused_first(options: dict[str, object], words: str) -> None:
    """What the binary does not take is a bad spec that names the option, its place and the way on."""
    with pytest.raises(BadSpec, match="here") as caught:
        argv(options)
    assert words in str(caught.value)


def test_help_of_the_older_layout_is_read() -> None:
    """A help whose lines are indented and repeat the hint gives the same options."""
    known = flags.parse("server", OLD_HELP)
    assert known.knows("ctx-size")
    assert known.knows("model")
    flag = known.find("mlock")
    assert flag is not None
    assert flag.hint == ""


def test_program_that_is_no_llama_server_is_named(tmp_path: Path) -> None:
    """A binary without --model in its help is no engine, and the message repeats what it said."""
    program = tmp_path / "thing"
    program.write_text("#!/bin/sh\necho hello from thing\n")
    program.chmod(0o755)
    with pytest.raises(EngineNotFound, match="hello from thing"):
        flags.help_of(program)


def test_help_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary that does not answer --help ends in one message."""
    monkeypatch.setattr(flags, "HELP_TIMEOUT", 0.2)
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    with pytest.raises(EngineNotFound, match="did not answer"):
        flags.help_of(program)


class Binary:
    """A program that cannot be run here, and answers for it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.asked = 0
        path.write_bytes(content)

    def run(self, argv: list[str], **settings: Any) -> subprocess.CompletedProcess[bytes]:
        assert argv == [str(self.path), "--help"]
        self.asked += 1
        return subprocess.CompletedProcess(argv, 0, b"-m, --model FNAME  model path\n", b"")

    def ask(self) -> flags.Help:
        """Ask as another process would, which has not asked yet."""
        flags._read.clear()
        return flags.help_of(self.path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flags, "_read", {})
    return tmp_path / "cache" / "help"


def test_help_is_asked_once_per_build(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later runs read the help from the cache; a new binary, or a new library beside it, is asked anew."""
    binary = Binary(tmp_path / "llama-server", b"\x7fELF one")
    monkeypatch.setattr(flags, "_run", binary.run)
    assert binary.ask() == binary.ask()
    assert flags.help_of(binary.path).knows("model")
    assert binary.asked == 1
    assert len(list(cache.iterdir())) == 1
    (tmp_path / "libgone.so").symlink_to("nowhere")
    (tmp_path / "libllama.so.0").write_bytes(b"x")
    binary.ask()
    binary.path.write_bytes(b"\x7fELF another")
    binary.ask()
    assert binary.asked == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"binary": "x", "text": "hello"}'])
def test_damaged_cache_is_asked_anew_and_mended(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    """A kept help that cannot be read, or is none, costs one question."""
    binary = Binary(tmp_path / "llama-server", b"\x7fELF one")
    monkeypatch.setattr(flags, "_run", binary.run)
    binary.ask()
    (kept,) = cache.iterdir()
    kept.write_bytes(damage)
    assert binary.ask().knows("model")
    assert binary.ask().knows("model")
    assert binary.asked == 2


def test_help_needs_no_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache folder cannot be made the help is asked each time; nothing else changes."""
    cache.parent.write_text("a file")
    binary = Binary(tmp_path / "llama-server", b"\x7fELF one")
    monkeypatch.setattr(flags, "_run", binary.run)
    assert binary.ask().knows("model")
    assert binary.ask().knows("model")
    assert binary.asked == 2


def test_script_is_asked_in_every_process(tmp_path: Path, cache: Path) -> None:
    """A script may start another program tomorrow, so its help is kept for this process only."""
    program = tmp_path / "wrapper"
    program.write_text("#!/bin/sh\necho asked >> \"$0.count\"\necho '-m, --model FNAME  model path'\n")
    program.chmod(0o755)
    first = flags.help_of(program)
    assert flags.help_of(program) is first
    flags._read.clear()
    assert flags.help_of(program) == first
    assert (tmp_path / "wrapper.count").read_text() == "asked\n" * 2
    assert not cache.exists()

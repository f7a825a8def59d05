"""Options of a spec against the binary's own help."""

from __future__ import annotations

from pathlib import Path

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


def test_help_is_asked_once_per_file(tmp_path: Path) -> None:
    """The help of an unchanged binary is read once, and again when the file changes."""
    program = tmp_path / "server"
    count = tmp_path / "count"
    program.write_text(f"#!/bin/sh\necho x >> {count}\necho '--model F     path'\n")
    program.chmod(0o755)
    first = flags.help_of(program)
    assert flags.help_of(program) is first
    program.write_text(program.read_text() + "echo '--other N     more'\n")
    assert flags.help_of(program).knows("other")
    assert count.read_text() == "x\nx\n"

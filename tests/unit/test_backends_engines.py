"""Specs become launch plans, or one message that says why not."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from pytest_vram import backends
from pytest_vram.backends import PlanContext, binary, engine, gguf_file, ports, smoke, store
from pytest_vram.backends.addresses import root_of
from pytest_vram.errors import BadSpec, EngineNotFound, ModelNotFound
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.readings import Unmeasurable
from pytest_vram.spec import BackendSpec

HELP = """\
-m,    --model FNAME                    model path to load
-c,    --ctx-size N                     size of the prompt context
--rpc SERVERS                           comma-separated list of RPC servers (host:port)
-dev,  --device <dev1,dev2,..>          comma-separated list of devices
--host HOST                             ip address to listen
--port PORT                             port to listen (default: 8080)
--api-key KEY                           API key
--ui,  --webui, --no-ui, --no-webui     whether to enable the Web UI (default: enabled)
-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192)
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        max number of context checkpoints to create per slot (default: 32)
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 3: info
                                         - 4: trace (more info)
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A program that prints a llama-server's help."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{HELP}END\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def llama(tmp_path: Path, server: Path) -> Any:
    """Makes specs of engine ``llama-server`` with a model that has the right magic."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))

    def make(**changes: Any) -> BackendSpec:
        keys: dict[str, Any] = {"model": "model.gguf", "binary": str(server), **changes}
        return BackendSpec(name="agent", engine="llama-server", origin="vram.toml", base=str(tmp_path), **keys)

    return make


def device(kind: str, label: str, name: str) -> DeviceInfo:
    return DeviceInfo(label=label, kind=kind, name=name, capacity=Unmeasurable(reason="test"), source="test")


# ---------------------------------------------------------------- registry


def test_unknown_engine_names_the_known_and_the_nearest() -> None:
    """A misspelt engine is a bad spec with the place, the nearest name and the whole list."""
    with pytest.raises(BadSpec, match=r"from vram\.toml.*did you mean 'llama-server'.*command, attach"):
        engine("lama-server", origin="vram.toml")


def test_entry_points_add_engines_but_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's engine is found by name; one that calls itself llama-server is not taken."""
    points = [
        EntryPoint("llama-server", "pytest_vram.backends.command:Command", backends.GROUP),
        EntryPoint("other", "pytest_vram.backends.command:Command", backends.GROUP),
        EntryPoint("broken", "a_missing_package.engine:Engine", backends.GROUP),
        EntryPoint("wrong", "os:path", backends.GROUP),
    ]
    monkeypatch.setattr(backends, "entry_points", lambda group: points)
    assert engine("llama-server").name == "llama-server"
    assert engine("other").name == "command"
    with pytest.raises(BadSpec, match="pip install a_missing_package"):
        engine("broken")
    with pytest.raises(BadSpec, match="is not a subclass"):
        engine("wrong")


# ---------------------------------------------------------------- llama-server


def test_plan_listens_on_loopback_and_prints_buffers(llama: Any, server: Path, tmp_path: Path) -> None:
    """A plan has loopback, a free port, the user's options, the verbosity of buffers and a key by environment."""
    plan = engine("llama-server").plan(llama(options={"ctx-size": 4096}), PlanContext())
    model = str(tmp_path / "model.gguf")
    assert plan.argv == [
        *(str(server), "--model", model, "--host", "127.0.0.1", "--port", "0"),
        *("--ctx-size", "4096", "--verbosity", "4", "--no-ui"),
    ]
    assert plan.secret_env == "LLAMA_API_KEY"
    assert plan.unset == ["LLAMA_"]
    assert plan.url == "http://127.0.0.1:{port}"
    assert plan.health == "/health"


def test_equal_specs_make_equal_plans(llama: Any) -> None:
    """Two processes that plan the same spec get the same identity, so they share a server."""
    make = engine("llama-server").plan
    assert make(llama(), PlanContext()).key == make(llama(), PlanContext()).key
    assert make(llama(), PlanContext()).key != make(llama(options={"ctx-size": 1}), PlanContext()).key


def test_fixed_port_and_louder_log_are_the_users(llama: Any) -> None:
    """A port and a verbosity that the user sets are kept."""
    plan = engine("llama-server").plan(llama(options={"port": 8123, "log-verbosity": 5}), PlanContext())
    assert plan.argv[plan.argv.index("--port") + 1] == "8123"
    assert plan.url == "http://127.0.0.1:8123"
    assert "--verbosity" not in plan.argv


def test_model_is_put_where_the_run_measures(llama: Any) -> None:
    """RPC devices of the run are offered, unless the spec names some; on cpu every other device is left out."""
    make = engine("llama-server").plan
    rpc = PlanContext(devices=(device("rpc", "gpu1", "RPC1[127.0.0.1:2]"),), rpc=("127.0.0.1:1", "127.0.0.1:2"))
    argv = make(llama(), rpc).argv
    assert argv[argv.index("--rpc") + 1] == "127.0.0.1:2"
    own = make(llama(options={"rpc": "127.0.0.1:9"}), rpc).argv
    assert own.count("--rpc") == 1
    cpu = PlanContext(devices=(device("cpu", "host", "host memory"),))
    argv = make(llama(), cpu).argv
    assert argv[argv.index("--device") + 1] == "none"
    assert "--device" not in make(llama(), PlanContext()).argv


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {"host": "0.0.0.0"}}, "127.0.0.1"),
        ({"options": {"api-key": "x"}}, "a random one for each server, which tests find in `vram_backend.api_key`"),
        ({"options": {"port": 70000}}, "65535"),
        ({"options": {"verbosity": 3}}, "must be 4 or more"),
        ({"options": {"ctx-sizes": 3}}, "did you mean 'ctx-size'"),
        ({"model": None}, "has no `model`"),
        ({"argv": ["x"]}, "belongs to engine 'command'"),
        ({"url": "http://x"}, "belongs to engine 'attach'"),
        ({"api_key": "env:NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_what_the_product_sets_itself_is_refused_with_the_reason(
    llama: Any, changes: dict[str, Any], words: str
) -> None:
    """Options and keys that would be ignored or do harm are bad specs that name the spec file."""
    with pytest.raises(BadSpec, match=r"vram\.toml") as caught:
        engine("llama-server").plan(llama(**changes), PlanContext())
    assert words in str(caught.value)


def test_own_key_reaches_the_server_by_environment_only(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key from the spec, or from a variable that it names, is in the environment and never in the arguments."""
    monkeypatch.setenv("MY_KEY", "s3cret")
    plan = engine("llama-server").plan(llama(api_key="env:MY_KEY"), PlanContext())
    assert plan.api_key == "s3cret"
    assert "s3cret" not in plan.argv


def test_asked_is_in_the_words_of_the_boot_log(llama: Any) -> None:
    """Options whose effect the log states are named as its facts are; automatic ones are left out."""
    options = {
        "ctx-size": 4096,
        "parallel": -1,
        "gpu-layers": 99,
        "cache-type-k": "q8_0",
        "flash-attn": "on",
        "ubatch-size": "256",
    }
    assert engine("llama-server").asked(llama(options=options)) == {
        "context": 4096,
        "layers_offloaded": 99,
        "cache_type_k": "q8_0",
        "flash_attention": "enabled",
        "ubatch": 256,
    }


def test_host_caches_are_switched_off_under_the_binarys_names(llama: Any) -> None:
    """The variant for idle checks replaces the user's settings of host caches, aliases included."""
    spec = engine("llama-server").without_host_caches(llama(options={"swa-checkpoints": 8, "ctx-size": 512}))
    assert spec.options == {"ctx-size": 512, "cache-ram": 0, "ctx-checkpoints": 0}


def test_properties_come_from_props_and_slots() -> None:
    """Slots and context per slot are read; a total is given only where one slot has all of it."""
    read = engine("llama-server").properties
    one = read({"/props": {"default_generation_settings": {"n_ctx": 512}, "total_slots": 1, "model_path": "m"}})
    assert (one.context, one.slots, one.context_per_slot, one.model) == (512, 1, 512, "m")
    two = read({"/slots": [{"n_ctx": 256}, {"n_ctx": 256}]})
    assert (two.context, two.slots, two.context_per_slot) == (None, 2, 256)
    assert read({"/props": "nonsense"}).slots is None


# ---------------------------------------------------------------- binaries


def test_binary_missing_everywhere_lists_the_places(
    llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without any binary the message has each place that was looked at and the ways on."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binary, "PACKAGES", ("not_installed_at_all",))
    with pytest.raises(EngineNotFound, match=r"PATH: .*not-installed-at-all.*cache.*vram demo.*binary"):
        binary.locate(llama(binary=None))


def test_known_bad_build_is_passed_over(
    llama: Any, server: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A binary that died in a smoke test on this CPU is skipped for one in the cache."""
    monkeypatch.setenv("PATH", str(server.parent))
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binary, "PACKAGES", ())
    cached = tmp_path / "cache" / "engines" / "llama-server" / "0.1" / "bin" / "llama-server"
    cached.parent.mkdir(parents=True)
    cached.write_text("#!/bin/sh\n")
    cached.chmod(0o755)
    assert binary.locate(llama(binary=None)) == server
    result = smoke.Smoke(ok=False, reason="SIGILL", binary="x", cpu=smoke.cpu_identity(), seconds=0.1)
    monkeypatch.setattr(store, "smoke_result", lambda path: result if Path(path) == server else None)
    assert binary.locate(llama(binary=None)) == cached


@pytest.mark.parametrize(
    ("name", "words"), [("missing", "does not exist"), (".", "is a folder"), ("plain", "is not executable")]
)
def test_named_binary_that_cannot_run_is_told_apart(llama: Any, tmp_path: Path, name: str, words: str) -> None:
    """A wrong `binary` says what is wrong with it and where it was written."""
    (tmp_path / "plain").write_text("x")
    with pytest.raises(EngineNotFound, match=words) as caught:
        binary.locate(llama(binary=str(tmp_path / name)))
    assert "[backend.agent] in vram.toml" in str(caught.value)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"version https://git-lfs", "git lfs pull"),
        (b"<html>", "it starts with '<html>'"),
        (b'\x10\x00\x00\x00\x00\x00\x00\x00{"a":1}', "safetensors"),
    ],
)
def test_model_that_is_no_gguf_says_what_it_is(llama: Any, tmp_path: Path, content: bytes | None, words: str) -> None:
    """A missing, empty or foreign file is a model error that says what was found."""
    if content is not None:
        (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(ModelNotFound, match=r"vram\.toml") as caught:
        gguf_file.resolve(llama(model="other.gguf"))
    assert words in str(caught.value)


def test_model_that_is_a_folder_names_what_is_in_it(llama: Any, tmp_path: Path) -> None:
    """A folder is refused with the GGUF files that it holds."""
    with pytest.raises(ModelNotFound, match=r"folder.*model\.gguf"):
        gguf_file.resolve(llama(model=str(tmp_path)))


def test_split_model_needs_all_parts_and_the_first_one(llama: Any, tmp_path: Path) -> None:
    """A split model is named by its first part, and a missing part is found before the server starts."""
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00003.gguf").write_bytes(b"GGUF1234")
    with pytest.raises(ModelNotFound, match="name m-00001-of-00003"):
        gguf_file.resolve(llama(model="m-00002-of-00003.gguf"))
    with pytest.raises(ModelNotFound, match=r"m-00003-of-00003\.gguf \(part 3 of 3"):
        gguf_file.resolve(llama(model="m-00001-of-00003.gguf"))
    (tmp_path / "m-00003-of-00003.gguf").write_bytes(b"GGUF1234")
    assert gguf_file.resolve(llama(model="m-00001-of-00003.gguf")).name == "m-00001-of-00003.gguf"


def test_demo_model_that_was_not_fetched_names_the_command(
    llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the demo model in the cache the message names `vram demo`."""
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ModelNotFound, match="vram demo"):
        gguf_file.resolve(llama(model="demo:SmolLM2-135M"))
    with pytest.raises(ModelNotFound, match="only demo model"):
        gguf_file.resolve(llama(model="demo:other"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_model_says_so(llama: Any, tmp_path: Path) -> None:
    """A model without read permission is an error with the system's reason."""
    (tmp_path / "model.gguf").chmod(0)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        gguf_file.resolve(llama())


# ---------------------------------------------------------------- command and attach


def command(tmp_path: Path, **changes: Any) -> BackendSpec:
    keys: dict[str, Any] = {
        "argv": [sys.executable, "-m", "server", "--port", "{port}", "--model", "{model}"],
        "health": "/health",
        "model": "some/name",
        **changes,
    }
    return BackendSpec(name="own", engine="command", origin="vram.toml", base=str(tmp_path), **keys)


def test_command_gets_one_steady_port_everywhere(tmp_path: Path) -> None:
    """The same port stands in arguments, environment and URL, and is the same for every process of a run."""
    context = PlanContext(run="20261130-abc")
    make = engine("command").plan
    plan = make(command(tmp_path, env={"PORT": "{port}"}), context)
    port = plan.argv[4]
    assert plan.url == f"http://127.0.0.1:{port}"
    assert plan.env == {"PORT": port}
    assert plan.argv[-1] == "some/name"
    assert make(command(tmp_path, env={"PORT": "{port}"}), context).key == plan.key
    assert make(command(tmp_path, env={"PORT": "{port}"}), PlanContext(run="another")).argv[4] != port


def test_port_of_a_stranger_is_passed_over() -> None:
    """A port that another program listens on is not chosen; one of this run's own server is kept."""
    first = ports.steady_port("a", run="r")
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", first))
        stranger.listen()
        assert ports.steady_port("a", run="r") != first
    assert ports.steady_port("a", run="r") == first


def test_port_of_this_runs_own_server_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that plans after the server listens gets the same port as the one before it."""
    first = ports.steady_port("a", run="r")
    monkeypatch.setattr(ports, "_listener_run", lambda port: "r")
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", first))
        ours.listen()
        assert ports.steady_port("a", run="r") == first


def test_command_names_the_engine_of_its_log(tmp_path: Path) -> None:
    """A command may name the engine whose log it writes; that grammar reads it, and says when it is ready."""
    named = engine("command").plan(command(tmp_path, log="vllm", health=None), PlanContext(run="r"))
    assert (named.engine, named.grammar, named.health) == ("command", "vllm", None)
    assert engine("command").plan(command(tmp_path), PlanContext(run="r")).grammar == "command"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"argv": []}, BadSpec, "has no `argv`"),
        ({"health": None}, BadSpec, "nothing says when it is ready"),
        ({"health": "health"}, BadSpec, "must be a path"),
        ({"health": "http://"}, BadSpec, "is not a URL"),
        ({"health": "/a\r\nX: y"}, BadSpec, "must be a path"),
        ({"health": "/a b"}, BadSpec, "must be a path"),
        ({"url": "http://a b"}, BadSpec, "is not a URL"),
        ({"url": "http://127.0.0.1:{port}/\n"}, BadSpec, "is not a URL"),
        ({"options": {"ctx-size": 4}}, BadSpec, "`options`"),
        ({"api_key": "a\nb"}, BadSpec, "no header can carry it"),
        ({"api_key": "schl\u00fcssel"}, BadSpec, "no header can carry it"),
        ({"argv": [sys.executable]}, BadSpec, "where it listens"),
        ({"model": None}, BadSpec, "`model` is not set"),
        ({"argv": ["no-such-program-here", "{port}"]}, EngineNotFound, "is not on PATH"),
        ({"argv": ["./missing", "{port}"]}, EngineNotFound, "does not exist"),
        ({"log_patterns": {"ready": "("}}, BadSpec, "not a regular expression"),
        ({"log_patterns": {"redy": "x"}}, BadSpec, "did you mean 'ready'"),
        ({"log": "vlm"}, BadSpec, "did you mean 'vllm'"),
        ({"log": "command"}, BadSpec, "logs are read of llama-server"),
        ({"log": "vllm", "log_patterns": {"kv": "x"}}, BadSpec, "both `log` and `log_patterns`"),
        ({"pid": 3}, BadSpec, "belongs to engine 'attach'"),
    ],
)
def test_command_that_cannot_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Each mistake in a command spec has its own message with the spec's place."""
    with pytest.raises(error, match=r"vram\.toml") as caught:
        engine("command").plan(command(tmp_path, **changes), PlanContext(run="r"))
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_attach_names_what_to_watch(tmp_path: Path) -> None:
    """An attached server has a root URL without /v1, a process and nothing to start."""
    keys: dict[str, Any] = {"name": "daemon", "engine": "attach", "origin": "vram.toml", "base": str(tmp_path)}
    plan = engine("attach").plan(BackendSpec(**keys, url="http://127.0.0.1:11434/v1/", process="ollama"), PlanContext())
    assert (plan.url, plan.process, plan.argv, plan.health) == ("http://127.0.0.1:11434", "ollama", [], "/v1/models")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"process": "x"}, "has no `url`"),
        ({"url": "http://h"}, "neither `pid` nor `process`"),
        ({"url": "http://h", "pid": os.getpid(), "process": "x"}, "both"),
        ({"url": "127.0.0.1:80", "process": "x"}, "is not a URL"),
        ({"url": "http://h", "process": "x", "options": {"a": 1}}, "`options`"),
        ({"url": "http://h", "process": "x", "health": "/a\nb"}, "must be a path"),
        ({"url": "http://h", "pid": 2**22 + 1}, "no such process"),
        ({"url": "http://h", "pid": 10**20}, "no such process"),
        ({"url": "http://u:sekret@h:1/", "process": "x"}, "holds a user name or a password"),
        ({"url": "http://h", "process": "x", "health": "http://u:sekret@h/health"}, "holds a user name or a password"),
    ]
    for changes, words in wrong:
        with pytest.raises(BadSpec) as caught:
            engine("attach").plan(BackendSpec(**keys, **changes), PlanContext())
        assert words in str(caught.value)
        assert "sekret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/openai/v1/", "https://h/openai"),
    ],
)
def test_server_root_and_v1_are_the_same_address(url: str, root: str) -> None:
    """Both spellings of a base URL give the server's root."""
    assert root_of(url, "here") == root

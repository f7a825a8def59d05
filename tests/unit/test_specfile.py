"""The config file: what is read, and one line for everything that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram import specfile
from pytest_vram.backends import engine
from pytest_vram.backends.base import PlanContext
from pytest_vram.backends.pool import overridden
from pytest_vram.errors import BadInput, BadSpec
from pytest_vram.spec import as_table, without_secrets


def read(folder: Path, text: str | bytes) -> specfile.SpecFile:
    """The spec file with this text."""
    path = folder / "vram.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return specfile.read(path)


EXAMPLE = """
default = "agent"
budget = "6GB"

[backend.agent]
engine = "llama-server"
model = "~/models/my-moe-q4.gguf"
boot_timeout = 120
floors = { tokens_per_second = 20 }

[backend.agent.options]
n-gpu-layers = 999
n-cpu-moe = 6
ctx-size = 4096
cache-type-k = "q8_0"
flash-attn = "on"
mlock = true

[backend.daemon]
engine = "attach"
url = "http://127.0.0.1:11434/v1"
process = "ollama"
"""


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    """Backends, their options, floors and the default come out as written."""
    found = read(tmp_path, EXAMPLE)
    assert found.default == "agent"
    assert found.values == {"budget": "6GB"}
    agent = found.backends["agent"]
    assert (agent.engine, agent.boot_timeout, agent.request_timeout) == ("llama-server", 120.0, 300.0)
    assert agent.options["n-cpu-moe"] == 6
    assert agent.floors.tokens_per_second == 20
    assert agent.base == str(tmp_path)
    assert found.backends["daemon"].process == "ollama"
    assert "demo" in found.backends


def test_without_a_file_there_is_the_demo_backend() -> None:
    """The built-in backend is always there and is the default."""
    found = specfile.read(None)
    assert (found.default, list(found.backends)) == ("demo", ["demo"])
    assert found.backends["demo"].engine == "llama-server"


def test_the_only_backend_is_the_default(tmp_path: Path) -> None:
    """A file with one backend need not say default."""
    assert read(tmp_path, '[backend.mine]\nengine = "attach"\nurl = "http://127.0.0.1:1"\npid = 7\n').default == "mine"


@pytest.mark.parametrize("name", specfile.profiles())
def test_every_profile_makes_a_backend(tmp_path: Path, name: str) -> None:
    """The ready profiles are valid, and a backend's own keys override them key by key."""
    plain = read(tmp_path, f'[backend.x]\nprofile = "{name}"\n').backends["x"]
    more = read(
        tmp_path, f'[backend.x]\nprofile = "{name}"\nboot_timeout = 7\n[backend.x.options]\nmine = 1\n'
    ).backends["x"]
    assert more.boot_timeout == 7
    assert more.options == {**plain.options, "mine": 1}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("budget = ", ["is not valid TOML", "Invalid value"]),
        (b"\xff\xfe", ["is not UTF-8"]),
        ('bugdet = "4GB"', ["unknown key 'bugdet'", "did you mean 'budget'?"]),
        ('backend = "agent"', ["backend = 'agent' is not a table"]),
        ("default = 3\n", ["default = 3 is not a backend"]),
        ('default = "agnet"\n[backend.agent]\nengine = "command"\nargv = ["x"]', ["'agnet'", "known are 'agent', 'demo'"]),
        ("[backend.agent]\nmodel = 'x'", ["backend.agent has no engine"]),
        ("[backend.agent]\nengine = 3", ["backend.agent.engine = 3"]),
        ("[backend.agent]\nengine = 'llama-server'\nmodle = 'x'", ["unknown key 'modle'", "did you mean 'model'?"]),
        ("[backend.agent]\nengine = 'llama-server'\nargv = ['x']", ["backend.agent.argv means nothing to engine 'llama-server'", "'command'"]),
        ("[backend.agent]\nengine = 'command'\nargv = 'python -m x'", ["is one string: write a list"]),
        ("[backend.agent]\nengine = 'command'\nargv = [3]", ["argv[0] = 3"]),
        ("[backend.agent]\nengine = 'attach'\npid = '7'", ["pid = '7' is not a process id"]),
        ("[backend.agent]\nengine = 'attach'\npid = true", ["pid = True is not a process id"]),
        ("[backend.agent]\nengine = 'llama-server'\nboot_timeout = 'soon'", ["boot_timeout = 'soon'", "seconds"]),
        ("[backend.agent]\nengine = 'llama-server'\nboot_timeout = 0", ["boot_timeout = 0"]),
        ("[backend.agent]\nengine = 'llama-server'\nboot_timeout = nan", ["boot_timeout = nan"]),
        ("[backend.agent]\nengine = 'llama-server'\nfloors = { tps = 3 }", ["unknown key 'tps'", "tokens_per_second"]),
        ("[backend.agent]\nengine = 'llama-server'\nfloors = { tokens_per_second = -1 }", ["tokens_per_second = -1", "above 0"]),
        ("[backend.agent]\nengine = 'llama-server'\nenv = { A = 1 }", ["env.A = 1"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = 0.2", ["backend.a.sampling = 0.2 is not a table"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { temprature = 0.2 }", ["backend.a.sampling: unknown key 'temprature'", "did you mean 'temperature'?"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { temperature = 2.1 }", ["sampling.temperature = 2.1 is not a number from 0 to 2"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { temperature = nan }", ["sampling.temperature = nan"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { temperature = true }", ["sampling.temperature = True"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { top_p = 0 }", ["sampling.top_p = 0 is not a number above 0 to 1"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { seed = -1 }", ["sampling.seed = -1 is not a whole number from 0 to 4294967294"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { max_tokens = 0 }", ["sampling.max_tokens = 0 is not a whole number from 1 to 32768"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { max_tokens = 1.5 }", ["sampling.max_tokens = 1.5"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { extra = { min_p = inf } }", ["sampling.extra.min_p = inf cannot be sent as JSON"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { extra = { when = 2026-01-01 } }", ["sampling.extra.when", "cannot be sent as JSON"]),
        ("[backend.a]\nprofile = 'demo'\nsampling = { extra = { messages = [] } }", ["sampling.extra.messages is set by another key"]),
        ("[backend.a]\nprofile = 'demo'\ntoolcalls = { protocol = 'json' }", ["toolcalls.protocol = 'json' is none of 'tools', 'json_schema', 'few_shot'"]),
        ("[backend.a]\nprofile = 'demo'\ntoolcalls = { stream = 1 }", ["toolcalls.stream = 1 is not true or false"]),
        ("[backend.a]\nprofile = 'demo'\ntoolcalls = { tool_choice = 'none' }", ["toolcalls.tool_choice = 'none' is none of 'auto', 'required'"]),
        ("[backend.a]\nprofile = 'demo'\ntoolcalls = { protocol = 'few_shot', parallel = true }", ["toolcalls.parallel means nothing to protocol 'few_shot'"]),
        ("[backend.a]\nprofile = 'demo'\ntoolcalls = { logit_bias = { a = 101 } }", ["toolcalls.logit_bias.a = 101 is not a number from -100 to 100"]),
        ("[backend.agent]\nengine = 'llama-server'\noptions = { a = { b = 1 } }", ["options.a"]),
        ("[backend.agent]\nengine = 'llama-server'\noptions = { a = inf }", ["options.a = inf"]),
        ("[backend.agent]\nengine = 'llama-server'\noptions = { a = [] }", ["options.a = []"]),
        ("[backend.agent]\nprofile = 'dmeo'", ["profile = 'dmeo'", "did you mean 'demo'?"]),
        ("[backend.agent]\nprofile = 'demo'\nengine = 'command'", ["profile 'demo' is for engine 'llama-server'"]),
        ("backend.agent = 3", ["backend.agent = 3 is not a table"]),
        ("[backend.'a/b']\nengine = 'command'", ["'a/b' cannot name a backend"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line_with_its_place(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    """The message names the file, the key with its value, and what is accepted."""
    with pytest.raises(BadSpec) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "vram.toml"))
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_sampling_and_tool_calling_come_out_as_written(tmp_path: Path) -> None:
    """Their tables are part of the spec and of its table in reports; what is left out has its default."""
    spec = read(
        tmp_path,
        "[backend.a]\nprofile = 'demo'\nsampling = { temperature = 0.2, top_k = 40, extra = { min_p = 0.05, dry = ['x'] } }\n"
        "toolcalls = { stream = true, parallel = false, logit_bias = { read_log = -2 } }\n",
    ).backends["a"]
    assert (spec.sampling.temperature, spec.sampling.seed, spec.sampling.top_k) == (0.2, 0, 40)
    assert spec.sampling.extra == {"min_p": 0.05, "dry": ["x"]}
    assert (spec.toolcalls.protocol, spec.toolcalls.stream, spec.toolcalls.parallel) == ("tools", True, False)
    assert as_table(spec)["toolcalls"]["logit_bias"] == {"read_log": -2.0}
    assert as_table(spec)["sampling"] == {"temperature": 0.2, "top_k": 40, "extra": {"min_p": 0.05, "dry": ["x"]}}


def test_sampling_starts_no_other_server(tmp_path: Path) -> None:
    """What requests say is no part of a launch plan: tests that ask in different ways share a server."""
    text = f"[backend.a]\nengine = 'command'\nargv = [{json.dumps(sys.executable)}]\nurl = 'http://127.0.0.1:8000'\nhealth = '/health'\n"
    plain = read(tmp_path, text).backends["a"]
    asked = read(tmp_path, text + "sampling = { seed = 3 }\ntoolcalls = { stream = true }\n").backends["a"]
    assert plain != asked
    plans = [engine("command").plan(spec, PlanContext(run="r")) for spec in (plain, asked)]
    assert plans[0].key == plans[1].key


def test_a_change_for_one_use_is_merged_and_checked_as_the_file_is(tmp_path: Path) -> None:
    """``@vram_backend("a", sampling={"seed": 3})`` keeps the other keys, and a bad value names its place."""
    spec = read(tmp_path, "[backend.a]\nprofile = 'demo'\nsampling = { temperature = 0.2 }\n").backends["a"]
    changed = overridden(spec, {"sampling": {"seed": 3}, "toolcalls": {"protocol": "few_shot"}})
    assert (changed.sampling.temperature, changed.sampling.seed, changed.toolcalls.protocol) == (0.2, 3, "few_shot")
    with pytest.raises(BadSpec, match=r"a change to \[backend\.a\]: sampling\.seed = -1"):
        overridden(spec, {"sampling": {"seed": -1}})
    with pytest.raises(BadSpec, match="`toolcalls` must be a table"):
        overridden(spec, {"toolcalls": "few_shot"})


def test_the_file_is_looked_for_in_two_places(tmp_path: Path) -> None:
    """vram.toml first, then [tool.vram] in pyproject.toml, else none."""
    assert specfile.locate(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert specfile.locate(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[tool.vram]\nbudget = "1GB"\n')
    path = specfile.locate(tmp_path)
    assert path == tmp_path / "pyproject.toml"
    assert specfile.read(path).values == {"budget": "1GB"}
    (tmp_path / "vram.toml").write_text("")
    assert specfile.locate(tmp_path) == tmp_path / "vram.toml"


@pytest.mark.parametrize(("name", "part"), [("nowhere.toml", "does not exist"), (".", "is a folder")])
def test_a_named_file_must_be_there(tmp_path: Path, name: str, part: str) -> None:
    """A config file that was asked for by name and is missing is an error with the place it was named."""
    with pytest.raises(BadSpec, match=f"{part}.*--vram-config"):
        specfile.locate(tmp_path, str(tmp_path / name))


def test_an_api_key_never_reaches_a_report(tmp_path: Path) -> None:
    """Specs in reports have their key replaced."""
    spec = read(tmp_path, "[backend.a]\nengine='attach'\nurl='http://127.0.0.1:1'\npid=7\napi_key='hush'\n").backends[
        "a"
    ]
    assert spec.api_key == "hush"
    assert "hush" not in str(as_table(spec))
    argv = ["serve", "--api-key", "hush", "--token=hush", "--max-tokens", "5"]
    assert without_secrets(argv) == ["serve", "--api-key", "***", "--token=***", "--max-tokens", "5"]


toml_text = st.lists(
    st.sampled_from(
        ["[backend.a]", 'engine = "command"', "engine = 1", 'profile = "demo"', "options = {}", "options = 3", "[tool.vram]",
         "default = 'a'", "budget = []", "argv = []", "floors = {}", "env = 'x'", "sampling = 3", "toolcalls = {}", "[backend]", "[[backend.a]]", "pid = -1"]
    ),
    max_size=6,
).map("\n".join)  # fmt: skip


@given(toml_text | st.text(max_size=30))
def test_any_file_gives_specs_or_one_message(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """No text in a config file makes anything but a BadInput."""
    folder = tmp_path_factory.mktemp("any")
    try:
        read(folder, text.encode("utf-8", "surrogatepass"))
    except BadInput as error:
        assert "\n" not in str(error).strip()


def test_several_backends_without_a_default_have_none(tmp_path: Path) -> None:
    """Nothing is chosen for the user: neither one of his backends nor the demo."""
    text = "[backend.a]\nengine='command'\nargv=['x']\n[backend.b]\nengine='command'\nargv=['y']\n"
    assert read(tmp_path, text).default is None


def test_what_already_runs_is_not_waited_for_long(tmp_path: Path) -> None:
    """Attaching has ten seconds by default, starting has two minutes."""
    found = read(tmp_path, "[backend.a]\nengine='attach'\nurl='http://127.0.0.1:1'\npid=7\n").backends
    assert found["a"].boot_timeout == 10
    assert found["demo"].boot_timeout > 10

"""Settings that a real llama-server really ignored are found by name, and those that it took are not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary, engine
from pytest_vram.backends.smoke import free_port
from pytest_vram.checks import judge_applied, judge_experts, judge_fresh, judge_moved
from pytest_vram.spec import BackendSpec
from pytest_vram.testing import software_gpu, weights_as_buffers, write_llama, write_qwen3moe

pytestmark = pytest.mark.engine
Start = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    "ctx-size": 1024,
    "parallel": 2,
    "batch-size": 256,
    "ubatch-size": 128,
    "cache-type-k": "q8_0",
    "flash-attn": "on",
    "kv-unified": True,
    "rope-freq-scale": 0.5,
    "cache-ram": 16,
    "ctx-checkpoints": 3,
    "threads": 1,
}
FACTS = {
    "context", "slots", "batch", "ubatch", "cache_type_k", "kv_unified", "rope_freq_scale", "prompt_cache_limit_bytes",
    "checkpoints", "threads",
}  # fmt: skip
#: Becomes the server with its address and verbosity only: every other option is dropped in silence.
WRAPPER = """#!{python} -S
import os, sys
words, kept = sys.argv[1:], []
while words:
    word = words.pop(0)
    if word in ("--help", "--no-webui", "--no-ui"):
        kept.append(word)
    elif word in ("--model", "--host", "--port", "--verbosity", "--device"):
        kept += [word, words.pop(0)]
os.execv({binary!r}, [{binary!r}, *kept, "--threads", "2"])
"""


@pytest.fixture
def real() -> str:
    """A build that runs here."""
    return os.fspath(next(place.path for place in binary.places() if place.usable and place.path is not None))


def test_what_was_taken_is_applied(rehearse: Start, spec: Start, tmp_path: Path) -> None:
    """Every setting of a sound boot is shown by its log or its server, and the boot is this run's."""
    write_llama(tmp_path / "tiny.gguf")
    run = rehearse(spec("tiny.gguf", options=OPTIONS))
    backend = run.pool.acquire(run.pool.spec())
    assert set(backend.asked) == FACTS | {"flash_attention"}
    properties = backend.properties()
    assert properties.slot_contexts == (1024, 1024)  # one cache for both
    assert judge_applied(backend.asked, backend.boot.facts, properties=properties, boot=backend.boot) is None
    seen = backend.listening()
    assert [holder.pid for holder in seen.holders] == [backend.pid]
    assert judge_fresh(seen, backend.boot) is None
    assert judge_moved(backend.running.at_start, backend.running.at_ready, backend.boot) == []
    # Of layers the log says that they are on a device, and no buffer is.
    finding = judge_applied({"layers_offloaded": 99}, backend.boot.facts, boot=backend.boot)
    assert finding is not None
    assert finding.verdict == "failed"
    assert "layers_offloaded" in finding.text
    before = backend.listening()
    backend.restart()
    assert [one.pid for one in backend.listening().holders] != [one.pid for one in before.holders]
    assert judge_fresh(backend.listening(), backend.boot) is None
    backend.stop()


def test_each_option_that_a_wrapper_dropped_is_named(rehearse: Start, spec: Start, tmp_path: Path, real: str) -> None:
    """A wrapper that swallows options starts a server that works, and every one of them is named as not in effect."""
    write_llama(tmp_path / "tiny.gguf")
    path = tmp_path / "llama-server"
    path.write_text(WRAPPER.format(python=sys.executable, binary=real))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    run = rehearse(spec("tiny.gguf", binary=str(path), options=OPTIONS))
    backend = run.pool.acquire(run.pool.spec())
    properties, boot = backend.properties(), backend.boot
    unnoticed = []
    for name in FACTS - {"kv_unified"}:  # automatic slots share one cache anyway
        finding = judge_applied({name: backend.asked[name]}, boot.facts, properties=properties, boot=boot)
        if finding is None or finding.verdict != "failed" or f"not in effect: {name}." not in finding.text:
            unnoticed.append((name, finding))
    assert unnoticed == []
    assert backend.locked() == 0
    assert judge_applied({"mlock": True}, boot.facts, locked=backend.locked()) is not None
    backend.stop()


@pytest.fixture
def old_server(tmp_path: Path, real: str) -> Iterator[tuple[int, str]]:
    """A server from before a change of the configuration, which nobody restarted."""
    write_llama(tmp_path / "tiny.gguf")
    port = free_port()
    argv = [real, "--model", str(tmp_path / "tiny.gguf"), "--port", str(port), "--ctx-size", "512", "--parallel", "1"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.05)
            yield process.pid, url
        finally:
            process.kill()


def test_an_old_server_is_told_by_what_it_says(rehearse: Start, old_server: tuple[int, str], tmp_path: Path) -> None:
    """Of a server that is attached to, its own word is held against the settings that it should have."""
    pid, url = old_server
    spec = BackendSpec(name="old", engine="attach", origin="the test", base=str(tmp_path), url=url, pid=pid)
    run = rehearse(spec)
    backend = run.pool.acquire(run.pool.spec())
    properties = backend.properties()
    assert properties.context_trained is not None
    finding = judge_applied({"context": 1024, "slots": 2, "ubatch": 64}, {}, properties=properties)
    assert finding is not None
    assert finding.verdict == "failed"
    assert "not in effect: context, slots." in finding.text
    assert "ubatch" in finding.text
    assert judge_applied({"context": 512, "slots": 1}, {}, properties=properties) is None


def test_a_command_is_held_against_its_own_arguments(rehearse: Start, tmp_path: Path, real: str) -> None:
    """Short options of a command's `argv` are understood by the engine's help, and shown by its log."""
    write_llama(tmp_path / "tiny.gguf")
    argv = [real, "-m", "{model}", "--port", "{port}", "-c", "768", "-np", "1", "-ub", "64", "-lv", "4", "-dev", "none"]
    spec = BackendSpec(
        name="cmd", engine="command", origin="the test", base=str(tmp_path), argv=argv, model="tiny.gguf",
        log="llama-server", health="/health",
    )  # fmt: skip
    assert engine("command").asked(spec) == {"context": 768, "slots": 1, "ubatch": 64, "device": "none"}
    run = rehearse(spec)
    backend = run.pool.acquire(run.pool.spec())
    assert judge_applied(backend.asked, backend.boot.facts, properties=backend.properties(), boot=backend.boot) is None
    assert judge_fresh(backend.listening(), backend.boot) is None
    finding = judge_applied({**backend.asked, "ubatch": 512}, backend.boot.facts, boot=backend.boot)
    assert finding is not None
    assert "not in effect: ubatch." in finding.text
    backend.stop()


def test_experts_that_stayed_on_the_device_are_found(rehearse: Start, spec: Start, tmp_path: Path, real: str) -> None:
    """With `n-cpu-moe` and without it, the weights on the host are those of the estimate, and never of the other."""
    write_qwen3moe(tmp_path / "moe.gguf")
    options = {"ctx-size": 512, "parallel": 1, "n-gpu-layers": 99, "fit": "off", **weights_as_buffers(Path(real))}
    on_host, found = {}, {}
    with software_gpu() as gpus:
        run = rehearse(spec("moe.gguf", options=options), kind="rpc", rpc=[gpus[0].endpoint])
        for count in (0, 2):
            backend = run.pool.acquire(run.pool.spec(n_cpu_moe=count))
            on_host[count] = backend.ledger.buckets()["weights"]["host"]
            found[count] = judge_moved(
                {"gpu0": backend.running.at_start["gpu0"]}, {"gpu0": backend.running.at_ready["gpu0"]}, backend.boot
            )
            backend.stop()
    assert found == {0: [], 2: []}
    given = {"moved": on_host[2], "unmoved": on_host[0]}
    assert judge_experts(on_host[2], **given) is None
    dropped = judge_experts(on_host[0], **given)
    assert dropped is not None
    assert dropped.verdict == "failed"

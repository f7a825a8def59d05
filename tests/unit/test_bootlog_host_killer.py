"""The host's out-of-memory killer, as kernels, systemd, containers and shells say it."""

from __future__ import annotations

import pytest

from pytest_vram.bootlog import Failure, read
from pytest_vram.bootlog.host_killer import NEEDLES, Kill, read_kill, with_kill

KERNEL = (
    "Out of memory: Killed process 4321 (llama-server) total-vm:39123456kB, anon-rss:14123456kB, file-rss:2048kB,"
    " shmem-rss:0kB, UID:1000 pgtables:30000kB oom_score_adj:0"
)


def kill(text: str) -> Kill:
    found = read_kill(text)
    assert found is not None
    return found


def test_kernel() -> None:
    """The kernel's line names the process and what it held."""
    found = kill(KERNEL)
    assert (found.certain, found.name, found.pid, found.group) == (True, "llama-server", 4321, False)
    assert found.held == (14123456 + 2048) << 10
    assert "13,794 MiB" in str(found.failure(phase="weights").note)


@pytest.mark.parametrize(
    "text",
    [
        "Out of memory: Kill process 4321 (ollama) score 912 or sacrifice child",
        "Killed process 4321 (ollama_llama_se) total-vm:39kB, anon-rss:14kB, file-rss:0kB",
        "Memory cgroup out of memory: Killed process 7 (llama-server) total-vm:9kB, anon-rss:8kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/d,task=llama-server,pid=7",
        "ollama.service: A process of this unit has been killed by the OOM killer.",
        "ollama.service: Failed with result 'oom-kill'.",
        '            "OOMKilled": true,',
        "      Reason:       OOMKilled",
    ],
)
def test_certain(text: str) -> None:
    """Who knows it says it in so many words."""
    found = kill(text)
    assert found.certain
    assert found.ours


@pytest.mark.parametrize(
    "text",
    [
        "Killed",
        "./run.sh: line 3:  1234 Killed                  python serve.py",
        "[1]+  Killed                  llama-server -m x.gguf",
        "zsh: killed     llama-server -m x.gguf",
        "server-1 exited with code 137",
        "      Exit Code:    137",
        "##[error]Process completed with exit code 137.",
        "llama runner process has terminated: signal: killed",
        "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.",
        "ollama.service: Main process exited, code=killed, status=9/KILL",
        "  exitcode  : -9 (pid: 123)",
    ],
)
def test_likely(text: str) -> None:
    """A process that was ended by SIGKILL was likely ended for want of memory, and somebody may have done it."""
    failure = kill(text).failure(phase="weights", line=3)
    assert (failure.kind, failure.certainty, failure.phase, failure.line) == ("host_oom_killed", "likely", "weights", 3)
    assert "SIGKILL" in str(failure.note)


@pytest.mark.parametrize(
    "text",
    [
        '"OOMKilled": false,',
        "OOMKilled=false",
        "CUDA error: out of memory",
        "The hero was Killed by a dragon",
        "n_ctx = 137",
        "exit status 9",
        "prompt 137 done, slot 9",
        "killed the old server",
    ],
)
def test_not_a_kill(text: str) -> None:
    """A device that is full, numbers and stories are no kill."""
    assert read_kill(text) is None


def test_group_is_told_from_the_host() -> None:
    """A container's limit that ran out is said to be that."""
    found = kill("Memory cgroup out of memory: Killed process 7 (llama-server) total-vm:9kB, anon-rss:8kB")
    assert "container" in str(found.failure(phase=None).note)
    assert "host's memory" in str(kill(KERNEL).failure(phase=None).note)


def test_another_program() -> None:
    """The end of another program is not the engine's; of one in Python it is not certain."""
    assert not kill(KERNEL.replace("llama-server", "chrome")).ours
    python = KERNEL.replace("llama-server", "python3")
    assert not kill(python).certain
    found = read_kill(python, python=True)
    assert found is not None
    assert found.certain


def test_needles() -> None:
    """Needles are plain phrases, so that a long log is looked through fast."""
    assert all(needle.replace(" ", "").replace("-", "").replace("_", "").isalnum() for needle in NEEDLES)


def test_which_failure_explains_the_end() -> None:
    """What the engine said itself stays; a crash that the kernel caused is the kernel's."""
    killed = kill(KERNEL).failure(phase="weights")
    signal = kill("Killed").failure(phase="kv")
    refused = Failure(kind="out_of_memory", certainty="certain", text="x")
    crash = Failure(kind="crash", certainty="unknown", text="x")
    assert with_kill(None, signal) is signal
    assert with_kill(refused, killed) is refused
    assert with_kill(crash, killed) is killed
    better = with_kill(signal, killed)
    assert (better.certainty, better.phase) == ("certain", "kv")


@pytest.mark.parametrize("engine", ["ollama", "transformers", "llama-server"])
def test_end_of_a_load(engine: str) -> None:
    """Every engine's log may end with the kernel's line."""
    begin = {
        "ollama": 'time=2025-10-22T02:17:50.114Z level=INFO source=server.go:400 msg="starting runner" cmd="x"',
        "transformers": "Loading weights:  41%|████      | 119/291 [00:09<00:14, 12.44it/s]",
        "llama-server": "load_tensors: loading model tensors, this can take a while... (mmap = false)",
    }[engine]
    boot = read(f"{begin}\n{KERNEL}\n", engine=engine)
    assert boot.failure is not None
    assert (boot.failure.kind, boot.failure.certainty, boot.failure.line) == ("host_oom_killed", "certain", 2)

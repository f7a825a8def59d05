"""The shipped suite finds what it is there to find: a deployment that passes a budget and is broken all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import shell

FAKE = Path(__file__).with_name("fake_llama_server.py")
CONFIG = """
default = "fake"

[backend.fake]
engine = "llama-server"
binary = "llama-server"
model = "model.gguf"
boot_timeout = 20
floors = { tokens_per_second = 20 }

[backend.fake.options]
ctx-size = 4096
parallel = 1
"""
FILLING = {"test_long_prompt_is_counted_in_full", "test_context_can_be_filled"}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are owned on Linux only")


def check(folder: Path, fault: str, *arguments: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Run `vram check` against the fake with this fault: exit code, outcome and reason of each test."""
    binary = folder / "llama-server"
    binary.write_text(f"#!{sys.executable}\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
    binary.chmod(0o755)
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (folder / "vram.toml").write_text(f"{CONFIG}\n[backend.fake.env]\nFAKE = '{fault}'\n", encoding="utf-8")
    code = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "check", "--json", "--vram-device=cpu", "-p", "no:cacheprovider"]
    environment = shell()
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert "Traceback" not in done.stderr.replace("Traceback (most recent call last) ->", ""), done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == "pytest-vram/report/1", done.stderr
    tests = {test["nodeid"].removeprefix("pytest_vram_specs."): test for test in document["tests"]}
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    return done.returncode, outcomes, {name: str(test.get("reason")) for name, test in tests.items()}


def test_sound_deployment_passes(tmp_path: Path) -> None:
    """Against a deployment that does what it was asked every test passes, but those that need a device for layers or a
    floor that its config file does not set."""
    code, outcomes, reasons = check(tmp_path, "", "--vram-budget=1GB")
    others = {name: (outcome, reasons[name]) for name, outcome in outcomes.items() if outcome != "passed"}
    assert set(others) == {
        "test_applied::test_layers_are_on_the_device",
        "test_sessions::test_early_facts_are_used_out_of_a_summary",
    }, others
    assert "sets no floors.recall" in others["test_sessions::test_early_facts_are_used_out_of_a_summary"][1]
    assert len(outcomes) >= 12
    assert code == 0


@pytest.mark.parametrize(
    ("fault", "module", "failing"),
    [
        ("cuts", "test_context", {"test_prompt_over_the_context_is_refused", *FILLING}),
        ("drops", "test_context", FILLING),
        ("endless", "test_context", {"test_prompt_over_the_context_is_refused"}),
        ("shrinks", "test_applied", {"test_boot_log_shows_what_was_asked", "test_server_of_this_run_reports_it"}),
        ("stranger", "test_applied", {"test_server_of_this_run_reports_it"}),
        ("replays", "test_applied", {"test_it_was_booted_by_this_run"}),
        ("unloads", "test_applied", {"test_memory_stays_while_it_answers"}),
        ("silent", "test_boot", {"test_boot_log_explains_the_memory"}),
        ("leaks", "test_idle", {"test_idle_memory_returns_after_five_turns"}),
        ("slow", "test_throughput", {"test_decode_rate_is_above_its_floor"}),
        ("mute", "test_requests", {"test_short_chat_is_answered"}),
    ],
)
def test_broken_deployment_fails(tmp_path: Path, fault: str, module: str, failing: set[str]) -> None:
    """Each fault fails the tests that watch for it, and no other test of their module; the exit code is 1."""
    code, outcomes, reasons = check(tmp_path, fault, module)
    failed = {name.partition("::")[2] for name, outcome in outcomes.items() if outcome == "failed"}
    assert failed == failing, (outcomes, reasons)
    assert code == 1


@pytest.mark.parametrize(
    ("fault", "outcome", "says"), [("swells", "failed", "peak"), ("chokes", "error", "Compute error")]
)
def test_a_boot_within_the_budget_is_not_enough(tmp_path: Path, fault: str, outcome: str, says: str) -> None:
    """What a long prompt takes breaks the budget though the boot kept to it; a prompt that is refused is an error."""
    code, outcomes, reasons = check(tmp_path, fault, "test_growth", "test_boot", "--vram-budget=200MiB")
    growth = "test_growth::test_budget_holds_while_it_serves"
    assert outcomes.pop(growth) == outcome, reasons
    assert says in reasons[growth]
    assert set(outcomes.values()) == {"passed"}, reasons
    assert code == 1

"""``--vram-device=predicted`` and ``vram_estimate``: estimates are judged, nothing is measured, nothing starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.sizing import estimate
from pytest_vram.testing import recipes
from pytest_vram.units import MIB
from tests.conftest import Inner, shell

FAKE = Path(__file__).with_name("fake_llama_server.py")
SPECS = """
default = "large"
[backend.large]
engine = "llama-server"
model = "large.gguf"
binary = "no-such-engine"
[backend.large.options]
ctx-size = 8192
n-gpu-layers = 99
parallel = 1
temp = 0.5
[backend.other]
engine = "command"
argv = ["true"]
url = "http://127.0.0.1:1"
"""
TESTS = """
import pytest

pytestmark = pytest.mark.vram_backend("large")

@pytest.mark.max_vram("{over}")
def test_over(): pass

@pytest.mark.max_vram("{between}")
def test_between(): pass

@pytest.mark.max_vram("{under}")
def test_under(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a spec of a model of 6 GiB whose engine is not on this machine."""
    recipe = recipes.llama(layers=16, embedding=4096, heads=32, kv_heads=8, head_size=128, feed_forward=14336)
    recipe.write(pytester.path / "large.gguf")
    pytester.path.joinpath("vram.toml").write_text(SPECS)
    return pytester


def report(folder: Path) -> dict[str, Any]:
    """The JSON report of the inner run."""
    table: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return table


def interval(project: pytest.Pytester) -> tuple[int, int]:
    """Both ends of the estimate on the card."""
    made = estimate(str(project.path / "large.gguf"), ctx_size=8192, n_gpu_layers=99, parallel=1)
    return made.total()["gpu0"], made.at_most()["gpu0"]


def test_the_ends_of_the_estimate_decide(project: pytest.Pytester, inner: Inner) -> None:
    """A limit under the lower end fails, one between the ends is undecided, one at the upper end holds."""
    low, high = interval(project)
    assert low < high
    project.makepyfile(test_it=TESTS.format(over=f"{low - 1}B", between=f"{high - 1}B", under=f"{high}B"))
    result = inner("--vram-device=predicted", "--vram-report=out.json", "test_it.py")
    assert result.ret == 1
    tests = {test["nodeid"].rpartition("::")[2]: test for test in report(project.path)["tests"]}
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    assert outcomes == {"test_over": "failed", "test_between": "inconclusive", "test_under": "passed"}
    peak = tests["test_under"]["peak"]["gpu0"]
    assert (peak["source"], peak["exact"], peak["bytes"], peak["at_most"]) == ("estimate", False, low, high)
    assert {entry["source"] for entry in tests["test_under"]["ledger"]["entries"]} == {"estimate"}
    text = tests["test_over"]["findings"][0]["text"]
    assert text.startswith("The predicted memory of the test's backends is between ")
    assert "nothing was measured" in text.splitlines()[0]
    assert "predicted to lie in this interval" in text
    assert f"{low / MIB:,.2f}–{high / MIB:,.2f}" in text, "the breakdown shows both ends"
    assert "printed by the engine" not in text
    lines = result.stdout.str().split("= vram =")[1].split("short test summary")[0].splitlines()
    assert all("(predicted," in " ".join(lines) for line in lines if line.startswith(("verdict", "estimate")))
    result.stdout.fnmatch_lines(["device      none: the estimate of each backend is held against the limits"])
    assert not (project.path / ".vram").exists(), "a keeper was started"


def test_the_host_stands_in_for_a_card(project: pytest.Pytester, inner: Inner) -> None:
    """A deployment without a device is judged by what the host holds, as `vram fit` judges it."""
    toml = project.path / "vram.toml"
    toml.write_text(toml.read_text().replace("n-gpu-layers = 99", 'device = "none"'))
    made = estimate(str(project.path / "large.gguf"), ctx_size=8192, device="none", parallel=1)
    low, high = made.total()["host"], made.at_most()["host"]
    project.makepyfile(test_it=TESTS.format(over=f"{low - 1}B", between=f"{high - 1}B", under=f"{high}B"))
    result = inner("--vram-device=predicted", "--vram-report=out.json", "test_it.py")
    tests = {test["nodeid"].rpartition("::")[2]: test for test in report(project.path)["tests"]}
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    between = "inconclusive" if low < high else "failed"
    assert outcomes == {"test_over": "failed", "test_between": between, "test_under": "passed"}
    assert (tests["test_under"]["peak"]["host"]["bytes"], result.ret) == (low, 1)
    assert "stands in for VRAM" in tests["test_over"]["findings"][0]["text"]


def test_a_budget_holds_for_tests_with_a_backend_only(project: pytest.Pytester, inner: Inner) -> None:
    """The budget is held against the estimate of each test's backend, changes for the test included; others run."""
    project.makepyfile(
        test_it="""
        import pytest

        def test_plain(): pass

        @pytest.mark.vram_backend("large")
        def test_within(): pass

        @pytest.mark.vram_backend("large", ctx_size=131072)
        def test_long(): pass
        """
    )
    result = inner("--vram-device=predicted", "--vram-budget=gpu0=10GB", "--vram-report=out.json")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["vram: budget gpu0=10GB on the estimate of each backend: nothing is measured"])
    tests = {test["nodeid"].rpartition("::")[2]: test for test in report(project.path)["tests"]}
    assert set(tests) == {"test_within", "test_long"}
    assert tests["test_long"]["findings"][0]["limit_from"] == "--vram-budget"


def test_what_cannot_be_predicted_is_not_judged(project: pytest.Pytester, inner: Inner) -> None:
    """No backend, an engine without estimates, a phase, host memory and rates: each is said, none passes."""
    project.makepyfile(
        test_it="""
        import pytest
        from pytest_vram import max_host_memory, max_vram, min_tokens_per_second, vram_backend

        @max_vram("80GB")
        def test_no_backend(): pass

        @max_host_memory("80GB")
        def test_host(vram_client): pass

        @min_tokens_per_second(1)
        def test_rate(vram_client): pass

        @vram_backend("other")
        @max_vram("80GB")
        def test_engine(): pass

        @vram_backend("large", no_such_option=1)
        @max_vram("80GB")
        def test_option(): pass

        @vram_backend("large", model="none.gguf")
        @max_vram("80GB")
        def test_model(): pass

        @vram_backend("large")
        @max_vram("80GB", phase="warm-up")
        def test_phase(): pass

        @vram_backend("large")
        @max_vram("80GB", scope="process")
        def test_process(): pass

        @vram_backend("large")
        @max_vram("80GB")
        @max_host_memory("80GB")
        @min_tokens_per_second(1)
        def test_more(): pass

        @vram_backend("large")
        @max_vram("80GB", over="baseline", scope="backend")
        def test_rise(): pass
        """
    )
    result = inner("--vram-device=predicted", "--vram-report=out.json")
    tests = {test["nodeid"].rpartition("::")[2]: test for test in report(project.path)["tests"]}
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    assert outcomes == {
        "test_no_backend": "skipped",
        "test_host": "skipped",
        "test_rate": "skipped",
        "test_engine": "inconclusive",
        "test_option": "inconclusive",
        "test_model": "inconclusive",
        "test_phase": "inconclusive",
        "test_process": "inconclusive",
        "test_more": "inconclusive",
        "test_rise": "passed",
    }
    texts = {name: " ".join(f["text"] for f in test["findings"]) for name, test in tests.items()}
    assert "this test uses no backend" in tests["test_no_backend"]["reason"]
    assert "@max_host_memory" in tests["test_host"]["reason"]
    assert "@min_tokens_per_second" in tests["test_rate"]["reason"]
    assert "backend 'other' (engine 'command') cannot be predicted" in " ".join(texts["test_engine"].split())
    assert "no-such-option" in texts["test_option"]
    assert "does not exist" in texts["test_model"]
    assert len(tests["test_more"]["findings"]) == 2
    assert result.ret == 0
    strict = inner("--vram-device=predicted", "--vram-missing=fail")
    assert strict.ret == 1
    assert "1 passed" in strict.stdout.str()
    assert "9 failed" in strict.stdout.str()


def test_a_missing_engine_is_an_error_of_the_test_that_starts_it(project: pytest.Pytester, inner: Inner) -> None:
    """A test that uses its backend starts it as in any run; where that cannot be done, no estimate lets it pass."""
    project.makepyfile("def test_it(vram_client): pass")
    result = inner("--vram-device=predicted", "--vram-budget=80GB")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no-such-engine*does not exist*"])


def test_the_fixture_starts_nothing(project: pytest.Pytester, inner: Inner) -> None:
    """`vram_estimate` follows the marker, is a ledger with notes, and works where nothing can be measured."""
    project.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.vram_backend("large", ctx_size=16384)
        def test_marker(vram_estimate):
            assert vram_estimate.buckets()["kv"] == {"gpu0": 16 * 16384 * 8 * 128 * 2 * 2}
            assert vram_estimate.settings["ctx_size"] == 16384
            assert vram_estimate.model.layers == 16
            assert "--ctx-size" in vram_estimate.command or "-c" in vram_estimate.command

        def test_default(vram_estimate):
            assert vram_estimate.buckets()["kv"] == {"gpu0": 16 * 8192 * 8 * 128 * 2 * 2}

        @pytest.mark.vram_backend("other")
        def test_other(vram_estimate): pass
        """
    )
    result = inner()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*backend 'other' (engine 'command') cannot be predicted*"])
    assert not (project.path / ".vram").exists()


def test_workers_judge_estimates_too(project: pytest.Pytester, inner: Inner) -> None:
    """With xdist each worker makes the estimates that its tests need."""
    low, high = interval(project)
    project.makepyfile(test_it=TESTS.format(over=f"{low - 1}B", between=f"{high - 1}B", under=f"{high}B"))
    result = inner("--vram-device=predicted", "-n2", "test_it.py")
    assert result.ret == 1
    assert "1 failed, 1 passed, 1 inconclusive" in result.stdout.str()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are owned on Linux only")
@pytest.mark.parametrize(("budget", "code"), [("1GB", 0), ("110MiB", 1)])
def test_the_suite_holds_estimates_against_the_budget(tmp_path: Path, budget: str, code: int) -> None:
    """`vram check` serves as ever on a machine without a card, and its verdict on memory is the estimate's."""
    engine = tmp_path / "llama-server"
    engine.write_text(f"#!{sys.executable}\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
    engine.chmod(0o755)
    recipes.llama().write(tmp_path / "model.gguf")
    keys = 'engine = "llama-server"\nbinary = "llama-server"\nmodel = "model.gguf"\n'
    options = "[backend.fake.options]\nctx-size = 4096\nparallel = 1\n"
    (tmp_path / "vram.toml").write_text(f"[backend.fake]\n{keys}{options}")
    program = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "check", "--json", "--vram-device=predicted", f"--vram-budget={budget}"]
    environment = shell()
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    outcomes = {test["nodeid"].removeprefix("pytest_vram_specs."): test["outcome"] for test in document["tests"]}
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped == {
        "test_applied::test_memory_rose_while_it_loaded",
        "test_applied::test_memory_stays_while_it_answers",
        "test_applied::test_layers_are_on_the_device",
        "test_growth::test_budget_holds_while_it_serves",
        "test_idle::test_idle_memory_returns_after_five_turns",
        "test_sessions::test_early_facts_are_used_out_of_a_summary",
        "test_sessions::test_idle_memory_returns_after_a_conversation_with_tools",
        "test_throughput::test_decode_rate_is_above_its_floor",
    }
    assert set(outcomes.values()) - {"skipped"} == {"passed" if code == 0 else "failed"}
    (backend,) = document["backends"]
    assert backend["peak"] == {}
    assert "unattributed" not in {entry["bucket"] for entry in backend["ledger"]["entries"]}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are owned on Linux only")
@pytest.mark.parametrize("module", ["test_idle", "test_throughput"])
def test_where_all_tests_need_a_measurement_nothing_is_started(tmp_path: Path, module: str) -> None:
    """A module of the suite that can judge nothing skips all of its tests, although there is no engine to start."""
    recipes.llama().write(tmp_path / "model.gguf")
    (tmp_path / "vram.toml").write_text(
        '[backend.fake]\nengine = "llama-server"\nbinary = "no-such-engine"\nmodel = "model.gguf"\n'
        "[backend.fake.floors]\ntokens_per_second = 5\n"
    )
    program = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "check", module, "--json", "--vram-device=predicted"]
    environment = shell()
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    document = json.loads(done.stdout)
    assert document["tests"], done.stderr
    assert {test["outcome"] for test in document["tests"]} == {"skipped"}
    assert document["backends"] == []

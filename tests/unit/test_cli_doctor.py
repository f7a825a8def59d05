"""What `vram doctor` finds, on a machine made for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.cli import main
from pytest_vram.measure import DeviceInfo
from pytest_vram.readings import Unmeasurable
from pytest_vram.spec import DeviceSpec
from pytest_vram.testing import Card, FakeDriver, Process, fake_nvml
from pytest_vram.units import MIB
from tests.unit.nvml_kit import needs_fake

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `vram doctor --json` in an empty project with an empty cache: exit code and document."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """One card with accounting, and one whose processes have no figures."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cards = [Card(reserved=300 * MIB, accounting=True), Card(processes=(Process(pid=1, available=False),))]
    with fake_nvml(cards) as made:
        yield made


@needs_fake
def test_cards_are_listed_each(two_cards: FakeDriver, doctor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each card has a line of its own: what to write, its size, what is usable, and how its figures come about."""
    _, document = doctor()
    main(["doctor"])
    found = [device for device in document["devices"] if device["kind"] == "cuda"]
    assert [device["spec"] for device in found] == ["cuda:0", "cuda:1"]
    assert [device["uuid"] for device in found] == [two_cards.uuid(0), two_cards.uuid(1)]
    assert (found[0]["capacity"], found[0]["usable"]) == (4096 * MIB, 3796 * MIB)
    assert [device["accounting"] for device in found] == [True, False]
    assert [device["per_process"] for device in found] == [True, False]
    text = capsys.readouterr().out
    assert "3,796 MiB of it usable" in text
    assert "by process, accounting on: exact peaks, engines call it CUDA0" in text
    assert "device-delta" in text
    assert "N/A" in text


LLAMA_SERVER = "version: 1234 (abcdef)\n-m, --model FNAME  path\n--host HOST  address\n--port PORT  port"


def engine(folder: Path, text: str) -> None:
    """Put an executable llama-server that prints this into a folder."""
    folder.mkdir(parents=True)
    binary = folder / "llama-server"
    binary.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    binary.chmod(0o755)


@linux_only
def test_healthy_machine(doctor: Any) -> None:
    """Host memory can be measured, no config file is no trouble, and every other kind says why not."""
    _, found = doctor()
    assert not any("config" in text or "measured" in text for text in found["trouble"])
    assert found["config"] == {"valid": True, "path": None, "default": "demo", "backends": ["demo"], "error": None}
    kinds = {device["kind"]: device for device in found["devices"]}
    assert set(kinds) == {"cpu", "cuda", "drm", "vulkan", "rpc"}
    assert kinds["cpu"]["measurable"] is True
    assert kinds["cpu"]["capacity"] > 0
    assert all(device["reason"] for device in found["devices"] if not device["measurable"])
    assert found["models"][0]["usable"] is False
    assert "vram demo" in found["models"][0]["reason"]


def test_a_default_backend_that_cannot_start_is_trouble(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model: it is named with the way on, and the exit code is 1; with engine and model all is well."""
    monkeypatch.setattr("pytest_vram.cli.doctor._leftovers", list)  # of other runs on this machine
    code, found = doctor()
    assert code == 1
    assert any("'demo' cannot be started" in text and "vram demo" in text for text in found["trouble"])
    engine(tmp_path / "bin", LLAMA_SERVER)
    (tmp_path / "project" / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    Path("vram.toml").write_text("[backend.mine]\nengine = 'llama-server'\nmodel = 'm.gguf'\n")
    code, found = doctor()
    assert found["trouble"] == []
    assert code == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("budget = '3g'", "ambiguous"),
        ("[backend.x]\nengine = 'llama-servr'", "llama-server"),
        ("[backend.x]\nengine = 'attach'", "url"),
        ("[backend.x]\nengine = 'command'", "argv"),
        ("[backend.x]\nengine = 'llama-server'", "model"),
    ],
)
def test_what_a_run_would_refuse_is_trouble_here_already(doctor: Any, tmp_path: Path, text: str, part: str) -> None:
    """A setting or a backend that cannot be used is found without a run."""
    engine(tmp_path / "bin", LLAMA_SERVER)
    Path("vram.toml").write_text(text)
    code, found = doctor()
    assert code == 1
    assert part in json.dumps([found["trouble"], found["config"]])


def test_engine_on_path_is_found_with_its_version(doctor: Any, tmp_path: Path) -> None:
    """A llama-server on PATH is listed with the version line that it prints."""
    engine(tmp_path / "bin", "version: 1234 (abcdef)")
    _, found = doctor()
    on_path = next(place for place in found["engines"] if place["place"] == "PATH")
    assert on_path["usable"] is True
    assert on_path["version"] == "version: 1234 (abcdef)"


def test_bad_config_file_is_trouble(doctor: Any) -> None:
    """A config file that cannot be used is named with its fault, and the exit code is 1."""
    Path("vram.toml").write_text("budjet = '4GB'\n")
    code, found = doctor()
    assert code == 1
    assert found["config"]["valid"] is False
    assert "did you mean 'budget'?" in found["config"]["error"]


@linux_only
def test_process_of_a_dead_run_is_a_leftover(doctor: Any) -> None:
    """A process that carries a run's mark while nobody keeps that run is listed, and the exit code is 1."""
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    environment = {"PYTEST_VRAM_RUN": "20200101T000000Z-dead00"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        code, found = doctor()
        process.communicate("\n")
    ours = [leftover for leftover in found["leftovers"] if leftover["pid"] == process.pid]
    assert code == 1
    assert ours[0]["run"] == "20200101T000000Z-dead00"
    assert "input()" in ours[0]["command"]


@linux_only
def test_reap_of_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was left behind, that is said, and the exit code is 0."""
    monkeypatch.setattr("pytest_vram.keeper.leftovers._ours", list)  # of other runs on this machine
    monkeypatch.setattr("pytest_vram.keeper.leftovers.clean", lambda runs: [])
    assert main(["doctor", "--reap"]) == 0
    assert capsys.readouterr().out == "No run that is over has left anything behind.\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_columns_and_reasons(doctor: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind stands apart from what is said of it, and what was looked for is said once."""

    def survey(specs: list[DeviceSpec], rpc: list[str]) -> list[Any]:
        (spec,) = specs
        if spec.kind == "vulkan":
            return [DeviceInfo(label="gpu0", kind="nvml", name="A card", capacity=Unmeasurable(reason="?"), source="x")]
        return [Unmeasurable(reason=f"{spec.kind}: there is no {spec.kind}; device files: none")]

    monkeypatch.setattr("pytest_vram.cli.doctor.measure.survey", survey)
    main(["doctor"])
    text = capsys.readouterr().out
    assert "  yes  vulkan:0  gpu0: A card" in text
    assert "  no   cpu       there is no cpu; device files: none\n" in text
    assert "  no   drm       there is no drm\n" in text
    assert text.count("device files") == 1

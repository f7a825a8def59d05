"""A real llama-server's dry run: its figures are read for models of any size, and nothing is ever loaded."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary as binaries
from pytest_vram.backends import dry_run as module
from pytest_vram.backends.confined import Confined
from pytest_vram.backends.dry_run import compare, dry_run, exact, ledger_of
from pytest_vram.bootlog.dry_run import DryRunLog
from pytest_vram.errors import BackendError, BadModel, BadSpec
from pytest_vram.ledger import Entry, Ledger
from pytest_vram.testing import recipes, software_gpu, sparse
from pytest_vram.testing.software import SoftwareGpu

pytestmark = pytest.mark.engine

MIB = 1 << 20
BUILDS = [place.path for place in binaries.places() if place.path is not None]
#: What a process may read and hold that looks at headers only.
HEADERS_ONLY = 256 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama_70b(folder: Path) -> Path:
    """The shape of Llama-3-70B in q4_k: 36 GiB that take some blocks of the disk."""
    recipe = recipes.llama(
        layers=80,
        embedding=8192,
        heads=64,
        kv_heads=8,
        head_size=128,
        feed_forward=28672,
        context=131072,
        types=recipes.Types(matrices="q4_k", output="q6_k"),
    )
    return recipe.write(folder / "70b.gguf")


@pytest.fixture(scope="module")
def moe(folder: Path) -> Path:
    """A small mixture of experts."""
    return recipes.qwen3moe().write(folder / "moe.gguf")


@pytest.fixture
def gpu() -> Iterator[SoftwareGpu]:
    """A software GPU of the build that runs here."""
    with software_gpu() as (device,):
        yield device


def build() -> Path:
    """The build that runs here: both ends of a software GPU must be of one."""
    return next(place.path for place in binaries.places() if place.usable and place.path is not None)


class Watched:
    """Looks at the process in the moment before it is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.held = -1
        real = Confined.end

        def end(process: Confined) -> None:
            if Path(f"/proc/{process.pid}/io").exists():
                io = Path(f"/proc/{process.pid}/io").read_text()
                status = Path(f"/proc/{process.pid}/status").read_text()
                self.read = int(io.split("rchar:")[1].split()[0])
                self.held = int(status.split("RssAnon:")[1].split()[0]) * 1024 if "RssAnon:" in status else 0
            real(process)

        monkeypatch.setattr(Confined, "end", end)


@pytest.mark.parametrize("engine", BUILDS, ids=[path.parent.parent.name for path in BUILDS])
def test_a_70b_model_is_sized_on_the_host_without_being_read(
    engine: Path, llama_70b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every build prints weights, cache and compute buffer of a 36 GiB model; its process reads and holds headers."""
    watched = Watched(monkeypatch)
    dry = dry_run(engine, llama_70b, {"ctx-size": 8192, "parallel": 1}, device_none=True)
    assert 0 <= watched.read < HEADERS_ONLY
    assert 0 <= watched.held < HEADERS_ONLY
    weights = dry.of("host", "model")
    assert weights.low <= llama_70b.stat().st_size <= weights.high + 16 * MIB
    assert dry.of("host", "context").holds(8192 * 80 * 8 * 128 * 2 * 2)
    assert dry.of("host", "context").resolution < MIB
    assert dry.of("host", "compute").resolution < MIB
    assert (dry.facts["context"], dry.facts["slots"], dry.facts["layers"]) == (8192, 1, 80)
    assert dry.trial.projected is not None


@pytest.mark.parametrize(
    "options",
    [{"n-gpu-layers": 99}, {"n-gpu-layers": 3}, {"n-cpu-moe": 2}, {"override-tensor": "ffn_.*_exps=CPU"}],
    ids=["all layers", "some layers", "experts on the CPU", "override"],
)
def test_settings_that_make_fit_give_up_are_sized_too(moe: Path, gpu: SoftwareGpu, options: dict[str, Any]) -> None:
    """Where the user placed layers or experts, fit changes nothing, and the table is printed all the same."""
    dry = dry_run(build(), moe, {"ctx-size": 1024, **options}, endpoints=[gpu.endpoint])
    assert dry.fits is True
    assert {row.label for row in dry.rows} == {"gpu0", "host"}
    assert dry.of("gpu0", "context").bytes > 0
    moved = dry.of("host", "model").bytes > 1 * MIB
    assert moved == (options != {"n-gpu-layers": 99})
    assert f"[{gpu.endpoint}]" in dry.trial.devices["gpu0"]


def test_what_does_not_fit_this_machine_is_sized_and_said(llama_70b: Path, gpu: SoftwareGpu) -> None:
    """Figures are of the settings as given, not of those that fit would choose, and that they do not fit is known."""
    dry = dry_run(build(), llama_70b, {"ctx-size": 131072 * 8}, endpoints=[gpu.endpoint])
    assert dry.fits is False
    assert dry.of("gpu0", "context").holds(131072 * 8 * 80 * 8 * 128 * 2 * 2)
    assert gpu.used() < 64 * MIB


def test_two_devices_have_a_row_each(llama_70b: Path) -> None:
    """Two software GPUs share the layers; their rows add up to the model's cache."""
    with software_gpu(2) as devices:
        endpoints = [device.endpoint for device in devices]
        dry = dry_run(build(), llama_70b, {"ctx-size": 8192, "fit-target": "512,512"}, endpoints=endpoints)
        assert all(device.used() < 64 * MIB for device in devices)
    low = sum(dry.of(label, "context").low for label in ("gpu0", "gpu1"))
    high = sum(dry.of(label, "context").high for label in ("gpu0", "gpu1"))
    assert low <= 8192 * 80 * 8 * 128 * 2 * 2 <= high
    assert dry.of("host", "context").high == 0
    assert min(dry.of("gpu0", "model").bytes, dry.of("gpu1", "model").bytes) > 15 << 30


def waited_at(pipe: Path) -> bool:
    """Whether somebody waits at the other end of a pipe; it is broken for him then."""
    assert pipe.is_fifo()
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


class Deaf(DryRunLog):
    """Never notices that the dry run is over, and hears of nothing after it."""

    def feed(self, raw: str) -> None:
        super().feed(raw)
        if "fitting params to free memory took" in raw:
            self.loading = True

    @property
    def decided(self) -> bool:
        return False

    @decided.setter
    def decided(self, value: bool) -> None:
        pass


class Slow(Deaf):
    """Does not notice either that the trial has opened the model."""

    @property
    def opened(self) -> bool:
        return False

    @opened.setter
    def opened(self, value: bool) -> None:
        pass


def test_without_a_kill_there_is_no_file_to_load(
    folder: Path, gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kill is late and no limit is set, the engine stands still at the model's name, with nothing loaded."""
    monkeypatch.setattr(module, "DryRunLog", Deaf)
    monkeypatch.setattr(module, "_drivers_here", lambda: True)
    names: list[Path] = []
    close, kill = module._close, Confined.end

    def closing(folder: Path) -> None:
        close(folder)
        names.extend(folder.iterdir())

    stood: list[bool] = []

    def late(process: Confined) -> None:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}").exists() and not stood and time.monotonic() < deadline:
            if waited_at(names[0]):
                stood.append(gpu.used() < 64 * MIB)
            time.sleep(0.01)
        kill(process)

    monkeypatch.setattr(module, "_close", closing)
    monkeypatch.setattr(Confined, "end", late)
    model = recipes.llama(embedding=1024, feed_forward=16384).write(folder / "loads.gguf")
    dry = dry_run(build(), model, {"ctx-size": 512, "n-gpu-layers": 99}, endpoints=[gpu.endpoint])
    assert dry.of("gpu0", "model").bytes > 192 * MIB
    assert stood == [True], "it did not come to the pipe, or had loaded something by then"


def test_without_kill_and_links_the_limit_of_its_data_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the links stay as well, there is no host memory for weights of 3 GiB."""
    monkeypatch.setattr(module, "DryRunLog", Slow)
    monkeypatch.setattr(module, "_drivers_here", lambda: False)
    kill = Confined.end
    ended: list[int | None] = []

    def late(process: Confined) -> None:
        guard = threading.Timer(20, kill, [process])
        guard.start()
        try:
            while os.read(process.output, 1 << 16):
                pass
            deadline = time.monotonic() + 20
            while Path(f"/proc/{process.pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            guard.cancel()
            kill(process)
        ended.append(process.code)

    monkeypatch.setattr(Confined, "end", late)
    model = recipes.llama(layers=16, embedding=4096, feed_forward=8192).write(folder / "large.gguf")
    dry = dry_run(build(), model, {"ctx-size": 512, "mmap": False}, device_none=True)
    assert dry.of("host", "model").bytes > 3 << 30
    assert ended == [1]


@pytest.mark.parametrize("engine", BUILDS, ids=[path.parent.parent.name for path in BUILDS])
def test_separate_caches_without_a_context_are_sized(engine: Path, moe: Path) -> None:
    """An engine that has to try twice finds the model twice."""
    dry = dry_run(engine, moe, {"parallel": 2, "kv-unified": False}, device_none=True)
    assert dry.facts["slots"] == 2
    assert dry.of("host", "context").bytes > 0


def test_split_files_are_followed(folder: Path) -> None:
    """The parts of a split model are found beside the first one."""
    recipe = recipes.llama()
    parts = folder / "split"
    parts.mkdir()
    first = recipe.write(parts / "whole.gguf", split=3)
    dry = exact(first, {"ctx_size": 512, "lora": None}, device_none=True)
    assert first.name.endswith("-00001-of-00003.gguf")
    assert dry.of("host", "model").low <= recipe.bytes <= dry.of("host", "model").high


def test_what_the_engine_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    """An architecture that the engine does not know, and a file that was cut short, are errors with its sentence."""
    sparse.write_sparse(tmp_path / "odd.gguf", {"general.architecture": "nosuch"}, [])
    with pytest.raises(BackendError, match="unknown model architecture: 'nosuch'"):
        exact(tmp_path / "odd.gguf", {}, device_none=True)
    recipes.llama().write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BackendError, match="corrupted or incomplete") as caught:
        exact(tmp_path / "cut.gguf", {}, device_none=True)
    assert "vram-dry-run-" not in str(caught.value)
    with pytest.raises(BadSpec, match="no-such-option"):
        exact(tmp_path / "whole.gguf", {"no_such_option": 1}, device_none=True)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(BadModel, match="not a GGUF file"):
        exact(tmp_path / "text.gguf", {}, device_none=True)
    with pytest.raises(BadModel, match="does not exist"):
        exact(tmp_path / "none.gguf", {}, device_none=True)


def test_a_device_that_is_not_there_is_said(moe: Path) -> None:
    """An endpoint that nobody serves is an error, and no figures of the host stand in for the device's."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(BackendError, match=f"{endpoint}|RPC|rpc"):
        exact(moe, {"ctx_size": 512}, endpoints=[endpoint])


def test_the_deployment_s_own_switches_do_not_spoil_it(moe: Path) -> None:
    """Options that would hide the table or start something else are left out; variables of the shell do not count."""
    options = {"fit": "off", "verbosity": 1, "port": 80, "host": "0.0.0.0", "ctx-size": 512}
    before = dict(os.environ)
    os.environ["LLAMA_ARG_CTX_SIZE"] = "65536"
    try:
        dry = exact(moe, options, device_none=True)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert dry.facts["context"] == 512
    assert "--fit" not in dry.argv


def test_a_ledger_of_it_stands_beside_an_estimate(moe: Path) -> None:
    """The ledger's source is the dry run; weights with experts, and cache with states, are compared as groups."""
    dry = exact(moe, {"ctx_size": 1024, "parallel": 1}, device_none=True)
    ledger = ledger_of(dry)
    assert {entry.source for entry in ledger.entries} == {"dry-run"}
    assert set(ledger.buckets()) == {"weights", "kv", "compute"}
    weights, kv = ledger.buckets()["weights"]["host"], ledger.buckets()["kv"]["host"]

    def rules(**changes: int) -> Ledger:
        sizes = {"weights": weights - 1000, "experts": 2000, "kv": kv - 500, "recurrent": 500, **changes}
        entries = [
            Entry(bucket=name, device="host", bytes=size, source="estimate")  # type: ignore[arg-type]
            for name, size in sizes.items()
        ]
        output = Entry(bucket="compute", device="host", bytes=99 * MIB, source="estimate", detail="output buffer")
        return Ledger(entries=(*entries, output))

    rows = {row.group: row for row in compare(rules(), dry)}
    assert rows["weights"].agree
    assert rows["kv"].agree
    assert (rows["compute"].rule, rows["compute"].agree) == (0, False)
    rows = {row.group: row for row in compare(rules(kv=kv + 10 * MIB), dry)}
    assert not rows["kv"].agree
    assert rows["kv"].error == pytest.approx(10 * MIB / kv, rel=0.01)

"""The pool against a scripted keeper: specs, overrides, identity of backends, labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram import bootlog
from pytest_vram.backends import PlanContext, Pool
from pytest_vram.backends.labels import relabelled
from pytest_vram.backends.record import RequestRecord
from pytest_vram.bootlog import Boot
from pytest_vram.errors import BackendDied, BadSpec, BootFailed, KeeperError
from pytest_vram.keeper.messages import Acquire, DeviceInfo, Done, Granted, Reply, Request, Restart, Running, Stop, Turn
from pytest_vram.ledger import Entry
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.spec import BackendSpec

HOST = DeviceInfo(label="host", kind="cpu", name="host memory", capacity=Unmeasurable(reason="t"), source="t")


class Keeper:
    """Starts nothing; gives every plan a server, each time with the generation that it is told."""

    socket = "/nowhere"

    def __init__(self, log: Path) -> None:
        self.asked: list[Request] = []
        self.generation = 1
        self.death: str | None = None
        self.log = log
        self.url = "http://127.0.0.1:9"
        self.reply: Reply | None = None

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        self.asked.append(request)
        if self.reply is not None:
            return self.reply
        if isinstance(request, Turn):
            if self.death is not None:
                raise BackendDied(self.death)
            return Granted(window=1)
        if isinstance(request, Stop):
            return Done()
        if isinstance(request, Restart):
            self.generation += 1
            key = request.key
        else:
            assert isinstance(request, Acquire)
            key = request.plan.key
        host = Reading(bytes=50 << 20, source="host-hwm", scope="backend", device="host", exact=True)
        return Running(
            key=key,
            name="agent",
            generation=self.generation,
            pid=100 + self.generation,
            pids=[100 + self.generation],
            url=self.url,
            log=str(self.log),
            fresh=True,
            api_key=f"key{self.generation}",
            boot_peak={"gpu0": Unmeasurable(reason="gone")},
            host_boot_peak=host,
        )

    def close(self) -> None:
        pass


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    log = tmp_path / "agent.1.log"
    log.write_text("hello\n")
    return Keeper(log)


@pytest.fixture
def pool(keeper: Keeper, tmp_path: Path) -> Pool:
    spec = BackendSpec(
        name="agent",
        engine="command",
        origin="vram.toml",
        base=str(tmp_path),
        argv=["sh", "-c", "true", "{port}"],
        health="/health",
        env={"A": "1"},
    )
    return Pool(keeper, PlanContext(run="r"), {"agent": spec}, "agent", lambda: 7, connect=lambda name: keeper)


def test_spec_is_overridden_key_by_key(pool: Pool) -> None:
    """Keys of the table are replaced, tables are merged, other names are engine options, None removes one."""
    spec = pool.spec("agent", boot_timeout=5, env={"B": "2"}, ctx_size=512, options={"n-gpu-layers": 9})
    assert spec.boot_timeout == 5.0
    assert spec.env == {"A": "1", "B": "2"}
    assert spec.options == {"ctx-size": 512, "n-gpu-layers": 9}
    pool.specs["agent"] = spec
    assert pool.spec(ctx_size=None).options == {"n-gpu-layers": 9}
    assert pool.spec() == spec


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("agnet", {}, "known are agent"),
        (None, {"boot_timeout": "soon"}, "cannot be used"),
        (None, {"name": "x"}, "cannot be changed"),
        (None, {"options": 3}, "must be a table"),
        (None, {"env": 3}, "must be a table"),
        (None, {"ctx_size": {"a": 1}}, "cannot be used"),
    ],
)
def test_wrong_name_or_override_is_a_bad_spec(
    pool: Pool, name: str | None, overrides: dict[str, Any], words: str
) -> None:
    """A backend that is not there, or a value of the wrong type, is a bad spec that says which."""
    with pytest.raises(BadSpec) as caught:
        pool.spec(name, **overrides)
    assert words in str(caught.value)


def test_equal_specs_share_a_backend_that_follows_its_server(pool: Pool, keeper: Keeper) -> None:
    """The same spec gives the same object; a fresh generation and a restart change it in place, clients included."""
    backend = pool.acquire(pool.spec())
    assert backend.command[-1].isdigit()
    assert pool.acquire(pool.spec()) is backend
    assert (backend.generation, backend.pid, backend.api_key) == (1, 101, "key1")
    keeper.generation, keeper.url = 2, "http://127.0.0.1:10"
    assert pool.acquire(pool.spec()) is backend
    assert (backend.generation, backend.client.target.url) == (2, "http://127.0.0.1:10")
    backend.restart()
    assert (backend.generation, backend.client.target.api_key) == (3, "key3")
    assert pool.acquire(pool.spec(env={"B": "2"})) is not backend
    assert all(request.window == 7 for request in keeper.asked if isinstance(request, Acquire | Restart))
    backend.stop()
    assert keeper.asked[-1] == Stop(key=backend.key)


def test_requests_of_all_clients_are_taken_once(pool: Pool) -> None:
    """Records of every client of a backend are collected, and handed over once."""
    backend = pool.acquire(pool.spec())
    record = RequestRecord(id="1", backend="agent", path="/", result="ok", t=0, latency=1.0)
    for client in (backend.client, backend.async_client, pool.client_for(backend)):
        client._keep(record)
    assert len(backend.take_requests()) == 3
    assert backend.take_requests() == []


def test_ledger_takes_measured_figures_only(pool: Pool) -> None:
    """A device that could not be measured gets no total; the host's boot peak stands beside the cards."""
    backend = pool.acquire(pool.spec())
    assert backend.boot.evidence == "none"
    assert backend.ledger.total() == {"host": 50 << 20}


def test_backend_without_a_log_has_no_evidence(pool: Pool, keeper: Keeper) -> None:
    """A silent server, a log that is gone and an attached server have no evidence and the reason, never zero bytes."""
    backend = pool.acquire(pool.spec())
    keeper.log.write_text("")
    assert (backend.boot.evidence, backend.boot.warnings) == ("none", ("the server has written nothing to its log",))
    keeper.log.unlink()
    backend.restart()
    assert "cannot be read" in backend.boot.warnings[0]
    keeper.log.write_bytes(b"\0\xff" * 5000)
    backend.restart()
    assert "mostly not text" in backend.boot.warnings[0]
    assert backend.ledger.total() == {"host": 50 << 20}
    keeper.log = Path()
    backend.running = msgspec.structs.replace(backend.running, log="")
    backend._boot = None
    assert "did not start" in backend.boot.warnings[0]
    assert backend.log is None


def test_variables_that_were_kept_back_are_named(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine does not let a server inherit is a warning of its boot; the spec's own variables are not."""
    monkeypatch.setenv("A", "2")
    monkeypatch.setenv("AB_CTX", "8")
    assert pool.acquire(pool.spec()).kept_from_it == []
    backend = pool.acquire(pool.spec(boot_timeout=9))
    backend.plan = msgspec.structs.replace(backend.plan, unset=["A"], secret_env="AB_KEY")
    monkeypatch.setenv("AB_KEY", "k")
    assert "AB_CTX" in backend.kept_from_it
    assert not {"A", "AB_KEY"} & set(backend.kept_from_it)
    assert "AB_CTX" in backend.boot.warnings[0]
    assert "`env` of [backend.agent]" in backend.boot.warnings[0]


def test_capabilities_that_are_missing_are_named(pool: Pool) -> None:
    """Missing capabilities are listed in order; a name that is none is a mistake of the caller."""
    backend = pool.acquire(pool.spec())
    assert backend.missing("chat", "layers", "tokenize") == ["layers", "tokenize"]
    with pytest.raises(ValueError, match="is not a capability"):
        backend.missing("teleport")


def test_fate_is_the_keepers_sentence(pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead backend's fate is what the keeper refuses turns with; a living one has none."""
    monkeypatch.setattr("pytest_vram.backends.pool.FATE_WAIT", 0.0)
    assert pool.fate("k") is None
    keeper.death = "agent#1 was killed by SIGKILL"
    assert pool.fate("k") == "agent#1 was killed by SIGKILL"


def test_build_that_lacks_instructions_names_the_way_on(
    pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A boot that SIGILL ended points at the command that finds another build; other failures are left as they are."""
    failure = BootFailed("killed by SIGILL")

    def call(request: Request, timeout: float | None = None) -> Reply:
        raise failure

    monkeypatch.setattr(keeper, "call", call)
    with pytest.raises(BootFailed, match=r"SIGILL\nRun `vram demo`"):
        pool.acquire(pool.spec())
    failure = BootFailed("exit code 1")
    with pytest.raises(BootFailed, match=r"^exit code 1$"):
        pool.acquire(pool.spec())


def test_answer_of_another_kind_is_a_keeper_error(pool: Pool, keeper: Keeper) -> None:
    """A keeper that answers something else is not taken for a server."""
    keeper.reply = Done()
    with pytest.raises(KeeperError, match="Done"):
        pool.acquire(pool.spec())


# ---------------------------------------------------------------- labels


def rpc(label: str, endpoint: str) -> DeviceInfo:
    return DeviceInfo(label=label, kind="rpc", name=f"RPC9[{endpoint}]", capacity=HOST.capacity, source="t")


def boot(**devices: str) -> Boot:
    entries = tuple(Entry(bucket="weights", device=label, bytes=1, source="engine-log") for label in devices)
    return Boot(engine="llama-server", era="2026", evidence="complete", entries=entries, devices=devices)


def test_devices_of_the_log_get_the_runs_labels() -> None:
    """RPC devices are matched by endpoint, in whatever order the log lists them; host buffers stay on the host."""
    context = PlanContext(devices=(rpc("gpu0", "h:1"), rpc("gpu1", "h:2")), rpc=("h:1", "h:2"))
    read = relabelled(boot(gpu0="RPC0[h:2]", gpu1="RPC0[h:1]", host="CPU"), context)
    assert read.devices == {"gpu1": "RPC0[h:2]", "gpu0": "RPC0[h:1]", "host": "CPU"}
    assert [entry.device for entry in read.entries] == ["gpu1", "gpu0", "host"]


def test_device_that_is_not_measured_never_takes_a_measured_label() -> None:
    """A card of the log that the run does not measure keeps apart from the run's gpu0, and on cpu it is no host."""
    context = PlanContext(devices=(rpc("gpu0", "h:1"),), rpc=("h:1",))
    read = relabelled(boot(gpu0="CUDA0", gpu1="RPC0[h:1]"), context)
    assert read.devices == {"CUDA0": "CUDA0", "gpu0": "RPC0[h:1]"}
    on_host = relabelled(boot(gpu0="CUDA0", host="CPU"), PlanContext(devices=(HOST,)))
    assert on_host.devices == {"gpu0": "CUDA0", "host": "CPU"}
    assert msgspec.to_builtins(on_host.entries[0])["device"] == "gpu0"


def test_sizes_without_a_device_are_the_hosts_where_only_it_is_measured() -> None:
    """Patterns of a command that name no device explain host memory on cpu, and the first card elsewhere."""
    patterns = {"weights": r"weights: (?P<weights_mib>[\d.]+)(?: on (?P<device>\w+))?"}
    unnamed = bootlog.read("weights: 2.5 MiB\n", engine="command", patterns=patterns)
    named = bootlog.read("weights: 2.5 on CUDA7\n", engine="command", patterns=patterns)
    on_host = PlanContext(devices=(HOST,))
    assert relabelled(unnamed, on_host).ledger().total() == {"host": 5 << 19}
    assert relabelled(named, on_host).ledger().total() == {"gpu7": 5 << 19}
    assert relabelled(unnamed, PlanContext()).ledger().total() == {"gpu0": 5 << 19}

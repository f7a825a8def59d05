"""A smaller card is played on a software GPU: what does not fit into it really fails to load."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary
from pytest_vram.errors import BootFailed
from pytest_vram.readings import Reading
from pytest_vram.testing import Shape, SoftwareGpu, software_gpu, weights_as_buffers, write_llama
from pytest_vram.units import MIB

pytestmark = pytest.mark.engine

CARD = 64_000_000
LARGE = 131_072
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def gpu() -> Iterator[SoftwareGpu]:
    """One software GPU for this module."""
    with software_gpu() as (found,):
        yield found


@pytest.fixture
def options() -> dict[str, Any]:
    """All layers on the device and nothing shrunk to fit."""
    executable = next(place.path for place in binary.places() if place.usable and place.path is not None)
    return {"n-gpu-layers": 99, "parallel": 1, "ctx-size": 2048, "fit": "off", **weights_as_buffers(executable)}


@pytest.fixture
def shape(tmp_path: Path) -> Shape:
    """A small dense model in the test's folder."""
    return write_llama(tmp_path / "tiny.gguf")


def soft_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_DATA)[0]


def test_small_loads_and_large_fails_by_name_and_bytes(
    rehearse: Start, spec: Start, options: dict[str, Any], shape: Shape, gpu: SoftwareGpu
) -> None:
    """On a played card of 64MB a deployment of 4 MiB of KV cache loads, one of 128 MiB fails naming device and bytes,
    and afterwards the small one loads again."""
    run = rehearse(spec("tiny.gguf", options=options), kind="rpc", rpc=[gpu.endpoint], emulate=CARD)
    (device,) = run.client.welcome.devices
    assert isinstance(device.capacity, Reading)
    assert (device.capacity.bytes, device.limit_from) == (CARD, "emulated")
    assert "plays a card of 64MB" in device.notes[-1]
    small = run.pool.acquire(run.pool.spec())
    assert small.ledger.buckets()["kv"] == {"gpu0": shape.kv_bytes(2048)}
    small.stop()
    wanted = shape.kv_bytes(LARGE)
    for _ in range(5):  # at times this engine crashes on the failed allocation before a line of it is written
        with pytest.raises(BootFailed) as caught:
            run.pool.acquire(run.pool.spec(ctx_size=LARGE))
        text = str(caught.value)
        if "Out of memory" in text:
            break
    assert "Out of memory" in text
    assert "RPC0" in text
    assert str(wanted) in text
    assert f"{wanted / MIB:.1f} MiB" in text
    run.pool.acquire(run.pool.spec()).stop()


def test_limit_is_lifted_at_the_end(rehearse: Start, spec: Start, gpu: SoftwareGpu) -> None:
    """While the run lives its device's server has a limit of the card's size and its own need; then the old one."""
    before = soft_limit(gpu.pid)
    run = rehearse(spec(None), kind="rpc", rpc=[gpu.endpoint], emulate=CARD)
    assert CARD < soft_limit(gpu.pid) < CARD + 16 * MIB
    run.close()
    assert soft_limit(gpu.pid) == before


def test_engine_plans_for_the_card(
    rehearse: Start, spec: Start, options: dict[str, Any], shape: Shape, gpu: SoftwareGpu
) -> None:
    """With `--fit` on and nothing asked for, llama-server leaves free what the played card does not have."""
    del options["n-gpu-layers"], options["ctx-size"], options["fit"]
    run = rehearse(spec("tiny.gguf", options=options), kind="rpc", rpc=[gpu.endpoint], emulate=CARD)
    backend = run.pool.acquire(run.pool.spec())
    margin = int(backend.command[backend.command.index("--fit-target") + 1])
    assert backend.log is not None
    assert f"cannot meet free memory target of {margin} MiB" in backend.log.read_text()
    backend.stop()

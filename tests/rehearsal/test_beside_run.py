"""A real engine on a software GPU: its estimate beside what it printed and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.backends import binary
from pytest_vram.cli import main
from pytest_vram.testing import Shape, software_gpu, weights_as_buffers, write_llama
from tests.conftest import Inner

pytestmark = pytest.mark.engine

TESTS = """
from pytest_vram import max_vram

def test_served(vram_client):
    vram_client.complete("a " * 300, max_tokens=4)
"""


def spec(model: Path, context: int) -> str:
    """A spec file for a model, its weights loaded into buffers."""
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    table = {"ctx-size": context, "parallel": 1, "cache-ram": 0, "fit": "off", "n-gpu-layers": 99}
    lines = "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in {**table, **weights_as_buffers(executable)}.items()
    )
    return (
        f"[backend.tiny]\nengine = 'llama-server'\nmodel = {json.dumps(str(model))}\n[backend.tiny.options]\n{lines}\n"
    )


def test_a_failure_shows_the_estimate_beside_the_figures(
    pytester: pytest.Pytester, inner: Inner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every printed bucket is as predicted; a run that passes has no estimate; two runs compare by their settings."""
    model = pytester.path / "m.gguf"
    write_llama(model, Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    pytester.makepyfile(TESTS)
    with software_gpu():
        pytester.path.joinpath("vram.toml").write_text(spec(model, 1024))
        inner("--vram-device=rpc:0", "--vram-budget=4GB").assert_outcomes(passed=1)
        (first,) = (pytester.path / ".vram" / "runs").iterdir()
        pytester.path.joinpath("vram.toml").write_text(spec(model, 4096))
        failed = inner("--vram-device=rpc:0", "--vram-budget=20MiB", "--vram-report=out.json")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*ledger*gpu0*predicted*printed*measured*"])
    passed = json.loads((first / "report.json").read_text())
    assert [one["beside"] for one in (*passed["tests"], *passed["backends"])] == [None, None]
    report = json.loads((pytester.path / "out.json").read_text())
    for one in (*report["tests"], *report["backends"]):
        rows = [row for row in one["beside"]["differences"] if row["bucket"] != "unattributed"]
        assert {(row["bucket"], row["device"]) for row in rows} >= {
            ("weights", "gpu0"),
            ("kv", "gpu0"),
            ("compute", "gpu0"),
        }
        assert {row["meaning"] for row in rows} <= {"equal", "rounding"}, rows
        rest = [
            row for row in one["beside"]["differences"] if (row["bucket"], row["device"]) == ("unattributed", "gpu0")
        ]
        assert "unknown" not in {row["meaning"] for row in rest if row["most"] > 1 << 20}, rest
    capsys.readouterr()
    assert main(["compare", str(first), str(pytester.path / "out.json"), "--fail-on", "kv:5%", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (kv,) = [row for row in found["deployments"][0]["differences"] if (row["bucket"], row["device"]) == ("kv", "gpu0")]
    assert (kv["after"] // kv["before"], kv["meaning"]) == (4, "setting")
    assert ("ctx-size", 1024, 4096) in [
        (one["setting"], one["before"], one["after"]) for one in found["deployments"][0]["changes"]
    ]

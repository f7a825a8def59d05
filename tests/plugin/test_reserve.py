"""Room that must stay free, and what is said before any test where it cannot."""

from __future__ import annotations

import pytest

from pytest_vram import measure
from pytest_vram.activity import Activity
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.needs import Plan
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec
from tests.conftest import Inner
from tests.plugin.test_budget import project as project
from tests.plugin.test_budget import report
from tests.unit.test_quick import FakeRun

MIB = 1 << 20


def all_but(megabytes: int) -> str:
    """A reserve that leaves this much of the machine's memory."""
    (device,) = measure.survey((DeviceSpec(kind="cpu", text="cpu"),))
    assert isinstance(device, DeviceInfo)
    assert isinstance(device.capacity, Reading)
    return f"{device.capacity.bytes // MIB - megabytes}MiB"


def test_a_peak_that_leaves_too_little_fails(project: pytest.Pytester, inner: Inner) -> None:
    """With 200 MiB left beside the reserve a child of 300 MB fails its test and one of 60 MB does not; no budget is
    needed for it, and the header says what is held."""
    project.makepyfile(
        """
        from children import child

        def test_small(): child(60)
        def test_large(): child(300)
        """
    )
    result = inner(f"--vram-reserve={all_but(200)}", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["vram: reserve * on host memory *", "*and the reserve *more than host has*"])
    small, large = report(project)["tests"]
    assert small["findings"] == []
    (finding,) = large["findings"]
    assert (finding["check"], finding["verdict"], finding["limit_from"]) == ("vram_reserve", "failed", "--vram-reserve")
    assert "usable" in finding["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram-reserve=900TiB", "--vram-device=cpu"), "*the reserve *from --vram-reserve) leaves nothing of host*"),
        (("--vram-reserve=1GB", "--vram-device=rpc:0"), "*the reserve 953.7 MiB (from --vram-reserve) cannot be held*"),
        (("--vram-reserve=1g", "--vram-device=cpu"), "*`1g` is ambiguous*--vram-reserve*"),
    ],
)
def test_a_reserve_that_cannot_be_is_a_usage_error(
    project: pytest.Pytester, inner: Inner, arguments: tuple[str, ...], message: str
) -> None:
    """Before any test, in one line that names the place."""
    project.makepyfile("def test_it(): pass")
    result = inner(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    pytest.LineMatcher([" ".join(text.split())]).fnmatch_lines([message])


def test_a_reserve_in_a_file_that_cannot_be_held_warns(project: pytest.Pytester, inner: Inner) -> None:
    """From a config file it is a warning, and the tests run unjudged."""
    project.makepyfile("def test_it(): pass")
    project.path.joinpath("vram.toml").write_text('reserve = "1GB"\ndevice = "rpc:0"\n')
    result = inner()
    result.assert_outcomes(passed=1)
    assert "the reserve 953.7 MiB" in " ".join(result.stdout.str().split())


@pytest.mark.parametrize(("capacity", "skips"), [(4 << 30, True), (None, False), (int(23.57 * 2**30), False)])
def test_requires_vram_never_skips_on_a_size_that_could_not_be_read(capacity: int | None, skips: bool) -> None:
    """Insufficient permissions on a MIG slice are no 0 GiB: the test runs; a "24 GB" card shows a little less."""
    run = FakeRun()
    size: Reading | Unmeasurable = Unmeasurable(reason="Insufficient Permissions")
    if capacity is not None:
        size = Reading(bytes=capacity, source="nvml-device", scope="device", device="gpu0", exact=True)
    run._devices = [DeviceInfo(label="gpu0", kind="nvml", name="H200 MIG 1g.35gb", capacity=size, source="NVML")]
    activity = Activity(run, None)  # type: ignore[arg-type]
    plan = Plan(requires=[{"size": 24 << 30, "text": "24GiB"}])
    if skips:
        with pytest.raises(pytest.skip.Exception, match="4,096 MiB"):
            activity._admit(plan)
    else:
        activity._admit(plan)

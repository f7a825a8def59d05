"""The run report as data: what every format is a view of. Its JSON schema is ``report/schema/report.json``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_vram.advice.records import Advice
from pytest_vram.backends.growth import Growth
from pytest_vram.backends.record import RequestRecord
from pytest_vram.checks.finding import Finding
from pytest_vram.differences import Beside
from pytest_vram.keeper.messages import BootPhase, DeviceInfo, HostUse, Residue, Sampling, Share, Stranger
from pytest_vram.ledger import Ledger
from pytest_vram.measure.torch_memory import Allocator
from pytest_vram.readings import Measured
from pytest_vram.report.soaks import SoakDocument
from pytest_vram.report.toolcalls import DefectTable, ToolcallRecord
from pytest_vram.sessions.turns import Turn

FORMAT = "pytest-vram/report/1"
Outcome = Literal["passed", "failed", "skipped", "inconclusive", "error"]


class BackendRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one backend.

    :ivar ledger: the engine's printed buckets against the peak of this generation (``unattributed`` included).
    :ivar spec: the resolved spec, secrets left out. :ivar peak: boot and use, label → figure.
    :ivar beside: the estimate beside the ledger, where a report was asked for or a test failed.
    :ivar growth: what a probe found that it takes beyond its boot while it serves; ``None`` where none was made.
    """

    name: str
    engine: str
    generation: int
    key: str
    pid: int
    command: list[str]
    spec: dict[str, Any]
    log: str
    ledger: Ledger
    facts: dict[str, Any] = {}
    phases: list[BootPhase] = []
    boot_peak: dict[str, Measured] = {}
    at_ready: dict[str, Measured] = {}
    peak: dict[str, Measured] = {}
    boot_seconds: float | None = None
    growth: Growth | None = None
    beside: Beside | None = None


class IdleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Idle memory of a test with ``idle_rollback``, device label → figure.

    :ivar before: what its own part of the run held before it, and its backends once they were ready.
    :ivar after: the same after its teardown. :ivar settled: whether two reads agreed in the end.
    """

    before: dict[str, Measured]
    after: dict[str, Measured]
    tolerance: int
    limit_from: str
    settled: bool = True


class TestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one test.

    :ivar nodeid: key of the test; tests of the shipped suite are ``pytest_vram_specs.module::test`` everywhere.
    :ivar peak: label → peak that was judged: the run's where a budget decides, else ``own``. :ivar limit: label →
        smallest limit, with its origin in ``limit_from``.
    :ivar own: label → peak of the run without what other tests held at the same time.
    :ivar baseline: label → what ``own`` was when it began, with what its backends held when it began to use them.
    :ivar process: label → peak of the test's own process, where that is known.
    :ivar toolcalls: what became of the cases of its ``toolcall_accuracy`` marker.
    :ivar turns: of its ``vram_session``. :ivar idle: what its ``idle_rollback`` marker compared.
    :ivar soak: what its ``vram_soak`` marker's soak showed.
    :ivar backends: ``name#generation`` of the backends that it used.
    :ivar beside: the estimates of its backends beside its ledger, where a limit on its memory did not hold.
    :ivar device: label → peak of the whole device, everyone included. :ivar allocators: torch's, in the test's own
        process. :ivar strangers: processes of others on the devices meanwhile.
    :ivar residues: what earlier tests had left behind when it began.
    :ivar spill: label → memory that was given on the device and lay in host memory.
    :ivar host_use: page faults, swap and control group of its backends.
    :ivar advice: what would let it pass, best first, where a limit on memory did not hold or a backend did not boot
        for want of it; ``no_advice`` says why there is none.
    :ivar waited: seconds before it could begin; ``waited_for`` says who held what was wanted.
    """

    __test__ = False  # not a test class

    nodeid: str
    outcome: Outcome
    seconds: float
    peak: dict[str, Measured] = {}
    own: dict[str, Measured] = {}
    baseline: dict[str, Measured] = {}
    process: dict[str, Measured] = {}
    host: Measured | None = None
    limit: dict[str, int] = {}
    limit_from: str | None = None
    phases: dict[str, dict[str, Measured]] = {}
    ledger: Ledger | None = None
    beside: Beside | None = None
    findings: list[Finding] = []
    shares: list[Share] = []
    requests: list[RequestRecord] = []
    toolcalls: ToolcallRecord | None = None
    turns: list[Turn] = []
    idle: IdleRecord | None = None
    soak: SoakDocument | None = None
    backends: list[str] = []
    overlapped: list[str] = []
    device: dict[str, Measured] = {}
    allocators: list[Allocator] = []
    strangers: list[Stranger] = []
    residues: list[Residue] = []
    spill: dict[str, Measured] = {}
    host_use: HostUse | None = None
    waited: float = 0.0
    waited_for: list[str] = []
    sampling: Sampling | None = None
    boot: bool = False
    advice: list[Advice] = []
    no_advice: str | None = None
    reason: str | None = None
    attempt: int = 1
    worker: str | None = None


class OutsideRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The budget was broken while no test was in its set-up or call: in a teardown, or between tests.

    :ivar device: label, or ``sum``. :ivar peak: largest figure, at least, and ``limit``: bytes. :ivar seconds: for how
        long at least. :ivar after: test that had ended last, "" before the first. :ivar before: test that began next,
        "" after the last.
    """

    device: str
    peak: int
    limit: int
    seconds: float
    after: str
    before: str


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself. :ivar settings: name → value and the place it came from. :ivar counts: outcome → tests.

    :ivar outside: times outside of any test at which the budget was broken; one is enough to fail the run.
    """

    id: str
    started: str
    seconds: float
    verdict: Literal["passed", "failed", "inconclusive"]
    device: str
    devices: list[DeviceInfo]
    settings: dict[str, dict[str, Any]]
    versions: dict[str, str]
    counts: dict[str, int]
    command: list[str]
    sampling: Sampling | None = None
    keeper_cpu_share: float | None = None
    warnings: list[str] = []
    folder: str | None = None
    outside: list[OutsideRecord] = []


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    :ivar defects: kinds of defect in tool calls beside the settings of the backends, where several were asked the same
        cases.
    """

    run: RunInfo
    tests: list[TestRecord]
    backends: list[BackendRecord]
    journal: str | None = None
    defects: list[DefectTable] = []
    format: str = FORMAT

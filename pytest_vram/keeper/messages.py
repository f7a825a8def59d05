"""What is said on the keeper's socket: length-prefixed JSON, one request and one reply at a time per connection.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, at most :data:`LARGEST`. Requests are one of
the structs of :data:`Request` (told apart by ``op``), replies one of :data:`Reply`. Requests marked *no reply* are
fire-and-forget. End of file on a connection releases everything that it held: windows, turns, and, for the
controller, the run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_vram.measure.device import DeviceInfo as DeviceInfo
from pytest_vram.readings import Measured
from pytest_vram.spec import DeviceSpec, LaunchPlan, Limits

PROTOCOL = 2
LARGEST = 16 << 20
#: Environment variables of everything that the keeper starts: the run's id, and the backend's ``name#generation``.
RUN_MARK = "PYTEST_VRAM_RUN"
BACKEND_MARK = "PYTEST_VRAM_BACKEND"
#: The same: PID and start time of the run's controller, with ":"; when that is gone, so should they be.
CONTROLLER_MARK = "PYTEST_VRAM_CONTROLLER"
#: Environment variable of all that tests start: ids of the runs that they belong to, the outermost first, with ":".
MEMBER_MARK = "PYTEST_VRAM_MEMBER"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=str.lower, omit_defaults=True):
    """What every message has.

    :ivar number: of the request on its connection, rising; its reply carries the same one. 0 where none is waited for.
    """

    number: int = 0


# ---------------------------------------------------------------- requests


class Hello(_Message, frozen=True, kw_only=True):
    """First message of every connection. → :class:`Welcome`.

    :ivar role: ``controller`` (its end is the run's end), ``worker`` (an xdist worker; its end closes its windows),
        ``turn`` (a short connection that waits for a turn at a backend), ``viewer`` (reads only).
    :ivar pid: the speaker; ``controller`` and ``worker`` are pytest processes and are never counted on ``cpu``.
    :ivar start_time: field 22 of ``/proc/PID/stat``, so that a reused PID is noticed.
    """

    role: str
    pid: int
    start_time: int
    name: str = ""
    protocol: int = PROTOCOL


class Open(_Message, frozen=True, kw_only=True):
    """Open a window. → :class:`Opened`.

    :ivar kind: ``test``, ``phase`` or ``request``.
    :ivar name: node id, phase name or request id.
    :ivar parent: window that this one is a part of; its backends are this one's.
    :ivar exclusive: wait until no other window of kind ``test`` is open, and keep others out (``serial_only``), in
        other runs on this machine as well.
    :ivar need: device label → bytes that the test may hold, its backends included; a test without a need holds nothing.
    :ivar uses: keys of the launch plans of the backends that its fixtures will start; ``need`` covers what they hold.
    :ivar alone: those of them that no other test may use at the same time.
    :ivar settle: wait for two agreeing reads before the baseline is taken, for this many seconds at most.
    :ivar quick: the window of several short tests without needs, which the gate of their process speaks for: it keeps
        nobody out and waits for nobody.
    """

    kind: str
    name: str
    parent: int | None = None
    exclusive: bool = False
    need: dict[str, int] = {}
    uses: list[str] = []
    alone: list[str] = []
    settle: float = 0.0
    quick: bool = False


class Close(_Message, frozen=True, kw_only=True):
    """Close a window. → :class:`Closed`. What a test was admitted for stays its own until :class:`Leave`.

    :ivar name: what it is called from now on; several tests may have shared it, and one of them is what it is about.
    """

    window: int
    name: str = ""
    record: dict[str, Any] = {}


class Leave(_Message, frozen=True, kw_only=True):
    """The test of this window is over, its teardown included: others may have what it was admitted for. *No reply.*"""

    window: int


class Abandon(_Message, frozen=True, kw_only=True):
    """Nobody waits for the reply to this request any more: it ends, and what it opened is given back. *No reply.*

    It is heeded at once, whatever the connection waits for. A request that is no wait is carried out all the same.
    """

    request: int


class Ping(_Message, frozen=True, kw_only=True):
    """A sign of life is wanted. → :class:`Done`, at once, whatever the connection waits for."""


class Peek(_Message, frozen=True, kw_only=True):
    """Figures of an open window so far. → :class:`Closed`, the window stays open."""

    window: int


class Now(_Message, frozen=True, kw_only=True):
    """Current figures (no peak). → :class:`Figures`.

    :ivar settle: wait up to this many seconds for two agreeing reads 100 ms apart (idle memory); 0 reads at once.
    :ivar tolerance: bytes by which two reads may differ and still agree.
    :ivar backends: ``name#generation`` of the backends of a test whose window may be closed already: their figures are
        given as the window's would be, with ``own`` and ``rest``, and only these need to agree.
    """

    window: int | None = None
    settle: float = 0.0
    tolerance: int = 1 << 20
    backends: list[str] | None = None


class Acquire(_Message, frozen=True, kw_only=True):
    """Make sure that the server of this plan runs, and let ``window`` use it. → :class:`Running`.

    The reply comes when it is ready. A dead server is started anew as the next generation. Errors:
    ``boot-failed``, ``boot-timeout``.
    """

    plan: LaunchPlan
    window: int | None = None


class Prepare(_Message, frozen=True, kw_only=True):
    """This plan is about to be used by a test: end unused servers now, before its window opens. → :class:`Done`."""

    plan: LaunchPlan


class Restart(_Message, frozen=True, kw_only=True):
    """Stop the server with this key and start it again. → :class:`Running`."""

    key: str
    window: int | None = None


class Stop(_Message, frozen=True, kw_only=True):
    """Stop the server with this key. → :class:`Done`."""

    key: str


class Turn(_Message, frozen=True, kw_only=True):
    """Wait for the turn of one request at a backend; ends with :class:`EndTurn` or the connection. → :class:`Granted`.

    :ivar serial: one request at a time at this backend, over all processes of the run; else granted at once.
    """

    key: str
    request: str
    serial: bool = True
    parent: int | None = None
    timeout: float = 300.0


class EndTurn(_Message, frozen=True, kw_only=True):
    """The request is over. → :class:`Closed`. ``record`` goes to the journal as a ``request`` line."""

    record: dict[str, Any] = {}


class Note(_Message, frozen=True, kw_only=True):
    """Append a journal line. *No reply.*"""

    kind: str
    fields: dict[str, Any] = {}


class Status(_Message, frozen=True, kw_only=True):
    """What the keeper has. → :class:`State`."""


class Finish(_Message, frozen=True, kw_only=True):
    """Stop every server, write the last line, end. → :class:`Done`. Only from the controller."""

    outcome: str = ""


# ---------------------------------------------------------------- replies


class Welcome(_Message, frozen=True, kw_only=True):
    """The keeper's greeting.

    :ivar guard: PID of its guard, which ends everything when it gets SIGTERM.
    :ivar lease_folder: folder of the gates, empty where there are none; with ``lease_devices`` for
        :class:`pytest_vram.leases.Gate`.
    """

    pid: int
    guard: int = 0
    run: str
    folder: str
    generation: int
    devices: list[DeviceInfo] = []
    lease_folder: str = ""
    lease_devices: list[str] = []


class Opened(_Message, frozen=True, kw_only=True):
    """A window is open. ``waited`` is in seconds; ``waited_for`` says who held what was wanted, one sentence each."""

    window: int
    t: int
    waited: float = 0.0
    waited_for: list[str] = []


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one process held at its mark within a window; ``others``: it is in no figure of the test's own."""

    pid: int
    name: str
    device: str
    bytes: int
    backend: str | None = None
    others: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How well a window was sampled: real median interval and longest gap, in milliseconds.

    :ivar gaps: intervals of more than three times the wanted one.
    """

    samples: int
    interval_ms: float | None
    longest_gap_ms: float | None
    gaps: int = 0


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is not of this run and held memory on a device during a window.

    :ivar held: bytes when the window closed. :ivar grew: most that it rose above what it held at the opening.
    :ivar talked_to: a process of the run had a connection to it meanwhile.
    :ivar decisive: its growth makes the window's figures unfit for a verdict; ``why`` says for what reason.
    """

    pid: int
    name: str
    device: str
    held: int
    grew: int
    talked_to: bool = False
    decisive: bool = False
    why: str = ""


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a test left behind: not a backend's, and still held when the next window opened.

    :ivar test: name of the test during which it came. :ivar pids: processes that hold it, with their names.
    :ivar first_use: a pytest process came onto the device during that test, so that the driver's context, which stays
        until the process ends, is a part of it (107 to 1,105 MiB were seen, by card).
    :ivar context: bytes of it that may be that context: 1,280 MiB, or all of it. No part of the figures below.
    :ivar own: it is held by the pytest process of the window or by what came from it, or nobody knows from where.
    :ivar lasted: what of it was held from the opening to the closing.
    :ivar at_peak: what of it was still held when the peak of ``run`` was reached, at least; ``at_peak_most``: at most.
    """

    test: str
    device: str
    bytes: int
    pids: list[tuple[int, str]] = []
    first_use: bool = False
    context: int = 0
    own: bool = True
    lasted: int = 0
    at_peak: int = 0
    at_peak_most: int = 0


class HostUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the backends of a window did to the host besides its memory, summed over their processes.

    :ivar major_faults: pages that had to be read from disk, in bytes. :ivar major_fault_count: how many; ``None`` where
        that could not be read. :ivar swap_grew: bytes that went to swap, most seen above
        the opening. :ivar group_peak: most that the control group of the backends held since they were started, where
        the kernel keeps it (``memory.peak``).
    """

    major_faults: Measured | None = None
    major_fault_count: int | None = None
    swap_grew: Measured | None = None
    group_peak: Measured | None = None


class PeakTime(msgspec.Struct, frozen=True, kw_only=True):
    """When the lower end of a peak was reached: after ``since`` and not later than ``at`` (monotonic ns)."""

    since: int
    at: int


class Over(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One time during which the run held more than its budget; times are monotonic ns.

    :ivar device: label, or ``sum``. :ivar bytes: largest lower end. :ivar since: when the last read began that was
        within the budget. :ivar begin: when the first read began that was over it (for a mark, which may have been
        reached at any time before: ``since``), and ``at`` when that was over. :ivar last: when the last such read was
        over, and ``until`` when the first one was that was within the budget again; ``None`` while none was.
    :ivar after: test whose window was closed last when it began. :ivar before: the one that was opened first after.
    :ivar judged: it reached into a window of one test alone, which was judged by it.
    """

    device: str
    limit: int
    bytes: int
    since: int
    begin: int
    at: int
    last: int
    until: int | None = None
    after: str = ""
    before: str = ""
    judged: bool = False


class Closed(_Message, frozen=True, kw_only=True):
    """What a window saw; every table is device label → figure.

    :ivar run: peak over everything of this run (contract "What is counted"), boot peaks of used backends included.
    :ivar own: the same without what certainly belongs to other tests that ran at the same time: other workers' pytest
        processes with what they started, and backends that this window does not use. Where nothing does, or a device
        does not say who holds its memory, it is the same figure.
    :ivar backend: peak of the window's backends alone, boot peaks included.
    :ivar process: peak of the test's own process.
    :ivar device: peak of the whole device, everyone included.
    :ivar baseline: what ``own`` was when the window opened, with what each backend of the window held when the window
        began to use it; without those that ended. :ivar baseline_backend: the same for the window's backends.
    :ivar risen: how far ``own`` was above ``baseline`` before that was moved for another backend, where it was.
    :ivar risen_backend: the same for the window's backends.
    :ivar host: peak host memory of the process trees of the window's backends, boot included.
    :ivar phases: phase name → label → peak, of boots and of phase windows inside this one.
    :ivar boot: true where a boot peak decided ``run``.
    :ivar boots: ``run`` or ``own`` → devices on which the lower end of that peak is of a boot.
    :ivar overlapped: names of test windows that were open at the same time and shared a backend or the device.
    :ivar shares: who held what, largest first, at most 20.
    :ivar deaths: one sentence for each backend of this window that died in it.
    :ivar trouble: sentences about measurement faults within the window.
    :ivar lost: one sentence for each device that stopped answering within the window ("GPU is lost").
    :ivar peak_at: when the peak of ``run`` was reached. :ivar strangers: processes of others that grew meanwhile.
    :ivar residues: what earlier tests had left behind when the window opened, still held at its peak.
    :ivar spill: label → memory of the run that was given on the device and lay in host memory.
    :ivar host_use: page faults, swap and control group of the backends.
    :ivar waited: seconds before the window was opened, and ``waited_for`` who held what was wanted.
    :ivar over: times at which the budget was broken, in a window that several tests share.
    """

    t0: int
    t1: int
    run: dict[str, Measured] = {}
    own: dict[str, Measured] = {}
    backend: dict[str, Measured] = {}
    process: dict[str, Measured] = {}
    device: dict[str, Measured] = {}
    baseline: dict[str, Measured] = {}
    baseline_backend: dict[str, Measured] = {}
    risen: dict[str, Measured] = {}
    risen_backend: dict[str, Measured] = {}
    host: Measured | None = None
    phases: dict[str, dict[str, Measured]] = {}
    boot: bool = False
    boots: dict[str, list[str]] = {}
    overlapped: list[str] = []
    shares: list[Share] = []
    deaths: list[str] = []
    trouble: list[str] = []
    lost: list[str] = []
    sampling: Sampling | None = None
    peak_at: dict[str, PeakTime] = {}
    strangers: list[Stranger] = []
    residues: list[Residue] = []
    spill: dict[str, Measured] = {}
    host_use: HostUse | None = None
    waited: float = 0.0
    waited_for: list[str] = []
    over: list[Over] = []


class Figures(_Message, frozen=True, kw_only=True):
    """Current figures: label → figure, for the whole run and for the window's backends.

    ``settled`` is false when the reads still disagreed at the end of the wait. ``host`` is the host memory of the
    window's backends, ``None`` where it uses none; where ``host`` is a measured device it is the same figure.

    :ivar own: the run without what certainly belongs to other tests, where ``backends`` were given. :ivar rest: ``own``
        without any backend, for the devices that say which process holds what.
    """

    t: int
    run: dict[str, Measured] = {}
    backend: dict[str, Measured] = {}
    host: Measured | None = None
    settled: bool = True
    own: dict[str, Measured] = {}
    rest: dict[str, Measured] = {}


class BootPhase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A phase of a boot: monotonic ns, peak and proportional set size where read at its end."""

    name: str
    start: int
    end: int | None = None
    peak: dict[str, Measured] = {}
    pss: Measured | None = None


class Running(_Message, frozen=True, kw_only=True):
    """A server that is ready. ``fresh`` says that this request started it."""

    key: str
    name: str
    generation: int
    pid: int
    pids: list[int]
    url: str
    log: str
    fresh: bool
    api_key: str | None = None
    t_start: int = 0
    t_ready: int = 0
    phases: list[BootPhase] = []
    boot_peak: dict[str, Measured] = {}
    at_start: dict[str, Measured] = {}
    at_ready: dict[str, Measured] = {}
    host_boot_peak: Measured | None = None


class Granted(_Message, frozen=True, kw_only=True):
    """It is this request's turn. ``waited`` is in seconds."""

    window: int
    waited: float = 0.0


class Done(_Message, frozen=True, kw_only=True):
    """It is done."""


class State(_Message, frozen=True, kw_only=True):
    """Everything alive, for people and for tests. ``held``: what the run holds at the last sample, as in peaks.

    For the controller, which asks at the end: ``over``, every time at which the budget was broken; ``peak`` of the
    whole run, where there is a budget; and ``residues``, what tests have left behind until now.

    :ivar warnings: what somebody must know of the leases: folders and files that cannot be used.
    """

    pid: int
    run: str
    t: int
    devices: list[DeviceInfo] = []
    backends: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    sampling: Sampling | None = None
    own_cpu_share: float | None = None
    journal_trouble: str | None = None
    leases: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    held: dict[str, Measured] = {}
    over: list[Over] = []
    peak: dict[str, Measured] = {}
    residues: list[Residue] = []
    warnings: list[str] = []


class Failed(_Message, frozen=True, kw_only=True):
    """The request failed.

    :ivar error: name of the exception class in :mod:`pytest_vram.errors` that the client raises.
    """

    error: str
    message: str


Request = (
    Hello
    | Open
    | Close
    | Leave
    | Abandon
    | Ping
    | Peek
    | Now
    | Acquire
    | Prepare
    | Restart
    | Stop
    | Turn
    | EndTurn
    | Note
    | Status
    | Finish
)
Reply = Welcome | Opened | Closed | Figures | Running | Granted | Done | State | Failed


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper is told when it is started, as JSON on its standard input.

    :ivar run: id of the run. :ivar folder: run folder. :ivar socket: path of the socket to listen on.
    :ivar controller: PID and start time of the controller; when it is gone, everything goes.
    :ivar devices: what to measure. :ivar interval_ms: sampling interval.
    :ivar rpc: endpoints ``host:port`` of RPC devices, in index order.
    :ivar budget: what the tests of the run may hold together. :ivar reserve: bytes of each device that stay free.
    :ivar emulate: size of the card that is played, in bytes. :ivar leases: whether tests wait for each other.
    """

    run: str
    folder: str
    socket: str
    controller: tuple[int, int]
    devices: list[DeviceSpec]
    interval_ms: float = 10.0
    rpc: list[str] = []
    settings: dict[str, Any] = {}
    budget: Limits | None = None
    reserve: int = 0
    emulate: int | None = None
    leases: bool = True

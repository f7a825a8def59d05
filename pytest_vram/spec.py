"""What should run: backend specs, the devices and limits a user names, and the launch plan of one server.

These are data only. :mod:`pytest_vram.settings` reads them from files and options, the engines in
:mod:`pytest_vram.backends` turn a :class:`BackendSpec` into a :class:`LaunchPlan`, and the keeper carries it out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

OptionValue = str | int | float | bool

HIDDEN = "***"
_SECRET = re.compile(r"(?:api[-_]?key|token(?!s)|secret|password|passwd|credential)", re.IGNORECASE)


class Floors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Least performance that a deployment must keep.

    :ivar tokens_per_second: median decode rate. :ivar recall: share of early facts that are used out of a summary after
        they have left the window.
    """

    tokens_per_second: float | None = None
    recall: float | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``[backend.NAME.sampling]``: how cases and conversations are sampled; part of a result's fingerprint.

    :ivar extra: other fields of the request, as the engine has them (``min_p``, ``repeat_penalty`` …).
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 512
    extra: dict[str, Any] = {}


class ToolCalling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``[backend.NAME.toolcalls]``: how tools are offered to the model; part of a result's fingerprint.

    :ivar protocol: ``tools`` (OpenAI's ``tools``), ``json_schema`` (response format) or ``few_shot`` (JSON by examples
        in the system prompt, for models without a tool template). :ivar stream: answers are streamed.
    :ivar tool_choice: ``auto``, ``required`` …, where the engine takes it. :ivar logit_bias: tool → bias of its name's
        tokens, where the engine takes it.
    """

    protocol: str = "tools"
    stream: bool = False
    tool_choice: str | None = None
    parallel: bool | None = None
    logit_bias: dict[str, float] = {}


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[backend.NAME]`` table, after its profile was merged in and defaults were applied.

    Paths are absolute or relative to ``base`` (the folder of the file that the spec came from), ``~`` expanded.

    :ivar name: key of the table.
    :ivar origin: where it came from, for messages, such as ``/srv/vram.toml``.
    :ivar base: folder that relative paths start from.
    :ivar options: the engine's own long options without dashes; values become flags.
    :ivar env: extra environment of the server.
    :ivar log: the engine whose log a ``command`` server writes, such as ``vllm``: that grammar reads its boot.
    :ivar boot_timeout: seconds until ready. :ivar request_timeout: seconds for one request.
    """

    name: str
    engine: str
    origin: str
    base: str
    model: str | None = None
    binary: str | None = None
    profile: str | None = None
    options: dict[str, OptionValue | list[OptionValue]] = {}
    env: dict[str, str] = {}
    boot_timeout: float = 120.0
    request_timeout: float = 300.0
    floors: Floors = Floors()
    sampling: Sampling = Sampling()
    toolcalls: ToolCalling = ToolCalling()
    # engine = "command"
    argv: list[str] = []
    health: str | None = None
    log_patterns: dict[str, str] = {}
    log: str | None = None
    # engine = "attach"
    url: str | None = None
    pid: int | None = None
    process: str | None = None
    # name sent as "model" in requests, where the server wants one
    served_model: str | None = None
    api_key: str | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A budget: bytes for every device, for some by label, or for their sum.

    :ivar each: limit of every device without one of its own.
    :ivar by_label: ``gpu0`` → bytes.
    :ivar total: limit of the sum over devices.
    :ivar text: as the user wrote it.
    """

    text: str
    each: int | None = None
    by_label: dict[str, int] = {}
    total: int | None = None

    def of(self, label: str) -> int | None:
        """The limit of the device with this label, or ``None``."""
        return self.by_label.get(label, self.each)


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How long a soak is: so many turns, or so many seconds. :ivar text: as the user wrote it."""

    text: str
    turns: int | None = None
    seconds: float | None = None


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One device of ``--vram-device``.

    :ivar kind: ``auto``, ``cpu``, ``predicted``, ``cuda``, ``uuid``, ``drm``, ``vulkan`` or ``rpc``.
    :ivar index: number after the colon; ``None`` for a bare kind, which means all of it.
    :ivar name: what follows the colon where it is not a number (``card0``, a UUID).
    """

    kind: str
    index: int | None = None
    name: str | None = None
    text: str = ""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the keeper must know to own one server, engine by engine the same.

    :ivar name: backend's name; log files and journal lines carry it.
    :ivar engine: engine's name. :ivar log: engine whose boot-log grammar reads its log, where that is another name.
    :ivar argv: command; empty for ``attach``.
    :ivar env: additions to the environment.
    :ivar unset: beginnings of names of variables that the server does not inherit; ``env`` may set them all the same.
    :ivar secret_env: variable that receives the random key of this server, or ``None`` when it takes none.
    :ivar url: base URL with ``{port}`` where the port is read back, e.g. ``http://127.0.0.1:{port}``; without it
        the port is fixed.
    :ivar port_pattern: regular expression whose group 1 is the port in a log line, or ``None``.
    :ivar health: path (or whole URL) that answers 200 once ready; ``None``: the ``ready`` log pattern decides.
    :ivar log_patterns: phase name → regular expression of the log line that begins it (``command`` engine).
    :ivar own_port: refuse a port whose listener is not one of this server's processes.
    :ivar pid: process to watch (``attach``). :ivar process: name of processes to watch (``attach``).
    :ivar stop_grace: seconds between SIGTERM and SIGKILL.
    :ivar sole: what it needs that serves one server at a time: endpoints ``host:port`` of RPC devices.
    """

    name: str
    engine: str
    argv: list[str] = []
    env: dict[str, str] = {}
    unset: list[str] = []
    cwd: str = "."
    secret_env: str | None = None
    api_key: str | None = None
    url: str = ""
    port_pattern: str | None = None
    health: str | None = None
    log_patterns: dict[str, str] = {}
    log: str | None = None
    own_port: bool = True
    pid: int | None = None
    process: str | None = None
    boot_timeout: float = 120.0
    stop_grace: float = 5.0
    sole: list[str] = []

    @property
    def grammar(self) -> str:
        """The engine whose grammar reads the server's log."""
        return self.log or self.engine

    @property
    def key(self) -> str:
        """Identity of the server: equal plans share one. 16 hexadecimal digits."""
        # 30 and 30.0 are equal, and not the same JSON.
        plan = msgspec.structs.replace(self, boot_timeout=float(self.boot_timeout), stop_grace=float(self.stop_grace))
        return hashlib.sha256(msgspec.json.encode(plan, order="sorted")).hexdigest()[:16]


def as_table(spec: BackendSpec) -> dict[str, Any]:
    """The spec as plain data for reports, without what looks like a secret: keys, tokens and passwords."""
    table: dict[str, Any] = msgspec.to_builtins(spec)
    if table.get("api_key"):
        table["api_key"] = HIDDEN
    table["env"] = {name: HIDDEN if _SECRET.search(name) else value for name, value in spec.env.items()}
    table["argv"] = without_secrets(spec.argv)
    return table


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line with the values of options such as ``--api-key`` hidden."""
    shown: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and _SECRET.search(name) is not None
        shown.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals
    return shown

"""llama.cpp's own server."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pytest_vram.backends import asked, binary, flags, gguf_file
from pytest_vram.backends.answers import read
from pytest_vram.backends.asked import whole
from pytest_vram.backends.base import Engine, PlanContext, Properties, refuse_foreign_keys
from pytest_vram.backends.keys import api_key
from pytest_vram.errors import BadSpec, EngineNotFound
from pytest_vram.spec import BackendSpec, LaunchPlan, OptionValue
from pytest_vram.units import MIB

#: Buffers are printed from this verbosity on, in builds whose help calls it "trace".
VERBOSITY = 4
PORT_PATTERN = r"listening on https?://[^\s/]*:(\d+)"

#: Variables of the user's shell that would change the deployment behind the spec's back, such as LLAMA_ARG_CTX_SIZE.
VARIABLES = "LLAMA_"

_OWN = "pytest-vram sets it itself"
_KEY = f"{_OWN}, a random one for each server, which tests find in `vram_backend.api_key`"
REFUSED: dict[str, str] = {
    "model": "write model = … in [backend.NAME]",
    "model-url": "nothing is fetched while tests run: put the file on this machine and set `model`",
    "hf-repo": "nothing is fetched while tests run: put the file on this machine and set `model`",
    "docker-repo": "nothing is fetched while tests run: put the file on this machine and set `model`",
    "models-dir": "one backend is one model, whose memory is explained: set `model`",
    "models-preset": "one backend is one model, whose memory is explained: set `model`",
    "host": f"{_OWN} to 127.0.0.1: servers under test are not reachable from outside",
    "api-key": _KEY,
    "api-key-file": _KEY,
    "api-prefix": "readiness and properties are read from the server's root",
    "ssl-key-file": "the server is reachable from this machine only and spoken to in plain HTTP",
    "ssl-cert-file": "the server is reachable from this machine only and spoken to in plain HTTP",
    "log-file": f"{_OWN}: the log in the run folder is where buffers are read from",
    "log-disable": "without a log the memory breakdown has no buckets",
    "help": "it prints and exits",
    "version": "it prints and exits",
    "cache-list": "it prints and exits",
    "list-devices": "it prints and exits",
    "completion-bash": "it prints and exits",
}
#: MiB that ``--fit`` leaves free in builds whose help does not say it.
_FIT_TARGET = 1024
_HOST_CACHES: dict[str, OptionValue] = {"cache-ram": 0, "ctx-checkpoints": 0}


class LlamaServer(Engine):
    """``engine = "llama-server"``: options are the binary's own, checked against its ``--help``."""

    name: ClassVar[str] = "llama-server"

    def plan(self, spec: BackendSpec, context: PlanContext) -> LaunchPlan:
        """A plan that listens on loopback, prints its buffers and takes its key from the environment."""
        refuse_foreign_keys(spec, self.name)
        executable = binary.locate(spec)
        known = flags.help_of(executable)
        model = gguf_file.resolve(spec)
        where = f"[backend.{spec.name}.options] in {spec.origin}"
        options = dict(spec.options)
        _check_verbosity(options, known, where)
        port = _take_port(options, where)
        added = self._placement(spec, context, known) + self._margin(spec, context, known)
        argv = [str(executable), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        argv += flags.to_argv(options, known, origin=where, refused=REFUSED)
        argv += added
        if _prints_buffers_at(known) and not _given(options, known, "verbosity", "verbose"):
            argv += ["--verbosity", str(VERBOSITY)]
        argv += _without_page(options, known)
        key = api_key(spec)
        environment = dict(spec.env)
        if key is not None:
            environment["LLAMA_API_KEY"] = key
        return LaunchPlan(
            name=spec.name,
            engine=self.name,
            argv=argv,
            env=environment,
            unset=[VARIABLES],
            cwd=spec.base,
            secret_env=None if key is not None else "LLAMA_API_KEY",
            api_key=key,
            url="http://127.0.0.1:{port}" if port == 0 else f"http://127.0.0.1:{port}",
            port_pattern=PORT_PATTERN,
            health="/health",
            boot_timeout=spec.boot_timeout,
            sole=_endpoints(argv),
        )

    def _placement(self, spec: BackendSpec, context: PlanContext, known: flags.Help) -> list[str]:
        """Flags that put the model where this run measures: its RPC devices, or, on ``cpu``, no device at all."""
        options = spec.options
        endpoints = context.endpoints()
        if endpoints and not _given(options, known, "rpc"):
            if not known.knows("rpc"):
                raise EngineNotFound(
                    f"{known.binary} has no option --rpc, so it cannot use the device rpc:0 of this run: use a build"
                    " with llama.cpp's RPC backend"
                )
            return ["--rpc", ",".join(endpoints)]
        kinds = {device.kind for device in context.devices}
        if kinds == {"cpu"} and known.knows("device") and not _given(options, known, "device", "rpc"):
            # Host memory stands in for the card, so a GPU that happens to be here must stay out of it.
            return ["--device", "none"]
        return []

    @staticmethod
    def _margin(spec: BackendSpec, context: PlanContext, known: flags.Help) -> list[str]:
        """What ``--fit`` must leave free so that it plans for the card that is played.

        An RPC server says that all of its machine's memory is free, whatever limit it has. The margin is the part of
        that which is not there, and what the build leaves free anyway. A card whose rest is occupied says so itself.
        """
        if context.emulate is None or {device.kind for device in context.devices} != {"rpc"}:
            return []
        flag = known.find("fit-target")
        if flag is None or _given(spec.options, known, "fit-target"):
            return []
        usual = re.search(r"\bdefault: (\d+)", flag.text)
        seen = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        hidden = max(0, -(-(seen - context.emulate) // MIB))
        return ["--fit-target", str(hidden + (int(usual[1]) if usual else _FIT_TARGET))]

    def capabilities(self, spec: BackendSpec) -> frozenset[str]:
        """Everything that a check may ask for, except what the options switch off."""
        found = {
            "boot-log",
            "chat",
            "completions",
            "token-counts",
            "timings",
            "tokenize",
            "properties",
            "layers",
            "restart",
            "host-caches-off",
            "process",
        }
        if spec.options.get("embedding") or spec.options.get("embeddings") or spec.options.get("reranking"):
            found -= {"chat", "completions", "timings"}
        return frozenset(found)

    def asked(self, spec: BackendSpec) -> Mapping[str, OptionValue]:
        """The options that decide memory and window, under the log's names; automatic values are left out."""
        try:
            known = flags.help_of(binary.locate(spec))
        except EngineNotFound:
            known = None
        return asked.of_llama(spec.options, known, spec.env)

    def without_host_caches(self, spec: BackendSpec) -> BackendSpec:
        """The same deployment without prompt cache and context checkpoints in host memory.

        Builds that do not know an option of these have no such cache.
        """
        known = flags.help_of(binary.locate(spec))
        options = dict(spec.options)
        for name, value in _HOST_CACHES.items():
            flag = known.find(name)
            if flag is None or flag.removed:
                continue
            for spelling in (*flag.names, *flag.negatives):
                options.pop(spelling, None)
            options[name] = value
        return msgspec.structs.replace(spec, options=options)

    def property_paths(self) -> tuple[str, ...]:
        """``/props`` has the context of a slot and their number, ``/slots`` each slot's, ``/v1/models`` the model."""
        return ("/props", "/slots", "/v1/models")

    def properties(self, answers: Mapping[str, object]) -> Properties:
        """See :func:`pytest_vram.backends.answers.read`."""
        return read(answers)


def _endpoints(argv: Sequence[str]) -> list[str]:
    """RPC devices of a command line: each serves one client at a time (the accept loop of ggml-rpc.cpp)."""
    values = [value for name, value in itertools.pairwise(argv) if name == "--rpc"]
    values += [word.partition("=")[2] for word in argv if word.startswith("--rpc=")]
    parts = [part.strip() for value in values for part in value.split(",")]
    return [part for part in parts if part.rpartition(":")[2].isdigit()]


def _given(options: Mapping[str, object], known: flags.Help, *names: str) -> bool:
    for name in names:
        flag = known.find(name)
        if flag is not None and any(spelling in options for spelling in (*flag.names, *flag.negatives)):
            return True
    return False


def _take_port(options: dict[str, Any], where: str) -> int:
    """Remove ``port`` from the options: 0 lets the system choose, and is what most should keep."""
    if "port" not in options:
        return 0
    port = whole(options.pop("port"))
    if port is None or not 0 <= port <= 65535:
        raise BadSpec(f"option 'port' ({where}) must be a number from 0 (any free port) to 65535")
    return port


def _prints_buffers_at(known: flags.Help) -> bool:
    """Whether this build hides its buffers below verbosity 4; older ones print them unasked."""
    flag = known.find("verbosity")
    return flag is not None and re.search(r"\b4: trace", flag.text) is not None


def _check_verbosity(options: Mapping[str, Any], known: flags.Help, where: str) -> None:
    if not _prints_buffers_at(known):
        return
    flag = known.find("verbosity")
    for spelling in flag.names if flag is not None else ():
        level = whole(options.get(spelling))
        if spelling in options and (level is None or level < VERBOSITY):
            raise BadSpec(
                f"option {spelling!r} ({where}) must be {VERBOSITY} or more: below it this build does not print its"
                " buffers, and the memory breakdown would have no buckets"
            )


def _without_page(options: Mapping[str, object], known: flags.Help) -> list[str]:
    """No web page: a server under test needs none, and it costs memory."""
    flag = known.find("no-webui") or known.find("no-ui")
    if flag is None or any(spelling in options for spelling in (*flag.names, *flag.negatives)):
        return []
    return [f"--{flag.negatives[0]}"] if flag.negatives else []

"""Any server that a command starts."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from pytest_vram.backends import asked, flags, ports
from pytest_vram.backends.addresses import path_of, root_of
from pytest_vram.backends.answers import PATHS, read
from pytest_vram.backends.base import Engine, PlanContext, Properties, refuse_foreign_keys
from pytest_vram.backends.keys import api_key
from pytest_vram.bootlog import engines as engines_with_logs
from pytest_vram.bootlog.boot import PHASES
from pytest_vram.errors import BadSpec, EngineNotFound
from pytest_vram.paths import expanded
from pytest_vram.spec import BackendSpec, LaunchPlan, OptionValue

PORT, MODEL = "{port}", "{model}"


class Command(Engine):
    """``engine = "command"``: any ``argv``, a health path or URL, and log patterns that name the phases of the boot.

    ``{port}`` in ``argv``, ``health``, ``url`` and ``env`` is replaced by one free loopback port, ``{model}`` in
    ``argv`` by the spec's ``model``. Without ``{port}`` the address comes from ``url``, or from a whole URL in
    ``health``. Where the command starts an engine whose log can be read, ``log`` names it instead of patterns.
    """

    name: ClassVar[str] = "command"

    def plan(self, spec: BackendSpec, context: PlanContext) -> LaunchPlan:
        """A plan for this command; everything that can be refused before it starts is refused here."""
        where = f"[backend.{spec.name}] in {spec.origin}"
        refuse_foreign_keys(spec, self.name, "argv", "health", "log", "log_patterns", "url")
        if spec.options:
            names = ", ".join(map(repr, spec.options))
            raise BadSpec(f"`options` of {where} mean nothing to a command: write {names} into `argv`")
        if not spec.argv:
            raise BadSpec(f'{where} has no `argv`: write the command as a list, such as ["python", "-m", "server"]')
        _check_patterns(spec, where)
        _check_log(spec, where)
        port = _port(spec, context)
        argv = [_filled(text, port) for text in spec.argv]
        if any(MODEL in text for text in argv):
            if spec.model is None:
                raise BadSpec(f"{MODEL} stands in `argv` of {where}, but `model` is not set")
            argv = [text.replace(MODEL, _model(spec)) for text in argv]
        argv[0] = _executable(argv[0], spec, where)
        health = _health(spec, where, port)
        return LaunchPlan(
            name=spec.name,
            engine=self.name,
            argv=argv,
            env={name: _filled(value, port) for name, value in spec.env.items()},
            cwd=spec.base,
            api_key=api_key(spec),
            url=_url(spec, where, port, health),
            health=health,
            log_patterns=dict(spec.log_patterns),
            log=spec.log,
            boot_timeout=spec.boot_timeout,
        )

    def capabilities(self, spec: BackendSpec) -> frozenset[str]:
        """An OpenAI-compatible server that this run owns."""
        return frozenset({"chat", "completions", "token-counts", "restart", "process", "properties"})

    def asked(self, spec: BackendSpec) -> Mapping[str, OptionValue]:
        """What ``argv`` and ``env`` ask of the engine that ``log`` names, under the log's names."""
        known = None
        program = asked.program_of(spec.argv, spec.log)
        if program is not None and spec.log in ("llama-server", "ik_llama"):
            try:
                known = flags.help_of(Path(_found(program, spec)))
            except EngineNotFound:
                known = None  # a script that does not print the engine's help
        return asked.of_command(spec.argv, spec.log, env=spec.env, known=known)

    def property_paths(self) -> tuple[str, ...]:
        """Those of every engine whose answers can be read."""
        return PATHS

    def properties(self, answers: Mapping[str, object]) -> Properties:
        """See :func:`pytest_vram.backends.answers.read`."""
        return read(answers)


def _found(program: str, spec: BackendSpec) -> str:
    path = expanded(program, f"the program in `argv` of [backend.{spec.name}] in {spec.origin}")
    if path.name == program:
        return shutil.which(program, path=spec.env.get("PATH")) or program
    return str(path if path.is_absolute() else Path(spec.base) / path)


def _check_patterns(spec: BackendSpec, where: str) -> None:
    for phase, pattern in spec.log_patterns.items():
        if phase not in PHASES:
            near = difflib.get_close_matches(phase, PHASES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BadSpec(f"{phase!r} in `log_patterns` of {where} is not a phase: {hint}known are {', '.join(PHASES)}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadSpec(
                f"the pattern {pattern!r} for {phase!r} in `log_patterns` of {where} is not a regular"
                f" expression: {error}"
            ) from None


def _check_log(spec: BackendSpec, where: str) -> None:
    """Refuse a log that nothing here can read, and patterns beside one that says its phases itself."""
    if spec.log is None:
        return
    known = engines_with_logs()
    if spec.log not in known:
        near = difflib.get_close_matches(spec.log, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadSpec(f"`log` of {where} is {spec.log!r}: {hint}logs are read of {', '.join(known)}")
    if spec.log_patterns:
        raise BadSpec(
            f"{where} has both `log` and `log_patterns`: the log of {spec.log} says its phases without patterns"
        )


def _port(spec: BackendSpec, context: PlanContext) -> int | None:
    texts = [*spec.argv, spec.health or "", spec.url or "", *spec.env.values()]
    if not any(PORT in text for text in texts):
        return None
    pairs = [f"{name}={value}" for name, value in sorted(spec.env.items())]
    return ports.steady_port(spec.name, *spec.argv, *pairs, run=context.run)


def _filled(text: str, port: int | None) -> str:
    return text if port is None else text.replace(PORT, str(port))


def _model(spec: BackendSpec) -> str:
    """A file next to the spec as an absolute path; anything else, such as a repository's name, as it is."""
    assert spec.model is not None
    path = expanded(spec.model, f"`model` of [backend.{spec.name}] in {spec.origin}")
    beside = path if path.is_absolute() else Path(spec.base) / path
    return str(beside) if beside.exists() else spec.model


def _executable(program: str, spec: BackendSpec, where: str) -> str:
    path = expanded(program, f"the program in `argv` of {where}")
    if path.name == program:
        if shutil.which(program, path=spec.env.get("PATH")) is None:
            raise EngineNotFound(
                f"{program!r}, the program in `argv` of {where}, is not on PATH: install it or write its whole path"
            )
        return program
    whole = path if path.is_absolute() else Path(spec.base) / path
    if not whole.is_file():
        raise EngineNotFound(f"{whole}, the program in `argv` of {where}, does not exist")
    return str(whole)


def _health(spec: BackendSpec, where: str, port: int | None) -> str | None:
    if spec.health is None:
        if "ready" not in spec.log_patterns and spec.log is None:
            raise BadSpec(
                f"{where} has no `health`, no `log` and no `ready` pattern in `log_patterns`, so nothing says when it"
                ' is ready: set one, such as health = "/health"'
            )
        return None
    health = _filled(spec.health, port)
    if "://" in health:
        root_of(health, f"`health` of {where}")
    else:
        path_of(health, f"`health` of {where}")
    return health


def _url(spec: BackendSpec, where: str, port: int | None, health: str | None) -> str:
    if spec.url is not None:
        return root_of(_filled(spec.url, port), f"`url` of {where}")
    if health is not None and "://" in health:
        split = urlsplit(health)
        return f"{split.scheme}://{split.netloc}"
    if port is not None:
        return f"http://127.0.0.1:{port}"
    raise BadSpec(
        f"{where} does not say where it listens: put {PORT} into `argv` (a free port is filled in), or set `url`"
    )

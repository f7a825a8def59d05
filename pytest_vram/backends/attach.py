"""A server that already runs and that this run does not own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import psutil

from pytest_vram.backends.addresses import path_of, root_of
from pytest_vram.backends.answers import PATHS, read
from pytest_vram.backends.base import Engine, PlanContext, Properties, refuse_foreign_keys
from pytest_vram.backends.keys import api_key
from pytest_vram.errors import BadSpec
from pytest_vram.spec import BackendSpec, LaunchPlan

#: What every OpenAI-compatible server answers.
HEALTH = "/v1/models"


class Attach(Engine):
    """``engine = "attach"``: a ``url``, and the ``pid`` or the name of the ``process`` whose memory counts."""

    name: ClassVar[str] = "attach"

    def plan(self, spec: BackendSpec, context: PlanContext) -> LaunchPlan:
        """A plan that starts nothing; it names what to watch."""
        where = f"[backend.{spec.name}] in {spec.origin}"
        refuse_foreign_keys(spec, self.name, "url", "pid", "process", "health")
        for key, value in (("options", spec.options), ("env", spec.env), ("binary", spec.binary)):
            if value:
                raise BadSpec(f"`{key}` of {where} means nothing to a server that already runs: leave it out")
        if spec.url is None:
            raise BadSpec(f"{where} has no `url`: write the server's address, such as http://127.0.0.1:11434/v1")
        if spec.pid is None and spec.process is None:
            raise BadSpec(
                f"{where} has neither `pid` nor `process`, so its memory cannot be measured: write the process's name,"
                ' such as process = "ollama"'
            )
        if spec.pid is not None and spec.process is not None:
            raise BadSpec(f"{where} has both `pid` and `process`: keep one of them")
        if spec.pid is not None and not _runs(spec.pid):
            raise BadSpec(f"`pid` of {where} is {spec.pid}, but no such process runs")
        health = spec.health or HEALTH
        if "://" in health:
            root_of(health, f"`health` of {where}")
        else:
            path_of(health, f"`health` of {where}")
        return LaunchPlan(
            name=spec.name,
            engine=self.name,
            cwd=spec.base,
            api_key=api_key(spec),
            url=root_of(spec.url, f"`url` of {where}"),
            health=health,
            own_port=False,  # a proxy or a container may listen for it
            pid=spec.pid,
            process=spec.process,
            boot_timeout=spec.boot_timeout,
        )

    def capabilities(self, spec: BackendSpec) -> frozenset[str]:
        """An OpenAI-compatible server; it is not ours to restart."""
        return frozenset({"chat", "completions", "token-counts", "process", "properties"})

    def property_paths(self) -> tuple[str, ...]:
        """Those of every engine whose answers can be read."""
        return PATHS

    def properties(self, answers: Mapping[str, object]) -> Properties:
        """See :func:`pytest_vram.backends.answers.read`."""
        return read(answers)


def _runs(pid: int) -> bool:
    try:
        return pid > 0 and psutil.pid_exists(pid)
    except OverflowError:  # more than any system counts to
        return False

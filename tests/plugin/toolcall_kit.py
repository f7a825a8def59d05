"""A project whose backends answer tool calls by a script, with cases of its own: few, so that a run is short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_vram.testing.scripted import Script, backend_table

TOOLS = {
    "tools": {
        "job_status": {
            "description": "Whether a job of the scheduler runs, and since when.",
            "parameters": {
                "type": "object",
                "properties": {"job": {"type": "string"}, "runs": {"type": "integer"}},
                "required": ["job"],
                "additionalProperties": False,
            },
        },
        "job_stop": {
            "description": "Stops a job of the scheduler.",
            "parameters": {
                "type": "object",
                "properties": {"job": {"type": "string"}},
                "required": ["job"],
                "additionalProperties": False,
            },
        },
    }
}


def cases(count: int) -> list[dict[str, Any]]:
    """So many cases, each of a family of its own."""
    found = []
    for number in range(count):
        job = f"rotate-{number}"
        found.append(
            {
                "id": f"case-{number:03}",
                "family": f"family-{number:03}",
                "category": "choice" if number % 2 else "single",
                "language": "de" if number % 5 == 0 else "en",
                "messages": [{"role": "user", "content": f"Does {job} run at the moment?"}],
                "tools": ["job_status", "job_stop"] if number % 2 else ["job_status"],
                "expect": [{"name": "job_status", "arguments": {"job": [job], "runs": [1]}, "omittable": ["runs"]}],
            }
        )
    return found


def write_cases(folder: Path, count: int, name: str = "cases.jsonl") -> Path:
    """A file of cases, with its tools beside it."""
    (folder / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    path = folder / name
    path.write_text("".join(json.dumps(case) + "\n" for case in cases(count)), encoding="utf-8")
    return path


def project(folder: Path, scripts: dict[str, Script], *, count: int = 60, **keys: Any) -> None:
    """Cases, and a config file with a scripted backend for each of the scripts, the first the default."""
    path = write_cases(folder, count)
    tables = [backend_table(script, folder, name=name, cases=str(path), **keys) for name, script in scripts.items()]
    default = f'default = "{next(iter(scripts))}"\n'
    (folder / "vram.toml").write_text(default + "".join(tables), encoding="utf-8")

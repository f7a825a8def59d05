"""A project whose backend knows the decisions of a conversation of this package, by a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.sessions import Conversation
from pytest_vram.testing.scripted import Script, backend_table


def project(folder: Path, scripts: dict[str, Script], conversation: Conversation | None = None, **keys: Any) -> None:
    """A config file with these scripted backends, the first being the default."""
    path = folder / "decisions.jsonl"
    lines = decisions(conversation) if conversation is not None else [_UNUSED]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tables = [backend_table(script, folder, name=name, cases=str(path), **keys) for name, script in scripts.items()]
    default = f'default = "{next(iter(scripts))}"\n'
    (folder / "vram.toml").write_text(default + "".join(tables), encoding="utf-8")


def decisions(conversation: Conversation) -> list[dict[str, Any]]:
    """Every decision of a conversation as a line of a case file."""
    found = []
    for case in conversation.cases():
        line = msgspec.to_builtins(case)
        found.append({key: value for key, value in line.items() if key != "origin"})
    return found


def records(folder: Path) -> dict[str, Any]:
    """Test function → its record in the report."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {test["nodeid"].partition("::")[2]: test for test in report["tests"]}


_UNUSED = {
    "id": "unused",
    "family": "unused",
    "category": "irrelevance",
    "messages": [{"role": "user", "content": "nobody asks this"}],
    "tools": [],
    "expect": [],
}

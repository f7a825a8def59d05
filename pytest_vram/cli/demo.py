"""``vram demo``: a real engine and a small real model, fetched where they are missing, then checked."""

from __future__ import annotations

import argparse
import os

from pytest_vram.backends import flags, store
from pytest_vram.cli.check import check
from pytest_vram.cli.output import Answer, progress
from pytest_vram.settings import variable
from pytest_vram.specfile import DEMO

#: What the demo passes where neither the command line nor the environment says otherwise.
DEFAULTS = {"budget": "4GB", "device": "cpu"}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Fetch what is missing, then run the suite against the built-in ``demo`` backend.

    :raises BackendError: when engine or model cannot be had; the message says what was tried.
    """
    model = store.fetch_model(progress)
    engine = store.fetch_engine(progress)
    # Kept for the run in this process: else the first test would ask the binary, and count that process as its own.
    flags.help_of(engine)
    progress(f"engine {engine}")
    progress(f"model  {model}")
    arguments = [f"--vram-backend={DEMO}"]
    for name, value in DEFAULTS.items():
        flag = f"--vram-{name}"
        given = any(word == flag or word.startswith(f"{flag}=") for word in rest)
        if not given and not os.environ.get(variable(name)):
            arguments.append(f"{flag}={value}")
            progress(f"{flag}={value} (what the demo uses where you say nothing)")
    return check([*arguments, *rest], as_json=options.json)

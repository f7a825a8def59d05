"""A run that a command makes outside of pytest: its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pytest_vram.cli.output import progress
from pytest_vram.errors import KeeperError
from pytest_vram.keeper.messages import Finish, State, Status
from pytest_vram.run import Run
from pytest_vram.summary import prune


@contextlib.contextmanager
def ending(made: Run, verb: str) -> Iterator[None]:
    """End the run behind the block in any case: an interrupt, in the middle of a boot too, leaves no process.

    :param verb: of the command, which says so where the run's journal is incomplete.
    """
    outcome = "interrupted"
    try:
        yield
        outcome = "0"
    finally:
        if made.connected:
            client = made.keeper()
            try:
                state = client.call(Status(), 10)
                if isinstance(state, State) and state.journal_trouble:
                    progress(f"vram {verb}: the journal is incomplete: {state.journal_trouble}")
                client.call(Finish(outcome=outcome), 30)
            except KeeperError:
                client.dismiss()
            made.close()
            prune(Path(made.identity.folder).parent, keep=Path(made.identity.folder))

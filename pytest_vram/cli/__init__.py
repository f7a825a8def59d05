"""The ``vram`` command: one module per verb, none imported before it is asked for."""

from pytest_vram.cli.entry import main

__all__ = ["main"]

"""The ``vram`` command: one module per verb, none imported before it is asked for."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``vram``; see :func:`pytest_vram.cli.entry.main`. Ctrl-C while it is imported is answered as later on."""
    try:
        from pytest_vram.cli import entry

        return entry.main(argv)
    except KeyboardInterrupt:
        return 130

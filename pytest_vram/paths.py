"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from pytest_vram.errors import BadInput


def expanded(text: str | Path, what: str) -> Path:
    """A path with ``~`` and ``~user`` replaced by the home they stand for.

    :param what: where the path was written, for the message, such as ``HF_HOME`` or ``option lora``.
    :raises BadInput: there is no such user, or no home is known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise BadInput(
            f"{what} is {str(text)!r}, and there is no home folder that {Path(text).parts[0]!r} stands for: write the"
            " whole path"
        ) from None

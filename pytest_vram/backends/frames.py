"""Which frames a user's traceback leaves out."""

from __future__ import annotations

from pytest_vram.errors import VramError


def of_ours(excinfo: object) -> bool:
    """For a module's ``__tracebackhide__``: whether pytest leaves the module's frames out of this error's traceback.

    True for errors that this package raises on purpose: their sentence says it all, and the traceback ends at the
    user's line. Anything else is a defect, whose frames are needed.

    :param excinfo: pytest's ``ExceptionInfo``.
    """
    return isinstance(getattr(excinfo, "value", None), VramError)

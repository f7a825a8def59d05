"""API keys of specs."""

from __future__ import annotations

import os

from pytest_vram.errors import BadSpec
from pytest_vram.spec import BackendSpec


def api_key(spec: BackendSpec) -> str | None:
    """The spec's API key; ``env:NAME`` is read from the environment so that files need not hold secrets.

    :raises BadSpec: the variable is not set, or the key is empty or cannot stand in a header.
    """
    if spec.api_key is None:
        return None
    where = f"`api_key` of [backend.{spec.name}] in {spec.origin}"
    if not spec.api_key.startswith("env:"):
        if not spec.api_key:
            raise BadSpec(f"{where} is empty: leave it out, or write the key or env:NAME")
        return _checked(spec.api_key, where)
    name = spec.api_key.removeprefix("env:")
    value = os.environ.get(name, "")
    if not value:
        raise BadSpec(f"{where} names the environment variable {name!r}, which is not set")
    return _checked(value, f"{where}, read from the environment variable {name!r},")


def _checked(key: str, where: str) -> str:
    """The key, which no message shows."""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise BadSpec(
            f"{where} holds blanks at its ends, line ends or characters outside ASCII, so no header can carry it"
        )
    return key

"""Which report formats exist, and writing one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pytest_vram.errors import BadSetting
from pytest_vram.report import json
from pytest_vram.report.records import RunReport

_WRITERS: dict[str, tuple[Callable[[RunReport], bytes], str]] = {
    ".json": (json.encode, "the whole run as one JSON document; its schema is report/schema/report.json"),
}
#: Suffixes of two parts, which ``Path.suffix`` would cut in half.
_LONG = (".trace.json",)


def formats() -> dict[str, str]:
    """Suffix → what it holds, of every format that this version writes."""
    return {suffix: text for suffix, (_, text) in _WRITERS.items()}


def suffix_of(path: str | Path) -> str:
    """The suffix that decides the format of ``path``, in lower case.

    :raises BadSetting: a format that this version does not write; the message lists what there is.
    """
    name = Path(path).name.lower()
    suffix = next((long for long in _LONG if name.endswith(long)), Path(name).suffix)
    if suffix not in _WRITERS:
        what = f"suffix {suffix!r}" if suffix else "no suffix"
        raise BadSetting(
            f"no report can be written to {str(path)!r}: it has {what}, and this version writes {', '.join(_WRITERS)}"
        )
    return suffix


def write(report: RunReport, path: str | Path) -> None:
    """Write ``report`` to ``path`` in the format of its suffix.

    The file appears whole or not at all: it is written under a temporary name in the same folder, then renamed.
    Missing folders are made.

    :raises BadSetting: an unknown format, or a path that cannot be written; the message names path and reason.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    encode, _ = _WRITERS[suffix_of(target)]
    data = encode(report)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and not target.is_file():
            raise OSError(0, "it is there and is no file")
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise BadSetting(
            f"the report could not be written to {str(path)!r}: {error.strerror or error};"
            " give --vram-report a file in a folder that can be written"
        ) from None

"""Small C programs of the test kit: built once with the compiler that is here, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_vram.backends import store
from pytest_vram.errors import BackendError

_HERE = Path(__file__).parent
_TIMEOUT = 120.0


class FakeDriverUnavailable(BackendError):
    """The fake driver cannot be built on this machine; the message says why."""


def build(source: str, name: str, *, driver: int) -> Path:
    """Build ``source`` of this folder as the library or program ``name``; what was built before is taken again.

    Two at once end with one whole file: it is moved into place by one rename.

    :param name: file name; one with ``.so`` in it is a shared library of that soname.
    :param driver: major version of the driver that it plays.
    :raises FakeDriverUnavailable: not Linux, no compiler, or it does not compile.
    """
    if not sys.platform.startswith("linux"):
        raise FakeDriverUnavailable(f"the fake driver runs on Linux only, and this is {sys.platform}")
    compiler = _compiler()
    if compiler is None:
        raise FakeDriverUnavailable(
            "the fake driver needs a C compiler once, and there is none on PATH: install gcc or clang, or set CC"
        )
    library = ".so" in name
    options = ["-O2", "-std=gnu11", f"-DDRIVER={driver}", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if library:
        options += ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
    digest = hashlib.sha256("\0".join([*compiler, *options]).encode())
    for file in sorted(_HERE.glob("fake_*.[ch]")):
        digest.update(file.read_bytes())
    folder = store.cache_folder() / "fake-driver" / digest.hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
            made = Path(scratch) / name
            done = subprocess.run(
                [*compiler, *options, "-o", str(made), str(_HERE / source), "-lpthread"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            if done.returncode != 0:
                said = " ".join(done.stderr.split())[:400]
                raise FakeDriverUnavailable(f"{shlex.join(compiler)} cannot build the fake driver: {said}")
            made.replace(target)
    except subprocess.TimeoutExpired:
        raise FakeDriverUnavailable(f"{shlex.join(compiler)} took longer than {_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise FakeDriverUnavailable(
            f"the fake driver cannot be kept in {folder}: {error.strerror}; set PYTEST_VRAM_CACHE to another folder"
        ) from None
    return target


def _compiler() -> list[str] | None:
    own = shlex.split(os.environ.get("CC", ""))
    for command in [own] if own else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    return None

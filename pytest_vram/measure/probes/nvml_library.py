"""NVIDIA's driver through its own Python bindings: loading, errors, and entry points of whatever version there is.

:data:`VARIABLE` names the library where it is not on the loader's path. NVML creates no CUDA context and takes no
memory of a card; it does keep a connection to the driver until :meth:`Library.close`, which counts openings.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

#: Environment variable: path of NVIDIA's NVML library where it is not on the loader's path.
VARIABLE = "PYTEST_VRAM_NVML"
NAME = "libnvidia-ml.so.1"
#: Where WSL keeps it, which is not on the loader's path of every distribution.
WSL = "/usr/lib/wsl/lib/libnvidia-ml.so.1"

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 3, 4, 6, 7
UNINITIALIZED, INVALID_ARGUMENT, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 1, 2, 9, 12, 13
GPU_IS_LOST, RESET_REQUIRED, MISMATCH, VERSION_MISMATCH, GPU_NOT_FOUND = 15, 16, 18, 25, 28
#: After these the card, or its driver, does not come back while this process runs.
FOR_GOOD = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, MISMATCH, GPU_NOT_FOUND})
#: The entry point is not there, or not for this device: an older one may be.
ABSENT = frozenset({FUNCTION_NOT_FOUND, NOT_SUPPORTED, INVALID_ARGUMENT, VERSION_MISMATCH})
#: "Not available" in place of a number.
NOT_AVAILABLE = (1 << 64) - 1

Function = Callable[..., int]


class DriverFault(Exception):
    """An answer of the driver that is no figure. :ivar code: NVML's number. :ivar text: what it means."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class OldProcess(ctypes.Structure):
    """An entry of the first version of the process lists (``nvmlProcessInfo_v1_t``)."""

    _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong)]


class Handle(NamedTuple):
    """A card or a MIG slice. ``value`` is what the bindings take for it."""

    value: Any
    uuid: str
    name: str


class Library:
    """NVML, loaded and initialised. One owner; :meth:`close` gives it up.

    :cvar answers: how many calls have come back in this process.
    :raises DriverFault: it cannot be loaded or does not answer; the text is a reason for people.
    """

    answers: ClassVar[int] = 0

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        if path:
            _load(path, required=True)
        elif os.path.exists(WSL):
            _load(WSL, required=False)
        elif sys.platform.startswith("linux") and "pynvml" not in sys.modules:
            _look_for()
        self._bindings = _bindings()
        try:
            self._bindings.nvmlInit()
        except self._bindings.NVMLError as error:
            raise DriverFault(int(error.value), _why_not(int(error.value), str(error), path)) from None
        except (OSError, AttributeError, self._mismatch()) as error:
            raise DriverFault(FUNCTION_NOT_FOUND, f"NVIDIA's driver library cannot be used: {error}") from None
        self._open = True
        self._library: Any = getattr(self._bindings, "nvmlLib", None)

    def _mismatch(self) -> type[Exception]:
        # Not an NVMLError, and not in the bindings of old.
        found = getattr(self._bindings, "NVMLLibraryMismatchError", AttributeError)
        return found if isinstance(found, type) and issubclass(found, Exception) else AttributeError

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of the bindings.

        :raises DriverFault: whatever it raises, one that the bindings or the driver do not have included.
        """
        try:
            answer = getattr(self._bindings, name)(*arguments)
            Library.answers += 1
            return answer
        except self._bindings.NVMLError as error:
            raise DriverFault(int(error.value), self.text(int(error.value))) from None
        except (AttributeError, self._mismatch()):
            raise DriverFault(FUNCTION_NOT_FOUND, f"the driver or its Python bindings have no {name}") from None
        except (UnicodeDecodeError, ValueError) as error:
            raise DriverFault(INVALID_ARGUMENT, f"the driver's answer to {name} cannot be read: {error}") from None

    def text(self, code: int) -> str:
        """What an error number means, in NVML's own words."""
        try:
            return str(self._bindings.NVMLError(code))
        except (self._bindings.NVMLError, AttributeError, TypeError):
            return f"NVML error {code}"

    def function(self, *names: str) -> tuple[str, Function] | None:
        """The first of these entry points that the driver has; ``None`` when it has none."""
        for name in names:
            try:
                return name, getattr(self._library, name)
            except AttributeError:
                continue
        return None

    def struct(self, *names: str) -> Any:
        """The first of these structures that the bindings have.

        :raises DriverFault: they have none.
        """
        for name in names:
            found = getattr(self._bindings, name, None)
            if found is not None:
                return found
        raise DriverFault(FUNCTION_NOT_FOUND, f"nvidia-ml-py has no {names[0]}: install a newer one")

    def close(self) -> None:
        """Give it up; the last one who does ends the connection to the driver."""
        if self._open:
            self._open = False
            try:
                self._bindings.nvmlShutdown()
            except self._bindings.NVMLError:
                pass  # a lost driver cannot be given up any more


@contextmanager
def opened() -> Iterator[Library]:
    """The library for a moment.

    :raises DriverFault: it cannot be loaded or does not answer.
    """
    library = Library()
    try:
        yield library
    finally:
        library.close()


def _bindings() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        reason = f"Python's bindings of NVIDIA's driver are missing ({error}): pip install nvidia-ml-py"
        raise DriverFault(FUNCTION_NOT_FOUND, reason) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign or half-installed module raises
        what = f"{type(error).__name__}: {error}"
        reason = f"the module pynvml that Python finds cannot be imported ({what}): pip install nvidia-ml-py"
        raise DriverFault(FUNCTION_NOT_FOUND, reason) from None
    if not hasattr(pynvml, "NVMLError") or not hasattr(pynvml, "nvmlDeviceGetMemoryInfo"):
        reason = "the module pynvml that Python finds is not NVIDIA's: pip install nvidia-ml-py"
        raise DriverFault(FUNCTION_NOT_FOUND, reason)
    found: ModuleType = pynvml
    return found


def _load(path: str, *, required: bool) -> None:
    """Load the library by its path, so that the bindings' own loading finds it by its name."""
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if required:
            raise DriverFault(FUNCTION_NOT_FOUND, f"{VARIABLE}={path} cannot be loaded: {error}") from None


def _look_for() -> None:
    """Load the library from the loader's path before its bindings are imported.

    That costs a tenth of a second, in vain on machines without a card.

    :raises DriverFault: it is not there.
    """
    try:
        ctypes.CDLL(NAME, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        # What the linker says of one that is there, such as one of another architecture, is a reason of its own.
        missing = "no such file" in str(error).lower() or "not found" in str(error).lower()
        why = _why_not(LIBRARY_NOT_FOUND, "", None)
        raise DriverFault(LIBRARY_NOT_FOUND, why if missing else f"{why}: {error}") from None


def _why_not(code: int, text: str, path: str | None) -> str:
    """Why the driver does not answer, for people."""
    if code == LIBRARY_NOT_FOUND and path:
        return f"{VARIABLE}={path} is not NVIDIA's {NAME}: the loader does not find that by its name"
    if code == LIBRARY_NOT_FOUND:
        return f"NVIDIA's driver library {NAME} is not present (or cannot be loaded)"
    if code == DRIVER_NOT_LOADED:
        return (
            "NVIDIA's library is present, but its kernel driver is not loaded or its devices are not in this container"
        )
    if code == MISMATCH:
        return "NVIDIA's library and its kernel driver are of different versions: the machine needs a restart"
    where = f" ({VARIABLE}={path})" if path else ""
    return f"NVIDIA's driver does not answer: {text}{where}"

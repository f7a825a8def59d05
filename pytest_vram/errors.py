"""Every exception that this package raises on purpose.

::

    VramError
    ├── BadInput              the user's input; commands exit with 2
    │   ├── BadSize           a size that cannot be read
    │   ├── BadSetting        an option, environment variable, ini key or config value
    │   ├── BadSpec           a spec file or a backend in it
    │   ├── BadMarker         arguments of a marker
    │   ├── BadModel          a model file or folder that cannot be sized
    │   ├── BadCases          cases of tool calls, or an earlier results file
    │   └── WindowFull        what must stay in a window is over its limit
    ├── BackendError          the deployment under test
    │   ├── EngineNotFound    no usable engine binary or package
    │   ├── EngineRefused     it refused the model or a setting before it loaded anything
    │   ├── ModelNotFound     no such model, or not a model
    │   ├── BootFailed        died or refused while it started
    │   ├── BootTimeout       neither ready nor dead in its time
    │   ├── BackendDied       died after it was ready
    │   ├── RequestFailed     answered with an error
    │   └── RequestTimeout    did not answer in time
    ├── MeasurementError      a source broke while it was read
    ├── KeeperError           the keeper of the run
    │   ├── KeeperUnavailable it could not be started here
    │   └── KeeperLost        it died; open judgements are errors
    └── LeaseError            admission to the device

Messages are complete sentences for a person: what is wrong, where it came from, what to do.
"""

from __future__ import annotations

from pytest_vram.text import printable


class VramError(Exception):
    """Base of every error of this package."""


class BadInput(VramError):
    """Something the user wrote cannot be used. Commands exit with code 2."""


class BadSize(BadInput, ValueError):
    """A size that cannot be read, such as ``3g``."""


class BadSetting(BadInput):
    """A value of an option, environment variable, ini key or config file."""


class BadSpec(BadInput):
    """A spec file that cannot be used, or a backend in it."""


class BadMarker(BadInput):
    """Arguments of a marker that cannot be used."""


class BadModel(BadInput):
    """A model file or folder that cannot be sized: missing, damaged, hostile, or of another format.

    Names from inside of it, and of files beside it, are other people's text: what is not printable is escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BadCases(BadInput):
    """Cases of tool calls, or a results file, that cannot be used; the message names file and line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class WindowFull(BadInput):
    """What must stay in a window, with what is to be appended, is over its limit; the window is as it was."""


class BackendError(VramError):
    """Trouble with the deployment under test: an error of the test, never a verdict."""


class EngineNotFound(BackendError):
    """No usable engine binary or package was found."""


class EngineRefused(BackendError):
    """The engine itself refused the model or a setting in its dry run; the message has its own sentence."""


class ModelNotFound(BackendError):
    """The model does not exist or is not a model."""


class BootFailed(BackendError):
    """The backend died, or refused its settings, while it started.

    :ivar spec: the backend's, where it was started for a test.
    """

    spec: object = None


class BootTimeout(BackendError):
    """The backend was neither ready nor dead within its boot timeout."""


class BackendDied(BackendError):
    """The backend died after it had been ready."""


class RequestFailed(BackendError):
    """The backend answered a request with an error.

    :ivar retry_after: the header of that name, where there is one: seconds, or a date of HTTP.
    """

    def __init__(
        self, message: str, *, status: int | None = None, body: str = "", retry_after: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.retry_after = retry_after


class RequestTimeout(BackendError):
    """The backend did not answer a request in time."""


class MeasurementError(VramError):
    """A source of readings broke while it was being read."""


class KeeperError(VramError):
    """Trouble with the keeper process of this run."""


class KeeperUnavailable(KeeperError):
    """A keeper could not be started here; the reason is the message."""


class KeeperLost(KeeperError):
    """The keeper died; what it was measuring cannot be judged."""


class LeaseError(VramError):
    """Admission to the device could not be obtained."""

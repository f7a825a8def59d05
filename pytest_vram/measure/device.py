"""A device that is measured, as data."""

from __future__ import annotations

import msgspec

from pytest_vram.readings import Measured


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device that is measured. ``capacity`` is its nominal size as the user's limit sees it.

    :ivar label: ``host``, ``gpu0`` …; every table of figures is keyed by it.
    :ivar kind: ``cpu`` or ``rpc``. :ivar name: for people, such as ``RPC0[127.0.0.1:50052]``.
    :ivar source: where its figures come from, such as ``/proc/PID/status``.
    """

    label: str
    kind: str
    name: str
    capacity: Measured
    source: str
    uuid: str | None = None

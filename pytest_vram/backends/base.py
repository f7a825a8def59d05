"""The engine interface: a spec in, a launch plan out; concrete defaults for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from pytest_vram.errors import BadSpec
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.spec import BackendSpec, LaunchPlan, OptionValue

#: Capabilities that a check may ask for, and what each means.
CAPABILITIES: dict[str, str] = {
    "boot-log": "the engine prints its buffers when it starts",
    "chat": "OpenAI-compatible chat completions",
    "completions": "OpenAI-compatible text completions",
    "token-counts": "token counts of prompts and answers in `usage`",
    "timings": "the server times its own prompt and decode phases",
    "tokenize": "the server tokenizes text on request",
    "properties": "the server can be asked for its model, context and slots",
    "layers": "the boot log says which layers are on the device",
    "restart": "this run owns the server and can start it again",
    "host-caches-off": "host-side prompt caches can be switched off",
    "process": "the server's processes are known, so its memory can be measured",
}


class Properties(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a running server says of itself; ``None`` where it does not say.

    :ivar model: path of the model. :ivar models: names that it serves. :ivar loaded: names in memory (Ollama).
    :ivar slot_contexts: context of each slot, in tokens. :ivar context_trained: tokens that the model was trained with.
    :ivar model_bytes: bytes of its tensors. :ivar projector: images or sound are taken. :ivar draft: a slot speculates.
    :ivar adapters: how many LoRA adapters there are. :ivar held_bytes: what the engine says the model takes, in bytes,
        and :ivar device_bytes: the part of it on a device (Ollama). :ivar settings: other settings, named as facts are.
    """

    context: int | None = None
    slots: int | None = None
    context_per_slot: int | None = None
    model: str | None = None
    models: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    slot_contexts: tuple[int, ...] = ()
    context_trained: int | None = None
    parameters: int | None = None
    model_bytes: int | None = None
    projector: bool | None = None
    draft: bool | None = None
    adapters: int | None = None
    held_bytes: int | None = None
    device_bytes: int | None = None
    settings: dict[str, OptionValue] = {}


class PlanContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may need besides the spec.

    :ivar devices: the devices of this run. :ivar rpc: endpoints of RPC devices among them, in order.
    :ivar rootdir: folder of the project. :ivar run: id of the run; the same in all its processes.
    :ivar emulate: size in bytes of the card that is played; an engine that plans by the free memory is told of it.
    :ivar predicted: nothing is measured, and estimates are judged; servers run on whatever devices they find.
    """

    devices: tuple[DeviceInfo, ...] = ()
    rpc: tuple[str, ...] = ()
    rootdir: str = "."
    run: str = ""
    predicted: bool = False
    emulate: int | None = None

    def endpoints(self) -> dict[str, str]:
        """Endpoint → label of the RPC devices that this run measures; without any device, every endpoint given."""
        if not self.devices:
            return {endpoint: f"gpu{index}" for index, endpoint in enumerate(self.rpc)}
        found: dict[str, str] = {}
        for endpoint in self.rpc:
            for device in self.devices:
                if device.kind == "rpc" and f"[{endpoint}]" in device.name:
                    found[endpoint] = device.label
        return found


class Engine(ABC):
    """One kind of server. Engines are stateless: everything comes in and goes out as data."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, spec: BackendSpec, context: PlanContext) -> LaunchPlan:
        """Turn a spec into a launch plan, checking all that can be checked without starting anything.

        :raises BadSpec: an option that the binary does not know, a missing key, a bad value.
        :raises EngineNotFound: no binary. :raises ModelNotFound: no model, or not one.
        """

    def capabilities(self, spec: BackendSpec) -> frozenset[str]:
        """Names out of :data:`CAPABILITIES` that this engine has with this spec."""
        return frozenset({"chat"})

    def asked(self, spec: BackendSpec) -> Mapping[str, OptionValue]:
        """What the spec asks for, in the words of :attr:`pytest_vram.bootlog.Boot.facts`; absent where it does not."""
        return {}

    def without_host_caches(self, spec: BackendSpec) -> BackendSpec:
        """The same deployment with host-side prompt caches off, for idle checks."""
        return spec

    def properties(self, answers: Mapping[str, object]) -> Properties:
        """Read :meth:`property_paths`' answers (path → decoded JSON)."""
        return Properties()

    def property_paths(self) -> tuple[str, ...]:
        """Paths that a client must GET for :meth:`properties`."""
        return ()


#: Keys of a spec that belong to some engines only; the first engine of each is the one to name.
_KEYS_OF = {
    "argv": "command",
    "health": "command",
    "log": "command",
    "log_patterns": "command",
    "url": "attach",
    "pid": "attach",
    "process": "attach",
}


def refuse_foreign_keys(spec: BackendSpec, engine: str, *own: str) -> None:
    """Refuse keys that this engine would ignore.

    :param own: those of :data:`_KEYS_OF` that it does use.
    :raises BadSpec: naming the key and an engine that has it.
    """
    for key, other in _KEYS_OF.items():
        if key not in own and getattr(spec, key):
            raise BadSpec(
                f"`{key}` of [backend.{spec.name}] in {spec.origin} means nothing to engine {engine!r};"
                f" it belongs to engine {other!r}"
            )

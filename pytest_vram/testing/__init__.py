"""What tests of checks and deployments need: GPUs in software, a fake driver, tiny models, what runs out of memory.

A backend that answers as a script says is :mod:`pytest_vram.testing.scripted`; ``Script`` here is a fake card's.
"""

from pytest_vram.testing.fake_nvml import (
    Card,
    FakeDriver,
    FakeDriverUnavailable,
    Fault,
    Memory,
    Process,
    Script,
    Slice,
    fake_nvml,
)
from pytest_vram.testing.memory import OutOfMemory, out_of_memory, weights_as_buffers
from pytest_vram.testing.models import Shape, write_llama, write_qwen3moe
from pytest_vram.testing.scripted import ScriptedBackend, ScriptedClient, backend_table, scripted_backend
from pytest_vram.testing.software import SoftwareGpu, rpc_server, software_gpu

__all__ = [
    "Card",
    "FakeDriver",
    "FakeDriverUnavailable",
    "Fault",
    "Memory",
    "OutOfMemory",
    "Process",
    "Script",
    "ScriptedBackend",
    "ScriptedClient",
    "Shape",
    "Slice",
    "SoftwareGpu",
    "backend_table",
    "fake_nvml",
    "out_of_memory",
    "rpc_server",
    "scripted_backend",
    "software_gpu",
    "weights_as_buffers",
    "write_llama",
    "write_qwen3moe",
]

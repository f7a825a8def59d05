"""What tests of checks and deployments need: a GPU in software, tiny models, deployments that run out of memory."""

from pytest_vram.testing.memory import OutOfMemory, out_of_memory, weights_as_buffers
from pytest_vram.testing.models import Shape, write_llama, write_qwen3moe
from pytest_vram.testing.software import SoftwareGpu, rpc_server, software_gpu

__all__ = [
    "OutOfMemory",
    "Shape",
    "SoftwareGpu",
    "out_of_memory",
    "rpc_server",
    "software_gpu",
    "weights_as_buffers",
    "write_llama",
    "write_qwen3moe",
]

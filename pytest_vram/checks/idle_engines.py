"""What of an engine and its device looks like a leak and is none, named only where it can be there."""

from __future__ import annotations

from typing import Literal

import msgspec

#: A workspace of cuBLAS, one for each handle and stream, in bytes.
WORKSPACE = 8_519_680

Family = Literal["", "llama.cpp", "pool", "transformers"]
#: Engine → what its memory is like; others are not known, such as those that are attached to.
FAMILIES: dict[str, Family] = {
    "llama-server": "llama.cpp",
    "llama.cpp": "llama.cpp",
    "ik_llama": "llama.cpp",
    "koboldcpp": "llama.cpp",
    "ollama": "llama.cpp",
    "llama-cpp-python": "llama.cpp",
    "vllm": "pool",
    "sglang": "pool",
    "transformers": "transformers",
}
#: Engines that take llama-server's options by their names.
FLAGS = ("llama-server", "llama.cpp", "ik_llama")
#: Beginning of a device's label, or of the source of its figures → the library that kernels on it come from.
LIBRARIES = {
    "nvml": "cuda",
    "nvidia": "cuda",
    "cuda": "cuda",
    "uuid": "cuda",
    "gpu-": "cuda",
    "mig-": "cuda",
    "vulkan": "vulkan",
    "rpc": "rpc",
    "drm": "other",
    "host": "host",
    "cpu": "host",
}

CACHES_OFF = "a soak with --cache-ram 0 --ctx-checkpoints 0, or one that is long enough to fill both to their caps"
GRAPHS = "CUDA graphs that are captured as new shapes come"
CUBLAS = "workspaces of cuBLAS"
PIPELINES = "Vulkan pipelines that are compiled as new shapes come"
ALLOCATOR = "the allocator's cache"
PROMPT_CACHE = "prompt cache (--cache-ram): 8 GiB unless set"
CHECKPOINTS = "context checkpoints (--ctx-checkpoints)"


class About(msgspec.Struct, frozen=True):
    """Whose memory a series is. :ivar engine: its name, "": not known. :ivar library: of its device, "": not known."""

    engine: str = ""
    library: str = ""

    @property
    def family(self) -> Family:
        """What the engine's memory is like; "": not known."""
        return FAMILIES.get(self.engine, "")

    def in_process(self, *, counted: bool) -> list[str]:
        """What grows on the device and is outside of what torch tells.

        :param counted: whether the figure goes up by whole workspaces of cuBLAS.
        """
        named = f"{CUBLAS}: it grows by multiples of {WORKSPACE:,} bytes" if counted else CUBLAS
        match self.library:
            case "vulkan":
                return [PIPELINES]
            case "rpc":
                return [f"what the RPC server's own library loads as shapes come (for CUDA: graphs, {named})"]
            case "other":
                return ["kernels and workspaces that the device's library loads as new shapes come"]
            case "host":
                return []
        return [named, GRAPHS]

    def in_host(self) -> list[str]:
        """What grows in host memory."""
        match self.family:
            case "llama.cpp" if self.engine in FLAGS:
                return [f"llama.cpp's {PROMPT_CACHE}", f"llama.cpp's {CHECKPOINTS}"]
            case "llama.cpp":
                return ["llama.cpp's prompt cache", "llama.cpp's context checkpoints"]
            case "pool":
                return ["caches of multi-modal inputs and of the tokenizer"]
            case "transformers":
                return ["past_key_values that are kept in host memory"]
        return [f"if the engine is llama.cpp: {PROMPT_CACHE}; {CHECKPOINTS}"]

    def in_torch(self) -> list[str]:
        """What live tensors may be, beside a leak."""
        match self.family:
            case "transformers":
                return ["past_key_values that something keeps", "a cache of the framework"]
            case "pool":
                return ["a cache of the framework beside its pool: the prefix cache is inside of it"]
        return ["a cache of the framework"]

    def in_one_figure(self) -> list[str]:
        """What else one figure of unknown origin may hold."""
        if self.family == "llama.cpp":
            return [f"{self.in_host()[0]} (in host memory)"]
        return [ALLOCATOR, *(f"{one} (in host memory)" for one in self.in_host())]

    def settles_host(self) -> str:
        """What tells growth of host memory from a cache that fills."""
        if self.engine in FLAGS:
            return CACHES_OFF
        if self.family:
            return "a run that is long enough to fill these caches: they reach a level, a leak does not"
        return f"a longer run: a cache reaches a level; if the engine is llama.cpp, {CACHES_OFF}"

    def settles_process(self) -> str:
        """What tells growth outside of torch from what is loaded as it is needed."""
        what = "compiled pipelines" if self.library == "vulkan" else "lazily loaded graphs and workspaces"
        return f"a longer run: {what} reach a level, a leak does not"

    def settles_torch(self) -> str:
        """What tells live tensors that leak from those that a cache keeps."""
        caches = {"pool": "prefix cache", "transformers": "kept past_key_values"}.get(
            self.family, "prefix cache, kept past_key_values"
        )
        return f"flush the framework's caches ({caches}) after a turn and look again"

    def settles_one_figure(self) -> str:
        """Which sources apart would say more."""
        apart = "process, host" if self.family == "llama.cpp" else "torch-allocated, torch-reserved, process, host"
        return f"the same soak with the sources apart ({apart})"


UNKNOWN = About()


def about(engine: str | None, device: str | None) -> About:
    """Whose memory a series is.

    :param engine: its name.
    :param device: its kind, as in ``cuda:0``, ``vulkan:0`` and ``rpc:…``, a GPU's UUID, or the source of its figures.
    """
    label = (device or "").lower()
    library = next((name for kind, name in LIBRARIES.items() if label.startswith(kind)), "")
    return About((engine or "").lower(), library)

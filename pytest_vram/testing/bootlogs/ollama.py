"""Ollama's server log in the formats of its releases, with llama.cpp's lines inside where it carried those."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from pytest_vram.bootlog.lines import size
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.testing.bootlogs import Written

_KINDS: tuple[tuple[str, Bucket], ...] = (
    ("model weights", "weights"),
    ("kv cache", "kv"),
    ("compute graph", "compute"),
)


class _Log:
    """A log that is being written, with what it says."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.entries: list[Entry] = []
        self.devices: dict[str, str] = {}
        self._now = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(10**7))

    def own(self, source: str, message: str, pairs: str = "", *, level: str = "INFO") -> None:
        """A line of Ollama itself."""
        self._now += timedelta(milliseconds=self.rng.randrange(1, 900))
        stamp = f"{self._now:%Y-%m-%dT%H:%M:%S}.{self._now.microsecond // 1000:03d}Z"
        text = f'"{message}"' if " " in message or not message else message
        self.lines.append(f"time={stamp} level={level} source={source} msg={text}{' ' if pairs else ''}{pairs}")

    def carried(self, *lines: str) -> None:
        """Lines of the model's process."""
        self.lines.extend(lines)

    def device(self, name: str) -> str:
        """The label of a device: they count in the order in which a log uses them."""
        if name.startswith("CPU") or name.endswith("_Host"):
            self.devices.setdefault("host", "CPU")
            return "host"
        known = {other: label for label, other in self.devices.items()}
        label = known.get(name, f"gpu{len([other for other in self.devices if other != 'host'])}")
        self.devices.setdefault(label, name)
        return label

    def entry(self, bucket: Bucket, device: str, number: str, unit: str) -> None:
        """A figure that the reader must find, as printed."""
        figure = size(number, unit)
        assert figure is not None
        self.entries.append(
            Entry(
                bucket=bucket,
                device=self.device(device),
                bytes=figure[0],
                source="engine-log",
                resolution=figure[1],
            )
        )

    def mebibytes(self, bucket: Bucket, device: str, largest: int = 9000) -> str:
        """A random size in MiB with two digits, as llama.cpp prints it."""
        number = f"{self.rng.uniform(0.01, largest):.2f}"
        self.entry(bucket, device, number, "MiB")
        return number

    def human(self) -> tuple[str, str]:
        """A random size as Ollama prints it."""
        unit = self.rng.choice(("GiB", "GiB", "MiB"))
        return f"{self.rng.uniform(1, 99 if unit == 'GiB' else 1023):.1f}", unit

    def written(self, facts: dict[str, Any], *, ready: bool = True, failure: str | None = None) -> Written:
        return Written(
            engine="ollama",
            text="\n".join(self.lines) + "\n",
            entries=tuple(self.entries),
            devices=self.devices,
            facts=facts,
            ready=ready,
            failure=failure,
        )


def _cards(rng: Random) -> list[str]:
    kind = rng.choice(("CUDA", "CUDA", "ROCm", "Vulkan"))
    return [f"{kind}{number}" for number in range(rng.choice((1, 1, 2)))]


def _start(log: _Log, version: str) -> None:
    log.own("routes.go:1331", f"Listening on 127.0.0.1:11434 (version {version})")
    log.lines.append('[GIN] 2025/01/01 - 10:00:00 | 200 |      39.4µs |       127.0.0.1 | HEAD     "/"')


def _settings(rng: Random) -> dict[str, int]:
    slots = rng.choice((1, 2, 4))
    each = rng.choice((2048, 4096, 8192))
    return {"context": slots * each, "context_per_slot": each, "slots": slots}


def _layers(rng: Random) -> tuple[int, int]:
    whole = rng.randrange(13, 82)
    return (whole if rng.random() < 0.7 else rng.randrange(1, whole)), whole


# ---------------------------------------------------------------- llama.cpp's lines inside


def _of_2024(log: _Log, cards: list[str], layers: tuple[int, int], context: int, *, mapped: str) -> None:
    """``llm_load_tensors`` and ``llama_kv_cache_init``."""
    offloaded, whole = layers
    log.carried(
        "llama_model_loader: loaded meta data with 24 key-value pairs and 291 tensors from"
        " /root/.ollama/models/blobs/sha256-00 (version GGUF V3 (latest))",
        f"llm_load_print_meta: n_layer          = {whole - 1}",
        "llm_load_tensors: ggml ctx size =    0.22 MiB",
        f"llm_load_tensors: offloading {min(offloaded, whole - 1)} repeating layers to GPU",
        f"llm_load_tensors: offloaded {offloaded}/{whole} layers to GPU",
    )
    for name in (mapped, *cards):
        log.carried(f"llm_load_tensors: {name:>10} buffer size = {log.mebibytes('weights', name):>8} MiB")
    log.carried(f"llama_new_context_with_model: n_ctx      = {context}")
    for name in cards:
        log.carried(f"llama_kv_cache_init: {name:>10} KV buffer size = {log.mebibytes('kv', name):>8} MiB")
    for name in (*cards, f"{cards[0].rstrip('0123456789')}_Host"):
        number = log.mebibytes("compute", name, 900)
        log.carried(f"llama_new_context_with_model: {name:>10} compute buffer size = {number:>8} MiB")


def _of_2025(log: _Log, cards: list[str], layers: tuple[int, int], settings: dict[str, int]) -> None:
    """``load_tensors`` and ``llama_context``."""
    log.carried(
        *(
            f"llama_model_load_from_file_impl: using device {name} (A Card) (0000:01:00.0) - 9000 MiB free"
            for name in cards
        ),
        "load_tensors: loading model tensors, this can take a while... (mmap = true)",
        f"load_tensors: offloaded {layers[0]}/{layers[1]} layers to GPU",
    )
    for name in ("CPU_Mapped", *cards):
        log.carried(f"load_tensors: {name:>12} model buffer size = {log.mebibytes('weights', name):>8} MiB")
    log.carried(
        "llama_context: constructing llama_context",
        f"llama_context: n_seq_max     = {settings['slots']}",
        f"llama_context: n_ctx         = {settings['context']}",
        f"llama_context: n_ctx_per_seq = {settings['context_per_slot']}",
    )
    for name in cards:
        log.carried(f"llama_kv_cache: {name:>10} KV buffer size = {log.mebibytes('kv', name):>8} MiB")
    for name in cards:
        log.carried(f"llama_context: {name:>10} compute buffer size = {log.mebibytes('compute', name, 900):>8} MiB")


# ---------------------------------------------------------------- releases


def _february_2024(rng: Random) -> Written:
    log, cards, layers = _Log(rng), _cards(rng), _layers(rng)
    context = rng.choice((2048, 4096))
    _start(log, "0.1.27")
    log.own("dyn_ext_server.go:90", "Loading Dynamic llm server: /tmp/ollama/cuda_v11/libext_server.so")
    _of_2024(log, cards, layers, context, mapped="CPU")
    log.own("dyn_ext_server.go:161", "Starting llama main loop")
    return log.written({"context": context, "layers_offloaded": layers[0], "layers_offloadable": layers[1]})


def _december_2024(rng: Random) -> Written:
    log, cards, layers, settings = _Log(rng), _cards(rng), _layers(rng), _settings(rng)
    library = cards[0].rstrip("0123456789").lower()
    _start(log, "0.5.4")
    whole, part = log.human(), log.human()
    log.own(
        "memory.go:356",
        f"offload to {library}",
        f'layers.requested=-1 layers.model={layers[1]} layers.offload={layers[0]} layers.split=""'
        f' memory.available="[9.0 GiB]" memory.gpu_overhead="0 B" memory.required.full="{" ".join(whole)}"'
        f' memory.required.partial="{" ".join(part)}" memory.required.kv="1.0 GiB"'
        f' memory.required.allocations="[{" ".join(part)}]" memory.weights.total="2.4 GiB"'
        ' memory.weights.repeating="2.1 GiB" memory.weights.nonrepeating="308.2 MiB"'
        ' memory.graph.full="424.0 MiB" memory.graph.partial="570.7 MiB"',
    )
    log.own(
        "server.go:376",
        "starting llama server",
        f'cmd="/usr/lib/ollama/ollama_llama_server runner --model /blobs/sha256-00 --ctx-size {settings["context"]}'
        f' --batch-size 512 --n-gpu-layers {layers[0]} --threads 8 --parallel {settings["slots"]} --port 38609"',
    )
    log.own("sched.go:449", "loaded runners", "count=1")
    _of_2024(log, cards, layers, settings["context"], mapped="CPU_Mapped")
    seconds = f"{rng.uniform(0.5, 60):.2f}"
    log.own("server.go:594", f"llama runner started in {seconds} seconds")
    partial = size(*part)
    assert partial is not None
    facts = {
        **settings,
        "batch": 512,
        "layers_offloaded": layers[0],
        "layers_offloadable": layers[1],
        "layers_requested": -1,
        "projected_device_bytes": partial[0],
        "boot_seconds": float(seconds),
        "build": "0.5.4",
    }
    return log.written(facts)


def _july_2025(rng: Random) -> Written:
    """Ollama's engine, which says what it holds as it loads; a trial says ``0 B`` first, and the cache is not told."""
    log, cards, layers, settings = _Log(rng), _cards(rng), _layers(rng), _settings(rng)
    _start(log, "0.9.6")
    log.own(
        "server.go:438",
        "starting llama server",
        f'cmd="/usr/bin/ollama runner --ollama-engine --model /blobs/sha256-00 --ctx-size {settings["context"]}'
        f' --batch-size 512 --n-gpu-layers {layers[0]} --threads 8 --parallel {settings["slots"]} --port 40123"',
    )
    log.own("ggml.go:116", "", 'architecture=mistral3 file_type=Q8_0 name="" description="" num_tensors=585')
    log.own("ggml.go:362", f"offloaded {layers[0]}/{layers[1]} layers to GPU")
    for name in (*cards, "CPU"):
        number, unit = log.human()
        log.entry("weights", name, number, unit)
        log.own("ggml.go:365", "model weights", f'buffer={name} size="{number} {unit}"')
    final = [(name, *log.human()) for name in cards]
    for name in cards:
        log.own("ggml.go:672", "compute graph", f'backend={name} buffer_type={name} size="0 B"')
    for name, number, unit in final:
        log.entry("compute", name, number, unit)
        log.own("ggml.go:672", "compute graph", f'backend={name} buffer_type={name} size="{number} {unit}"')
    log.own("ggml.go:672", "compute graph", 'backend=CPU buffer_type=CPU size="0 B"')
    log.own("server.go:637", f"llama runner started in {rng.uniform(0.5, 60):.2f} seconds")
    facts = {
        **settings,
        "layers_offloaded": layers[0],
        "layers_offloadable": layers[1],
        "architecture": "mistral3",
        "quantization": "Q8_0",
    }
    return log.written(facts)


def _sums(log: _Log, devices: list[str], *, counted: bool, level: str = "INFO") -> None:
    """The sums of Ollama's engine; of a trial, or of a prediction, they are not what the reader must find."""
    for kind, bucket in _KINDS:
        for name in devices:
            number, unit = log.human()
            if counted:
                log.entry(bucket, name, number, unit)
            log.own("device.go:240", kind, f'device={name} size="{number} {unit}"', level=level)
    log.own("device.go:272", "total memory", 'size="7.6 GiB"', level=level)


def _request(log: _Log, operation: str, settings: dict[str, int], planned: int, flash: str) -> None:
    log.own(
        "runner.go:895",
        "load",
        f'request="{{Operation:{operation} LoraPath:[] Parallel:{settings["slots"]} BatchSize:512'
        f" FlashAttention:{flash} KvSize:{settings['context']} KvCacheType: NumThreads:6"
        f" GPULayers:{planned}[ID:GPU-00 Layers:{planned}(0..28)]"
        ' MultiUserCache:false ProjectorPath: MainGPU:0 UseMmap:false}"',
    )


def _october_2025(rng: Random) -> Written:
    """Ollama's engine with a trial whose layout did not fit."""
    log, cards, layers, settings = _Log(rng), _cards(rng), _layers(rng), _settings(rng)
    _start(log, "0.12.6")
    log.own(
        "server.go:400", "starting runner", 'cmd="/usr/bin/ollama runner --ollama-engine --model /blobs/00 --port 4"'
    )
    log.own("sched.go:491", "gpu memory", 'id=GPU-00 library=CUDA available="10.3 GiB" free="10.7 GiB" overhead="0 B"')
    log.own("server.go:653", "loading model", f'"model layers"={layers[1]} requested=-1')
    _request(log, "fit", settings, layers[1], "Disabled")
    _sums(log, [*cards, "CPU"], counted=False, level="DEBUG")
    _request(log, "alloc", settings, layers[0], "Enabled")
    _request(log, "commit", settings, layers[0], "Enabled")
    log.own("ggml.go:482", f"offloaded {layers[0]}/{layers[1]} layers to GPU")
    _sums(log, [*cards, "CPU"], counted=True)
    log.own("server.go:1310", f"llama runner started in {rng.uniform(0.5, 60):.2f} seconds")
    facts = {
        **settings,
        "layers_offloaded": layers[0],
        "layers_offloadable": layers[1],
        "layers_requested": -1,
        "flash_attention": "enabled",
        "batch": 512,
    }
    return log.written(facts)


def _may_2026(rng: Random) -> Written:
    """A prediction by Ollama, then llama.cpp's own lines of the same buffers."""
    log, cards, layers, settings = _Log(rng), _cards(rng), _layers(rng), _settings(rng)
    _start(log, "0.20.2")
    log.own("server.go:432", "starting runner", 'cmd="/usr/bin/ollama runner --model /blobs/sha256-00 --port 40123"')
    log.own("server.go:499", "loading model", f'"model layers"={layers[1]} requested=-1')
    _sums(log, [*cards, "CPU"], counted=False)
    _request(log, "commit", settings, layers[0], "Auto")
    _of_2025(log, cards, layers, settings)
    log.own("server.go:1390", f"llama runner started in {rng.uniform(0.5, 60):.2f} seconds")
    return log.written({**settings, "layers_offloaded": layers[0], "layers_offloadable": layers[1], "batch": 512})


def _july_2026(rng: Random) -> Written:
    """llama-server as a process of its own."""
    log, cards, layers, settings = _Log(rng), _cards(rng), _layers(rng), _settings(rng)
    _start(log, "0.32.2")
    log.own(
        "llama_server.go:433",
        "starting llama-server",
        f'cmd="/usr/lib/ollama/llama-server --host 127.0.0.1 --port 40123 --model /blobs/sha256-00'
        f" -c {settings['context']} -np {settings['slots']} --log-verbosity 4 --no-log-prefix --no-log-timestamps"
        ' -b 512 --flash-attn auto"',
    )
    log.own("llama_server.go:1048", "loading model via llama-server", "model=/blobs/sha256-00")
    _of_2025(log, cards, layers, settings)
    log.carried("main: model loaded", "main: server is listening on http://127.0.0.1:40123")
    log.own("llama_server.go:1362", f"llama-server started in {rng.uniform(0.5, 60):.2f} seconds")
    facts = {**settings, "layers_offloaded": layers[0], "layers_offloadable": layers[1], "build": "0.32.2"}
    return log.written(facts)


def _too_large_for_the_host(rng: Random) -> Written:
    log = _Log(rng)
    _start(log, "0.12.6")
    log.own("sched.go:484", "system memory", 'total="15.5 GiB" free="3.4 GiB" free_swap="0 B"')
    log.own("server.go:400", "starting runner", 'cmd="/usr/bin/ollama runner --model /blobs/00 --port 4"')
    error = f"model requires more system memory ({rng.uniform(4, 90):.1f} GiB) than is available (3.4 GiB)"
    log.own("sched.go:511", "Load failed", f'model=/blobs/00 error="{error}"')
    return log.written({}, ready=False, failure="precheck")


WRITERS: dict[str, Callable[[Random], Written]] = {
    "2024-02": _february_2024,
    "2024-12": _december_2024,
    "2025-07": _july_2025,
    "2025-10": _october_2025,
    "2026-05": _may_2026,
    "2026-07": _july_2026,
    "too-large": _too_large_for_the_host,
}

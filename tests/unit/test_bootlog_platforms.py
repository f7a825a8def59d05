"""Servers in Python on devices that are no GPUs of NVIDIA: plugins' own words, and what devices are called."""

from __future__ import annotations

import pytest

from pytest_vram.bootlog import Boot, read

GIB = 1 << 30
MIB = 1 << 20
AT = "(EngineCore pid=41) INFO 04-15 06:30:01"
LOADED = f"{AT} [model_runner.py:1879] Loading model weights took 1.1250 GB"
ROOM = f"{AT} [worker.py:300] Available KV cache memory: 53.50 GiB"
SUMMARY = (
    f"{AT} [worker.py:575] Free memory on device (60.86/61.27 GiB) on startup. Desired GPU memory utilization is (0.9,"
    " 55.14 GiB). Actual usage: 1.13 GiB for weights, 0.22 GiB for peak activation, 0.13 GiB for non-torch memory,"
    " 0.04 GiB for NPU graph memory. Replace gpu_memory_utilization with `--kv-cache-memory=57403864576` (53.46 GiB) to"
    " fit into requested memory, or more. Current KV cache memory: 53.5 GiB. After warmup: torch reserved memory 54.9"
    " GiB, torch allocated memory 54.8 GiB."
)


def boot(*lines: str, engine: str = "vllm") -> Boot:
    return read("\n".join(lines) + "\n", engine=engine)


def gib(number: str) -> int:
    return round(float(number) * GIB)


def test_summary_of_a_plugin() -> None:
    """What a plugin says is in use is read in its own words, each buffer once, and its devices have their own name."""
    found = boot(LOADED, ROOM, SUMMARY, "INFO:     Application startup complete.")
    assert found.buckets == {
        "weights": {"gpu0": gib("1.125")},
        "kv": {"gpu0": gib("53.5")},
        "context": {"gpu0": gib("0.13")},
        "compute": {"gpu0": gib("0.22") + gib("0.04")},
    }
    assert (found.devices, found.evidence) == ({"gpu0": "NPU0"}, "complete")


def test_cache_of_a_summary_alone() -> None:
    """Where no other line of the cache is there, the summary's counts."""
    assert boot(SUMMARY).buckets["kv"] == {"gpu0": gib("53.5")}


def test_use_without_a_bucket() -> None:
    """Memory in use for something that is not known is said and not dropped."""
    found = boot(ROOM, SUMMARY.replace("0.04 GiB for NPU graph memory", "2.5 GiB for expert relay buffers"))
    assert any("2.5 GiB for expert relay buffers" in warning for warning in found.warnings)
    assert found.buckets["compute"] == {"gpu0": gib("0.22")}


def test_intel_cards_until_2025() -> None:
    """The peak that is printed for Intel's cards is of weights and the rest too: activations are what is left of it."""
    found = boot(
        "(EngineCore_0 pid=7) INFO 11-06 18:41:08 [gpu_model_runner.py:2018] Model loading took 12.5000 GiB and 5.05"
        " seconds",
        "(EngineCore_0 pid=7) INFO 11-06 18:41:09 [xpu_worker.py:104] Before memory profiling run, total GPU memory:"
        " 65520.00 MB, model load takes 12800.00 MB, free gpu memory is 52435.44 MB.",
        "(EngineCore_0 pid=7) INFO 11-06 18:41:10 [xpu_worker.py:139] After memory profiling run, peak memory usage is"
        " 13552.75 MB,torch mem is 12800.25 MB, non-torch mem is 426.50 MB, free gpu memory is 51896.32 MB.",
        "(EngineCore_0 pid=7) INFO 11-06 18:41:10 [kv_cache_utils.py:849] GPU KV cache size: 90,816 tokens",
    )
    assert found.buckets == {
        "weights": {"gpu0": gib("12.5")},
        "context": {"gpu0": round(426.5 * MIB)},
        "compute": {"gpu0": 326 * MIB},
    }
    assert (found.devices, found.facts["device_bytes"]) == ({"gpu0": "XPU0"}, 65520 * MIB)


def test_gaudi() -> None:
    """Sizes with four significant digits, of the profiled run, the cache and the warm-up."""
    found = boot(
        f"{AT} [__init__.py:216] Platform plugin hpu is activated",
        f"{AT} [hpu_model_runner.py:4814] Loading model weights took 14.9688 GB",
        f"{AT} [hpu_worker.py:403] Model profiling run took 504 MiB of device memory (15.95 GiB/94.62 GiB used) and 180.4"
        " MiB of host memory (475.4 GiB/1007 GiB used)",
        f"{AT} [hpu_worker.py:431] Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83"
        " GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 10 MiB reserved for KV cache dummy block 23.5 GiB"
        " reserved for usable KV cache",
        f"{AT} [hpu_model_runner.py:6308] Warmup finished in 49 secs, allocated 14.25 GiB of device memory",
        "INFO:     Application startup complete.",
    )
    assert found.buckets == {
        "weights": {"gpu0": gib("14.9688")},
        "kv": {"gpu0": gib("23.5")},
        "compute": {"gpu0": 504 * MIB + gib("14.25")},
    }
    resolutions = {entry.detail: entry.resolution for entry in found.entries}
    assert resolutions["model profiling run"] == round(0.05 * MIB)
    assert (found.devices, found.evidence) == ({"gpu0": "HPU0"}, "complete")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{AT} [__init__.py:216] Automatically detected platform cuda.", "CUDA0"),
        (f"{AT} [__init__.py:216] Automatically detected platform rocm.", "ROCm0"),
        (f"{AT} [__init__.py:216] Platform plugin ascend is activated", "NPU0"),
        (f"{AT} [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='m', device_config=cuda", "CUDA0"),
        (f"{AT} [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='m', device_config=npu", "NPU0"),
        (f"{AT} [core.py:1] Chunked prefill is enabled with max_num_batched_tokens=2048", "GPU0"),
        ("(EngineCore pid=41) ERROR 04-15 06:31:00 [core.py:9] RuntimeError: NPU out of memory. Tried to allocate 22.00"
         " MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated; 19.79 MiB free; 10.65 GiB reserved in total"
         " by PyTorch)", "NPU0"),
        ("(EngineCore pid=41) ERROR 04-15 06:31:00 [core.py:9] torch.OutOfMemoryError: HIP out of memory. Tried to"
         " allocate 22.00 MiB. GPU 0 has a total capacity of 23.98 GiB of which 0 bytes is free.", "ROCm0"),
    ],
)  # fmt: skip
def test_name_of_a_device(line: str, name: str) -> None:
    """A device is called what the log says that it is, and nothing in particular where the log does not say."""
    assert boot(line, ROOM).devices == {"gpu0": name}


def test_cards_of_amd_that_torch_calls_cuda() -> None:
    """A server on cards of AMD says so once, and then calls them what torch does."""
    config = f"{AT} [core.py:1] Initializing a V1 LLM engine (v0.11.1) with config: model='m', device_config=cuda"
    assert boot(f"{AT} [__init__.py:225] Automatically detected platform rocm.", config, ROOM).devices == {
        "gpu0": "ROCm0"
    }


@pytest.mark.parametrize(("graph", "name"), [("cuda", "CUDA0"), ("NPU", "NPU0"), ("XPU", "XPU0")])
def test_devices_of_sglang(graph: str, name: str) -> None:
    """SGLang names the kind of device in its arguments, or with its graphs."""
    lines = [
        "[2026-06-08 10:00:01] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=20.00 GB, mem"
        " usage=4.25 GB.",
        f"[2026-06-08 10:00:02] Capture {graph} graph end. Time elapsed: 1.00 s. mem usage=0.50 GB. avail mem=5.00 GB.",
    ]
    assert boot(lines[0], engine="sglang").devices == {"gpu0": "GPU0"}
    assert boot(*lines, engine="sglang").devices == {"gpu0": name}
    arguments = f"[2026-06-08 10:00:00] server_args=ServerArgs(model_path='m', device='{graph.lower()}', tp_size=1)"
    assert boot(arguments, lines[0], engine="sglang").devices == {"gpu0": name}

"""Boot logs of the real server, read back: every recorded log against the facts that were read off it by eye."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.bootlog import Boot, Follower, read

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs"
RECORDED = sorted(LOGS.rglob("*.log"))
ERA = LOGS / "llama-server" / "2026-b10068"
MIB = 1 << 20


def log(name: str) -> Path:
    return ERA / f"{name}.log"


def text(name: str) -> str:
    return log(name).read_text(encoding="utf-8")


def printed(mib: str) -> int:
    return round(float(mib) * MIB)


def as_expected(boot: Boot, expected: dict[str, Any]) -> dict[str, Any]:
    failure = None
    if boot.failure is not None:
        found = {"kind": boot.failure.kind, "phase": boot.failure.phase, "bucket": boot.failure.bucket}
        found |= {"device": boot.failure.device, "bytes": boot.failure.bytes}
        failure = {key: value for key, value in found.items() if value is not None}
    return {
        "engine": boot.engine,
        "era": boot.era,
        "evidence": boot.evidence,
        "ready": boot.ready,
        "phases": [span.name for span in boot.phases],
        "devices": boot.devices,
        "buckets": boot.ledger().buckets(),
        "facts": {key: boot.facts.get(key) for key in expected["facts"]},
        "failure": failure,
        "warnings": list(boot.warnings),
    }


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_log(path: Path) -> None:
    """Each recorded log reads as the facts beside it say."""
    expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert as_expected(read(path), expected) == expected


def test_logs_are_ours_to_publish() -> None:
    """Recorded logs hold no path of the machine that they were made on."""
    assert len(RECORDED) > 20
    for path in RECORDED:
        assert not any(sign in path.read_text(encoding="utf-8") for sign in ("/tmp", "/root", "/home", "/work/"))


def test_printed_figures() -> None:
    """SmolLM2 at a context of 4096 with an f16 cache has the 90.00 MiB of KV cache that the engine prints."""
    buckets = read(log("rpc")).ledger().buckets()
    assert buckets["kv"] == {"gpu0": 90 * MIB}
    assert buckets["weights"] == {"gpu0": printed("92.10"), "host": printed("28.69")}
    assert buckets["compute"] == {"gpu0": printed("16.38"), "host": printed("6.26") + printed("0.19")}


def test_resolution() -> None:
    """A figure printed with two decimals is known to half of the last one."""
    assert {entry.resolution for entry in read(log("rpc")).entries} == {round(0.005 * MIB)}


def test_mapped_file_is_host() -> None:
    """Weights that are mapped from the file are on the host and named as mapped."""
    boot = read(log("cpu"))
    weights = [entry for entry in boot.entries if entry.bucket == "weights"]
    assert [(entry.device, entry.detail) for entry in weights] == [("host", "CPU_Mapped model buffer")]
    assert boot.devices == {"host": "CPU"}


def test_offload_line_alone_is_not_believed() -> None:
    """Without a model buffer on a device no layer is there, whatever the engine says of offloading."""
    boot = read(log("cpu"))
    assert (boot.facts["layers_offloaded"], boot.facts["layers_on_device_real"]) == (31, 0)
    assert any("no buffer of the model is on a device" in warning for warning in boot.warnings)


def test_two_remote_devices() -> None:
    """Two RPC servers are two devices although both call their buffers RPC0."""
    boot = read(log("two-rpc-q8"))
    assert boot.devices == {"gpu0": "RPC0[127.0.0.1:50124]", "gpu1": "RPC0[127.0.0.1:50125]", "host": "CPU"}
    assert boot.ledger().buckets()["kv"] == {"gpu0": printed("25.50"), "gpu1": printed("22.31")}


def test_two_devices_of_one_endpoint() -> None:
    """Two devices of one RPC server stay apart, under the labels in which they were announced."""
    boot = read(
        "using device RPC0 (127.0.0.1:5) (unknown id) - 1 MiB free\n"
        "using device RPC1 (127.0.0.1:5) (unknown id) - 1 MiB free\n"
        "load_tensors: loading model tensors\n"
        "load_tensors: RPC1[127.0.0.1:5] model buffer size =     1.00 MiB\n"
        "load_tensors: RPC0[127.0.0.1:5] model buffer size =     2.00 MiB\n",
        engine="llama-server",
    )
    assert boot.ledger().buckets()["weights"] == {"gpu1": 1 * MIB, "gpu0": 2 * MIB}


def test_sliding_window_caches_add_up() -> None:
    """The two caches of a sliding-window model are summed."""
    boot = read(log("sliding-window"))
    assert boot.ledger().buckets()["kv"] == {"gpu0": printed("4.00") + printed("2.50")}
    assert (boot.facts["kv_cells"], boot.facts["kv_cells_sliding"]) == (8192, 1024)


def test_dry_run_is_not_counted() -> None:
    """The trial load of `--fit`, whose buffers a verbose log prints as well, changes nothing."""
    verbose, plain = read(log("verbose-dry-run")), read(log("sliding-window"))
    assert text("verbose-dry-run").count("KV buffer size") == 2 * text("sliding-window").count("KV buffer size")
    assert verbose.entries == plain.entries


def test_reserving_again_replaces() -> None:
    """Compute buffers that are reserved anew are not counted twice."""
    assert text("moe-cpu-2-lora").count("CPU compute buffer size") == 2
    buckets = read(log("moe-cpu-2-lora")).ledger().buckets()
    assert buckets["compute"] == {"gpu0": printed("11.04"), "host": printed("8.51")}
    assert buckets["lora"] == {"gpu0": printed("0.03")}


def test_draft_model() -> None:
    """A draft model's weights, cache and buffers are the bucket `draft`, even where it is the same file."""
    buckets = read(log("draft")).ledger().buckets()
    assert buckets["kv"] == {"gpu0": printed("22.50")}
    assert buckets["draft"]["gpu0"] == printed("92.10") + printed("22.50") + printed("13.38")


def test_second_context_of_a_model_is_a_draft() -> None:
    """A second context without a load of its own (multi-token prediction) adds to `draft`."""
    lines = text("rpc").split("\n")
    start = next(i for i, line in enumerate(lines) if "constructing llama_context" in line)
    end = next(i for i, line in enumerate(lines) if "reserve took" in line)
    twice = lines[: end + 1] + lines[start : end + 1] + lines[end + 1 :]
    once, both = read(log("rpc")), read("\n".join(twice))
    context = {"gpu0": 90 * MIB + printed("16.38"), "host": printed("6.26") + printed("0.19")}
    assert both.ledger().buckets()["draft"] == context
    assert both.ledger().buckets()["kv"] == once.ledger().buckets()["kv"]


def test_waking_up_replaces_the_first_load() -> None:
    """A model that is loaded again after sleep replaces its first load, and its phases follow."""
    boot = read(log("sleeping"))
    assert text("sleeping").count("CPU KV buffer size") == 2
    assert boot.ledger().buckets()["kv"] == {"host": printed("22.50")}
    names = [span.name for span in boot.phases]
    assert names.count("weights") == names.count("ready") == names.count("sleep") == 2


def test_another_model_without_a_word_is_a_draft() -> None:
    """A second model of another file, loaded in the same boot, is a draft model."""
    target = "load: loaded meta data with 3 key-value pairs and 2 tensors from {}.gguf (version GGUF V3 (latest))\n"
    body = "loading model tensors\nload_tensors: CUDA0 model buffer size = {} MiB\n"
    boot = read(target.format("a") + body.format("2.00") + target.format("b") + body.format("1.00"))
    assert boot.ledger().buckets() == {"weights": {"gpu0": 2 * MIB}, "draft": {"gpu0": 1 * MIB}}
    again = read(target.format("a") + body.format("2.00") + target.format("a") + body.format("1.00"))
    assert again.ledger().buckets() == {"weights": {"gpu0": 1 * MIB}}


def test_projector() -> None:
    """A vision encoder's weights and compute buffer are the bucket `projector`."""
    boot = read(
        "load_tensors: loading model tensors\n"
        "load_tensors: CUDA0 model buffer size = 100.00 MiB\n"
        "llama_context: constructing llama_context\n"
        "sched_reserve: reserving ...\n"
        "sched_reserve: CUDA0 compute buffer size = 10.00 MiB\n"
        "clip_ctx: CLIP using CUDA0 backend\n"
        "load_hparams: model size:         7.00 MiB\n"
        "alloc_compute_meta:      CUDA0 compute buffer size =     3.00 MiB\n"
        "alloc_compute_meta:        CPU compute buffer size =     0.50 MiB\n"
    )
    buckets = boot.ledger().buckets()
    assert buckets["projector"] == {"gpu0": 10 * MIB, "host": MIB // 2}
    assert buckets["compute"] == {"gpu0": 10 * MIB}


def test_names_of_last_year() -> None:
    """Function names do not matter: the phrases of 2024 and 2025 read the same."""
    boot = read(
        "llm_load_tensors: offloaded 33/33 layers to GPU\n"
        "load_tensors: loading model tensors, this can take a while... (mmap = true)\n"
        "load_tensors:   CPU_Mapped model buffer size =    70.31 MiB\n"
        "load_tensors:        CUDA0 model buffer size =  4095.05 MiB\n"
        "llama_context: constructing llama_context\n"
        "llama_context: n_ctx_per_seq = 4096\n"
        "llama_context:  CUDA_Host  output buffer size =     0.49 MiB\n"
        "llama_kv_cache_unified:      CUDA0 KV buffer size =   512.00 MiB\n"
        "llama_context:      CUDA0 compute buffer size =   296.00 MiB\n"
        "llama_context:  CUDA_Host compute buffer size =    16.01 MiB\n"
        "main: server is listening on http://127.0.0.1:8080 - starting the main loop\n"
    )
    assert boot.era == "2025"
    assert boot.evidence == "complete"
    assert boot.ledger().buckets() == {
        "weights": {"host": printed("70.31"), "gpu0": printed("4095.05")},
        "kv": {"gpu0": 512 * MIB},
        "compute": {"host": printed("0.49") + printed("16.01"), "gpu0": 296 * MIB},
    }
    assert [span.name for span in boot.phases] == ["start", "weights", "kv", "reserve", "ready"]


def test_quiet_log_is_no_evidence() -> None:
    """A log at the default verbosity is no evidence, and the warning names the option that helps."""
    boot = read(log("quiet"))
    assert (boot.evidence, boot.entries, boot.ready) == ("none", (), True)
    assert "-lv 4" in boot.warnings[-1]


def test_recovered_allocation() -> None:
    """An allocation that the engine recovers from is a warning and not a failure."""
    lines = text("rpc").split("\n")
    at = next(i for i, line in enumerate(lines) if "RPC0" in line and "compute buffer size" in line)
    lines[at:at] = [
        "0.01.500.000 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed:"
        " out of memory",
        "0.01.500.100 E graph_reserve: failed to allocate compute buffers",
        "0.01.500.200 W sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
    ]
    boot = read("\n".join(lines))
    assert boot.failure is None
    assert boot.evidence == "complete"
    assert any("retrying without pipeline parallelism" in warning for warning in boot.warnings)


def test_what_fit_changed_is_a_warning() -> None:
    """A context or layers that `--fit` cut down without being told to are warnings, though printed as information."""
    boot = read(log("fit-reduced"))
    assert any("context size reduced from 8192 to 4096" in warning for warning in boot.warnings)
    assert (boot.facts["context"], boot.facts["context_reduced_from"]) == (4096, 8192)
    assert (boot.facts["layers_offloaded"], boot.facts["layers_offloadable"]) == (22, 31)
    assert any("n_gpu_layers already set by user" in warning for warning in read(log("fit-failed")).warnings)


def test_unreachable_device_is_a_warning() -> None:
    """A remote device that cannot be reached is a warning: the engine goes on without it, on the CPU."""
    boot = read(log("fail-rpc-absent"))
    assert boot.ready
    assert "Failed to connect to 127.0.0.1:1" in boot.warnings


def test_cuda_out_of_memory() -> None:
    """A failed cudaMalloc names its device and size, and the later line its bucket."""
    boot = read(
        "load_tensors: loading model tensors\n"
        "llama_context: constructing llama_context\n"
        "allocating 512.00 MiB on device 1: cudaMalloc failed: out of memory\n"
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n",
        engine="llama-server",
    )
    assert boot.failure is not None
    assert (boot.failure.kind, boot.failure.bucket, boot.failure.bytes) == ("out_of_memory", "kv", 512 * MIB)
    assert boot.failure.device is not None
    assert boot.devices[boot.failure.device] == "CUDA1"


def test_out_of_memory_after_ready() -> None:
    """A server that runs out of memory while serving has failed, though it had been ready."""
    boot = read(text("rpc").replace("cleaning up before exit", "") + "\nCUDA error: out of memory\n")
    assert boot.ready
    assert boot.failure is not None
    assert boot.failure.kind == "out_of_memory"


def test_user_text_is_not_the_engine() -> None:
    """Lines inside a chat template are not read as the engine's words."""
    lines = text("rpc").split("\n")
    at = next(i for i, line in enumerate(lines) if line == "Hi there<|im_end|>")
    lines[at:at] = ["sched_reserve: CUDA7 compute buffer size = 9999.00 MiB", "failed to load model, said the user"]
    assert read("\n".join(lines)).entries == read(log("rpc")).entries
    assert read("\n".join(lines)).failure is None


def test_terminal_colours() -> None:
    """Colours that the engine prints on a terminal do not hide its lines."""
    coloured = "\n".join(f"\x1b[32m{line}\x1b[0m" for line in text("rpc").split("\n"))
    assert read(coloured).entries == read(log("rpc")).entries


def test_phase_times() -> None:
    """Phases carry the log's own clock, each ending where the next begins."""
    spans = read(log("rpc")).phases
    assert [span.start for span in spans] == sorted(span.start or 0 for span in spans)
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert spans[0].start == 0.010172


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_follower_agrees(path: Path) -> None:
    """Following a log line by line announces the phases that reading it whole finds."""
    whole = path.read_text(encoding="utf-8")
    boot = read(whole)
    follower = Follower(boot.engine)
    found = [phase for line in whole.split("\n") if (phase := follower.feed(line)) is not None]
    assert found == [span.name for span in boot.phases]
    assert follower.boot() == boot


def test_request_lines_do_not_move_phases() -> None:
    """What slots print of requests begins no phase and is no fact."""
    follower = Follower("llama-server")
    for line in text("rpc").split("\n"):
        if "cleaning up" in line:
            break
        follower.feed(line)
    before = follower.boot()
    assert follower.feed("0.09.000.000 I slot launch_slot_: id  0 | task 1 | new prompt, n_ctx = 17") is None
    assert follower.boot() == before

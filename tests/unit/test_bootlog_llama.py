"""llama.cpp's logs of all eras: what the reader makes of lines that are easily misread."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pytest_vram.bootlog import Boot, Failure, read
from pytest_vram.bootlog.devices import Labels
from pytest_vram.bootlog.llama_cpp import LlamaCpp
from pytest_vram.bootlog.llama_lines import WORDS
from pytest_vram.ledger import Ledger
from pytest_vram.testing.bootlogs.llama import WRITERS

MIB = 1 << 20
LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs"
RECORDED = sorted(path for name in ("llama-server", "ik_llama", "koboldcpp") for path in (LOGS / name).rglob("*.log"))

USING = "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 4070) (0000:06:00.0) - 10430 MiB free"
WEIGHTS = (
    "load_tensors: loading model tensors, this can take a while...\nload_tensors: CUDA0 model buffer size = 6000.00 MiB"
)
CONTEXT = "llama_context: constructing llama_context\nllama_context: n_ctx         = 4096"
CACHE = (
    "llama_kv_cache: CUDA0 KV buffer size = 512.00 MiB\n"
    "llama_kv_cache: size = 512.00 MiB (  4096 cells,  32 layers,  1/1 seqs), K (f16): 256.00 MiB, V (f16): 256.00 MiB"
)
COMPUTE = "sched_reserve: reserving ...\nsched_reserve: CUDA0 compute buffer size = 300.00 MiB"
READY = "main: model loaded\nsrv  update_slots: all slots are idle"
REFUSED = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144.00 MiB on device 0: cudaMalloc failed: out of memory"
)


def boot(*parts: str, engine: str = "llama-server") -> Boot:
    return read("\n".join(parts) + "\n", engine=engine)


def failure(*parts: str) -> Failure:
    found = boot(*parts).failure
    assert found is not None
    return found


def prefixed(text: str, *, level: str = "I") -> str:
    return "\n".join(f"0.00.{index:03d}.000 {level} {line}" for index, line in enumerate(text.split("\n")))


# ---------------------------------------------------------------- written logs


@pytest.mark.parametrize("era", WRITERS)
def test_written_logs(era: str) -> None:
    """A log that was made of random figures reads back to these, with its engine, devices, facts and failure."""
    for seed in range(12):
        written = WRITERS[era](Random(seed))
        found = read(written.text)
        assert found.buckets == Ledger(entries=written.entries).buckets()
        assert (found.engine, found.ready, found.devices) == (written.engine, written.ready, written.devices)
        assert {key: found.facts.get(key) for key in written.facts} == written.facts
        assert (found.failure and found.failure.kind) == written.failure


def test_eras() -> None:
    """Each era is told by its phrases."""
    eras = {era: read(writer(Random(1)).text).era for era, writer in WRITERS.items()}
    assert {era: found for era, found in eras.items() if found != era} == {
        "2023-12": "2023-11",
        "2026-table": "",
        "koboldcpp-2023": "2023-11",
        "koboldcpp-2024": "2024",
        "ik_llama": "2024",
        "router": "2025",
    }


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_lines_without_words(path: Path) -> None:
    """Leaving out the lines in which no word of the grammar is found changes nothing."""
    whole, some = LlamaCpp("llama-server", {}), LlamaCpp("llama-server", {})
    for line in path.read_text(encoding="utf-8").split("\n"):
        whole.feed(line)
        if WORDS.search(line):
            some.feed(line)
        else:
            some.skip(1)
    assert some.boot() == whole.boot()


def test_words_are_rare_in_requests() -> None:
    """What a server prints for each token at full verbosity holds no word, so that a reader need not look at it."""
    for line in (
        "slot process_toke: id  0 | task 9 | n_gen =      7, n_remaining = -1, next token:   284 ' ='",
        "srv  update_slots: run slots completed",
        "srv          send: sending result for task id = 9",
        'srv    operator(): http: streamed chunk: data: {"choices":[{"index":0,"delta":{"content":" the"}}]}',
        "que    start_loop: waiting for new tasks",
    ):
        assert WORDS.search(f"1.02.003.004 D {line}") is None


# ---------------------------------------------------------------- 2023


def test_last_two_layers_are_the_cache() -> None:
    """With 64 of 65 "layers" the V half of the cache is on the device, with 65 the K half too; the rest is scratch."""
    caches = {}
    for layers in (60, 64, 65):
        buckets = read(LOGS / "koboldcpp" / "2023-10" / f"layers-{layers}.log").buckets
        caches[layers] = (buckets["kv"].get("gpu0", 0) // MIB, buckets["compute"]["gpu0"] // MIB)
    assert caches == {60: (0, 686), 64: (4960, 686), 65: (9920, 686)}


def test_sum_of_a_context_is_not_taken_apart_by_guess() -> None:
    """Where only the sum of cache and scratch was printed, it stays one figure, of neither bucket."""
    found = boot("llama_new_context_with_model: total VRAM used: 16372.54 MB (model: 10726.53 MB, context: 5646.00 MB)")
    assert found.evidence == "partial"
    assert found.buckets == {"weights": {"gpu0": round(10726.53 * MIB)}, "other": {"gpu0": 5646 * MIB}}


def test_sums_over_several_cards() -> None:
    """Sums of a build that found several cards are those of all of them together, and a warning says so."""
    found = boot(
        "ggml_init_cublas: found 2 CUDA devices:",
        "llm_load_tensors: VRAM used: 3820.93 MiB",
        "llama_new_context_with_model: VRAM scratch buffer: 291.93 MiB",
    )
    assert found.devices == {"gpu0": "CUDA (2 devices together)"}
    assert any("lies on several devices" in warning for warning in found.warnings)


# ---------------------------------------------------------------- devices


def test_rows_on_several_devices() -> None:
    """Weights whose rows lie on several devices belong to none of them alone."""
    found = boot(
        "llm_load_tensors:  CUDA_Split buffer size =  9000.00 MiB",
        "llm_load_tensors:      CUDA0 buffer size =     1.00 MiB",
        "llm_load_tensors:      CUDA1 buffer size =     1.00 MiB",
    )
    assert found.devices == {"gpu2": "CUDA_Split", "gpu0": "CUDA0", "gpu1": "CUDA1"}
    assert any("CUDA_Split lies on several devices" in warning for warning in found.warnings)
    alone = boot(USING, "load_tensors:  CUDA_Split model buffer size =  9000.00 MiB")
    assert alone.buckets == {"weights": {"gpu0": 9000 * MIB}}


def test_shares_of_devices() -> None:
    """Where ik_llama.cpp prints how much of a split buffer is on which device, each device has its share."""
    found = boot(
        "Estimated model buffer size per device:",
        "    Device 0:   6000.00 MiB",
        "    Device 1:   3000.00 MiB",
        "llm_load_tensors: CUDA_Split buffer size =  9000.00 MiB",
        "llama_kv_cache_init: CUDA_Split KV buffer size =   100.00 MiB",
        "llama_kv_cache_init: KV cache size per device:",
        "    Device 0:  60 MiB",
        "    Device 1:  40 MiB",
        "llama_new_context_with_model: KV self size  =  100.00 MiB, K (f16):   50.00 MiB, V (f16):   50.00 MiB",
    )
    by_name = {
        bucket: {found.devices[label]: size // MIB for label, size in row.items()}
        for bucket, row in found.buckets.items()
    }
    assert by_name["kv"] == {"CUDA0": 60, "CUDA1": 40}
    assert by_name["weights"] == {"CUDA0": 6000, "CUDA1": 3000}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("CUDA_Host", "host"),
        ("CPU_Mapped", "host"),
        ("CPU_REPACK", "host"),
        ("Vulkan_Host", "host"),
        ("HTP0-REPACK", "gpu0"),
        ("MTL0_Mapped", "gpu0"),
        ("SYCL0", "gpu0"),
        ("CANN0", "gpu0"),
        ("Meta(CUDA0,CUDA1)", "gpu0"),
    ],
)
def test_kinds_of_buffers(name: str, label: str) -> None:
    """Pinned, mapped and repacked host buffers are the host's; everything else is a device, in any flavour."""
    assert Labels().of(name) == label


def test_decimal_commas() -> None:
    """A server under a locale with decimal commas prints the same figures."""
    parts = (USING, WEIGHTS, CONTEXT, CACHE, COMPUTE, READY)
    with_commas = [part.replace(".00 MiB", ",00 MiB") for part in parts]
    assert boot(*with_commas) == boot(*parts)


# ---------------------------------------------------------------- contexts, loads, processes


def test_lines_said_twice() -> None:
    """A line that begins a load or a context, and is there twice, begins it once."""
    parts = [*WEIGHTS.split("\n"), *CONTEXT.split("\n"), *CACHE.split("\n"), *COMPUTE.split("\n"), *READY.split("\n")]
    once = boot(*parts)
    for index, line in enumerate(parts):
        if "buffer size" not in line and " size = " not in line:
            assert boot(*parts[:index], line, *parts[index:]).buckets == once.buckets


def test_draft_context_that_is_freed() -> None:
    """In 2025 the draft's first context was freed before each slot got one of its own: it does not count."""
    draft = (
        "srv    load_model: loading draft model 'd.gguf'",
        WEIGHTS.replace("6000", "100"),
        CONTEXT,
        CACHE.replace("512", "10").replace("256", "5"),
        COMPUTE.replace("300", "20"),
    )
    context = (CONTEXT, CACHE.replace("512", "6").replace("256", "3"), COMPUTE.replace("300", "30"))
    slots = ("srv          init: initializing slots, n_slots = 2", *context, *context)
    found = boot(WEIGHTS, CONTEXT, CACHE, COMPUTE, *draft, *slots, READY)
    assert found.buckets["draft"] == {"gpu0": (100 + 2 * (6 + 30)) * MIB}
    assert found.buckets["kv"] == {"gpu0": 512 * MIB}


def test_embeddings_model_beside() -> None:
    """koboldcpp's model for embeddings is no draft: it adds to the buckets of the model beside it."""
    found = boot(
        "llama_model_loader: loaded meta data with 3 key-value pairs and 2 tensors from a.gguf (version GGUF V3)",
        WEIGHTS,
        "Loading Embeddings Model: b.gguf",
        "llama_model_loader: loaded meta data with 3 key-value pairs and 2 tensors from b.gguf (version GGUF V3)",
        WEIGHTS.replace("6000", "500"),
    )
    assert found.buckets == {"weights": {"gpu0": 6500 * MIB}}


def test_projector_before_the_model() -> None:
    """A projector that was loaded first, whose device then had no number, is the model's, on its device."""
    found = boot(
        "clip_model_load: CLIP using CUDA backend",
        "clip_model_load: model size:     595.49 MB",
        "clip_model_load: params backend buffer size =  595.49 MB (377 tensors)",
        "clip_model_load: compute allocated memory: 32.89 MB",
        "llama_model_loader: loaded meta data with 3 key-value pairs and 2 tensors from a.gguf (version GGUF V3)",
        "llm_load_tensors:      CUDA0 buffer size =   702.19 MiB",
    )
    assert found.buckets["projector"] == {"gpu0": round(595.49 * MIB) + round(32.89 * MIB)}
    assert found.devices == {"gpu0": "CUDA0"}


def test_caches_of_summaries() -> None:
    """Caches beside the raw one add to the bytes, and their cells are not taken for those of a sliding window."""
    found = boot(
        CONTEXT,
        "llama_kv_cache_dsv4: creating DSV4 raw KV cache",
        "llama_kv_cache_iswa: creating     SWA KV cache, size = 4352 cells",
        "llama_kv_cache:      CUDA0 KV buffer size =   182.75 MiB",
        "llama_kv_cache: size =  182.75 MiB (  4352 cells,  43 layers,  1/1 seqs), K (f16):  182.75 MiB, V (f16):    0.00 MiB",
        "llama_kv_cache_dsv4: creating DSV4 CSA compressed KV cache, size = 16000 cells",
        "llama_kv_cache:      CUDA0 KV buffer size =    10.00 MiB",
        "llama_kv_cache: size =   10.00 MiB ( 16000 cells,  21 layers,  1/1 seqs), K (f16):   10.00 MiB, V (f16):    0.00 MiB",
        "llama_dsv4_comp_state:      CUDA0 DSV4 csa state buffer size =     1.31 MiB",
    )
    assert found.facts["kv_bytes"] == round(192.75 * MIB)
    assert (found.facts["kv_cells"], found.facts["kv_layers"]) == (4352, 43)
    assert found.buckets["kv"] == {"gpu0": round(182.75 * MIB) + 10 * MIB + round(1.31 * MIB)}


def test_table_and_lines() -> None:
    """The table at the end is no second report of buffers whose lines were printed; its rest is a fact."""
    found = read(LOGS / "llama-server" / "2025" / "decimal-commas-and-table.log")
    alone = read(LOGS / "llama-server" / "2025" / "table-only.log")
    assert found.buckets["weights"]["gpu0"] == round(4095.05 * MIB)
    assert alone.buckets["weights"]["gpu0"] == 4095 * MIB
    assert {entry.resolution for entry in alone.entries} == {MIB}
    assert found.facts["unaccounted_bytes"] == alone.facts["unaccounted_bytes"] == {"gpu0": 460 * MIB}
    assert (found.evidence, alone.evidence) == ("complete", "partial")


def test_children_of_a_router() -> None:
    """Lines of two children that mix are kept apart; the one that began to load last counts."""
    first = [f"[101] {line}" for line in "\n".join((WEIGHTS, CONTEXT, CACHE, COMPUTE, READY)).split("\n")]
    second = [f"[202] {line.replace('CUDA0', 'CUDA1')}" for line in WEIGHTS.split("\n")]
    found = boot("main: starting router server", *first[:3], *second, *first[3:])
    assert found.devices == {"gpu1": "CUDA1"}
    assert found.buckets == {"weights": {"gpu1": 6000 * MIB}}
    assert any("2 processes loaded a model" in warning for warning in found.warnings)


def test_cache_without_devices() -> None:
    """A cache of which only the sum was printed is a fact and on no device; that is partial evidence, not none."""
    found = boot(
        "llama_new_context_with_model: KV self size  = 5120.00 MiB, K (f16): 2560.00 MiB, V (f16): 2560.00 MiB"
    )
    assert (found.entries, found.evidence) == ((), "partial")
    assert found.facts["kv_bytes"] == 5120 * MIB
    assert any("does not say where it lies" in warning for warning in found.warnings)


def test_missing_lines_are_told() -> None:
    """Buffers of a cache that do not add up to its sum make the evidence partial."""
    lines = CACHE.replace("size = 512.00 MiB (", "size = 1024.00 MiB (")
    found = boot(WEIGHTS, CONTEXT, lines, COMPUTE, READY)
    assert found.evidence == "partial"
    assert any("1,024 MiB by the log" in warning for warning in found.warnings)


def test_offloaded_layers_whose_experts_are_on_the_host() -> None:
    """All layers "on the GPU" with most of the weights in host memory is a warning, with the options that do it."""
    warnings = read(LOGS / "llama-server" / "2026" / "router-experts-on-host-cut.log").warnings
    assert any("49/49 layers" in warning and "--n-cpu-moe" in warning for warning in warnings)


def test_tensor_overrides() -> None:
    """Tensors that were placed elsewhere are counted, where the log is verbose enough to name them."""
    override = "0.00.500.000 D tensor blk.1.ffn_up_exps.weight (80 MiB q4_0) buffer type overridden to CPU"
    found = boot(prefixed(WEIGHTS), override, override.replace("blk.1", "blk.2"), prefixed(CONTEXT))
    assert found.facts["tensor_overrides"] == 2


# ---------------------------------------------------------------- failures


def test_size_to_the_byte() -> None:
    """Of two sizes of one refused allocation the one to the byte is given."""
    exact = "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 150995999"
    assert failure(WEIGHTS, CONTEXT, CACHE, REFUSED, exact).bytes == 150995999


@pytest.mark.parametrize(
    ("lines", "phase", "bucket", "certainty"),
    [
        ((), None, None, "unknown"),
        ((WEIGHTS,), "weights", "weights", "likely"),
        ((WEIGHTS, CONTEXT), "kv", "kv", "likely"),
        ((WEIGHTS, CONTEXT, CACHE), "reserve", "compute", "likely"),
        ((WEIGHTS, CONTEXT, CACHE, COMPUTE), "reserve", "compute", "likely"),
    ],
    ids=["nothing", "weights", "context", "cache", "compute"],
)
def test_place_of_a_lone_line(lines: tuple[str, ...], phase: str | None, bucket: str | None, certainty: str) -> None:
    """A refused allocation in the words that all share is placed by what came before, and never for certain."""
    found = failure(*lines, REFUSED)
    assert (found.phase, found.bucket, found.certainty) == (phase, bucket, certainty)
    assert found.bytes == 144 * MIB


@pytest.mark.parametrize(
    ("line", "phase", "bucket"),
    [
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "weights", "weights"),
        ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", "kv", "kv"),
        ("graph_reserve: failed to allocate compute buffers", "reserve", "compute"),
    ],
)
def test_words_that_tell(line: str, phase: str, bucket: str) -> None:
    """The line that says what the buffer was for is certain, whatever came before."""
    for before in ((), (WEIGHTS, CONTEXT), (WEIGHTS, CONTEXT, CACHE)):
        found = failure(*before, REFUSED, line)
        assert (found.phase, found.bucket, found.certainty) == (phase, bucket, "certain")


def test_consequences_are_not_the_cause() -> None:
    """What is printed after a refused allocation does not take its place."""
    found = failure(
        WEIGHTS, CONTEXT, CACHE, REFUSED, "srv    load_model: failed to load model, 'x.gguf'", "terminate called"
    )
    assert (found.kind, found.line) == ("out_of_memory", 7)
    assert found.text == REFUSED


def test_rocm_says_cuda() -> None:
    """The "device 0" of a ROCm build's cudaMalloc is ROCm0, also where no later line names it."""
    rocm = WEIGHTS.replace("CUDA0", "ROCm0")
    assert boot(rocm, CONTEXT, REFUSED).devices == {"gpu0": "ROCm0"}
    found = boot(REFUSED, "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size 150994944")
    assert found.devices == {"gpu0": "ROCm0"}


def test_what_was_left() -> None:
    """Free and total memory of the device are given, and what the printed buffers left of it."""
    total = "  Device 0: NVIDIA GeForce RTX 4070, compute capability 8.9, VMM: yes, VRAM: 11866 MiB"
    found = failure(total, USING, WEIGHTS, CONTEXT, CACHE, REFUSED)
    assert (found.free, found.total, found.absurd) == (10430 * MIB, 11866 * MIB, False)
    assert found.note is not None
    assert "leaves 3,918 MiB" in found.note


@pytest.mark.parametrize(("asked", "absurd"), [("11866.00", False), ("11866.01", True)])
def test_more_than_there_is(asked: str, absurd: bool) -> None:
    """A request beyond the whole device is said to be one that smaller settings will not cure."""
    total = "  Device 0: NVIDIA GeForce RTX 4070, compute capability 8.9, VMM: yes, VRAM: 11866 MiB"
    found = failure(total, USING, WEIGHTS, CONTEXT, CACHE, REFUSED.replace("144.00", asked))
    assert found.absurd is absurd
    assert ("smaller settings alone will not help" in (found.note or "")) is absurd


@pytest.mark.parametrize(
    "line",
    [
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1073741824",
        "ggml_gallocr_reserve_n: failed to allocate CUDA_Host buffer of size 1073741824",
        "ggml_aligned_malloc: insufficient memory (attempted to allocate 1024.00 MB)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "llama_model_load: error loading model: mmap failed: Cannot allocate memory",
    ],
)
def test_host_refuses(line: str) -> None:
    """An allocation that the host refused is told apart from a device's."""
    found = failure(WEIGHTS, CONTEXT, line)
    assert (found.kind, found.device) == ("host_out_of_memory", "host")
    assert found.bytes in (1 << 30, None)


@pytest.mark.parametrize(
    "line",
    [
        "ggml_cuda_host_malloc: failed to allocate 100.00 MiB of pinned memory: out of memory",
        "srv  get_availabl: failed to allocate memory for prompt cache state: std::bad_alloc",
        "ggml_backend_sched_alloc_splits: failed to allocate graph, reserving (backend_ids_changed = 1)",
        "common_init_from_params: it is possible to run out of memory: try reducing --n-gpu-layers",
    ],
)
def test_no_failures(line: str) -> None:
    """What the engine makes up for, and its hints, are no failures."""
    assert boot(WEIGHTS, CONTEXT, CACHE, line).failure is None


def test_retry_without_copies() -> None:
    """A retry without pipeline parallelism is a recovery, after which there is one copy."""
    retry = "llama_new_context_with_model: compute buffer allocation failed, retrying without pipeline parallelism"
    found = boot(
        WEIGHTS, CONTEXT, CACHE, "x: pipeline parallelism enabled (n_copies=4)", REFUSED, retry, COMPUTE, READY
    )
    assert (found.failure, found.evidence, found.facts["pipeline_copies"]) == (None, "complete", 1)
    assert f"recovered: {REFUSED}" in found.warnings


def test_trial_of_fit_is_no_evidence() -> None:
    """What a trial run prints, its table and a refused allocation among it, is not what the deployment takes."""
    name = "common_memory_breakdown_print"
    table = (
        f"{name}: | memory breakdown [MiB] | total   free     self   model   context   compute    unaccounted |",
        f"{name}: |   - Host               |                  34 =    28 +       0 +       6                |",
    )
    trial = (
        "common_init_: fitting params to device memory ...",
        *table,
        REFUSED,
        "fitting params to free memory took 1 s",
    )
    assert boot(*trial, *WEIGHTS.split("\n")[:1]).entries == ()
    assert boot(*trial, WEIGHTS).failure is None
    # a log that was cut before its trial was over, and one whose trial has no lines around it
    assert boot("build: 8586 (64ac9ab66) with GNU 15.2.1 for Linux x86_64", *table).entries == ()
    assert boot(*table, *WEIGHTS.split("\n")[:1]).entries == ()


def test_draft_context_fails() -> None:
    """A draft's cache that does not fit is the draft's failure; the target's buffers stay."""
    found = boot(
        WEIGHTS,
        CONTEXT,
        CACHE,
        COMPUTE,
        "srv    load_model: creating MTP draft context against the target model 'x.gguf'",
        "llama_context: constructing llama_context",
        REFUSED,
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
    )
    assert found.failure is not None
    assert (found.failure.phase, found.failure.bucket) == ("kv", "draft")
    assert found.buckets["kv"] == {"gpu0": 512 * MIB}
    assert "draft" not in found.buckets


@pytest.mark.parametrize(
    ("lines", "phase", "bucket"),
    [
        ((), "ready", "compute"),
        (("slot launch_slot_: id  0 | task 0 | processing task",), "prefill", "compute"),
        (
            (
                "slot launch_slot_: id  0 | task 0 | processing task",
                "slot update_slots: id  0 | task 0 | prompt done, n_tokens = 20",
            ),
            "decode",
            "compute",
        ),
        (("srv  process_chun: processing image...", "encoding image slice..."), "prefill", "projector"),
        (
            ("slot launch_slot_: id  0 | task 0 | processing task", "srv  update_slots: all slots are idle"),
            "ready",
            "compute",
        ),
    ],
    ids=["unknown", "prefill", "decode", "image", "idle"],
)
def test_failure_while_serving(lines: tuple[str, ...], phase: str, bucket: str) -> None:
    """A request that runs out after a clean boot has failed in the part of the request that the log shows."""
    found = boot(
        WEIGHTS,
        CONTEXT,
        CACHE,
        COMPUTE,
        READY,
        *lines,
        "CUDA error: out of memory",
        "  current device: 0, in function alloc at ggml-cuda.cu:99",
    )
    assert found.ready
    assert found.failure is not None
    assert (found.failure.phase, found.failure.bucket) == (phase, bucket)
    assert (found.failure.device, found.failure.certainty) == ("gpu0", "likely")


def test_limit_of_one_buffer() -> None:
    """A buffer that is larger than the driver lets one be is refused with plenty of memory free, and that is said."""
    found = failure(
        WEIGHTS.replace("CUDA0", "Vulkan0"),
        CONTEXT,
        CACHE.replace("CUDA0", "Vulkan0"),
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
        "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 8753520640",
        "graph_reserve: failed to allocate compute buffers",
    )
    assert (found.device, found.bytes, found.bucket) == ("gpu0", 8753520640, "compute")
    assert "limits the size of one buffer" in (found.note or "")


def test_abort() -> None:
    """The line with which ggml ends the process is a crash, also where it has no prefix."""
    abort = "/build/ggml/src/ggml-backend.cpp:930: pre-allocated tensor in a buffer that cannot run the operation"
    assert failure(prefixed(WEIGHTS), prefixed(CONTEXT), abort).kind == "crash"


@pytest.mark.parametrize("said", ["33/" + "9" * 30, "9" * 30 + "/33"])
def test_one_absurd_number_of_two(said: str) -> None:
    """Of two numbers that are printed together, one that is no counter makes a fact of neither."""
    log = (
        "load_tensors: loading model tensors, this can take a while... (mmap = false)\n"
        f"load_tensors: offloaded {said} layers to GPU\nload_tensors:        CUDA0 model buffer size =  3095.05 MiB\n"
    )
    boot = read(log, engine="llama-server")
    assert not {"layers_offloaded", "layers_offloadable"} & set(boot.facts)
    assert boot.buckets == {"weights": {"gpu0": round(3095.05 * 2**20)}}

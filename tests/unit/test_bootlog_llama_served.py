"""llama.cpp's logs: what users wrote is not believed, and layers are counted as they are."""

from __future__ import annotations

import pytest

from tests.unit.test_bootlog_llama import CACHE, COMPUTE, CONTEXT, MIB, READY, REFUSED, WEIGHTS, boot, failure, prefixed

# ---------------------------------------------------------------- what users write


def test_what_users_write_is_not_believed() -> None:
    """Sizes and failures in the bodies of requests are nobody's evidence, with the log's prefix and without."""
    parts = (WEIGHTS, CONTEXT, CACHE, COMPUTE, READY)
    plain = boot(*parts)
    body = (
        '{"messages":[{"role":"user","content":"CUDA7 KV buffer size = 3.00 MiB; cudaMalloc failed: out of memory"}]}'
    )
    assert boot(*parts, f"request: {body}", body) == plain
    own = [prefixed(part) for part in parts]
    asked = f"0.09.000.000 D srv  log_server_r: request:  {body}"
    assert boot(*own, asked, "CUDA7 KV buffer size = 3.00 MiB", "failed to allocate CUDA7 buffer of size 5") == boot(
        *own
    )


def test_a_line_like_the_engines_own_end() -> None:
    """A line without prefix that looks like the engine's end is one only where the server says nothing after it."""
    own = [prefixed(part) for part in (WEIGHTS, CONTEXT, CACHE, COMPUTE, READY)]
    end = "CUDA error: out of memory"
    assert failure(*own, end).kind == "out_of_memory"
    assert boot(*own, end, "0.09.000.000 I srv  update_slots: all slots are idle").failure is None


def test_killed() -> None:
    """The kernel's word that it ended the server explains a log that breaks off; a server that goes on was not ended."""
    parts = (WEIGHTS, CONTEXT)
    assert failure(*parts, "Killed").kind == "host_oom_killed"
    assert failure(*parts, "Killed").certainty == "likely"
    kernel = "[ 812.301122] Out of memory: Killed process 71 (llama-server) total-vm:9kB, anon-rss:8kB, file-rss:0kB"
    found = failure(*parts, kernel)
    assert (found.kind, found.certainty, found.phase) == ("host_oom_killed", "certain", "kv")
    assert boot(*parts, CACHE, COMPUTE, READY, "Killed", "srv  update_slots: all slots are idle").failure is None


def test_log_that_ends_in_the_middle() -> None:
    """A log that was cut claims no failure, and its last phase is the one that it came to."""
    found = boot(WEIGHTS, CONTEXT)
    assert (found.failure, found.ready, found.phases[-1].name) == (None, False, "kv")


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("lines", "real"),
    [
        (("offloading 32 repeating layers to GPU", "offloaded 35/35 layers to GPU"), 32),  # 2023: halves of the cache
        (("offloading 40 repeating layers to GPU", "offloaded 41/41 layers to GPU"), 40),
        (("offloading 29 repeating layers to GPU", "offloaded 31/31 layers to GPU"), 30),  # 2026: one too few
        (("n_layer          = 30", "offloaded 31/31 layers to GPU"), 30),
        (("offloading 9 repeating layers to GPU", "offloaded 10/31 layers to GPU"), 9),
        (("offloading 10 repeating layers to GPU", "offloaded 10/33 layers to GPU"), 10),
        (("offloaded 10/33 layers to GPU",), 10),
        (("offloading 0 repeating layers to GPU", "offloaded 1/31 layers to GPU"), None),  # the output layer alone
    ],
)
def test_layers_on_a_device(lines: tuple[str, ...], real: int | None) -> None:
    """The model's own layers on a device are counted, neither the output layer nor halves of the cache."""
    tensors, buffers = WEIGHTS.split("\n")
    found = boot(tensors, *(f"load_tensors: {line}" for line in lines), buffers)
    assert found.facts.get("layers_on_device_real") == real
    assert "layers_repeating" not in found.facts
    assert not any("no buffer of the model" in warning for warning in found.warnings)
    on_host = boot(tensors, *(f"load_tensors: {line}" for line in lines), buffers.replace("CUDA0", "CPU"))
    assert on_host.facts["layers_on_device_real"] == 0


# ---------------------------------------------------------------- after the boot, in logs without prefixes

BOOTED = (WEIGHTS, CONTEXT, CACHE, COMPUTE, READY)
PASTED = (
    "user pasted log:",
    "llama_model_loader: loaded meta data with 3 key-value pairs and 2 tensors from b.gguf (version GGUF V3)",
    WEIGHTS.replace("6000", "9999"),
    CONTEXT.replace("4096", "512"),
    CACHE.replace("512.00", "64.00").replace("4096", "512"),
    "llama_kv_cache: CUDA9 KV buffer size = 64.00 MiB",
    COMPUTE.replace("300", "9999"),
    "srv  update_slots: all slots are idle",
)


@pytest.mark.parametrize("first", range(7))
def test_load_that_nothing_announced(first: int) -> None:
    """What looks like a load after the boot, and was not announced, changes nothing and is a warning."""
    plain, found = boot(*BOOTED), boot(*BOOTED, *PASTED[first:])
    assert (found.entries, found.facts, found.devices) == (plain.entries, plain.facts, plain.devices)
    assert (found.phases, found.ready, found.evidence) == (plain.phases, True, plain.evidence)
    assert [warning for warning in found.warnings if "looks like a load" in warning]
    assert len(found.warnings) == len(plain.warnings) + 1


@pytest.mark.parametrize(
    "announced",
    [
        "srv    load_model: loading model 'b.gguf'",
        "main: loading model",
        "ggml_cuda_init: found 1 CUDA devices:",
        "srv  handle_sleep: server is exiting sleeping state",
    ],
)
def test_load_that_was_announced(announced: str) -> None:
    """A load that a line announced replaces the one before it."""
    found = boot(*BOOTED, announced, *PASTED[1:])
    assert found.buckets["weights"] == {"gpu0": 9999 * MIB}
    assert found.facts["context"] == 512
    assert not any("looks like" in warning for warning in found.warnings)


def test_load_with_prefixes_needs_no_announcement() -> None:
    """Where the engine's own prefix stands before its lines, they are its own, whatever they say."""
    found = boot(*(prefixed(part) for part in (*BOOTED, *PASTED[2:])))
    assert found.buckets["weights"] == {"gpu0": 9999 * MIB}


SERVED = (
    "slot      release: id  0 | task 0 | stop processing: n_past = 30, truncated = 0",
    "srv  update_slots: all slots are idle",
    "slot launch_slot_: id  0 | task 1 | processing task",
)


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize(
    "sign",
    [
        "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:371",
        REFUSED,
        "GGML_ASSERT: ggml.c:1: x",
        "/build/ggml/src/ggml-backend.cpp:930: pre-allocated tensor in a buffer that cannot run the operation",
    ],
)
def test_failure_that_the_server_survived(sign: str, served: str) -> None:
    """Without prefixes, what looks like a failure and is followed by a server's work is a warning, else a failure."""
    request = "slot launch_slot_: id  0 | task 0 | processing task"
    assert boot(*BOOTED, request, "prompt: please explain", sign, "thanks").failure is not None
    found = boot(*BOOTED, request, "prompt: please explain", sign, "thanks", served)
    assert found.failure is None
    assert any(warning.startswith("looks like a failure") for warning in found.warnings)


def test_failure_of_the_engines_own_words() -> None:
    """A refused allocation in a line with the engine's prefix stays one, though the server went on."""
    found = boot(*(prefixed(part) for part in BOOTED), prefixed(REFUSED, level="E"), prefixed(SERVED[1]))
    assert found.failure is not None


# ---------------------------------------------------------------- who says what


def test_refusal_in_a_trial_without_an_end() -> None:
    """At the default verbosity nothing ends the trial of --fit: memory that was refused after it is a real boot's."""
    begin = ("log_info: verbosity = 3", "common_init_result: fitting params to device memory ...")
    refused = failure(
        *begin,
        REFUSED,
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 150994944",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "common_init_from_params: failed to create context with model 'a.gguf'",
    )
    assert (refused.kind, refused.bucket, refused.bytes) == ("out_of_memory", "kv", 150994944)
    assert (refused.certainty, refused.device, refused.phase) == ("certain", "gpu0", "kv")
    assert boot(*begin, REFUSED, "fitting params to free memory took 1 s", WEIGHTS).failure is None
    ready = boot(*begin, "common_init_from_params: warming up the model with an empty run", "main: model loaded")
    assert (ready.ready, ready.failure) == (True, None)


def test_size_of_an_output_buffer() -> None:
    """MiB are not taken for bytes, nor the word before "buffer" for a device."""
    found = failure(
        WEIGHTS,
        CONTEXT,
        "llama_context: failed to allocate output buffer of size 1200.00 MiB",
        "llama_init_from_model: failed to initialize the context: failed to reserve initial output buffer",
    )
    assert (found.bytes, found.bucket, found.device) == (1200 * MIB, "compute", None)


@pytest.mark.parametrize("end", ["150994944", ""])
def test_line_that_was_cut(end: str) -> None:
    """A line that was cut before its number still says that memory was refused, and where."""
    found = failure(WEIGHTS, CONTEXT, f"alloc_tensor_range: failed to allocate CUDA0 buffer of size {end}".rstrip())
    assert (found.kind, found.device, found.bytes) == ("out_of_memory", "gpu0", int(end) if end else None)


@pytest.mark.parametrize(
    ("lines", "bucket", "certainty"),
    [
        (("failed to initialize the context: failed to allocate buffer for rs cache",), "recurrent", "certain"),
        (("srv load_model: failed to load draft model, 'd.gguf'",), "draft", "likely"),
        (("srv load_model: failed to create MTP context",), "draft", "likely"),
        (("mtmd_init_from_file: error: Failed to load CLIP model from m.gguf",), "projector", "certain"),
        (("srv load_model: failed to load multimodal model, 'm.gguf'",), "projector", "certain"),
    ],
)
def test_whose_buffer_it_was(lines: tuple[str, ...], bucket: str, certainty: str) -> None:
    """The line after a refused allocation says whose it was, which the words of the allocation itself do not."""
    found = failure(WEIGHTS, CONTEXT, CACHE, REFUSED, *lines)
    assert (found.kind, found.bucket, found.certainty) == ("out_of_memory", bucket, certainty)


def test_projector_refused() -> None:
    """What is refused while the encoder of images is loaded is its own, for certain only where a line says so."""
    clip = "clip_ctx: CLIP using CUDA0 backend"
    found = failure(*BOOTED[:-1], clip, REFUSED)
    assert (found.bucket, found.certainty) == ("projector", "likely")


def test_device_of_an_error_of_2023() -> None:
    """The device in the line after an error, which in 2023 named no function."""
    assert failure(WEIGHTS, CONTEXT, "CUDA error 2 at a.cu:7006: out of memory", "current device: 3").device == "gpu3"


def test_retry_that_did_not_help() -> None:
    """A retry without pipeline parallelism that was refused as well is no recovery."""
    retry = "llama_init_from_model: compute buffer allocation failed, retrying without pipeline parallelism"
    found = boot(WEIGHTS, CONTEXT, CACHE, REFUSED, retry, REFUSED)
    assert found.failure is not None
    assert not any(warning.startswith("recovered") for warning in found.warnings)
    assert any(warning.startswith("refused, and again") for warning in found.warnings)


def test_two_boots_at_the_default_verbosity() -> None:
    """Without a line of the build a new process is known by the first thing that it says."""
    first = "cmn  common_param: common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)"
    good, bad = prefixed("\n".join((first, *BOOTED))), prefixed("\n".join((first, WEIGHTS, CONTEXT)))
    bad += "\n" + prefixed(REFUSED, level="E")
    found = boot(good, bad)
    assert (found.boots, found.ready, found.failure is not None) == (2, False, True)
    again = boot(bad, good)
    assert (again.boots, again.ready, again.failure) == (2, True, None)
    assert not any("recovered" in warning for warning in again.warnings)


def test_every_line_twice() -> None:
    """A log to which two wrote, each line of it twice, takes what it takes once."""
    lines = "\n".join(BOOTED).split("\n")
    twice = boot(*(line for line in lines for _ in range(2)))
    assert twice.buckets == boot(*BOOTED).buckets
    assert not any("recovered" in warning for warning in twice.warnings)

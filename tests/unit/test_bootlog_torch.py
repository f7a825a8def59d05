"""Torch's words for a refused allocation, and what the frames around it say it was for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.torch_messages import TorchMessage, read_message, with_more

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs" / "transformers"
GIB = 1 << 30
MIB = 1 << 20


def message(text: str) -> TorchMessage:
    found = read_message(text)
    assert found is not None
    return found


def gib(number: str) -> int:
    return round(float(number) * GIB)


def recorded(name: str) -> Boot:
    return read(LOGS / f"{name}.log")


def traceback(*frames: tuple[str, str, str], message: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> Boot:
    lines = ["Traceback (most recent call last):"]
    for file, function, source in frames:
        lines += [f'  File "/opt/env/lib/python3.11/site-packages/{file}", line 12, in {function}', f"    {source}"]
    return read("\n".join([*lines, f"torch.OutOfMemoryError: {message}", ""]), engine="transformers")


MODEL = "transformers/models/llama/modeling_llama.py"
UTILITIES = "transformers/generation/utils.py"


def test_message_until_2022() -> None:
    """The old message tells device, capacity, and what torch allocated and reserved."""
    found = message(
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 8.00 GiB total capacity; 6.63 GiB already"
        " allocated; 0 bytes free; 7.29 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
    )
    assert (found.device, found.asked, found.total, found.free) == ("cuda:3", 20 * MIB, 8 * GIB, 0)
    assert (found.allocated, found.reserved) == (gib("6.63"), gib("7.29"))
    assert not found.absurd


def test_message_with_a_limit_for_the_process() -> None:
    """Where enough is free but a limit of the process refuses, the note says so."""
    found = message(
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; 1.63 GiB already allocated;"
        " 5.00 GiB free; 3.00 GiB allowed; 1.70 GiB reserved in total by PyTorch)"
    )
    assert found.allowed == 3 * GIB
    assert "limit that was set for this process" in str(found.note())


@pytest.mark.parametrize("capacity", ["capacty", "capacity"])
def test_message_since_2023(capacity: str) -> None:
    """The newer message, whose first release misspelt a word, tells what is reserved beyond what is allocated."""
    found = message(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total {capacity} of 23.69 GiB"
        " of which 1.02 GiB is free. Process 77 has 0.50 GiB memory in use. Including non-PyTorch memory, this process"
        " has 22.00 GiB memory in use. 23.00 GiB allowed; Of the allocated memory 20.00 GiB is allocated by PyTorch, with"
        " 120.00 MiB allocated in private pools (e.g., CUDA Graphs), and 1.50 GiB is reserved by PyTorch but unallocated."
    )
    assert (found.device, found.asked, found.total) == ("cuda:1", 2 * GIB, gib("23.69"))
    assert (found.allocated, found.reserved, found.pools) == (20 * GIB, 20 * GIB + gib("1.5"), 120 * MIB)
    assert (found.in_use, found.others, found.allowed) == (22 * GIB, GIB // 2, 23 * GIB)
    assert "other processes hold" in str(found.note())


def test_process_with_a_number_may_be_this_one() -> None:
    """In a container torch names its own process by a number it does not know: nobody else is blamed."""
    found = message(
        "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 93.02 GiB of which 1.18 GiB is free."
        " Process 2752205 has 91.82 GiB memory in use. Of the allocated memory 90.63 GiB is allocated by PyTorch, and"
        " 120.54 MiB is reserved by PyTorch but unallocated."
    )
    assert found.others == gib("91.82")
    assert found.note() is None


def test_unknown_is_not_a_figure() -> None:
    """2**64 bytes, which a driver that cannot tell is printed as, are no figure."""
    found = message(
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 11.99 GiB of which 1.02 GiB is"
        " free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."
    )
    assert found.in_use is None


def test_absurd_request() -> None:
    """A request above the whole device is called absurd: no smaller setting helps."""
    found = message(
        "CUDA out of memory. Tried to allocate 130206.04 GiB. GPU 0 has a total capacity of 23.56 GiB of which 16.57 GiB"
        " is free."
    )
    assert found.absurd
    assert found.failure(phase=None, bucket=None, certainty="unknown").absurd


@pytest.mark.parametrize("unit", ["GB", "GiB"])
def test_apple_devices(unit: str) -> None:
    """On Apple devices GB stands for 2**30 bytes too."""
    found = message(
        f"RuntimeError: MPS backend out of memory (MPS allocated: 17.36 {unit}, other allocations: 613.56 MiB, max allowed:"
        f" 18.13 {unit}). Tried to allocate 192.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
    )
    assert (found.device, found.allocated, found.allowed) == ("mps", gib("17.36"), gib("18.13"))
    assert found.asked == 192 * MIB


def test_other_devices() -> None:
    """AMD's and Intel's devices use the same sentence."""
    rest = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.91 GiB."
    assert message(f"torch.OutOfMemoryError: HIP out of memory. {rest}").device == "hip:0"
    assert message(f"torch.OutOfMemoryError: XPU out of memory. {rest}").device == "xpu:0"


def test_message_in_several_lines() -> None:
    """The message of the driver's own pool comes in lines."""
    found = message("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)")
    for line in (
        "Currently allocated     : 5.05 GiB",
        "Requested               : 26.12 MiB",
        "Device limit            : 6.00 GiB",
        "Free (according to CUDA): 0 bytes",
        "PyTorch limit (set by user-supplied memory fraction)",
        "                        : 17179869184.00 GiB",
    ):
        found = with_more(found, line)
    assert (found.allocated, found.asked, found.total, found.free) == (gib("5.05"), round(26.12 * MIB), 6 * GIB, 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
            " tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
            8 * GIB,
        ),
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.", 4096),
        ("RuntimeError: unable to mmap 512 bytes from file </x/m.bin>: Cannot allocate memory (12)", 512),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.50 TiB for an array", (1 << 40) * 3 // 2),
        ("MemoryError: Cannot allocate memory (os error 12)", None),
        ("OSError: The paging file is too small for this operation to complete. (os error 1455)", None),
        ("MemoryError", None),
    ],
)
def test_host(text: str, size: int | None) -> None:
    """Host memory that is refused is told apart from a device's."""
    found = message(text)
    assert (found.kind, found.asked) == ("host_out_of_memory", size)


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ("RuntimeError: CUDA error: out of memory", True),
        ("torch.AcceleratorError: CUDA error: out of memory", True),
        ("OutOfMemoryError: CUDA out of memory.", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
    ],
)
def test_messages_without_figures(text: str, certain: bool) -> None:
    """A driver that says only that, and a library that found no memory, which is less certain."""
    assert message(text).certain == certain


@pytest.mark.parametrize(
    "text",
    [
        "If you see CUDA out of memory, try a smaller batch.",
        "CUDA error: device-side assert triggered",
        "except MemoryError as error:",
        "[ExpandableSegmentVA] Failed to reserve 9 GiB of virtual address space for CUDA out of memory",
        "",
    ],
)
def test_no_message(text: str) -> None:
    """Hints, other errors and code are no refused allocation."""
    assert read_message(text) is None


def test_cache_that_grows() -> None:
    """An allocation where the new keys are joined to the past ones is the KV cache's, while tokens are generated."""
    failure = recorded("2022/cache-grows").failure
    assert failure is not None
    assert (failure.phase, failure.bucket, failure.certainty, failure.bytes) == ("decode", "kv", "certain", 20 * MIB)
    assert (failure.total, failure.free, failure.line) == (8 * GIB, 0, 8)


def test_figures_of_a_message_are_facts() -> None:
    """What torch allocated belongs to no bucket: it is a fact, and the evidence is partial."""
    boot = recorded("2022/cache-grows")
    assert (boot.entries, boot.evidence) == ((), "partial")
    assert boot.facts == {"allocated_bytes": gib("6.63"), "reserved_bytes": gib("7.29")}


def test_weights() -> None:
    """An allocation within the loading of the model is the weights'."""
    failure = recorded("2024/loading-weights").failure
    assert failure is not None
    assert (failure.phase, failure.bucket, failure.certainty) == ("weights", "weights", "certain")


def test_moving_a_module() -> None:
    """A model that is moved to the device by hand is weights as well."""
    boot = traceback(
        ("torch/nn/modules/module.py", "to", "return self._apply(convert)"),
        ("torch/nn/modules/module.py", "_apply", "param_applied = fn(param)"),
        ("torch/nn/modules/module.py", "convert", "return t.to(device)"),
    )
    assert boot.failure is not None
    assert (boot.failure.bucket, boot.failure.certainty) == ("weights", "certain")


@pytest.mark.parametrize(("function", "certainty"), [("_prefill", "certain"), ("_sample", "likely")])
def test_a_model_at_work(function: str, certainty: str) -> None:
    """What a forward pass takes is compute; that it was the prompt's is certain only where the frames say so."""
    boot = traceback((UTILITIES, function, "outputs = self(**inputs)"), (MODEL, "forward", "return self.down_proj(x)"))
    assert boot.failure is not None
    assert (boot.failure.phase, boot.failure.bucket, boot.failure.certainty) == ("prefill", "compute", certainty)


def test_training_is_not_serving() -> None:
    """Gradients are in no bucket of a deployment, and no phase of one."""
    boot = traceback(("transformers/trainer.py", "training_step", "self.accelerator.backward(loss)"))
    assert boot.failure is not None
    assert (boot.failure.phase, boot.failure.bucket) == (None, "other")


def test_thin_evidence() -> None:
    """A message without frames says neither phase nor bucket."""
    failure = read("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n").failure
    assert failure is not None
    assert (failure.phase, failure.bucket, failure.certainty) == (None, None, "unknown")


def test_progress_tells_where_frames_do_not() -> None:
    """A message without frames while the weights were loaded is likely theirs."""
    boot = read(
        "Loading checkpoint shards:  33%|███▎      | 1/3 [00:02<00:05,  2.79s/it]\n"
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU \n"
    )
    assert boot.failure is not None
    assert (boot.failure.bucket, boot.failure.certainty) == ("weights", "likely")


def test_boxed_traceback() -> None:
    """A traceback in a box that broke names and the message over lines reads the same."""
    boot = recorded("2024/boxed")
    assert boot.failure is not None
    assert (boot.failure.bucket, boot.failure.bytes, boot.failure.total) == ("compute", 4 * GIB, gib("11.99"))
    assert boot.facts["reserved_bytes"] == gib("9.41") + round(312.02 * MIB)


def test_traceback_of_a_notebook() -> None:
    """IPython's frames tell as well."""
    boot = read(
        "File /opt/env/site-packages/transformers/models/llama/modeling_llama.py:209, in LlamaAttention.forward(self)\n"
        "    207 if past_key_value is not None:\n"
        "--> 209     key_states = torch.cat([past_key_value[0], key_states], dim=2)\n"
        "\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 GiB\n",
        engine="transformers",
    )
    assert boot.failure is not None
    assert (boot.failure.phase, boot.failure.bucket) == ("decode", "kv")


def test_reserved_above_the_card() -> None:
    """More reserved than the card has is said, with what it means on each kind of system."""
    boot = recorded("2026/spilled")
    assert boot.facts["allocated_bytes"] == gib("11.77")
    assert any("more" in warning and "Windows" in warning for warning in boot.warnings)
    assert any("counter is wrong" in warning for warning in recorded("2026/counter-above-card").warnings)


def test_layers_on_the_cpu() -> None:
    """Layers that were left on the CPU are a warning, though the boot is fine."""
    boot = recorded("2024/layers-on-cpu")
    assert (boot.ready, boot.failure, boot.facts["offloaded_to"]) == (True, None, "cpu")
    assert any("offloaded to the cpu" in warning for warning in boot.warnings)
    assert any("--samples" in warning for warning in boot.warnings)


def test_text_about_a_message() -> None:
    """A message that a request quotes is not one."""
    boot = read(
        'INFO: {"prompt": "why do I get CUDA out of memory. Tried to allocate 2.00 GiB"}\n', engine="transformers"
    )
    assert boot.failure is None


def test_an_error_that_the_program_survives() -> None:
    """A traceback after which the program goes on is no failure of the boot; one that ends the log is."""
    error = 'Traceback (most recent call last):\n  File "/app/a.py", line 1, in x\n    y()\nValueError: bad request\n'
    assert read(error + "INFO: served\n", engine="transformers").failure is None
    failure = read(error, engine="transformers").failure
    assert failure is not None
    assert (failure.kind, failure.certainty) == ("crash", "likely")

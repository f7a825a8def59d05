"""Labels of devices: the engine's own number, and sentences that say the engine's own name."""

from __future__ import annotations

import pytest

from pytest_vram.advice import of_boot
from pytest_vram.bootlog import read
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.bootlog.devices import named
from pytest_vram.bootlog.numbering import numbers, relabel
from pytest_vram.ledger import Entry
from pytest_vram.report.boot_lines import boot_lines

MIB = 1 << 20


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["CUDA11", "CUDA3", "CUDA0"], ["gpu11", "gpu3", "gpu0"]),
        (["HTP2", "HTP1", "HTP0-REPACK"], ["gpu2", "gpu1", "gpu0"]),
        (["ROCm1", "Vulkan0", "MTL0"], ["gpu1", "gpu0", "gpu2"]),  # the number of a second family is taken
        (["CUDA0", "Vulkan0", "Vulkan1"], ["gpu0", "gpu2", "gpu1"]),
        (["Metal"], ["gpu0"]),
        (["CUDA_Split", "CUDA0", "CUDA1"], ["gpu2", "gpu0", "gpu1"]),
        (["RPC0[192.0.2.7:1]", "RPC0[192.0.2.8:1]", "CUDA1"], ["gpu0", "gpu2", "gpu1"]),
        (["RPC3", "RPC1"], ["gpu0", "gpu1"]),
        (["cuda:3"], ["gpu3"]),
        (["Meta(CUDA0,CUDA1)", "CUDA (2 devices together)"], ["gpu0", "gpu1"]),
    ],
)
def test_numbers(names: list[str], found: list[str]) -> None:
    """A device has the number that its engine gives it; one without a number of its own has the smallest free one."""
    devices = {"host": "CPU"} | {f"gpu{place}": name for place, name in enumerate(names)}
    assert list(numbers(devices).values()) == found


def test_everything_has_the_new_label() -> None:
    """Entries, failure, devices and facts by device follow; what has no label stays, and devices are in order."""
    boot = Boot(
        engine="x",
        era="",
        evidence="partial",
        entries=(Entry(bucket="kv", device="gpu0", bytes=1, source="engine-log"),),
        devices={"host": "CPU", "gpu0": "CUDA10", "gpu1": "CUDA9"},
        facts={"free_bytes": {"gpu0": 5}, "layers": 3, "sizes": {"a": 1}},
        failure=Failure(kind="out_of_memory", certainty="certain", text="x", device="gpu1"),
    )
    found = relabel(boot, {"gpu0": "gpu10", "gpu1": "gpu9"})
    assert [entry.device for entry in found.entries] == ["gpu10"]
    assert list(found.devices.items()) == [("gpu9", "CUDA9"), ("gpu10", "CUDA10"), ("host", "CPU")]
    assert found.facts == {"free_bytes": {"gpu10": 5}, "layers": 3, "sizes": {"a": 1}}
    assert found.failure is not None
    assert found.failure.device == "gpu9"


@pytest.mark.parametrize(
    ("engine", "lines", "label"),
    [
        (
            "llama-server",
            [
                "load_tensors: loading model tensors",
                "load_tensors: CUDA11 model buffer size = 7.00 MiB",
                "load_tensors: CUDA4 model buffer size = 7.00 MiB",
                "x: allocating 9.00 MiB on device 4: cudaMalloc failed: out of memory",
            ],
            "gpu4",
        ),
        (
            "ollama",
            [
                "load_tensors: loading model tensors",
                "load_tensors: CUDA3 model buffer size = 7.00 MiB",
                "x: allocating 9.00 MiB on device 2: cudaMalloc failed: out of memory",
            ],
            "gpu2",
        ),
        (
            "transformers",
            [
                "Traceback (most recent call last):",
                '  File "a.py", line 1, in <module>',
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 6 has a total capacity of"
                " 23.69 GiB of which 1.00 GiB is free.",
            ],
            "gpu6",
        ),
    ],
)
def test_all_readers(engine: str, lines: list[str], label: str) -> None:
    """The card on which memory ran out has the number in the engine's message, whichever devices came before it."""
    failure = read("\n".join(lines) + "\n", engine=engine).failure
    assert failure is not None
    assert failure.device == label


@pytest.mark.parametrize(
    ("label", "said"), [("gpu4", "gpu4 (CUDA4)"), ("gpu0", "gpu0"), ("host", "host"), ("gpu9", "gpu9"), ("x", "x")]
)
def test_label_for_people(label: str, said: str) -> None:
    """A label is said with the engine's own name, where that says more."""
    assert named(label, {"gpu4": "CUDA4", "gpu0": "GPU0", "host": "CPU", "x": "x"}) == said


def test_sentences_name_the_card() -> None:
    """Failure, peaks and advice of a log name the card as its engine does, and devices stand in their order."""
    log = (
        "llama_model_loader: loaded meta data with 3 key-value pairs and 2 tensors from a.gguf (version GGUF V3)\n"
        "load_tensors: loading model tensors\n"
        "load_tensors: offloaded 33/33 layers to GPU\n"
        "load_tensors: CUDA10 model buffer size = 700.00 MiB\n"
        "load_tensors: CUDA4 model buffer size = 700.00 MiB\n"
        "llama_context: constructing llama_context\n"
        "llama_context: n_ctx         = 32768\n"
        "x: allocating 900.00 MiB on device 4: cudaMalloc failed: out of memory\n"
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n"
    )
    boot = read(log)
    said = " ".join(" ".join(boot_lines(boot, "a.log", advice=of_boot(boot))).split())
    assert "for kv, on gpu4 (CUDA4): certain" in said
    assert "runtime? gpu4 (CUDA4): cache and runtime" in said
    assert "gpu10 (CUDA10): weights" in said
    assert "memory ran out on gpu4 (CUDA4), and on none" in said
    assert list(boot.devices) == ["gpu4", "gpu10"]

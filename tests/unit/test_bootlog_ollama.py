"""Ollama's log in all its forms: which of two reports of a buffer counts, what the settings came to, and what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.bootlog import Boot, Follower, ollama_facts, read
from pytest_vram.bootlog.ollama_facts import of_command, of_request
from pytest_vram.bootlog.peaks import with_peaks
from pytest_vram.bootlog.slog import attributes

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs" / "ollama"
GIB = 1 << 30
MIB = 1 << 20


def recorded(name: str) -> Boot:
    return read(LOGS / f"{name}.log")


def text(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def mib(number: str) -> int:
    return round(float(number) * MIB)


def gib(number: str) -> int:
    return round(float(number) * GIB)


def own(message: str, pairs: str = "", *, level: str = "INFO") -> str:
    return f'time=2026-01-01T00:00:00.000Z level={level} source=server.go:1 msg="{message}" {pairs}\n'


def test_attributes() -> None:
    """Pairs are read with quoted keys and values, escapes and line breaks in them."""
    assert attributes(r'msg="loading model" "model layers"=29 requested=-1 error="a \"b\"\nc"') == {
        "msg": "loading model",
        "model layers": "29",
        "requested": "-1",
        "error": 'a "b"\nc',
    }
    assert ollama_facts.size_of(attributes('msg="kv cache" size="1.9 GiB')["size"]) is None, "a cut figure"


def test_pinned_host_memory_is_no_device_memory() -> None:
    """Of 256 MiB KV cache, the 208 MiB in pinned host memory are the host's."""
    boot = recorded("2024-02/image-request")
    assert boot.ledger().buckets()["kv"] == {"host": 208 * MIB, "gpu0": 48 * MIB}
    assert boot.ledger().total()["gpu0"] == mib("702.19") + mib("48") + mib("164.01")


def test_excerpt_of_an_old_log() -> None:
    """One line of Ollama among llama.cpp's is enough to tell whose log it is, and that the boot was through."""
    lines = text("2024-02/image-request").split("\n")
    begin = next(at for at, line in enumerate(lines) if "offloading 6 repeating" in line)
    end = next(at for at, line in enumerate(lines) if "Starting llama main loop" in line)
    boot = read("\n".join(lines[begin : end + 1]))
    assert (boot.engine, boot.ready, boot.failure, boot.evidence) == ("ollama", True, None, "complete")
    assert boot.ledger().buckets()["kv"] == {"host": 208 * MIB, "gpu0": 48 * MIB}


@pytest.mark.parametrize("name", ["2024-02/image-request", "2026-07/out-of-memory-while-serving"])
def test_image_after_a_clean_boot(name: str) -> None:
    """A boot that went well and an image that then found no room: the failure is the request's."""
    boot = recorded(name)
    assert boot.ready
    assert boot.failure is not None
    assert (boot.failure.kind, boot.failure.phase) == ("out_of_memory", "prefill")
    assert (boot.failure.bucket, boot.failure.certainty, boot.failure.device) == ("projector", "likely", "gpu0")


def test_request_that_is_not_an_image() -> None:
    """Without a sign of an image the failure is one while serving, and no more is claimed."""
    lines = text("2026-07/out-of-memory-while-serving").replace("encoding image slice...\n", "")
    failure = read(lines).failure
    assert failure is not None
    assert (failure.phase, failure.bucket, failure.bytes) == ("ready", "compute", 1432543232)


def test_sums_of_the_host_and_the_device() -> None:
    """Sums are read per device; the total of host and device together is a fact and no bucket."""
    boot = recorded("2025-10/split")
    assert boot.ledger().buckets() == {
        "weights": {"gpu0": gib("18.5"), "host": gib("11.7")},
        "kv": {"gpu0": gib("1.9"), "host": gib("1.1")},
        "compute": {"gpu0": mib("190.5"), "host": mib("84.0")},
    }
    assert boot.facts["reported_total_bytes"] == gib("33.5")
    assert boot.ledger().total()["gpu0"] < gib("20.6")
    assert {entry.resolution for entry in boot.entries} == {round(0.05 * GIB), round(0.05 * MIB)}


def test_prediction_beside_the_lines() -> None:
    """Buffers that Ollama predicted and llama.cpp then printed are counted once, as printed."""
    boot = recorded("2026-05/prediction-beside-lines")
    assert boot.ledger().buckets() == {
        "weights": {"host": mib("292.36"), "gpu0": mib("4168.09")},
        "kv": {"gpu0": 1792 * MIB},
        "compute": {"host": mib("0.60") + mib("72.01"), "gpu0": 304 * MIB},
    }
    assert boot.evidence == "complete"


def test_prediction_where_lines_end() -> None:
    """Of a log that ends early, the buckets that llama.cpp did not come to are as predicted; nothing failed."""
    boot = recorded("2026-05/prediction-beside-lines-cut")
    assert boot.ledger().buckets()["weights"] == {"host": mib("292.36"), "gpu0": mib("4168.09")}
    assert boot.ledger().buckets()["kv"] == {"gpu0": gib("1.8")}
    assert "prediction" in next(entry.detail for entry in boot.entries if entry.bucket == "kv")
    assert (boot.failure, boot.ready, boot.phases[-1].name, boot.evidence) == (None, False, "kv", "partial")
    assert (boot.facts["context"], boot.facts["slots"]) == (32768, 1)


def test_trial_of_nothing() -> None:
    """ "0 B" of a trial is no figure of a buffer."""
    boot = recorded("2025-07/two-cards")
    assert boot.ledger().buckets() == {
        "weights": {"gpu0": gib("11.5"), "gpu1": gib("11.9"), "host": mib("680")},
    }
    assert boot.devices == {"gpu0": "CUDA0", "gpu1": "CUDA1", "host": "CPU"}
    assert boot.evidence == "partial"


def test_last_sum_counts() -> None:
    """Of several reports of one device the last one counts."""
    boot = read(
        text("2025-07/two-cards")
        + own("compute graph", 'backend=CUDA0 buffer_type=CUDA0 size="1.0 GiB"')
        + own("compute graph", 'backend=CUDA0 buffer_type=CUDA0 size="1.5 GiB"')
    )
    assert boot.ledger().buckets()["compute"] == {"gpu0": gib("1.5")}


def test_trial_on_other_devices() -> None:
    """Devices that only a trial placed something on hold nothing."""
    trial = "".join(
        own(kind, f'device={device} size="1.0 GiB"')
        for kind in ("model weights", "kv cache", "compute graph")
        for device in ("CUDA0", "CUDA1")
    )
    final = own("model weights", 'device=CUDA0 size="2.0 GiB"') + own("kv cache", 'device=CUDA0 size="1.5 GiB"')
    boot = read(trial + own("total memory", 'size="6.0 GiB"') + final)
    assert boot.ledger().buckets() == {"weights": {"gpu0": 2 * GIB}, "kv": {"gpu0": gib("1.5")}}


def test_layout_that_is_being_tried_again() -> None:
    """A log that ends while another layout is tried has no failure yet."""
    lines = text("2025-10/layout-recovered").split("\n")
    refused = next(at for at, line in enumerate(lines) if "failed to allocate CUDA0" in line)
    failure = read("\n".join(lines[: refused + 1])).failure
    assert failure is not None
    assert (failure.kind, failure.bytes) == ("out_of_memory", 1241015296)
    assert read("\n".join(lines[: refused + 2])).failure is None


def test_refused_weights() -> None:
    """The engine's own lines say what was refused; the error that Ollama passes on does not hide them."""
    failure = recorded("2024-12/refused-weights").failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.bucket, failure.device) == (
        "out_of_memory",
        "weights",
        "weights",
        "gpu0",
    )
    assert (failure.bytes, failure.certainty) == (mib("25601.66"), "certain")


def test_error_alone() -> None:
    """An error that is passed on, without the engine's lines, tells the kind, and not what was being allocated."""
    boot = read(
        own("starting runner", 'cmd="/usr/bin/ollama runner --port 1"')
        + own("Load failed", r'error="llama runner process has terminated: cudaMalloc failed: out of memory"')
    )
    assert boot.failure is not None
    assert (boot.failure.kind, boot.failure.bucket) == ("out_of_memory", None)
    assert boot.failure.certainty != "certain"


def test_host_memory_is_a_precheck() -> None:
    """A model that wants more of the host than is free is refused before anything is loaded."""
    failure = recorded("2025-10/needs-host-memory").failure
    assert failure is not None
    assert (failure.kind, failure.device, failure.bytes, failure.free) == ("precheck", "host", gib("5.6"), gib("3.4"))


def test_layout_that_did_not_fit() -> None:
    """A layout that did not fit, and was tried again with fewer layers, is a warning."""
    boot = recorded("2025-10/layout-recovered")
    assert (boot.failure, boot.ready, boot.evidence) == (None, True, "complete")
    assert any("layout did not fit" in warning for warning in boot.warnings)
    assert any("24 of 27 layers" in warning for warning in boot.warnings)


def test_context_reduced_and_tried_again() -> None:
    """A load that was tried again with a smaller context is read as its second try, with a warning."""
    boot = recorded("2026-07/context-reduced")
    assert (boot.failure, boot.facts["context"]) == (None, 8192)
    assert boot.ledger().buckets()["kv"] == {"gpu0": 476 * MIB}
    assert any("reducing automatic context" in warning for warning in boot.warnings)


def test_models_come_and_go() -> None:
    """Of several loads the last one counts; settings that did not take effect are warnings."""
    boot = recorded("2025-06/two-loads")
    assert boot.ledger().buckets()["weights"] == {"gpu0": gib("3.5"), "host": gib("1.3")}
    said = " ".join(boot.warnings)
    for phrase in (
        "2 loads",
        "truncating input prompt (limit=4096 prompt=9123",
        "requested context size too large",
        "didn't recover",
    ):
        assert phrase in said
    assert (boot.facts["context"], boot.facts["slots"], boot.facts["layers_offloaded"]) == (40960, 1, 30)


def test_looking_at_another_model() -> None:
    """A model that was only looked at, and not loaded, does not take the place of the one that serves."""
    before = recorded("2025-06/two-loads")
    after = read(text("2025-06/two-loads") + own("system memory", 'total="31.3 GiB" free="2.0 GiB"'))
    assert after.entries == before.entries
    assert after.ready


def test_killed_by_the_kernel() -> None:
    """The kernel's line in the journal explains the runner's end."""
    failure = recorded("2025-10/killed").failure
    assert failure is not None
    assert (failure.kind, failure.certainty, failure.phase) == ("host_oom_killed", "certain", "weights")


def test_settings_of_a_request() -> None:
    """A request to load tells the whole context, slots and batch; what is left to the engine is not claimed."""
    operation, facts = of_request(
        "{Operation:commit LoraPath:[] Parallel:4 BatchSize:512 FlashAttention:Auto KvSize:16384 KvCacheType:q8_0"
        " NumThreads:6 GPULayers:29[ID:GPU-0 Layers:29(0..28)] MultiUserCache:false ProjectorPath: MainGPU:0 UseMmap:true}"
    )
    assert operation == "commit"
    assert facts == {
        "context": 16384,
        "context_per_slot": 4096,
        "slots": 4,
        "batch": 512,
        "threads": 6,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
        "mmap": True,
        "layers_planned": 29,
    }


def test_settings_of_a_command() -> None:
    """Both spellings of the runner's options are understood."""
    old = of_command("ollama runner --model /b --ctx-size 8192 --batch-size 512 --flash-attn --parallel 2 --no-mmap")
    assert old == {
        "model_path": "/b",
        "context": 8192,
        "batch": 512,
        "flash_attention": "enabled",
        "slots": 2,
        "mmap": False,
        "context_per_slot": 4096,
    }
    new = of_command("llama-server --model /b -c 8192 -np 1 -b 512 -ub 256 --cache-type-k q4_0 --flash-attn auto")
    assert (new["context"], new["slots"], new["ubatch"], new["cache_type_k"]) == (8192, 1, 256, "q4_0")
    assert "flash_attention" not in new


def test_settings_of_the_server() -> None:
    """What the environment asked for is kept apart from what a load came to."""
    boot = read(
        own(
            "server config",
            'env="map[OLLAMA_CONTEXT_LENGTH:4096 OLLAMA_FLASH_ATTENTION:true OLLAMA_KEEP_ALIVE:5m0s'
            ' OLLAMA_KV_CACHE_TYPE:q8_0 OLLAMA_NUM_PARALLEL:2 OLLAMA_GPU_OVERHEAD:0]"',
        )
        + own("Listening on 127.0.0.1:11434 (version 0.12.6)")
    )
    assert boot.facts == {
        "keep_alive": "5m0s",
        "cache_type_asked": "q8_0",
        "parallel_asked": 2,
        "context_asked": 4096,
        "flash_attention_asked": True,
        "build": "0.12.6",
        "url": "http://127.0.0.1:11434",
    }


def test_plan_is_no_ledger() -> None:
    """What Ollama plans as sums over all devices is facts: no bucket of a device is made of it."""
    boot = read(
        "time=2025-02-18T02:21:25.646Z level=INFO source=server.go:130 msg=offload library=cuda layers.requested=-1"
        ' layers.model=81 layers.offload=44 memory.available="[22.0 GiB 22.0 GiB]" memory.required.full="127.4 GiB"'
        ' memory.required.partial="87.1 GiB" memory.required.kv="19.5 GiB"\n'
    )
    assert (boot.entries, boot.evidence) == ((), "partial")
    assert boot.facts["projected_device_bytes"] == gib("87.1")
    assert boot.facts["devices_free_bytes"] == [22 * GIB, 22 * GIB]


def test_quiet_log() -> None:
    """A log without sizes is no evidence, and names the setting that prints them."""
    boot = read(own("starting runner", 'cmd="x"') + own("llama runner started in 2.50 seconds"))
    assert (boot.evidence, boot.ready, boot.facts["boot_seconds"]) == ("none", True, 2.5)
    assert "OLLAMA_DEBUG=1" in boot.warnings[-1]


def test_oldest_logs() -> None:
    """Releases of 2023 wrote no structured lines."""
    boot = read(
        "2023/10/11 15:42:08 llama.go:313: starting llama runner\n"
        "llm_load_tensors: VRAM used: 2035.00 MB\n"
        "2023/10/11 15:42:12 llama.go:365: llama runner started in 4.001 seconds\n",
        engine="ollama",
    )
    assert (boot.ready, boot.facts["boot_seconds"]) == (True, 4.001)


def test_many_warnings_stay_few() -> None:
    """A server that cuts every prompt does not fill the report."""
    lines = "".join(own("truncating input prompt", f"limit=4096 prompt={n}", level="WARN") for n in range(500))
    lines += "".join(own(f"trouble {n}", level="WARN") for n in range(500))
    assert len(read(text("2025-10/split") + lines).warnings) < 70


@pytest.mark.parametrize("path", sorted(LOGS.rglob("*.log")), ids=lambda path: path.stem)
def test_lines_left_out(path: Path) -> None:
    """Lines that hold none of the grammar's words can be left out, and nothing changes."""
    follower, filtered = Follower("ollama"), _Filtered()
    for line in path.read_text(encoding="utf-8").split("\n"):
        follower.feed(line)
        filtered.feed(line)
    assert filtered.boot() == follower.boot()


class _Filtered:
    def __init__(self) -> None:
        from pytest_vram.bootlog.ollama import Ollama

        self._grammar = Ollama("ollama", {})

    def feed(self, line: str) -> None:
        words = self._grammar.words
        if words is None or words.search(line):
            self._grammar.feed(line)
        else:
            self._grammar.skip(1)

    def boot(self) -> Boot:
        return with_peaks(self._grammar.boot())

"""Refused allocations inside lines of other programs: Rust's spans and errors, records in JSON, programs for images.

What users sent may stand in the same lines, and is never believed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.lines import LONGEST
from pytest_vram.bootlog.records import lines_of
from pytest_vram.bootlog.tracing import traced

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs"
GIB = 1 << 30
REFUSED = "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 22.05 GiB of which 301.12 MiB is free."
SERVER = "text_generation_client: router/client/src/lib.rs:33: Server error: "
STAMP = "2024-08-22T10:00:05.120000Z"


def boot(*lines: str) -> Boot:
    return read("\n".join(lines) + "\n", engine="transformers")


def record(message: str, level: str = "ERROR", **more: Any) -> str:
    return json.dumps({"asctime": "2026-03-08 16:44:10,250", "levelname": level, "message": message, **more})


@pytest.mark.parametrize(
    ("spans", "phase", "bucket"),
    [
        ("warmup{max_input_length=4095 max_prefill_tokens=4096}:warmup: ", "warm-up", None),
        ("batch{batch_size=1}:prefill:prefill{id=1 size=1}:prefill{id=1 size=1}: ", "prefill", "compute"),
        ('generate{parameters=Parameters { stop: ["}: {", "\\""] } n="3"}:batch:decode{size=2}: ', "decode", "compute"),
        ("generate{id=7}: ", None, None),
    ],
)
def test_error_behind_spans(spans: str, phase: str | None, bucket: str | None) -> None:
    """The message behind the spans of a server in Rust is read, and the spans say what it was at."""
    failure = boot(f"{STAMP} ERROR {spans}{SERVER}{REFUSED}").failure
    assert failure is not None
    assert (failure.kind, failure.bytes, failure.device) == ("out_of_memory", round(1.25 * GIB), "gpu0")
    assert (failure.phase, failure.bucket) == (phase, bucket)
    assert failure.certainty == ("likely" if phase else "unknown")


@pytest.mark.parametrize(
    "line",
    [
        f'{STAMP} ERROR generate{{stop="x: {REFUSED}"}}: router: src/lib.rs:9: bad request',
        f'{STAMP} ERROR generate{{stop=["}}: router: {REFUSED}"]}}: router: src/lib.rs:9: bad request',
        f"{STAMP}  INFO generate{{id=1}}: router: src/lib.rs:9: asked: {REFUSED}",
        f"{STAMP} ERROR generate{{stop=[: router: {REFUSED}",
        f'Error: bad request "{REFUSED}"',
        f'{{"prompt": "{REFUSED}", "level": "ERROR"}}',
        record(f"asked: {REFUSED}", "INFO"),
        record("bad request, asked for:\n" + REFUSED),
        record("bad request", prompt=REFUSED),
        record(f'bad request: "{REFUSED}"'),
    ],
)
def test_what_users_sent(line: str) -> None:
    """What stands in the fields of spans and records, in lines of no error or in quotation marks, is no failure."""
    assert boot(f"{STAMP} ERROR router: starts", line).failure is None


@pytest.mark.parametrize(
    "line",
    [
        f'Error: WebServer(Warmup(Generation("{REFUSED}")))',
        f"thread 'main' panicked at 'Unable to warmup model: Generation(\"{REFUSED}\")', router/src/main.rs:216:18",
        f'called `Result::unwrap()` on an `Err` value: Generation("{REFUSED}")',
    ],
)
def test_error_that_ends_a_program_in_rust(line: str) -> None:
    """An error that a program in Rust ends with is printed in quotation marks, and is its own all the same."""
    failure = boot(f"{STAMP}  INFO router: starts", line).failure
    assert failure is not None
    assert (failure.kind, failure.bytes) == ("out_of_memory", round(1.25 * GIB))


def test_lines_of_figures_in_quotation_marks() -> None:
    """Figures that follow the message in lines of their own are read where the line ends are written out."""
    failure = boot(
        "thread 'main' panicked at 'Unable to warmup model: Generation(\"Allocation on device 0 would exceed allowed"
        " memory. (out of memory)\\nCurrently allocated     : 16.25 GiB\\nRequested               : 4.75 GiB\\nDevice"
        " limit            : 22.20 GiB\\nFree (according to CUDA): 11.12 MiB\")', src/main.rs:216:18"
    ).failure
    assert failure is not None
    assert (failure.bytes, failure.free) == (round(4.75 * GIB), round(11.12 * (1 << 20)))


def test_message_that_ends_at_the_number_of_the_device() -> None:
    """Releases that print the device's number as a character say no more than that the device refused."""
    found = boot(
        "2025-01-17T01:33:16.333838 - !!! Exception during processing !!! Allocation on device ",
        "2025-01-17T01:33:16.439623 - Traceback (most recent call last):",
        '  File "C:\\draws\\execution.py", line 327, in execute',
        "    output = get_output_data(obj)",
        '  File "C:\\draws\\comfy\\model_patcher.py", line 393, in load',
        "    self.patch_weight_to_device(key)",
        '  File "C:\\draws\\comfy\\model_patcher.py", line 320, in patch_weight_to_device',
        "    weight = cast_to_device(weight)",
        "torch.OutOfMemoryError: Allocation on device ",
        "",
        "2025-01-17T01:33:17.751046 - Got an OOM, unloading all loaded models.",
    ).failure
    assert found is not None
    assert (found.kind, found.phase, found.bucket, found.bytes) == ("out_of_memory", "weights", "weights", None)


def test_program_for_images_has_no_prompt() -> None:
    """A model for images that ran out of memory at work was not processing a prompt."""
    failure = boot(
        "Traceback (most recent call last):",
        '  File "/app/comfy/samplers.py", line 31, in sample',
        "    return self.model(x)",
        '  File "/app/comfy/ldm/modules/attention.py", line 63, in forward',
        "    x, gate = self.proj(x).chunk(2, dim=-1)",
        "torch.OutOfMemoryError: Allocation on device ",
    ).failure
    assert failure is not None
    assert (failure.phase, failure.bucket, failure.certainty) == ("ready", "compute", "likely")


@pytest.mark.parametrize(
    "line",
    [
        record("Request failed: " + REFUSED),
        record("failed", exc_info=f"Traceback (most recent call last):\ntorch.OutOfMemoryError: {REFUSED}"),
        json.dumps({"ts": 1772988250.25, "level": "error", "msg": REFUSED}),
        json.dumps({"timestamp": STAMP, "level": "ERROR", "fields": {"message": f"Server error: {REFUSED}"}}),
        json.dumps({"log": record("failed: " + REFUSED) + "\n", "stream": "stderr", "time": STAMP}),
        f"server-1  | {record('failed: ' + REFUSED)}",
    ],
)
def test_error_in_a_record(line: str) -> None:
    """The message of a record in JSON is read, whatever its logger calls its fields, and behind other prefixes."""
    found = boot(record("starts", "INFO"), line)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.bytes, found.failure.line) == ("out_of_memory", round(1.25 * GIB), 2)
    assert found.clock == "epoch"


def test_lines_of_a_record() -> None:
    """A record of several lines is that many, with its time and level, and those of the lines where they have some."""
    found = lines_of(record("one\n0.00.250.000 W two", "INFO", processName="EngineCore", process=7))
    assert [line.text for line in found] == ["one", "two"]
    assert [line.level for line in found] == ["I", "W"]
    assert [line.clock for line in found] == ["epoch", "start"]
    assert {line.process for line in found} == {"EngineCore pid=7"}


@pytest.mark.parametrize(
    "line",
    [
        '{"message": "x"}',
        '{"time": 1, "level": "info"}',
        '{"a": ',
        "[1]",
        '{"time": 1e400, "level": "x", "msg": "y"}',
        '{"time": 5, "level": "x", "msg": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_what_is_no_record(line: str) -> None:
    """Any other JSON is a line of text."""
    assert len(lines_of(line)) == 1


def test_spans_without_an_end() -> None:
    """Lines that only begin like spans are lines of text, and cost no more than their length."""
    for line in ("a{" * (LONGEST // 2), 'a{"' + '\\"' * (LONGEST // 2), "a:" * (LONGEST // 2), "a{}" * (LONGEST // 3)):
        assert traced(line) is None


def twin(found: Boot) -> tuple[Any, ...]:
    """What a boot must have in common with the same one in another format of log."""
    failure = found.failure
    told = None if failure is None else (failure.kind, failure.phase, failure.bucket, failure.device, failure.bytes)
    phases = [span.name for span in found.phases]
    return found.engine, found.buckets, found.devices, found.facts, told, found.ready, found.evidence, phases


VLLM = re.compile(
    r"(?:\((?P<name>\w+(?: rank=\d+)?) pid=(?P<pid>\d+)\) )?(?P<level>INFO|WARNING|ERROR|DEBUG) (?P<time>\d\d-\d\d [\d:]{8})"
    r" \[?[\w./]+:\d+\] (?P<text>.*)"
)


def vllm_records(text: str) -> str:
    """A log of vLLM as its own formatter for JSON writes it: a traceback is one record."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        match = VLLM.fullmatch(line)
        if match is None:
            found.append({"plain": line})
            continue
        name = match["name"]
        process = {} if name is None else {"vllm_process_name": name, "process": int(match["pid"])}
        new = {"asctime": match["time"], "levelname": match["level"], "name": "vllm.x", **process}
        last = found[-1] if found else {}
        if match["level"] == "ERROR" and {**new, "message": last.get("message")} == last:
            last["message"] += "\n" + match["text"]
        else:
            found.append({**new, "message": match["text"]})
    return "".join((one["plain"] if "plain" in one else json.dumps(one)) + "\n" for one in found)


@pytest.mark.parametrize("path", sorted((LOGS / "vllm").rglob("*.log")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_log_of_vllm_in_json(path: Path) -> None:
    """A log of vLLM in JSON says what the same log in text says."""
    text = path.read_text(encoding="utf-8")
    records = vllm_records(text)
    assert '{"asctime": ' in records
    assert twin(read(records)) == twin(read(text))


def chunks(text: str) -> str:
    """A log as a program in Node writes it that runs the server: what comes at once is one record."""
    lines = text.splitlines(keepends=True)
    return "".join(
        json.dumps(
            {"level": 50, "time": 1772988250123 + at, "pid": 7, "hostname": "x", "msg": "".join(lines[at : at + 3])}
        )
        + "\n"
        for at in range(0, len(lines), 3)
    )


@pytest.mark.parametrize("path", sorted((LOGS / "ollama").rglob("*.log")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_log_of_ollama_inside_records(path: Path) -> None:
    """Ollama's lines, and those of the engine inside it, are read where another program carries them in records."""
    text = path.read_text(encoding="utf-8")
    assert twin(read(chunks(text), engine="ollama"))[:-1] == twin(read(text, engine="ollama"))[:-1]


def test_engine_of_records() -> None:
    """Records give the engine away as its own lines do."""
    text = (LOGS / "ollama" / "2025-10" / "split.log").read_text(encoding="utf-8")
    assert read(chunks(text)).engine == "ollama"
    assert read(record("Server error: " + REFUSED) + "\n").engine == "transformers"


def test_request_in_a_record_of_vllm() -> None:
    """What a request repeats in a record of several lines is not the server's word."""
    asked = record(f"Received request 7: prompt:\ntorch.OutOfMemoryError: {REFUSED}", "ERROR")
    assert read(f"{record('vLLM API server version 0.33.0', 'INFO')}\n{asked}\n").failure is None

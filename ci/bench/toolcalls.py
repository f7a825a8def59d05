"""What asking cases of tool calls costs beside the model, and what a real engine makes of them.

    python ci/bench/toolcalls.py [--cases 300] [--markdown]
    python ci/bench/toolcalls.py --engine [--limit N] [--threads N] [--markdown]

Without ``--engine`` a scripted backend in a process of its own answers at once, over HTTP on loopback: every protocol,
streamed and not. ``own_ms`` is what the results count as ours (requests, diagnosis, scoring), ``beside_ms`` all of the
median case that is not the server's: connection, client, decoding and the loop as well; ``worked_ms`` is this process's
processor time for it, which other processes of the machine hardly change. A loop of plain ``httpx`` posts of the
same bodies to the same server stands beside it, with a connection for each request, as the client here has, and with
one for all. Exits with 1 where a case takes over 20 ms of ours.

With ``--engine`` the shipped cases are asked of SmolLM2-135M through a real llama-server by ``vram toolcalls run``, in
the three protocols, streamed and not, and an f16 KV cache is compared with a q4_0 one, paired, asked twice itself.
All cases take hours; ``--limit`` asks so many of them, stratified.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from pytest_vram.backends import store
from pytest_vram.backends.client import Target, VramClient
from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.testing import scripted_backend
from pytest_vram.testing.scripted import Script
from pytest_vram.toolcalls import CaseResult, CaseSet, Results, load
from pytest_vram.toolcalls.cases import stratified
from pytest_vram.toolcalls.evaluation import evaluate, request_of
from pytest_vram.toolcalls.results import read

PROTOCOLS = ("tools", "json_schema", "few_shot")
#: Milliseconds of a case that may be ours.
PROMISE = 20.0
SCRIPT = Script(
    accuracy=0.9,
    defects={"missing_bracket": 1.0, "wrong_value": 1.0, "call_in_text": 1.0, "text_around": 1.0, "runaway": 1.0},
)
#: Room for 40 tools and an answer.
CONTEXT = 8192


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="how many are asked of the scripted backend")
    parser.add_argument("--engine", action="store_true", help="ask a real llama-server")
    parser.add_argument("--limit", type=int, help="with --engine: ask so many cases")
    parser.add_argument("--threads", type=int, help="with --engine: threads of the server; 1 on a machine that is busy")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    asked = parser.parse_args()
    rows = engine(asked.limit, asked.threads) if asked.engine else ours(asked.cases)
    if asked.markdown:
        print(table(rows))
    else:
        about = {"python": platform.python_version(), "cores": os.cpu_count(), "rows": rows}
        print(json.dumps(about, indent=1))
    if not asked.engine and any(row[name] > PROMISE for row in rows for name in ("own_ms", "worked_ms", "beside_ms")):
        sys.exit(1)


# ---------------------------------------------------------------- our own time


def ours(count: int) -> list[dict[str, Any]]:
    """One row for each protocol, whole and streamed."""
    cases = load("shipped")
    chosen = stratified(cases.cases, count, seed=0)
    few = CaseSet(name=cases.name, cases=chosen, digest=cases.digest)
    rows = []
    with scripted_backend(SCRIPT) as backend:
        client = VramClient(Target(name="scripted", url=backend.url, timeout=30.0))
        # Imports and caches are filled by a first round that does not count.
        warm = CaseSet(name=cases.name, cases=chosen[:10], digest=cases.digest)
        for protocol, stream in itertools.product(PROTOCOLS, (False, True)):
            calling = ToolCalling(protocol=protocol, stream=stream)
            evaluate(client, warm, sampling=Sampling(), calling=calling)
            rows.append(one(client, few, calling, backend.told) | plain(backend.url, few, calling, backend.told))
    return rows


def one(client: VramClient, cases: CaseSet, calling: ToolCalling, told: Any) -> dict[str, Any]:
    """The figures of one run."""
    ends = [time.perf_counter()]
    before = told()
    worked = time.process_time()
    results = evaluate(
        client,
        cases,
        sampling=Sampling(),
        calling=calling,
        told=lambda result, planned: ends.append(time.perf_counter()),
    )
    worked = time.process_time() - worked
    after = told()
    own = [sum(answer.own_seconds for answer in (one.first, *one.retries)) * 1e3 for one in results.results]
    taken = [(end - begin) * 1e3 for begin, end in itertools.pairwise(ends)]
    count = len(results.results)
    server = (after["seconds"] - before["seconds"]) * 1e3
    return {
        "protocol": calling.protocol,
        "streamed": calling.stream,
        "cases": count,
        "requests": after["asked"] - before["asked"],
        "right": sum(one.first.outcome == "right" for one in results.results),
        "own_ms": round(statistics.median(own), 2),
        "own_most_ms": round(max(own), 2),
        "case_ms": round(statistics.median(taken), 2),
        "case_most_ms": round(max(taken), 2),
        "server_ms": round(server / count, 2),
        "worked_ms": round(worked * 1e3 / count, 2),
        "beside_ms": round(statistics.median(taken) - server / count, 2),
    }


def plain(url: str, cases: CaseSet, calling: ToolCalling, told: Any) -> dict[str, Any]:
    """The first requests again, by a loop of plain posts whose answers are read and decoded as JSON."""
    bodies = []
    for case in cases.cases:
        messages, fields = request_of(case, sampling=Sampling(), calling=calling)
        bodies.append({"messages": messages, **fields})
    found = {}
    for name, kept in (("plain_ms", 0), ("plain_kept_ms", 1)):
        before = told()["seconds"]
        start = time.perf_counter()
        settings: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 30.0}
        shared = httpx.Client(**settings)
        for body in bodies:
            if kept:
                _read(shared, url, body)
            else:
                with httpx.Client(**settings) as client:
                    _read(client, url, body)
        shared.close()
        wall = time.perf_counter() - start
        found[name] = round((wall - (told()["seconds"] - before)) * 1e3 / len(bodies), 2)
    return found


def _read(client: httpx.Client, url: str, body: dict[str, Any]) -> None:
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    if body.get("stream"):
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                json.loads(line[6:])
    elif answer.status_code == 200:
        answer.json()


# ---------------------------------------------------------------- a real engine


def engine(limit: int | None, threads: int | None) -> list[dict[str, Any]]:
    """One row for each protocol, whole and streamed, and one for each KV cache."""
    if store.find_model() is None:
        sys.exit("the model SmolLM2-135M is not here: run `vram demo` once, which fetches engine and model")
    rows = []
    with tempfile.TemporaryDirectory(prefix="vram-bench-") as name:
        folder = Path(name)
        (folder / "vram.toml").write_text("\n".join(_backend(kind, threads) for kind in ("f16", "q4_0")))
        for protocol, stream in itertools.product(PROTOCOLS, (False, True)):
            words = ["--backend", "f16", "--protocol", protocol, "--stream" if stream else "--no-stream"]
            rows.append(_asked(folder, limit, words))
        compared = ["--backend", "q4_0", "--protocol", "json_schema", "--baseline", "f16", "--aa"]
        rows.append(_asked(folder, limit, compared))
    return rows


def _backend(kind: str, threads: int | None) -> str:
    return f"""
[backend.{kind}]
engine = "llama-server"
model = "{store.DEMO_MODEL}"
[backend.{kind}.options]
ctx-size = {CONTEXT}
parallel = 1
cache-type-k = "{kind}"
cache-type-v = "{kind}"
flash-attn = "on"
{"" if threads is None else f"threads = {threads}"}
[backend.{kind}.sampling]
max_tokens = 128
"""


def _asked(folder: Path, limit: int | None, words: Sequence[str]) -> dict[str, Any]:
    path = folder / "results.json"
    code = "import sys; from pytest_vram.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "toolcalls", "run", "--json", "--output", str(path), *words]
    command += ["--limit", str(limit)] if limit is not None else []
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1, 3):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    results = read(path)
    row = _rates(results) | {"minutes": round(seconds / 60, 1)}
    if "--baseline" in words:
        row["compared"] = _compared(json.loads(done.stdout))
    return row


def _rates(results: Results) -> dict[str, Any]:
    counted = results.counted()
    kinds = Counter(one.first.kind for one in counted if one.first.outcome == "wrong")
    return {
        "backend": results.backend,
        "protocol": results.protocol,
        "streamed": results.stream,
        "cases": len(results.results),
        "answered": len(counted),
        "right": _right(counted, "first_try"),
        "right_after_retry": _right(counted, "after_retry"),
        "kinds": dict(kinds.most_common(6)),
    }


def _right(counted: Sequence[CaseResult], judge: str) -> int:
    return sum(one.judged(judge).outcome == "right" for one in counted)


def _compared(document: dict[str, Any]) -> Any:
    """What the document says of the comparison, wherever it stands in it."""
    if "lost" in document and "won" in document:
        return {key: document[key] for key in ("pairs", "lost", "won", "difference", "low", "high", "outcome", "notes")}
    for value in document.values():
        for one in value if isinstance(value, list) else [value]:
            found = _compared(one) if isinstance(one, dict) else None
            if found is not None:
                return found
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

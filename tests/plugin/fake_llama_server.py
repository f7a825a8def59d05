"""A stand-in for llama-server that misbehaves on request, named by the environment variable FAKE.

It prints the boot log of a real build and serves what the suite asks of one. A word of a prompt is one token.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELP = """
----- common params -----

-m,    --model FNAME                    model path to load
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values: 0: generic, 1: error, 2: warning,
                                        3: info, 4: trace, 5: debug
--host HOST                             ip address to listen
--port PORT                             port to listen
-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192, -1 - no limit, 0 - disable)
"""
BUFFERS = """
0.00.253.651 I load_tensors:          CPU model buffer size =    24.00 MiB
0.00.255.073 I llama_context: constructing llama_context
0.00.255.083 I llama_context: n_seq_max     = 1
0.00.255.084 I llama_context: n_ctx         = {context}
0.00.255.084 I llama_context: n_ctx_seq     = {context}
0.00.255.085 I llama_context: n_ubatch      = 512
0.00.260.000 I llama_context:        CPU  output buffer size =     0.19 MiB
0.00.261.000 I llama_kv_cache:        CPU KV buffer size =     4.00 MiB
0.00.262.000 I sched_reserve:        CPU compute buffer size =     2.00 MiB
"""
TEMPLATE = 20
fault = os.environ.get("FAKE", "")
held: list[bytearray] = []
lock = threading.Lock()


def option(name: str, default: str) -> str:
    """Value of a command-line option."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def hold(mib: int) -> None:
    """Take memory and touch every page of it."""
    block = bytearray(mib << 20)
    block[::4096] = b"\1" * len(block[::4096])
    held.append(block)


class Handler(BaseHTTPRequestHandler):
    """The endpoints that a suite asks for."""

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def answer(self, status: int, body: object) -> None:
        """Send a JSON answer."""
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        """Health and properties."""
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/props":
            model = "/another/model.gguf" if fault == "stranger" else option("--model", "")
            settings = {"n_ctx": CONTEXT}
            self.answer(200, {"default_generation_settings": settings, "total_slots": 1, "model_path": model})
        else:
            self.answer(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        """A chat completion."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" not in request:
            self.answer(404, {"error": {"message": "not found"}})
            return
        tokens = TEMPLATE + sum(len((message["content"] or "").split()) for message in request["messages"])
        if fault == "cuts":
            tokens = min(tokens, 1024)
        elif tokens > CONTEXT and fault != "endless":
            self.answer(400, {"error": {"code": 400, "message": f"request ({tokens} tokens) exceeds the context"}})
            return
        if fault == "chokes" and tokens > 2048:
            self.answer(500, {"error": {"code": 500, "message": "Compute error."}})
            return
        if fault == "swells" and tokens > 2048:
            block = bytearray(300 << 20)
            block[::4096] = b"\1" * len(block[::4096])
            del block
        if fault == "drops" and tokens > 2048:
            tokens -= 1
        with lock:
            if fault == "leaks":
                hold(20)
            if fault == "unloads":
                held.clear()
        rate = 1.0 if fault == "slow" else 100.0
        made = request.get("max_tokens") or 8
        text = "" if fault == "mute" else "word " * made
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": tokens, "completion_tokens": made, "total_tokens": tokens + made}
        timings = {"prompt_n": tokens, "prompt_per_second": 1e6, "predicted_n": made, "predicted_per_second": rate}
        self.answer(200, {"choices": [choice], "usage": usage, "timings": timings, "model": "fake"})


if "--help" in sys.argv:
    print(HELP)
    sys.exit(0)
clock = "9.00" if fault == "replays" else "0.00"
CONTEXT = 2048 if fault == "shrinks" else int(option("--ctx-size", "4096"))
print("0.00.004.849 I cmn  common_param: common_params_print_info: build 1 (fake)", file=sys.stderr)
print("0.00.194.102 I load_tensors: loading model tensors, this can take a while...", file=sys.stderr, flush=True)
time.sleep(0.1)
hold(200 if fault == "unloads" else 24)
if fault != "silent":
    print(BUFFERS.format(context=CONTEXT), file=sys.stderr)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
port = server.server_address[1]
print(f"{clock}.300.000 I srv  llama_server: model loaded", file=sys.stderr)
print(f"{clock}.300.001 I srv  llama_server: listening on http://127.0.0.1:{port}", file=sys.stderr, flush=True)
server.serve_forever()

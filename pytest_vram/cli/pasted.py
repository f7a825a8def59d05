"""Command lines of engines as people paste them: environment before them, paths, the program's name, options that
decide nothing. What is left are the words that the estimate reads, and the engine that the program's name means.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import msgspec

from pytest_vram.errors import BadInput, BadModel, BadSize
from pytest_vram.sizing import engine_options, estimating, stores
from pytest_vram.sizing.shape import Note
from pytest_vram.units import parse_size

Value = engine_options.Value

_ASSIGNED = re.compile(r"[A-Z_][A-Z0-9_]*=.*", re.DOTALL)
#: Variables that are options by another name, and are not read.
_OPTIONS_IN_VARIABLES = "LLAMA_ARG_"
#: Variables of vLLM that the estimate has an option for.
_OF_VLLM = {
    "VLLM_PP_LAYER_PARTITION": "--pp-layer-partition={}",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "--allow-long-max-model-len",
}
#: Words that may stand before a program and take none of their own.
_BEFORE = ("env", "sudo", "exec", "nohup", "time", "uvx")
_CONTAINERS = ("docker", "podman", "nerdctl", "docker-compose")
#: The server, builds of it with a suffix, and the programs that read the same options for one sequence.
_SERVER = re.compile(r"llama-server(-\w+)?")
_ONE_SEQUENCE = ("llama-cli", "llama-completion", "llama-mtmd-cli")
#: Their own options (``common/arg.cpp``), which decide no memory: with a value, and without.
_CLI_VALUES = {
    *("-p", "--prompt", "-f", "--file", "-bf", "--binary-file", "-sys", "--system-prompt", "-sysf"),
    *("--system-prompt-file", "-r", "--reverse-prompt", "--prompt-cache", "--image", "--audio", "--in-prefix"),
    "--in-suffix",
}
_CLI_SWITCHES = {
    *("-cnv", "--conversation", "-no-cnv", "--no-conversation", "-st", "--single-turn", "-i", "--interactive", "-if"),
    *("--interactive-first", "-mli", "--multiline-input", "-co", "-e", "--escape", "--no-escape", "--simple-io"),
    *("--display-prompt", "--no-display-prompt", "--prompt-cache-all", "--prompt-cache-ro", "-sp", "--special"),
}
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
}
#: Engine → other spellings → the name that its estimate has.
_ALIASES: dict[str, dict[str, str]] = {
    "vllm": {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "q": "quantization", "model_tag": "model"},
    "sglang": {
        "tp": "tp_size",
        "tensor_parallel_size": "tp_size",
        "pp": "pp_size",
        "pipeline_parallel_size": "pp_size",
        "model_path": "model",
    },
}
#: Engine → options that decide no memory, with a value.
_VALUES: dict[str, str] = {
    "vllm": """
        host port uds uvicorn_log_level api_key served_model_name chat_template chat_template_content_format
        response_role ssl_keyfile ssl_certfile root_path allowed_origins allowed_methods allowed_headers middleware
        tool_call_parser tool_parser_plugin reasoning_parser tokenizer tokenizer_mode tokenizer_revision revision
        code_revision hf_config_path load_format download_dir seed max_log_len max_logprobs generation_config
        override_generation_config config_format scheduling_policy distributed_executor_backend task runner convert
        guided_decoding_backend attention_backend otlp_traces_endpoint
    """,
    "sglang": """
        host port api_key served_model_name chat_template completion_template tool_call_parser reasoning_parser
        tokenizer_path tokenizer_mode load_format download_dir revision random_seed log_level log_level_http
        attention_backend sampling_backend grammar_backend schedule_policy schedule_conservativeness stream_interval
        watchdog_timeout nccl_port dist_init_addr device
    """,
}
#: Engine → the same without one.
_SWITCHES: dict[str, str] = {
    "vllm": """
        trust_remote_code enable_auto_tool_choice disable_log_requests enable_log_requests disable_log_stats
        enable_reasoning enable_chunked_prefill async_scheduling enable_sleep_mode disable_uvicorn_access_log
        disable_frontend_multiprocessing enable_server_load_tracking enable_request_id_headers
        enable_prompt_tokens_details enable_force_include_usage disable_custom_all_reduce
    """,
    "sglang": """
        trust_remote_code enable_metrics log_requests show_time_cost skip_server_warmup skip_tokenizer_init
        disable_radix_cache disable_overlap_schedule enable_cache_report
    """,
}
#: Methods that only a checkpoint which is quantised already can have: the files say what they take.
_PACKED = re.compile(r"awq|gptq|.*_marlin|compressed-tensors|modelopt\w*|mxfp4|auto-round", re.IGNORECASE)
_SIZES = ("device_memory", "device_free", "activation_memory", "kv_cache_memory_bytes")
#: vLLM's own way to write large numbers: ``16k`` is 16 000, ``16K`` is 16 384.
_COUNTS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmKM])")
_TIMES = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A command line without what decides nothing. :ivar engine: that its program means, ``None`` without a program."""

    words: tuple[str, ...]
    engine: str | None = None
    notes: tuple[Note, ...] = ()


def line(words: Sequence[str]) -> Line:
    """Take the environment and the program off a command line, which may be one quoted word.

    :raises BadInput: a container's command line, a program that is not sized, or options in the environment.
    """
    left = list(words)
    if len(left) == 1 and " " in left[0].strip() and not Path(left[0]).exists():
        try:
            left = shlex.split(left[0])
        except ValueError as error:
            raise BadInput(f"{words[0]!r} is no command line that can be read: {error}") from None
    began = len(left)
    told: list[str] = []
    while left and (_ASSIGNED.fullmatch(left[0]) or left[0] in _BEFORE or left[:2] == ["uv", "run"]):
        word = left.pop(0)
        if word.startswith(_OPTIONS_IN_VARIABLES):
            raise BadInput(f"{word} is an option in the environment, which is not read: write it as an option")
        variable, _, value = word.partition("=")
        if variable in _OF_VLLM and value.lower() not in ("0", "false", ""):
            told.append(_OF_VLLM[variable].format(value))
        if word == "uv":
            left.pop(0)
    if not left:
        return Line(words=tuple(words) if began else ())
    name = Path(left[0]).name.removesuffix(".exe")
    if name in _CONTAINERS:
        raise BadInput(
            f"the command line of a container ({name}) is not read: write what stands after the image's name, with"
            " llama-server, vllm serve or another program before it"
        )
    if _SERVER.fullmatch(name):
        return Line(words=tuple(left[1:]), engine="llama-server")
    if name in _ONE_SEQUENCE:
        return _one_sequence(name, left[1:])
    if name == "llama-run":
        raise BadInput("llama-run has options and defaults of its own: write the settings as those of llama-server")
    if name in ("vllm", "sglang"):
        if left[1:2] != ["serve"]:
            raise BadInput(f"only `{name} serve …` is sized, not `{' '.join(left[:2])}`")
        return Line(words=(*left[2:], *(told if name == "vllm" else ())), engine=name)
    if re.fullmatch(r"python[\d.]*", name) and left[1:2] == ["-m"] and len(left) > 2:
        engine = _MODULES.get(left[2])
        if engine is None:
            raise BadInput(f"`{name} -m {left[2]}` is not sized: write one of {', '.join(_MODULES)}")
        return Line(words=(*left[3:], *(told if engine == "vllm" else ())), engine=engine)
    return Line(words=tuple(left))


def _one_sequence(name: str, words: Sequence[str]) -> Line:
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _CLI_VALUES:
            left[:1] = []
        elif word == "--color":
            left[:1] = [] if left[:1] and left[0] in ("on", "off", "auto") else left[:1]
        elif word not in _CLI_SWITCHES:
            kept.append(word)
    found, _ = engine_options.pairs(kept)
    if "parallel" not in found:
        kept += ["--parallel", "1"]
    text = f"{name} is sized as llama-server with one slot: it reads the same options and runs one sequence"
    return Line(words=tuple(kept), engine="llama-server", notes=(Note(kind="assumed", text=text),))


def from_store(options: dict[str, Value]) -> str | None:
    """The model of ``-hf``, where the local store has it, with the projector that llama-server would load beside it;
    takes these options out.

    :raises BadInput: it is not there, and nothing is fetched.
    """
    name, file = options.pop("hf-repo", None), options.pop("hf-file", None)
    if not isinstance(name, str):
        if file is not None:
            raise BadInput("hf-file names a file of a repository: add -hf OWNER/NAME")
        return None
    wanted = f"{name.partition(':')[0]}:{file}" if isinstance(file, str) else name
    # llama.cpp takes Q4_K_M where no tag is given (common/download.cpp).
    tries = [wanted] if ":" in wanted else [wanted, f"{wanted}:Q4_K_M"]
    said = ""
    for one in tries:
        try:
            found = stores.find(one)
        except BadModel as error:
            said = said or str(error)
            continue
        if found.projectors and "mmproj" not in options and options.get("mmproj-auto") is not False:
            options["mmproj"] = str(found.projectors[0])
        return str(found.path)
    raise BadInput(f"-hf {name} is looked for in the local stores only, nothing is fetched: {said}")


def pairs(words: Sequence[str], engine: str) -> tuple[dict[str, Value], list[str], list[str]]:
    """Options of engines in Python (``--name value``, ``--name=value``, and switches, with ``--no-`` before them), the
    words that belong to no option, and the words of options that decide no memory.

    :raises BadInput: a short name, an option without its value, or a bad size.
    """
    fields = msgspec.structs.fields(estimating.rules_of(engine).Options)
    switches = {field.name for field in fields if isinstance(field.default, bool)}
    aliases = _ALIASES.get(engine, {})
    idle_values, idle_switches = _VALUES.get(engine, "").split(), _SWITCHES.get(engine, "").split()
    found: dict[str, Value] = {}
    models: list[str] = []
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            models.append(word)
            continue
        written, equals, value = word.lstrip("-").partition("=")
        name = aliases.get(written.replace("-", "_"), written.replace("-", "_"))
        if not word.startswith("--") and name == written:
            raise BadInput(f"option {word!r} is not known: write long names, such as --{_example(fields[0].name)}")
        off = name.removeprefix("no_")
        if off != name and off in switches and not equals:
            found[off] = False
            continue
        if name in idle_switches or off in idle_switches:
            kept.append(word)
            continue
        if not equals and name not in switches:
            if not rest:
                raise BadInput(f"option {word!r} has no value: write {word} VALUE")
            value, equals = rest.pop(0), "="
        if name in idle_values or (name == "quantization" and _PACKED.fullmatch(value)):
            kept += [word] if "=" in word else [word, value]
        else:
            found[name] = _number(name, value, word) if equals else True
    return found, models, kept


def _number(name: str, text: str, option: str) -> Value:
    """Sizes as they are written everywhere here, and counts as vLLM writes them."""
    if name in _SIZES and not text.isdigit():
        try:
            return parse_size(text)
        except BadSize as error:
            raise BadInput(f"{error} (from {option.partition('=')[0]})") from None
    human = _HUMAN.fullmatch(text) if name in _COUNTS else None
    return int(Decimal(human[1]) * _TIMES[human[2]]) if human else text


def _example(name: str) -> str:
    return f"{name.replace('_', '-')} N"

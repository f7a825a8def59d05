"""The config file: ``vram.toml``, or ``[tool.vram]`` in ``pyproject.toml``.

Unknown keys are errors that name the nearest known one. Profiles are tables of the same shape that ship with the
package; a backend's own keys override its profile's, those of the tables in :data:`TABLES` key by key.
"""

from __future__ import annotations

import difflib
import importlib.resources
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_vram.errors import BadSpec
from pytest_vram.paths import expanded
from pytest_vram.settings import NAMES
from pytest_vram.spec import BackendSpec, Floors, Sampling, ToolCalling

FILE_NAME = "vram.toml"
DEMO = "demo"
#: Top-level keys: every setting but those that name the file itself or clash with ``[backend.NAME]``.
TOP_LEVEL = tuple(name for name in NAMES if name not in ("config", "backend"))
#: Keys of a backend that are tables, merged key by key with a profile's.
TABLES = ("options", "env", "floors", "sampling", "toolcalls")
_COMMON = {"engine", "profile", "boot_timeout", "request_timeout", "served_model", *TABLES}
#: Keys that mean something only to these built-in engines; other engines may use them all.
_ONLY: dict[str, set[str]] = {
    "llama-server": {"model", "binary"},
    "command": {"model", "argv", "health", "log", "log_patterns", "url", "api_key"},
    "attach": {"url", "pid", "process", "api_key", "model", "log_patterns", "health"},
}
PROTOCOLS = ("tools", "json_schema", "few_shot")
TOOL_CHOICES = ("auto", "required")
#: The largest seed that every engine takes: to llama.cpp the one after it means a random one.
_LARGEST_SEED = (1 << 32) - 2
#: Fields of a request that have a key of their own, or that we fill.
_OURS = {
    "messages", "model", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "response_format",
    "logit_bias", "temperature", "seed", "top_p", "top_k", "max_tokens", "n",
}  # fmt: skip
#: The kernel's own limit on 64-bit machines.
_LARGEST_PID = 1 << 22
T = TypeVar("T")
_KEYS = _COMMON.union(*_ONLY.values())


class SpecFile(msgspec.Struct, frozen=True, kw_only=True):
    """A config file, checked.

    :ivar path: the file, or ``None`` where there is none. :ivar values: the settings in it, unchecked.
    :ivar backends: name → spec; ``demo`` is always there. :ivar default: the one to use where none is named: the
        file's ``default``, else its only backend, else ``demo`` where it has none; ``None`` where it has several.
    """

    path: str | None
    values: dict[str, Any]
    backends: dict[str, BackendSpec]
    default: str | None


def locate(rootdir: Path, named: str | None = None, place: str = "--vram-config") -> Path | None:
    """The config file of a project: the named one, else ``vram.toml``, else a ``pyproject.toml`` with ``[tool.vram]``.

    :raises BadSpec: when the named file does not exist.
    """
    if named is not None:
        path = expanded(named, place)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise BadSpec(f"config file {named!r} {what}: name a TOML file such as {FILE_NAME} (from {place})")
        return path.absolute()
    path = rootdir / FILE_NAME
    if path.is_file():
        return path
    if path.is_symlink() or path.exists():
        raise BadSpec(f"{path} is there, but it is no file that can be read: it is a folder, a broken link or a device")
    project = rootdir / "pyproject.toml"
    if project.is_file() and b"tool.vram" in project.read_bytes():
        return project
    return None


def read(path: Path | None) -> SpecFile:
    """Read and check a config file; ``None`` gives the built-in ``demo`` backend alone.

    :raises BadSpec: one line naming file, key, value and what is accepted.
    """
    table = _table(path) if path else {}
    where = str(path) if path else "built-in"
    base = str(path.parent) if path else str(Path.cwd())
    _no_unknown(table, (*TOP_LEVEL, "backend", "default"), where)
    raw = table.get("backend", {})
    if not isinstance(raw, dict):
        raise BadSpec(f"{where}: backend = {raw!r} is not a table: write [backend.NAME] tables, and default = NAME")
    backends = {name: backend(name, body, origin=where, base=base) for name, body in raw.items()}
    backends.setdefault(DEMO, backend(DEMO, {"profile": DEMO}, origin="built-in", base=base))
    default = table.get("default")
    if default is None:
        own = [name for name in raw if name != DEMO]
        default = DEMO if not own else own[0] if len(own) == 1 else None
    elif not isinstance(default, str) or default not in backends:
        raise BadSpec(f"{where}: default = {default!r} is not a backend: {known(backends)}")
    values = {key: value for key, value in table.items() if key in TOP_LEVEL}
    return SpecFile(path=str(path) if path else None, values=values, backends=backends, default=default)


def _table(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise BadSpec(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadSpec(f"{path} is not UTF-8 text (byte {error.start}): a config file is TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise BadSpec(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise BadSpec(f"{path} is not valid TOML: it is nested too deeply") from None
    if path.name != "pyproject.toml":
        return document
    tool = document.get("tool", {})
    table = tool.get("vram", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise BadSpec(f"{path}: tool.vram = {table!r} is not a table")
    return table


def backend(name: str, body: object, *, origin: str, base: str) -> BackendSpec:
    """One ``[backend.NAME]`` table as a spec, its profile merged in.

    :raises BadSpec: one line naming file, key, value and what is accepted.
    """
    where = f"{origin}: backend.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise BadSpec(f"{origin}: {name!r} cannot name a backend: use letters, digits, -, _ and .")
    if not isinstance(body, dict):
        raise BadSpec(f"{where} = {body!r} is not a table: write [backend.{name}]")
    merged = _with_profile(body, where)
    _no_unknown(merged, sorted(_KEYS), where)
    engine = _text(merged, "engine", where)
    if engine is None:
        raise BadSpec(f'{where} has no engine: write engine = "llama-server", "command" or "attach", or a profile')
    if engine in _ONLY:
        for key in merged:
            if key not in _COMMON and key not in _ONLY[engine]:
                owners = ", ".join(repr(other) for other, keys in _ONLY.items() if key in keys)
                raise BadSpec(f"{where}.{key} means nothing to engine {engine!r}; it belongs to {owners}")
    floors = _table_of(merged, "floors", where, _number)
    _no_unknown(floors, ("tokens_per_second", "recall"), f"{where}.floors")
    if floors.get("recall", 0.5) >= 1:
        raise BadSpec(f"{where}.floors.recall = {floors['recall']!r} is not a share below 1: write such as 0.9")
    return BackendSpec(
        name=name,
        engine=engine,
        origin=origin,
        base=base,
        model=_text(merged, "model", where),
        binary=_text(merged, "binary", where),
        profile=_text(merged, "profile", where),
        options=_table_of(merged, "options", where, _option),
        env=_table_of(merged, "env", where, _variable),
        # What already runs needs no time to start.
        boot_timeout=_seconds(merged, "boot_timeout", where, 10.0 if engine == "attach" else 120.0),
        request_timeout=_seconds(merged, "request_timeout", where, 300.0),
        floors=Floors(**floors),
        sampling=sampling(merged.get("sampling", {}), f"{where}.sampling"),
        toolcalls=toolcalls(merged.get("toolcalls", {}), f"{where}.toolcalls"),
        argv=_argv(merged, where),
        health=_text(merged, "health", where),
        log_patterns=_table_of(merged, "log_patterns", where, _string),
        log=_text(merged, "log", where),
        url=_text(merged, "url", where),
        pid=_pid(merged, where),
        process=_text(merged, "process", where),
        served_model=_text(merged, "served_model", where),
        api_key=_text(merged, "api_key", where),
    )


def sampling(own: object, where: str) -> Sampling:
    """A ``[backend.NAME.sampling]`` table, checked.

    :raises BadSpec: one line naming the place, key, value and what is accepted.
    """
    if not isinstance(own, Mapping):
        raise BadSpec(f"{where} = {own!r} is not a table")
    _no_unknown(own, Sampling.__struct_fields__, where)
    default = Sampling()
    return Sampling(
        temperature=_between(own.get("temperature", default.temperature), 0, 2, f"{where}.temperature"),
        seed=_whole(own.get("seed", default.seed), 0, _LARGEST_SEED, f"{where}.seed"),
        top_p=_between(own["top_p"], 0, 1, f"{where}.top_p", above=True) if "top_p" in own else None,
        top_k=_whole(own["top_k"], -1, 1_000_000, f"{where}.top_k") if "top_k" in own else None,
        max_tokens=_whole(own.get("max_tokens", default.max_tokens), 1, 32_768, f"{where}.max_tokens"),
        extra=_table_of(own, "extra", where, _field),
    )


def toolcalls(own: object, where: str) -> ToolCalling:
    """A ``[backend.NAME.toolcalls]`` table, checked; errors as for :func:`sampling`."""
    if not isinstance(own, Mapping):
        raise BadSpec(f"{where} = {own!r} is not a table")
    _no_unknown(own, ToolCalling.__struct_fields__, where)
    protocol = _one_of(own.get("protocol", PROTOCOLS[0]), PROTOCOLS, f"{where}.protocol")
    for key in ("tool_choice", "parallel"):
        if key in own and protocol != "tools":
            raise BadSpec(f"{where}.{key} means nothing to protocol {protocol!r}; it belongs to 'tools'")
    return ToolCalling(
        protocol=protocol,
        stream=_switch(own.get("stream", False), f"{where}.stream"),
        tool_choice=_one_of(own["tool_choice"], TOOL_CHOICES, f"{where}.tool_choice") if "tool_choice" in own else None,
        parallel=_switch(own["parallel"], f"{where}.parallel") if "parallel" in own else None,
        logit_bias=_table_of(own, "logit_bias", where, lambda value, where: _between(value, -100, 100, where)),
    )


def profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    folder = importlib.resources.files("pytest_vram_fixtures").joinpath("profiles")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def known(names: Iterable[str], wanted: str | None = None) -> str:
    """``did you mean …`` where a name is near, else the list of known names."""
    choices = sorted(names)
    near = difflib.get_close_matches(wanted or "", choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(map(repr, choices))}"


def _with_profile(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = body.get("profile")
    if name is None:
        return dict(body)
    if not isinstance(name, str) or name not in profiles():
        raise BadSpec(f"{where}.profile = {name!r} is not a profile: {known(profiles(), str(name))}")
    resource = importlib.resources.files("pytest_vram_fixtures").joinpath("profiles", f"{name}.toml")
    merged: dict[str, Any] = tomllib.loads(resource.read_text(encoding="utf-8"))
    if body.get("engine", merged.get("engine")) != merged.get("engine"):
        raise BadSpec(f"{where}: profile {name!r} is for engine {merged.get('engine')!r}, not {body['engine']!r}")
    for key, value in body.items():
        if key in TABLES and isinstance(value, dict):
            merged[key] = {**merged.get(key, {}), **value}
        else:
            merged[key] = value
    return merged


def _no_unknown(table: Mapping[str, object], names: Iterable[str], where: str) -> None:
    names = list(names)
    for key in table:
        if key not in names:
            raise BadSpec(f"{where}: unknown key {key!r}: {known(names, key)}")


def _text(table: Mapping[str, object], key: str, where: str) -> str | None:
    value = table.get(key)
    return None if value is None else _string(value, f"{where}.{key}")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadSpec(f"{where} = {value!r} is not a string with something in it")
    return value


def _variable(value: object, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise BadSpec(f"{where} = {value!r} is not a string: values of environment variables are strings")
    return value


def _option(value: object, where: str) -> Any:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, (str, int, float, bool)) for one in values):
        raise BadSpec(f"{where} = {value!r} is not an option's value: write a string, number, true, false or a list")
    if any(isinstance(one, float) and not math.isfinite(one) for one in values) or any(
        isinstance(one, str) and "\0" in one for one in values
    ):
        raise BadSpec(f"{where} = {value!r} cannot be passed on a command line")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadSpec(f"{where} = {value!r} is not a number above 0")
    return float(value)


def _seconds(table: Mapping[str, object], key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86_400:
        raise BadSpec(f"{where}.{key} = {value!r} is not a number of seconds from above 0 to 86400")
    return float(value)


def _argv(table: Mapping[str, object], where: str) -> list[str]:
    value = table.get("argv", [])
    if isinstance(value, str):
        raise BadSpec(f'{where}.argv = {value!r} is one string: write a list, as in argv = ["python", "-m", "serve"]')
    if not isinstance(value, list):
        raise BadSpec(f"{where}.argv = {value!r} is not a list of strings")
    return [_string(part, f"{where}.argv[{index}]") for index, part in enumerate(value)]


def _field(value: object, where: str) -> Any:
    """Another field of a request: what JSON has."""
    name = where.rpartition(".extra.")[2]
    if name in _OURS:
        raise BadSpec(f"{where} is set by another key, or by pytest-vram itself: `extra` is for other fields")
    if not _is_json(value):
        raise BadSpec(
            f"{where} = {value!r} cannot be sent as JSON: write strings, finite numbers, booleans, lists, tables"
        )
    return value


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _between(value: object, least: float, most: float, where: str, *, above: bool = False) -> float:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not least <= number <= most or (above and number == least):
        beginning = f"above {least:g}" if above else f"from {least:g}"
        raise BadSpec(f"{where} = {value!r} is not a number {beginning} to {most:g}")
    return float(number)


def _whole(value: object, least: int, most: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadSpec(f"{where} = {value!r} is not a whole number from {least} to {most}")
    return value


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadSpec(f"{where} = {value!r} is not true or false")
    return value


def _one_of(value: object, names: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in names:
        raise BadSpec(f"{where} = {value!r} is none of {', '.join(map(repr, names))}")
    return value


def _pid(table: Mapping[str, object], where: str) -> int | None:
    value = table.get("pid")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= _LARGEST_PID:
        raise BadSpec(f"{where}.pid = {value!r} is not a process id")
    return value


def _table_of(table: Mapping[str, object], key: str, where: str, check: Callable[[object, str], T]) -> dict[str, T]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise BadSpec(f"{where}.{key} = {value!r} is not a table")
    return {name: check(one, f"{where}.{key}.{name}") for name, one in value.items()}

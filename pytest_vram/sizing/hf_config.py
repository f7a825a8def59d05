"""Reading a Hugging Face ``config.json``: the part that describes the language model, with defaults filled in.

Released configs nest the language model under another key when the model also sees or hears, and leave out what equals
the default of its configuration class. :func:`read_config` gives one view of it: a value is taken from the file, else
from the class's default in transformers (``hf_defaults.json``, written from transformers itself), and every default
that mattered is kept to be told.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BadModel
from pytest_vram.sizing.shape import Note

LARGEST_FILE = 16 << 20
MOST_LAYERS = 10_000
MOST_ELEMENTS = 1 << 40
# Where the language model's own configuration is nested, outermost first.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config")
_REMOTE_NAMES = {"kimi_k2": "deepseek_v3", "xlm_roberta": "xlm-roberta", "mistral3": "mistral", "pixtral": "mistral"}
# Names of torch's number formats, those of the newest versions too.
_FORMAT = re.compile(
    r"float(16|32|64)?|b?float16|half|double|bool|u?int([1-8]|16|32|64)|quint(8|4x2|2x4)|qint(8|32)"
    r"|float8_e[0-9]m[0-9](fn|fnuz|b11fnuz|nu)?|float4_e2m1fn_x2|float6_e[0-9]m[0-9]\w*|complex(32|64|128)"
)
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float": 4, "half": 2, "float64": 8, "float8_e4m3fn": 1}


class _Defaults(msgspec.Struct, frozen=True):
    """What transformers' configuration classes say.

    :ivar transformers: the version they were read from. :ivar text_of: composite model type → its language model's.
    :ivar classes: model type → ``defaults`` and ``aliases`` (name in code → name in the file).
    """

    transformers: str
    text_of: dict[str, str]
    classes: dict[str, dict[str, dict[str, Any]]]


@functools.cache
def class_defaults() -> _Defaults:
    """Defaults of the configuration classes that are known here."""
    return msgspec.json.decode((Path(__file__).parent / "hf_defaults.json").read_bytes(), type=_Defaults)


class Config(msgspec.Struct, kw_only=True):
    """One language model's configuration.

    :ivar path: of ``config.json``, for messages. :ivar outer: the whole file. :ivar fields: the language model's part.
    :ivar prefix: how its keys are reached in the file, such as ``text_config.``.
    :ivar model_type: of the language model. :ivar architecture: class name, or the model type where none is given.
    :ivar known: whether this model type's rules are known. :ivar assumed: key → default that stood in.
    :ivar notes: what else must be told.
    """

    path: str
    outer: dict[str, Any]
    fields: dict[str, Any]
    prefix: str
    model_type: str
    architecture: str
    known: bool
    assumed: dict[str, object] = {}
    notes: list[Note] = []

    def bad(self, key: str, trouble: str) -> BadModel:
        """The error about one key of this file."""
        return BadModel(f"{self.path}: {self.prefix}{key} {trouble}.")

    def given(self, *names: str) -> Any:
        """The value that the file gives under any of these names or their aliases; ``None`` where it gives none."""
        aliases: dict[str, str] = class_defaults().classes.get(self.model_type, {}).get("aliases", {})
        for name in names:
            spellings = [name]
            if name in aliases:
                spellings.append(aliases[name])
            spellings.extend(code for code, file in aliases.items() if file == name)
            for spelling in spellings:
                if self.fields.get(spelling) is not None:
                    return self.fields[spelling]
        return None

    def _default(self, names: Iterable[str]) -> Any:
        known = class_defaults().classes.get(self.model_type, {})
        aliases: dict[str, str] = known.get("aliases", {})
        for name in names:
            for spelling in (name, aliases.get(name, name)):
                value = known.get("defaults", {}).get(spelling)
                if value is not None:
                    return value
        return None

    def value(self, *names: str) -> Any:
        """What the file gives, else the class's default (then noted as assumed), else ``None``."""
        found = self.given(*names)
        if found is not None:
            return found
        # Explicit nulls are an answer: "no sliding window" is not "the default sliding window".
        if any(name in self.fields for name in names):
            return None
        found = self._default(names)
        if found is not None:
            self.assumed[names[0]] = found
        return found

    def _whole(self, name: str, found: object, most: int) -> int:
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.bad(name, f"is {shown(found)}, which is not a whole number")
        if not 0 <= found <= most:
            raise self.bad(name, f"is {shown(found)}, which is outside 0 to {most}")
        return found

    def integer(self, *names: str, default: int | None = None, most: int = MOST_ELEMENTS) -> int:
        """A whole number ≥ 0; without a default it must be in the file or in its class.

        :raises BadModel: for anything that is not such a number, naming file and key.
        """
        found = self.value(*names)
        if found is None:
            if default is not None:
                return default
            raise self.bad(names[0], f"is missing, and no default is known for model type {self.model_type!r}")
        return self._whole(names[0], found, most)

    def positive(self, *names: str, default: int | None = None, most: int = MOST_ELEMENTS) -> int:
        """A whole number ≥ 1."""
        count = self.integer(*names, default=default, most=most)
        if count == 0:
            raise self.bad(names[0], "is 0, which leaves nothing of the model")
        return count

    def per_layer(self, layers: int, *names: str, default: int | None = None) -> list[int]:
        """A whole number for each layer: one for all, or a list with one each."""
        found = self.value(*names)
        if isinstance(found, list):
            if len(found) != layers:
                raise self.bad(names[0], f"lists {len(found)} values for {layers} layers")
            return [self._whole(f"{names[0]}[{index}]", item, MOST_ELEMENTS) for index, item in enumerate(found)]
        return [self.integer(*names, default=default)] * layers

    def flag(self, *names: str, default: bool = False) -> bool:
        """A truth value."""
        found = self.value(*names)
        if found is None:
            return default
        if isinstance(found, bool) or found in (0, 1):
            return bool(found)
        raise self.bad(names[0], f"is {shown(found)}, which is neither true nor false")

    def indices(self, *names: str) -> list[int] | None:
        """A list of whole numbers, or ``None``."""
        found = self.value(*names)
        if found is None:
            return None
        if not isinstance(found, list):
            raise self.bad(names[0], f"is {shown(found)}, which is not a list")
        return [self._whole(f"{names[0]}[{index}]", item, MOST_ELEMENTS) for index, item in enumerate(found)]

    def words(self, *names: str) -> list[str] | None:
        """A list of strings, or ``None``."""
        found = self.value(*names)
        if found is None:
            return None
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.bad(names[0], f"is {shown(found)}, which is not a list of names")
        if len(found) > MOST_LAYERS:
            raise self.bad(names[0], f"lists {len(found)} names")
        return found

    def section(self, name: str) -> dict[str, Any] | None:
        """An object nested in the language model's part or in the file, or ``None``."""
        found = self.fields.get(name)
        if found is None:
            found = self.outer.get(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self.bad(name, f"is {shown(found)}, which is not an object")
        return found

    def has(self, *names: str) -> bool:
        """Whether the file or its class gives any of these, without noting a default."""
        return self.given(*names) is not None or self._default(names) is not None

    @property
    def dtype(self) -> str:
        """Name of the stored or loaded number format, ``""`` where the file does not say."""
        for fields in (self.fields, self.outer):
            for key in ("dtype", "torch_dtype"):
                found = fields.get(key)
                if found is None or found == "auto":
                    continue
                if not isinstance(found, str):
                    raise self.bad(key, f"is {shown(found)}, which is not the name of a number format")
                name = found.removeprefix("torch.")
                if not _FORMAT.fullmatch(name):
                    raise self.bad(key, f"is {shown(found)}, and PyTorch has no number format of that name")
                return name
        return ""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element in :attr:`dtype`; 2 where the file does not say, noted as assumed."""
        name = self.dtype
        if not name:
            self.assumed["dtype"] = "bfloat16"
            return 2
        if name not in _DTYPES:
            raise self.bad("dtype", f"is {name!r}; known are {', '.join(sorted(_DTYPES))}")
        return _DTYPES[name]

    def all_notes(self) -> tuple[Note, ...]:
        """Every note so far, with one that lists the defaults that stood in for missing values."""
        notes = list(self.notes)
        if self.assumed:
            listed = ", ".join(f"{key} = {shown(value)}" for key, value in self.assumed.items())
            notes.append(
                Note(
                    kind="assumed",
                    text=f"{self.path} leaves out {listed}: the defaults of {self.model_type!r} in transformers "
                    f"{class_defaults().transformers} stand in.",
                )
            )
        return tuple(notes)


def shown(value: object) -> str:
    """A value of a config as a message shows it: short, whatever it is."""
    text = json.dumps(value, default=str) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def regular(path: Path) -> os.stat_result:
    """The state of a file that can be read to its end; a pipe waits for a writer, and a device may never end.

    :raises BadModel: it is something else. :raises OSError: it is not there, or out of reach.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadModel(f"{path} is not a regular file: name a model's folder on a disk.")
    return status


def load_json(path: Path, largest: int = LARGEST_FILE) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    ``Infinity`` and ``NaN``, which Python writes and released configs contain, are read; they are refused where a
    size is asked for.

    :raises BadModel: for a file that is missing, unreadable, too large, not JSON or not an object.
    """
    try:
        size = regular(path).st_size
        if size > largest:
            raise BadModel(f"{path} has {size} bytes; a file of its kind has at most {largest}, so it is not one.")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise BadModel(f"{path} is nested too deeply to be a model's configuration.") from None
    except ValueError as error:
        # Python's own limit on digits is no advice for the reader of a message.
        told = "a number in it has thousands of digits" if "set_int_max_str_digits" in str(error) else error
        raise BadModel(f"{path} is not valid JSON: {told}.") from None
    if not isinstance(found, dict):
        raise BadModel(f"{path} holds {shown(found)} where a JSON object is expected.")
    return found


def read_config(folder: Path) -> Config:
    """The language model's configuration in a Hugging Face folder.

    :raises BadModel: when there is none, or it does not say which model it is.
    """
    path = folder if folder.name == "config.json" else folder / "config.json"
    if not path.exists():
        raise BadModel(_without_config(path.parent))
    outer = load_json(path)
    fields, prefix = outer, ""
    for key in _NESTED:
        inner = fields.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise BadModel(f"{path}: {prefix}{key} is {shown(inner)}, which is not an object.")
        # Some configs nest an empty or partial copy beside the flat values: the flat ones win there.
        if not inner or ("num_hidden_layers" not in inner and "num_hidden_layers" in fields):
            continue
        fields, prefix = inner, f"{prefix}{key}."
    architecture = _architecture(path, outer)
    model_type = _model_type(path, outer, fields, architecture)
    return Config(
        path=str(path),
        outer=outer,
        fields=fields,
        prefix=prefix,
        model_type=model_type,
        architecture=architecture or model_type,
        known=model_type in class_defaults().classes,
        assumed={},
        notes=[],
    )


def _without_config(folder: Path) -> str:
    """Why a folder without ``config.json`` is not a model, as one sentence with a way on."""
    if not folder.exists():
        return f"{folder} does not exist."
    if not folder.is_dir():
        return f"{folder} is not a folder."
    if (folder / "adapter_config.json").is_file():
        return f"{folder} has no config.json but an adapter_config.json: an adapter; give its base model's folder."
    ggufs = sorted(entry.name for entry in folder.glob("*.gguf"))
    if ggufs:
        return f"{folder} has no config.json; it holds GGUF files, give one of them, such as {folder / ggufs[0]}."
    if (folder / "params.json").is_file():
        return f"{folder} has no config.json but a params.json of another format; Hugging Face's is read."
    return f"{folder} has no config.json, so it is not a Hugging Face model folder."


def _architecture(path: Path, outer: dict[str, Any]) -> str:
    found = outer.get("architectures")
    if found is None:
        return ""
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise BadModel(f"{path}: architectures is {shown(found)}, which is not a list of names.")
    return found[0] if found else ""


def _model_type(path: Path, outer: dict[str, Any], fields: dict[str, Any], architecture: str) -> str:
    """The language model's type: its own, else the composite's, else the one that its class is named after."""
    known = class_defaults()
    for source in (fields, outer):
        found = source.get("model_type")
        if found is None:
            continue
        if not isinstance(found, str):
            raise BadModel(f"{path}: model_type is {shown(found)}, which is not a name.")
        found = _REMOTE_NAMES.get(found, found)
        found = found if found in known.classes else known.text_of.get(found, found)
        if found in known.classes or source is outer or "model_type" not in outer:
            return found
        # A nested part whose own type is unknown is what it is; the composite does not know better.
        return found
    if not architecture:
        raise BadModel(f"{path} names no model: it has neither model_type nor architectures.")
    bare = architecture
    for ending in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model", "ForMaskedLM"):
        bare = bare.removesuffix(ending)
    wanted = bare.lower()
    for model_type in known.classes:
        if model_type.replace("_", "").replace("-", "").removesuffix("text") == wanted:
            return model_type
    return bare

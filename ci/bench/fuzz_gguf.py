"""Fuzzes the GGUF header reader, guided by coverage (atheris), and says what came of it.

    pip install atheris
    python ci/bench/fuzz_gguf.py --runs 1000000 --folder FOLDER

Every input must end in a result or in ``BadModel``, within a second, and a file of under 1 MiB must not make the reader
allocate more than 64 MiB; the run stops at the first that does not. FOLDER keeps the inputs that reach new code;
``--replay`` reads these once more, without atheris, measures the peak allocation of each and counts the lines reached.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SECONDS, ALLOCATED = 1.0, 64 << 20
LONGEST = (1 << 20) - 1
LONGEST_MUTATED = 1 << 15  # bytes of what is changed blindly; large inputs are built
EVERY = 50  # executions between two whose allocations are measured, and which go through a file

NAME = Path("fuzzed.gguf")


class Tally:
    """What the worst inputs cost; kept on disk, because a fuzzing run ends without returning."""

    def __init__(self, folder: Path) -> None:
        self.file = folder.with_name(f"{folder.name}.json")
        self.executions = self.refused = 0
        self.slowest = 0.0
        self.largest = 0

    def save(self) -> None:
        self.file.write_text(
            json.dumps(
                {
                    "executions": self.executions,
                    "refused": self.refused,
                    "slowest_s": round(self.slowest, 6),
                    "largest_allocation_bytes": self.largest,
                }
            )
            + "\n",
            encoding="utf-8",
        )


def one(data: bytes, tally: Tally, *, measured: bool) -> None:
    """Read one input; whatever leaves this function is a finding."""
    from pytest_vram.errors import BadModel
    from pytest_vram.sizing import gguf

    if measured:
        tracemalloc.start()
    began = time.process_time()
    try:
        found = gguf.parse(NAME, data)
        for tensor in found.tensors:
            tensor.elements  # noqa: B018 - must not fail either
    except BadModel as error:
        tally.refused += 1
        if str(NAME) not in str(error):
            raise AssertionError("the message does not name the file") from error
    took = time.process_time() - began
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tally.largest = max(tally.largest, peak)
        assert peak <= ALLOCATED, f"{peak} bytes allocated for {len(data)} bytes"
    else:
        tally.slowest = max(tally.slowest, took)
        assert took < SECONDS, f"{took:.3f} s"
    tally.executions += 1


def through_file(data: bytes, file: Path) -> None:
    """The same by way of a file, its parts and its arrays included."""
    from pytest_vram.errors import BadModel
    from pytest_vram.sizing import gguf

    file.write_bytes(data)
    try:
        found = gguf.read(file)
        for key in found.arrays:
            assert len(found.array(key)) == found.length(key)
    except BadModel:
        pass


def seeds(folder: Path) -> None:
    """Whole headers of every kind of model, and of every kind of value, to start from."""
    from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
    from pytest_vram.testing.sparse import NumberType, Planned, Typed, header

    folder.mkdir(parents=True, exist_ok=True)
    whole = [
        recipes.llama(tokenizer="none"),
        attention_recipes.gpt_oss(layers=1),
        hybrid_recipes.jamba(tokenizer="none"),
    ]
    for number, recipe in enumerate(whole):
        for version in (2, 3):
            start, _ = header(recipe.metadata, recipe.tensors, version=version)
            (folder / f"seed-{number}-{version}").write_bytes(start)
    types: tuple[NumberType, ...] = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
    values: dict[str, Any] = {f"k.{code}": Typed(1, code) for code in types}
    values |= {"f": 1.5, "d": Typed(1.5, "f64"), "b": True, "s": "text", "ss": ["a" * (n % 30) for n in range(600)]}
    values |= {"ai": [1, 2, 3], "af": [0.5, 1.5], "ab": [True, False], "general.alignment": 64}
    values |= {"split.count": Typed(2, "u16"), "split.no": Typed(0, "u16")}
    small = [Planned(f"t{index}", (32, index + 1), type_) for index, type_ in enumerate(("f32", "q8_0", "i8", "q4_0"))]
    start, length = header(values, small, alignment=64)
    (folder / "seed-values").write_bytes(start.ljust(length, b"\0"))
    (folder / "seed-empty").write_bytes(header({}, [])[0])


def built(drawn: random.Random) -> bytes:
    """A whole header of random keys and tensors, one in a hundred about as large as 1 MiB can hold."""
    from pytest_vram.sizing import ggml
    from pytest_vram.testing.sparse import Planned, Typed, Value, header

    many = drawn.random() < 0.01
    keys = drawn.randrange(20_000) if many and drawn.random() < 0.5 else drawn.randrange(12)
    count = drawn.randrange(20_000) if many else drawn.randrange(12)
    kinds: list[Callable[[], Value]] = [
        lambda: drawn.randrange(1 << 40),
        lambda: Typed(drawn.randrange(256), "u8"),
        lambda: drawn.random() < 0.5,
        drawn.random,
        lambda: "x" * drawn.randrange(200),
        lambda: ["y" * drawn.randrange(99) for _ in range(drawn.choice((9, 99, 600)))],
        lambda: [drawn.randrange(99) for _ in range(drawn.randrange(9))],
        lambda: Typed(tuple(drawn.randrange(256) for _ in range(drawn.randrange(9))), "u8"),
    ]
    metadata: dict[str, Value] = {f"k{index}": drawn.choice(kinds)() for index in range(keys)}
    if drawn.random() < 0.2:
        metadata["general.alignment"] = 1 << drawn.randrange(13)
    alignment = metadata.get("general.alignment", 32)
    names = sorted(ggml.BY_NAME)
    tensors = []
    for index in range(count):
        one = ggml.BY_NAME[drawn.choice(names)]
        dims = [one.block * drawn.randrange(3), *(drawn.randrange(1, 4) for _ in range(drawn.randrange(4)))]
        tensors.append(Planned(f"t{index}", tuple(dims), one.name))
    start, length = header(metadata, tensors, version=drawn.choice((2, 3)), alignment=int(str(alignment)))
    return start.ljust(min(length, LONGEST), b"\0") if drawn.random() < 0.7 else start


def damaged(data: bytes, drawn: random.Random) -> bytes:
    """Some bytes changed, three times in five."""
    changed = bytearray(data)
    for _ in range(drawn.choice((0, 0, 1, 2, 4))):
        place = drawn.randrange(len(changed))
        count = drawn.randrange(1 << 20).to_bytes(8, "little")
        noise = drawn.choice((drawn.randbytes(1), drawn.randbytes(8), b"\xff" * 8, bytes(8), count))
        changed[place : place + len(noise)] = noise
    return bytes(changed)


def fuzz(folder: Path, runs: int, share: float) -> None:
    """Fuzz; does not return. ``share`` of the inputs are built anew, the others are changed from earlier ones."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["pytest_vram.sizing.gguf"]):
        importlib.import_module("pytest_vram.sizing.gguf")
    seeds(folder)
    tally = Tally(folder)
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    scratch = Path(tempfile.mkdtemp(dir=shared)) / "model-00001-of-00002.gguf"

    def test(data: bytes) -> None:
        one(data, tally, measured=tally.executions % EVERY == EVERY - 1)
        if tally.executions % EVERY == 0:
            through_file(data, scratch)
        if tally.executions % 10_000 == 0 or tally.executions == runs:
            tally.save()

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        drawn = random.Random(seed)
        if drawn.random() >= share:
            mutated: bytes = atheris.Mutate(data, min(most, LONGEST_MUTATED))
            return mutated
        return damaged(built(drawn), drawn)[:most]

    options = [f"-runs={runs}", f"-max_len={LONGEST}", "-len_control=0", "-timeout=60", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(folder)], test, custom_mutator=mutate)
    atheris.Fuzz()


def replay(folder: Path) -> None:
    """Every kept input once more: time, peak allocation, and which lines of the reader were reached."""
    from pytest_vram.sizing import gguf

    tally = Tally(folder)
    inputs = [file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()]
    for data in inputs:
        one(data, tally, measured=False)
        one(data, tally, measured=True)
    reached: set[int] = set()
    source = gguf.__file__

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != source:
            return None
        if event == "line":
            reached.add(frame.f_lineno)
        return trace

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model-00001-of-00002.gguf"
        sys.settrace(trace)
        for data in inputs:
            through_file(data, file)
        sys.settrace(None)
    lines = _lines(gguf.parse.__code__) | {
        line
        for value in vars(gguf).values()
        for code in _codes(value)
        if code.co_filename == source
        for line in _lines(code)
    }
    print(f"inputs {len(inputs)}, slowest {tally.slowest * 1000:.2f} ms, largest allocation {tally.largest} bytes")
    print(f"lines reached {len(reached & lines)} of {len(lines)}; not: {sorted(lines - reached)}")


def _codes(value: object) -> list[CodeType]:
    functions = list(vars(value).values()) if isinstance(value, type) else [value]
    return [code for one in functions if isinstance(code := getattr(one, "__code__", None), CodeType)]


def _lines(code: CodeType) -> set[int]:
    inner = {line for constant in code.co_consts if isinstance(constant, CodeType) for line in _lines(constant)}
    return inner | {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--built", type=float, default=0.03, help="share of inputs that are whole headers, many large")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--replay", action="store_true")
    arguments = parser.parse_args()
    if arguments.replay:
        replay(arguments.folder)
    else:
        fuzz(arguments.folder, arguments.runs, arguments.built)


if __name__ == "__main__":
    main()

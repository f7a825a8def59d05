"""Deployments that do not fit, the advice for them, and what a real engine says once it is followed."""

from __future__ import annotations

import random
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram import bootlog
from pytest_vram.advice import Advice, advise, of_boot
from pytest_vram.advice.goal import of_limits
from pytest_vram.advice.records import first_sufficient, joins
from pytest_vram.backends import dry_run, flags
from pytest_vram.errors import BackendError, EngineRefused
from pytest_vram.sizing import engine_options, eras, estimating, llama_cpp, llama_options
from pytest_vram.sizing.changes import requantised
from pytest_vram.sizing.options import Era, LlamaOptions
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import verdict
from pytest_vram.spec import Limits
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes, software_gpu
from pytest_vram.testing.real_shapes import real
from pytest_vram.testing.recipes import Recipe, Types
from pytest_vram.testing.sparse import write_sparse
from tests.rehearsal import sizing_boots
from tests.rehearsal.sizing_boots import Draw, Gpus

MIB = 1 << 20
#: What a predicted saving of weights and KV cache may be off: the larger of both.
SHARE, BYTES = 0.02, 4 * MIB
Options = dict[str, Any]
#: Changes that are made at once, to see what each saves after those before it.
_AT_ONCE = 3
_F16 = Types(matrices="f16", embedding="f16", output="f16", experts="f16")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and the part of what it takes on the first device that it may take."""

    name: str
    recipe: Recipe
    options: Options
    part: float
    gpus: int = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One change: what was predicted that it saves of one group of buffers, and what the engine says that it does.

    :ivar group: ``weights``, ``kv`` or ``compute``. :ivar low: the engine's saving at least, ``high`` at most.
    :ivar held: the engine's larger figure of the two, of which the saving is the difference.
    """

    setting: str
    group: str
    predicted: int
    low: int
    high: int
    held: int

    @property
    def error(self) -> int:
        """Bytes outside of what the engine printed."""
        return max(0, self.low - self.predicted, self.predicted - self.high)

    @property
    def allowed(self) -> int:
        """What it may be off."""
        return max(BYTES, round(SHARE * max(abs(self.low), abs(self.high))))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one case.

    :ivar limit: bytes on the device that is short. :ivar before: the engine's figure there at first. :ivar after: once
        the advice was followed, ``None`` where none was said to be enough. :ivar chosen: what was followed.
    :ivar rows: single changes. :ivar together: the first few of the list made at once, over all buffers.
    """

    case: Case
    device: str
    limit: int
    before: int
    after: int | None
    chosen: tuple[str, ...]
    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    together: Row | None = None

    @property
    def fits(self) -> bool:
        """Whether the engine's own figure is within the limit in the end."""
        return self.after is not None and self.after <= self.limit


def _dense(numbers: random.Random) -> tuple[str, Recipe]:
    name = numbers.choice(("Llama-3-8B", "Qwen3-4B", "SmolLM2-135M"))
    return name, real(name, types=numbers.choice((Types(), _F16)), tokenizer="bytes")


def _mixture(numbers: random.Random) -> tuple[str, Recipe]:
    name = numbers.choice(("Qwen3-30B-A3B", "Qwen3-235B-A22B"))
    return name, real(name, tokenizer="bytes")


def _leading_dense(numbers: random.Random) -> tuple[str, Recipe]:
    if numbers.random() < 0.4:
        return "DeepSeek-V3", real("DeepSeek-V3", tokenizer="bytes")
    layers = numbers.randint(6, 16)
    recipe = recipes.deepseek2(
        layers=layers, kv_rank=512, rope=64, nope=128, value=128, leading_dense=numbers.randint(1, 3)
    )
    return "deepseek2", recipe


def _windows(numbers: random.Random) -> tuple[str, Recipe]:
    name = numbers.choice(("Gemma3-4B", "Gemma3-12B", "Gemma3-27B", "gpt-oss"))
    return name, attention_recipes.gpt_oss() if name == "gpt-oss" else real(name, tokenizer="bytes")


def _hybrid(numbers: random.Random) -> tuple[str, Recipe]:
    made: dict[str, Callable[[], Recipe]] = {
        "Mamba-2.8B": lambda: real("Mamba-2.8B", tokenizer="bytes"),
        "jamba": hybrid_recipes.jamba,
        "granitehybrid": hybrid_recipes.granite_hybrid,
        "qwen3next": hybrid_recipes.qwen3next,
    }
    name = numbers.choice(tuple(made))
    return name, made[name]()


def _encoder(numbers: random.Random) -> tuple[str, Recipe]:
    return "bert", attention_recipes.bert()


KINDS: dict[str, Callable[[random.Random], tuple[str, Recipe]]] = {
    "dense": _dense,
    "mixture": _mixture,
    "leading dense, latent": _leading_dense,
    "windows": _windows,
    "hybrid": _hybrid,
    "encoder": _encoder,
}


def draw(kind: str, numbers: random.Random) -> Case:
    """A deployment of this kind of model that has to take less."""
    name, recipe = KINDS[kind](numbers)
    options: Options = {
        "ctx-size": numbers.choice((2048, 8192, 16384, 32768)),
        "parallel": numbers.choice((1, 1, 2, 4)),
        "ubatch-size": numbers.choice((512, 512, 1024, 2048)),
        "flash-attn": numbers.choice(("on", "on", "on", "off")),
        "n-gpu-layers": 999,
        "mmap": False,
    }
    if kind == "encoder":
        options |= {"embeddings": True, "ctx-size": 512, "batch-size": options["ubatch-size"]}
    elif numbers.random() < 0.3:
        options["kv-unified"] = True
    if kind == "windows" and numbers.random() < 0.3:
        options["swa-full"] = True
    if kind in ("mixture", "leading dense, latent") and numbers.random() < 0.5:
        options["n-cpu-moe"] = numbers.randint(1, 4)
    gpus = 2 if kind in ("dense", "mixture", "windows") and numbers.random() < 0.2 else 1
    if gpus > 1:
        options["tensor-split"] = numbers.choice(("1,1", "2,1"))
    return Case(name=name, recipe=recipe, options=options, part=numbers.uniform(0.3, 0.97), gpus=gpus)


class Bench:
    """One engine and its devices, and a folder for models."""

    def __init__(self, executable: Path, folder: Path, gpus: Gpus) -> None:
        self.executable, self.folder, self._gpus = executable, folder, gpus
        self.era: Era = eras.era_of(None, flags.help_of(executable).long_names())[0]
        self.runs = 0

    @property
    def endpoints(self) -> list[str]:
        """Endpoints of its devices, all of which are alive."""
        return self._gpus.endpoints()

    def tried(self, case: Case, *, every: bool) -> Outcome:
        """Ask for advice and follow it.

        :param every: each single change is tried as well.
        """
        model = case.recipe.write(self.folder / "model.gguf")
        shape = estimating.load(model)
        options = {**case.options, "rpc": ",".join(self.endpoints[: case.gpus])}
        given = llama_options.read(options)
        before = llama_cpp.predict(shape, given.options, self.era, given=given)
        device = max((label for label in before.devices), key=lambda label: before.at_most().get(label, 0))
        limit = round(before.at_most()[device] * case.part)
        limits = Limits(text="", by_label={device: limit})
        advice = advise(shape, given, lambda made: of_limits(made, verdict(made, limits), limits), era=self.era)
        at_first = self.printed(model, case, case.options)
        rows: list[Row] = []
        chosen = first_sufficient(advice)
        for one in advice:
            if one.effect == "saves" and (every or one in chosen):
                rows.extend(self._rows(case, shape, one, at_first, device))
        after = None
        if chosen:
            after = _held(self._followed(case, shape, chosen), device)
        return Outcome(
            case=case,
            device=device,
            limit=limit,
            before=_held(at_first, device),
            after=after,
            chosen=tuple(f"{one.setting} {one.after}" for one in chosen),
            rows=tuple(rows),
            advice=advice,
            together=self._together(case, shape, advice, at_first, device) if every else None,
        )

    def _together(
        self, case: Case, shape: ModelShape, advice: Sequence[Advice], at_first: dry_run.DryRun, device: str
    ) -> Row | None:
        """Several changes at once, which save what each saves after those before it."""
        made = [one for one in advice if joins(one)][:_AT_ONCE]
        if len(made) < 2:
            return None
        later = self._followed(case, shape, made)
        old, new = ([run.of(device, column) for column in ("model", "context", "compute")] for run in (at_first, later))
        return Row(
            setting=" + ".join(one.setting for one in made),
            group="all",
            predicted=sum(one.saves_bytes_after.bytes for one in made if one.saves_bytes_after is not None),
            low=sum(one.low for one in old) - sum(one.high for one in new),
            high=sum(one.high for one in old) - sum(one.low for one in new),
            held=sum(one.high for one in old),
        )

    def _rows(self, case: Case, shape: ModelShape, one: Advice, at_first: dry_run.DryRun, device: str) -> Iterator[Row]:
        later = self._followed(case, shape, [one])
        # Of some compute buffers a dry run prints something else than a boot, which advice is about.
        compute = self._compute(case, shape, [], device) - self._compute(case, shape, [one], device)
        for group, buckets in dry_run.GROUPS.items():
            column = {"weights": "model", "kv": "context", "compute": "compute"}[group]
            old, new = at_first.of(device, column), later.of(device, column)
            predicted = sum(size for bucket, size in one.saves_by_bucket.items() if bucket in buckets)
            if group == "compute":
                predicted = compute
            if predicted or old.bytes != new.bytes:
                yield Row(
                    setting=one.setting,
                    group=group,
                    predicted=predicted,
                    low=old.low - new.high,
                    high=old.high - new.low,
                    held=max(old.high, new.high),
                )

    def _compute(self, case: Case, shape: ModelShape, advice: Sequence[Advice], device: str) -> int:
        """What the rules say that a dry run prints of compute buffers."""
        options = dict(case.options)
        for one in advice:
            if one.setting == "model":
                shape = requantised(shape, one.after)
            else:
                options = followed(options, one.flag)
        given = llama_options.read({**options, "rpc": ",".join(self.endpoints[: case.gpus])})
        made = llama_cpp.predict(shape, given.options, self.era, given=given, dry_run=True)
        return made.buckets().get("compute", {}).get(device, 0)

    def _followed(self, case: Case, shape: ModelShape, advice: Iterable[Advice]) -> dry_run.DryRun:
        """The engine's figures once these changes are made as their flags say."""
        options = dict(case.options)
        model = self.folder / "model.gguf"
        for one in advice:
            if one.setting == "model":
                model = self._smaller(case.recipe, shape, one.after)
            else:
                options = followed(options, one.flag)
        return self.printed(model, case, options)

    def _smaller(self, recipe: Recipe, shape: ModelShape, name: str) -> Path:
        types = {tensor.name: tensor.type for tensor in requantised(shape, name).tensors}
        tensors = [
            msgspec.structs.replace(one, type=types[one.name]) if one.name in types else one for one in recipe.tensors
        ]
        return write_sparse(self.folder / "smaller.gguf", recipe.metadata, tensors)[0]

    def printed(self, model: Path, case: Case, options: Options) -> dry_run.DryRun:
        """What the engine's dry run prints."""
        self.runs += 1
        try:
            return dry_run.exact(
                model, options, binary=self.executable, endpoints=self.endpoints[: case.gpus], timeout=120.0
            )
        except EngineRefused:
            raise
        except BackendError as error:
            # Without a layer on it, nothing of a device is in the table.
            if "reached no device" not in str(error) or options.get("n-gpu-layers") not in (0, "0"):
                raise
            return dry_run.exact(model, options, binary=self.executable, device_none=True, timeout=120.0)


def followed(options: Options, flag: str) -> Options:
    """Options with a flag as advice writes it."""
    kept, _, gone = flag.partition("without ")
    found, _ = engine_options.pairs(shlex.split(kept))
    changed = {**options, **found}
    for name in shlex.split(gone):
        if name.startswith("--"):
            changed.pop(name.removeprefix("--"), None)
    return changed


def _held(dry: dry_run.DryRun, device: str) -> int:
    """Bytes on a device by the engine's table, at the lower end of what was cut off to whole MiB."""
    return sum(dry.of(device, column).low for column in ("model", "context", "compute"))


def over(outcome: Outcome) -> list[Row]:
    """Savings of weights and KV cache, and of several changes together, that are further off than they may be."""
    rows = [row for row in outcome.rows if row.group != "compute"]
    rows += [outcome.together] if outcome.together is not None else []
    return [row for row in rows if row.error > row.allowed]


class Booted(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment that really ran out of memory.

    :ivar failure: what its log said. :ivar flags: of the advice that was followed. :ivar after: what the next boot
        failed with; ``None``: it got all of its memory.
    """

    options: Options
    failure: str
    flags: str
    after: str | None


#: What a software GPU's process needs beside what it is asked for: pieces of tensors on their way.
_OWN = 12 * MIB
_TRIES = 6


def booted(executable: Path, numbers: random.Random) -> Booted | None:
    """A small deployment on a software GPU that is too small for it, and again as the advice from its log says.

    :returns: ``None`` where the engine died each time before the line that says why was written.
    """
    era = eras.era_of(None, flags.help_of(executable).long_names())[0]
    recipe = numbers.choice((recipes.llama, recipes.qwen3moe, recipes.gemma))(
        layers=6, embedding=512, kv_heads=4, head_size=64, types=_F16
    )
    options: Options = {
        "ctx-size": numbers.choice((16384, 32768, 65536)),
        "parallel": numbers.choice((1, 2)),
        "flash-attn": numbers.choice(("on", "on", "off")),
        "ubatch-size": numbers.choice((512, 2048)),
        "n-gpu-layers": 99,
        "mmap": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = recipe.write(Path(folder) / "model.gguf")
        shape = estimating.load(model)
        given = llama_options.read({**options, "device": "RPC0"})
        whole = llama_cpp.predict(shape, given.options, era, given=given).at_most()["gpu0"]
        memory = min(round(whole * numbers.uniform(0.5, 0.9)) + _OWN, whole * 9 // 10)
        first = _boot(executable, model, options, memory)
        assert not _complete(first), f"{options} booted with {memory} bytes: {first.entries}"
        if first.failure is None:
            return None
        advice = of_boot(first, shape=shape, options=options, free={"gpu0": memory - _OWN}, era=era)
        chosen = first_sufficient(advice)
        changed = dict(options)
        for one in chosen:
            if one.setting == "model":
                types = {tensor.name: tensor.type for tensor in requantised(shape, one.after).tensors}
                tensors = [msgspec.structs.replace(tensor, type=types[tensor.name]) for tensor in recipe.tensors]
                model = write_sparse(Path(folder) / "smaller.gguf", recipe.metadata, tensors)[0]
            else:
                changed = followed(changed, one.flag)
        again = _boot(executable, model, changed, memory)
    failed = None if _complete(again) and chosen else str(again.failure and again.failure.text)
    return Booted(options=options, failure=first.failure.text, flags=" ".join(one.flag for one in chosen), after=failed)


def _boot(executable: Path, model: Path, options: Options, memory: int) -> bootlog.Boot:
    """A boot until it has all of its memory or ends; one that lost the end of its log when it died is asked again."""
    words = [word for name, value in options.items() for word in engine_options.spelled(name, value)]
    draw = Draw(
        recipe=Recipe(architecture="", metadata={}, tensors=()), options=LlamaOptions(), arguments=tuple(words), gpus=1
    )
    boot = bootlog.Boot(engine="", era="", evidence="none")
    for _ in range(_TRIES):
        with software_gpu(memory=memory) as gpus:
            boot = sizing_boots.booted(executable, model, draw, [gpus[0].endpoint])
        if boot.failure is not None or _complete(boot):
            break
    return boot


def _complete(boot: bootlog.Boot) -> bool:
    """Whether it got all of its memory: a device's compute buffer is the last one, and is printed once it is there."""
    return boot.failure is None and any(one.bucket == "compute" and one.device != "host" for one in boot.entries)


__all__ = ["KINDS", "Bench", "Booted", "Case", "Outcome", "Row", "booted", "draw", "followed", "over"]

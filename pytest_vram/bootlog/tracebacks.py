"""Python tracebacks in logs, as the interpreter, IPython and rich print them.

The frames around a refused allocation tell what it was for.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

BEGINS = "Traceback (most recent call last)"
#: Frames that are kept of one traceback; forward calls of nested modules make long ones.
_MOST = 200
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]{1,400})", line \d{1,7}, in (?P<function>\S{1,120})', re.ASCII)
_IPYTHON = re.compile(
    r"^\s*(?:File )?(?P<file>[~./\w<][^ :]{0,400}\.pyx?)(?::\d{1,7},)? in (?P<function>[\w.<>]{1,120})", re.ASCII
)
_RICH = re.compile(r"^\s*[│|] (?P<file>[/\w].{0,400}\.py):\d{1,7} in(?: (?P<function>[\w.<>]{1,120}))? ")
#: The name alone, where the box was too narrow for it.
_NAME = re.compile(r"^\s*[│|] (?P<function>[\w.<>]{1,120}) +[│|]$")
_MARKED = re.compile(r"^\s*(?:-{2,}> ?\d{1,7} |[│|] ❱ +\d{1,7} [│|])(?P<source>.*)")
_BOX = " │|╭╰╮╯─"


class Frame(NamedTuple):
    """A call in a traceback; ``source`` is its line of code, where printed."""

    file: str
    function: str
    source: str = ""


class Frames:
    """The frames of the traceback that is being printed, outermost first."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque(maxlen=_MOST)
        self._wants_source = False
        self._marked = False

    def __bool__(self) -> bool:
        return bool(self._frames)

    def innermost_first(self) -> list[Frame]:
        """The frames, the one that failed first."""
        return list(reversed(self._frames))

    def clear(self) -> None:
        """Forget them: another traceback begins, or this one was used."""
        self._frames.clear()
        self._wants_source = False

    def feed(self, text: str) -> bool:
        """Take a line; true where it is a part of a traceback."""
        if BEGINS in text:
            self.clear()
            return True
        if "File " in text and (match := _FRAME.match(text)):
            return self._add(match, marked=False)
        if ".py" in text and (match := _RICH.match(text) or _IPYTHON.match(text)):
            return self._add(match, marked=True)
        if not self._frames:
            return False
        if not self._frames[-1].function and (match := _NAME.match(text)):
            self._frames[-1] = self._frames[-1]._replace(function=match["function"])
            return True
        if self._wants_source and (match := _MARKED.match(text) if self._marked else None):
            self._source(match["source"].strip(_BOX))
            return True
        if text[:4] == "    ":
            if self._wants_source and not self._marked:
                self._source(text.strip())
            return True
        return text[:1] in _BOX and bool(text.strip())

    def _add(self, match: re.Match[str], *, marked: bool) -> bool:
        self._frames.append(Frame(match["file"], match["function"] or ""))
        self._wants_source, self._marked = True, marked
        return True

    def _source(self, source: str) -> None:
        self._frames[-1] = self._frames[-1]._replace(source=source)
        self._wants_source = False


class Blame(NamedTuple):
    """What the frames say a refused allocation was for."""

    phase: str | None
    bucket: str | None
    certain: bool


_WEIGHTS = re.compile(
    r"^(?:.*\.)?(?:from_pretrained|_load_pretrained_model|_?load_state_dict\w*|load_shard_file\w*|load_shard_files\w*"
    r"|set_module_tensor_to_device|_load_parameter_into_model|_load_state_dict_into_meta_model|caching_allocator_warmup"
    r"|load_checkpoint_in_model|load_checkpoint_and_dispatch|dispatch_model|create_quantized_param|load_file"
    r"|convert_and_load_state_dict_in_model|materialize_tensors|_materialize_copy|_move_missing_keys_\w+|load_model"
    r"|load_weights|safe_load_file|load_llm_model|load_models_gpu|patch_model|patch_weight_to_device|partially_load"
    r"|load_torch_file|load_checkpoint_guess_config)$"
)
#: Methods of a module that move or convert all that it has.
_MOVES = re.compile(r"^(?:.*\.)?(?:to|cuda|xpu|half|float|bfloat16|double|_apply|convert)$")
_PAST = re.compile(
    r"\bpast_?(?:key|k|v|value|kv)?\w*|\blayer_past\b|\b(?:key|value|k|v)_cache\b|self\.(?:keys|values)\b"
)
_TRAINING = re.compile(r"^(?:.*\.)?(?:backward|training_step|_inner_training_loop|optimizer_step|run_backward)$")
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\]|[/\\]optim[/\\]")
_SEES = re.compile(
    r"^(?:.*\.)?(?:get_image_features|get_video_features|get_audio_features|encode_images|vision_tower)$"
)
_SEEING = re.compile(r"[/\\]modeling_\w*(?:clip|siglip|vision|vit)\w*\.py$", re.IGNORECASE)
#: Programs that make images: one run of theirs has neither a prompt's phase nor a cache.
_DRAWS = re.compile(r"[/\\](?:comfy|comfy_extras|diffusers|k_diffusion|sgm|ldm)[/\\]")
_SEEN = re.compile(
    r"\bself\.(?:model\.)?(?:visual|vision_tower|vision_model|vision_encoder|image_encoder|audio_tower|audio_encoder)\("
)
_FORWARD = re.compile(r"^(?:.*\.)?(?:forward|_call_impl|__call__|generate|_sample|sample|greedy_search|_beam_search)$")


def blame(frames: Frames) -> Blame:
    """What a refused allocation was for, by the frames around it; all of it ``None`` where they do not tell."""
    found = frames.innermost_first()
    names = [frame.function for frame in found]
    if any(_TRAINING.match(name) for name in names) or any(_OPTIMIZER.search(frame.file) for frame in found):
        return Blame(None, "other", certain=True)  # gradients or an optimizer's state: no serving
    forward = next((at for at, frame in enumerate(found) if _runs(frame)), None)
    loads = next((at for at, frame in enumerate(found) if _loads(frame)), None)
    if loads is not None and (forward is None or loads < forward):
        return Blame("weights", "weights", certain=True)
    if any(_SEES.match(one.function) or _SEEING.search(one.file) or _SEEN.search(one.source) for one in found):
        return Blame("prefill", "projector", certain=True)
    if (cache := _cache(found)) is not None:
        return cache
    if forward is None and not any(_FORWARD.match(name) for name in names):
        return Blame(None, None, certain=False)
    if any(_DRAWS.search(frame.file) for frame in found):
        return Blame("ready", "compute", certain=False)
    if any(name in ("warmup", "Warmup") for name in names):
        return Blame("warm-up", "compute", certain=False)
    # One token needs little; it is the whole prompt at once that does, unless the card was full already.
    return Blame("prefill", "compute", certain="_prefill" in names)


def _runs(frame: Frame) -> bool:
    """Whether a frame is a model at work."""
    name = frame.function.rpartition(".")[2]
    return name in ("forward", "_call_impl", "_wrapped_call_impl", "generate", "_prefill") and "accelerate" not in (
        frame.file
    )


def _loads(frame: Frame) -> bool:
    if _WEIGHTS.match(frame.function):
        return True
    return "module.py" in frame.file and _MOVES.match(frame.function) is not None


def _cache(found: list[Frame]) -> Blame | None:
    """The KV cache, where the innermost frames that are not torch's are about it."""
    names = [frame.function for frame in found]
    for frame in found[:6]:
        if frame.function == "init_kv_cache":
            return Blame("kv", "kv", certain=True)
        of_cache = re.search(r"[/\\]cache_utils\.py$", frame.file) is not None
        grows = "torch.cat" in frame.source and _PAST.search(frame.source) is not None
        if grows and not of_cache:
            return Blame("decode", "kv", certain=True)  # there was a past, so the prompt was through
        if of_cache and ("torch.cat" in frame.source or grows):
            return Blame("prefill" if "_prefill" in names else "decode", "kv", certain="_prefill" in names)
        if of_cache:
            return Blame("kv", "kv", certain=True)
        if frame.function in ("_reorder_cache", "reorder_cache"):
            return Blame("decode", "kv", certain=True)
        if re.search(r"[/\\](?:modeling_\w+|sdpa_attention|masking_utils)\.py$", frame.file):
            break
    return None

"""Which of llama.cpp's rules hold for a build: by its number, or by what its ``--help`` shows where it has none.

Builds that distributors make from an archive call themselves build 1; their options tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pytest_vram.errors import BadInput
from pytest_vram.sizing import defaults
from pytest_vram.sizing.options import CURRENT, Era
from pytest_vram.sizing.shape import Note

#: Numbers below this are not counted from llama.cpp's own history.
_FIRST = 1000
#: First builds with a rule. Known from change descriptions: b9460 (pull request 23861), b9501 (23907). Known by their
#: date only, and so to some hundred builds: December 2025 (17910), January 2026, May 2026 (23764).
_UNPADDED, _LATENT, _MASK_F16, _OUTPUTS, _COPIES, _SKIPPED = 7340, 7750, 9350, 9460, 9501, 10434
#: Mamba-2's blocks: the last build that was seen to lay them out as before, the first whose source does otherwise.
_MAMBA2_BEFORE, _MAMBA2_AFTER = 10434, 10773
#: Ranges of builds in which a rule may or may not hold.
_UNSURE = (
    (7200, 7560, "the padding of the attention mask"),
    (7560, 8000, "V under multi-head latent attention"),
    (9159, 9460, "the type of the attention mask"),
    (
        10069,
        10434,
        "whether prediction blocks (MTP) are loaded, the indexer of GLM's sparse attention cached, and what decides "
        "about flash attention under auto",
    ),
)


def era_of(build: int | None, options: Collection[str] = ()) -> tuple[Era, tuple[Note, ...]]:
    """The rules of a build, and what is not certain about them.

    :param build: its number; ``None`` or a small one: not known. :param options: its long options, where known.
    """
    if build is not None and build >= _FIRST:
        era = Era(
            build=build,
            defaults=defaults.of_build(build),
            mask_padded=build < _UNPADDED,
            mla_latent_only=build >= _LATENT,
            mask_f16=build >= _MASK_F16,
            outputs_per_slot=build >= _OUTPUTS,
            quant_copies_reserved=build >= _COPIES,
            extra_blocks_skipped=build >= _SKIPPED,
            glm_indexer=build >= _SKIPPED,
            sinks_ignored=build >= _SKIPPED,
            quant_v_settles=build >= _SKIPPED,
            mamba2_flat=False if build <= _MAMBA2_BEFORE else True if build >= _MAMBA2_AFTER else None,
        )
        unsure = [what for low, high, what in (*defaults.UNSURE, *_UNSURE) if low <= build < high]
        text = f"b{build} is about as old as a change of"
        return era, (
            *defaults.bounds(build),
            *(Note(kind="assumed", text=f"{text} {what}: it may follow the other rule") for what in unsure),
        )
    if not options:
        return CURRENT, ()
    if "fit" not in options:  # December 2025
        era = Era(
            defaults=defaults.of_options(options),
            mask_padded=True,
            mla_latent_only=False,
            mask_f16=False,
            outputs_per_slot=False,
            quant_copies_reserved=False,
            extra_blocks_skipped=False,
            glm_indexer=False,
            sinks_ignored=False,
            quant_v_settles=False,
            mamba2_flat=False,
        )
        text = "this build has no --fit, so the rules of before December 2025 are used"
        return era, (Note(kind="assumed", text=text),)
    if "load-mode" not in options:  # absent in b10068, present in b10434
        text = "this build has no --load-mode, so the rules of b10068 are used"
        era = Era(
            defaults=defaults.of_options(options),
            extra_blocks_skipped=False,
            glm_indexer=False,
            sinks_ignored=False,
            quant_v_settles=False,
            mamba2_flat=False,
        )
        return era, (Note(kind="assumed", text=text),)
    return CURRENT, ()


def read_build(text: str) -> int:
    """``10434`` or ``b10434``. :raises BadInput: anything else."""
    match = re.fullmatch(r"b?(\d{4,6})", text.strip(), re.ASCII)
    if match is None or int(match[1]) < _FIRST:
        raise BadInput(f"--build {text}: write the number of a build of llama.cpp, such as b10434")
    return int(match[1])

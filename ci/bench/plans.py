"""Every plan for real shapes under 4, 6 and 8 GB, held against llama-server's own dry run on a software GPU.

Run from a checkout; prints the table of ``docs/sizing-accuracy.md``::

    python ci/bench/plans.py [--minimum-context 4096]

A plan is confirmed when the engine's figures are within the budget; those that it prints in whole MiB are narrowed by
the rules where both agree. Ends with 1 where one is not. Nothing is loaded, whatever the size of the model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_vram.cli.asked import as_mapping, by_dry_run, narrowed
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import estimating, llama_options, planning
from pytest_vram.sizing.verdict import verdict
from pytest_vram.testing import software_gpu
from pytest_vram.testing.real_shapes import REAL, real

MIB = 1 << 20


def main() -> int:
    """Print the table; 1 where a plan does not fit by the engine's own figures."""
    parser = argparse.ArgumentParser(description="Plans of real shapes, confirmed by dry runs.")
    parser.add_argument("--minimum-context", type=int, default=4096)
    context = parser.parse_args().minimum_context
    print("| shape | budget | plans | confirmed | search, s | best: context, KV, experts on CPU, layers on GPU |")
    print("|---|---|---|---|---|---|")
    failed = 0
    with tempfile.TemporaryDirectory() as name, software_gpu() as gpus:
        for shape_name in REAL:
            path = real(shape_name, tokenizer="bytes").write(Path(name) / "model.gguf")
            shape = estimating.load(path)
            given = llama_options.read({"rpc": gpus[0].endpoint})
            wishes = planning.wishes_of(
                minimum_context=min(context, shape.context), slots=1, host_memory=None, reserve=0, prefer="speed"
            )
            for budget in planning.TIERS:
                began = time.process_time()
                found = planning.search_shapes([shape], parse_budget(budget), wishes, given)
                seconds = time.process_time() - began
                confirmed = 0
                for plan in found.plans:
                    options = as_mapping(plan.options, given.kept)
                    made = narrowed(*by_dry_run(shape, llama_options.read(options), options))
                    confirmed += verdict(made, found.budget).fits == "yes"
                failed += len(found.plans) - confirmed
                best = found.plans[0] if found.plans else None
                said = "nothing fits"
                if best is not None:
                    layers = f"{best.layers_on_gpu} of {best.layers}"
                    said = f"{best.context:,}, {best.cache_type}, {best.experts_on_cpu}, {layers}"
                print(
                    f"| {shape_name} | {budget} | {len(found.plans)} | {confirmed} | {seconds:.2f} | {said} |",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

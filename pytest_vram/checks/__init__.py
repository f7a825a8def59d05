"""What must hold: pure functions, figures and limits in, a :class:`Finding` or ``None`` out.

A check that holds returns ``None``. Evidence that does not decide is ``inconclusive``, which never passes.
"""

from pytest_vram.checks.applied import (
    judge_applied,
    judge_context,
    judge_counted,
    judge_experts,
    judge_layers,
    judge_locked,
)
from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.checks.budget import OWN, is_apart, judge_peak, own_of, scope_of, tightest
from pytest_vram.checks.evidence import judge_lost, judge_spill, judge_strangers
from pytest_vram.checks.finding import Finding, Verdict
from pytest_vram.checks.fresh import judge_fresh
from pytest_vram.checks.growth import judge_growth, judge_served
from pytest_vram.checks.host import judge_host
from pytest_vram.checks.idle import judge_idle_rollback
from pytest_vram.checks.idle_series import IdleVerdict, judge_idle
from pytest_vram.checks.moved import judge_answered, judge_loaded, judge_moved
from pytest_vram.checks.reserve import judge_reserve
from pytest_vram.checks.throughput import judge_rate

__all__ = [
    "OWN",
    "Finding",
    "IdleVerdict",
    "Verdict",
    "is_apart",
    "judge_answered",
    "judge_applied",
    "judge_context",
    "judge_counted",
    "judge_experts",
    "judge_fresh",
    "judge_growth",
    "judge_host",
    "judge_idle",
    "judge_idle_rollback",
    "judge_layers",
    "judge_loaded",
    "judge_locked",
    "judge_lost",
    "judge_moved",
    "judge_peak",
    "judge_rate",
    "judge_reserve",
    "judge_served",
    "judge_spill",
    "judge_strangers",
    "ledger_table",
    "own_of",
    "scope_of",
    "tightest",
]

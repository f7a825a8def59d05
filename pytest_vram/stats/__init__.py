"""Statistics under their textbook names, in plain Python.

Rates are shares between 0 and 1, ``n`` counts observations, a confidence such as 0.95 is that of one side unless a
function says otherwise. Where ``k`` and ``n`` may be real numbers they are counts divided by a design effect.
"""

from __future__ import annotations

from pytest_vram.stats.beta import (
    inverse_regularised_incomplete_beta,
    normal_quantile,
    regularised_incomplete_beta,
    student_t_quantile,
)
from pytest_vram.stats.binomial import binomial_cdf, clopper_pearson, wilson
from pytest_vram.stats.clusters import (
    ClusterTally,
    anova_icc,
    cluster_robust_interval,
    design_effect,
    korn_graubard_factor,
)
from pytest_vram.stats.paired import mcnemar_exact, pairs_needed, tango_bound, tango_interval, tango_score_test
from pytest_vram.stats.planning import (
    critical_count,
    detectable_drop,
    false_alarm_of_point_rule,
    fixed_sample_size,
    least_count_of_point_rule,
    more_without_failure,
    power_of_not_below,
    required_n_proven,
)
from pytest_vram.stats.sequential import OperatingCharacteristic, TruncatedSprt, average_sample_number, sprt
from pytest_vram.stats.trend import MannKendall, TheilSen, mann_kendall, theil_sen

__all__ = [
    "ClusterTally",
    "MannKendall",
    "OperatingCharacteristic",
    "TheilSen",
    "TruncatedSprt",
    "anova_icc",
    "average_sample_number",
    "binomial_cdf",
    "clopper_pearson",
    "cluster_robust_interval",
    "critical_count",
    "design_effect",
    "detectable_drop",
    "false_alarm_of_point_rule",
    "fixed_sample_size",
    "inverse_regularised_incomplete_beta",
    "korn_graubard_factor",
    "least_count_of_point_rule",
    "mann_kendall",
    "mcnemar_exact",
    "more_without_failure",
    "normal_quantile",
    "pairs_needed",
    "power_of_not_below",
    "regularised_incomplete_beta",
    "required_n_proven",
    "sprt",
    "student_t_quantile",
    "tango_bound",
    "tango_interval",
    "tango_score_test",
    "theil_sen",
    "wilson",
]

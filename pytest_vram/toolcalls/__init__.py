"""Tool calls: cases, what a model answered, what is wrong with it, and a verdict on the rate.

A *case* is one decision of a model: a conversation, tools, and the calls that are right. An answer is *diagnosed*
before anything is repaired, *scored* against the calls that are right, and the rates are *judged* with exact intervals.
"""

from __future__ import annotations

from pytest_vram.toolcalls.cases import CATEGORIES, Case, CaseSet, ExpectedCall, Tool, load
from pytest_vram.toolcalls.diagnosis import KINDS, Call, Diagnosis, diagnose
from pytest_vram.toolcalls.results import Answer, CaseResult, Results

__all__ = [
    "CATEGORIES",
    "KINDS",
    "Answer",
    "Call",
    "Case",
    "CaseResult",
    "CaseSet",
    "Diagnosis",
    "ExpectedCall",
    "Results",
    "Tool",
    "diagnose",
    "load",
]

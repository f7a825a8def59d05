"""Admission between tests, workers and runs on one machine, by files that a dead process cannot keep."""

from pytest_vram.leases.gate import Gate as Gate
from pytest_vram.leases.gate import Turnstiles as Turnstiles

"""Two ledgers beside each other: what differs, by how much, and what the difference means.

Nothing is explained away: each rule has a bound, and what lies beyond it is ``unknown``. The differences of a device
add up to the difference of its totals exactly (a driver's context of which two estimates know the same range is one
number, and no difference).
"""

from pytest_vram.differences.comparing import between, ends_of, grown
from pytest_vram.differences.records import MEANINGS, Beside, Cause, Change, Difference, Meaning
from pytest_vram.differences.sides import GROWTH

__all__ = ["GROWTH", "MEANINGS", "Beside", "Cause", "Change", "Difference", "Meaning", "between", "ends_of", "grown"]

"""Comparison of the parameters of all ranks of a generation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbelastic.messages import WeightsDiffer, WeightsSampled

if TYPE_CHECKING:
    from collections.abc import MutableMapping

SLIGHT = (1e-6, 0.0, 0.25)
CLEAR = (1e-2, 1e-6, 0.05)
"""Relative and absolute difference, and the share of values that may differ so.

Processors of different kinds round differently, so that some values may differ in their last bits.
Without an average over the ranks nearly all values differ a little, and many of them clearly.
"""


def differ(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Return whether two samples of parameters belong to different models."""
    if len(some) != len(others):
        return True
    for relative, absolute, share in (SLIGHT, CLEAR):
        pairs = zip(some, others, strict=True)
        unequal = sum(not math.isclose(a, b, rel_tol=relative, abs_tol=absolute) for a, b in pairs)
        if unequal > share * len(some):
            return True
    return False


def compare(
    seen: MutableMapping[tuple[int, bool], WeightsSampled], sample: WeightsSampled
) -> WeightsDiffer | None:
    """Compare a sample with the first of its moment; return a warning if they differ.

    `seen` has the first sample of each moment, those besides the state apart; it is updated.
    """
    key = (sample.moment, sample.besides)
    first = seen.get(key)
    if first is None or first.generation != sample.generation:
        seen[key] = sample
        return None
    if not differ(first.values, sample.values):
        return None
    return WeightsDiffer(tuple(dict.fromkeys((*first.plain, *sample.plain))))

"""Comparison of sequences by identity, because comparing tensors yields tensors."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences are of the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))

"""Adasum: a sum of orthogonal gradients, an average of parallel ones.

From Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924::

    adasum(a, b) = (1 - a·b / (2 a·a)) a  +  (1 - a·b / (2 b·b)) b

Neighbouring ranks are combined, then neighbouring pairs, and so on. Every rank gathers all
gradients and computes the same in float64, by elementwise operations alone, so the result has the
same bits on all ranks. Memory and communication grow with the number of ranks.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator, Handle


class GradientOp(enum.Enum):
    """Reductions of gradients that communicators do not have."""

    ADASUM = "adasum"


Adasum = GradientOp.ADASUM

# The square of a norm below which a vector counts as zero, as in Horovod.
_NOTHING = sys.float_info.min**0.5


def adasum_async(
    communicator: Communicator, buffer: torch.Tensor, lengths: Sequence[int]
) -> Handle:
    """Begin to combine each part of a lent `buffer`, of these `lengths`."""

    def combine_parts(everyone: Sequence[torch.Tensor]) -> None:
        parts = [torch.split(each, list(lengths)) for each in (buffer, *everyone)]
        for target, *vectors in zip(*parts, strict=True):
            target.copy_(combine(vectors))

    return GatheredReduction(communicator, buffer, combine_parts)


class GatheredReduction:
    """Operation that gathers the vectors of all ranks, for each rank to reduce by itself."""

    def __init__(
        self,
        communicator: Communicator,
        vector: torch.Tensor,
        reduce: Callable[[Sequence[torch.Tensor]], object],
    ) -> None:
        self._reduce = reduce
        self._everyone = [torch.empty_like(vector) for _ in range(communicator.size)]
        self._handle = communicator.allgather_async(self._everyone, vector)

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._handle.done()

    def wait(self) -> None:
        """Wait for it, and reduce."""
        if self._everyone:
            self._handle.wait()
            self._reduce(self._everyone)
            self._everyone = []  # else the handle holds all ranks' vectors


def combine(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of vectors in their order, in float64."""
    level = [vector.double() for vector in vectors]  # squares overflow in float16
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_combined(a, b) for a, b in pairs] + level[len(level) // 2 * 2 :]
    return level[0]


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    aa, ab, bb = _sums(torch.stack([a * a, a * b, b * b]))  # BLAS's dot() has an order of its own
    return a * _factor(ab, aa) + b * _factor(ab, bb)


def _factor(product: float, square: float) -> float:
    return 1.0 if square < _NOTHING else 1.0 - product / square / 2  # NaN makes NaN


def _sums(rows: torch.Tensor) -> list[float]:
    """Add up each row by halves: an order that depends on nothing but its length."""
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        rest = rows[:, half:]
        rows = rows[:, :half].clone()
        rows[:, : rest.shape[1]] += rest
    return rows[:, 0].tolist() if rows.shape[1] else [0.0] * len(rows)

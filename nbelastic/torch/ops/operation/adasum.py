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
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Begin to combine each part of `buffer` with that of the other ranks, in place.

    The buffer is lent, as to :meth:`~nbelastic.collectives.Communicator.allreduce_async`. It has
    parts of these `lengths`, of real numbers. Elements after the last part are summed.
    """
    lengths = [*lengths, buffer.numel() - sum(lengths)]

    def combine_parts(everyone: Sequence[torch.Tensor]) -> None:
        theirs = [torch.split(each, lengths) for each in everyone]
        *parts, rest = zip(*theirs, strict=True)
        *own, last = torch.split(buffer, lengths)
        for target, vectors in zip(own, parts, strict=True):
            target.copy_(combine(vectors))
        last.copy_(torch.stack(rest).sum(0))

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
            self._everyone = []


def combine(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of vectors in their order, in float64."""
    level = [vector.double() for vector in vectors]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_combined(a, b) for a, b in pairs] + level[len(level) // 2 * 2 :]
    return level[0]


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    aa, ab, bb = _sums(torch.stack([a * a, a * b, b * b]))
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

"""Shares of an epoch's samples, and samples that ranks have done; pure.

A *deal* is common to all members of a generation: the order of the epoch's samples, the samples
that were done when the generation formed, and the number of ranks. It gives each rank its *shard*.
A *claim* is what a rank has done of a deal since: positions in its shard, and samples by index.
:func:`merge_claims` adds the claims of the present ranks to what was done. It takes ranks that are
gone to have done the positions that all others have done, which is exact in lockstep.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Claim", "Deal", "Order", "Wire", "choose_root", "merge_claims"]

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
Wire = tuple[int, int, bytes, int, int, bool]
"""Packed deal: number of samples, epoch, mask of samples done, merges, seed, shuffle."""

_SEED_LIMIT = 1 << 32


@dataclass(frozen=True)
class Order:
    """Order of an epoch's samples, the same on all ranks."""

    length: int
    epoch: int
    seed: int
    shuffle: bool

    @cached_property
    def indices(self) -> Indices:
        """Return the samples in their order, made at the first call."""
        indices = np.arange(self.length, dtype=np.int64)
        if self.shuffle:
            # The legacy generator: its stream is fixed for good, so ranks may differ in NumPy.
            words = [self.seed % _SEED_LIMIT, self.epoch % _SEED_LIMIT]
            np.random.RandomState(words).shuffle(indices)
        indices.setflags(write=False)
        return indices


@dataclass(frozen=True, eq=False)
class Deal:
    """Epoch's samples dealt to `size` ranks; never modified.

    Attributes
    ----------
    order : Order
        All samples of the epoch.
    done : array of bool
        For each sample, by index, whether it was done before the deal.
    size : int
        Number of ranks.
    merges : int
        Number of merges of claims that have led to `done`.
    """

    order: Order
    done: Mask
    size: int
    merges: int = 0

    @staticmethod
    def new(order: Order, size: int, merges: int = 0) -> Deal:
        """Deal a full epoch."""
        return Deal(order, np.zeros(order.length, dtype=np.bool_), size, merges)

    @cached_property
    def left(self) -> int:
        """Return how many samples are dealt, before padding."""
        return self.order.length - int(np.count_nonzero(self.done))

    @cached_property
    def remaining(self) -> Indices:
        """Return the samples that are dealt, in their order."""
        indices = self.order.indices
        return indices[~self.done[indices]] if self.left < self.order.length else indices

    @property
    def per_rank(self) -> int:
        """Return the length of each shard."""
        return -(-self.left // self.size)

    def shard(self, rank: int) -> Indices:
        """Return the samples of `rank`; the deal is padded from its start to divide evenly."""
        if self.per_rank * self.size == self.left:
            return self.remaining[rank :: self.size]
        positions = np.arange(rank, self.per_rank * self.size, self.size)
        return self.remaining[positions % self.left]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return the identity of this deal: claims on equal deals can be merged."""
        digest = hashlib.blake2b(np.packbits(self.done).tobytes(), digest_size=16).digest()
        order = self.order
        return (order.length, order.epoch, order.seed, order.shuffle, self.size, digest)

    def pack(self) -> Wire:
        """Return the deal as plain values, without the number of ranks."""
        order = self.order
        done = np.packbits(self.done).tobytes()
        return (order.length, order.epoch, done, self.merges, order.seed, order.shuffle)

    @staticmethod
    def unpack(wire: Wire, known: Order, size: int) -> Deal:
        """Return a packed deal, dealt to `size` ranks.

        Parameters
        ----------
        wire : tuple
            A result of :meth:`pack`.
        known : Order
            An order, used again if it is the same.
        size : int
            Number of ranks.
        """
        length, epoch, packed, merges, seed, shuffle = wire
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=length)
        order = Order(length, epoch, seed, shuffle)
        return Deal(known if order == known else order, bits.astype(np.bool_), size, merges)


@dataclass(frozen=True, eq=False)
class Claim:
    """Samples of a deal that one rank has done.

    Attributes
    ----------
    key : tuple
        That of the deal.
    merges : int
        That of the deal.
    rank : int
        Rank of its shard of the deal.
    spans : tuple of (int, int)
        Positions in its shard: the first, and that after the last.
    indices : array of int
        Further samples, by index.
    """

    key: tuple[Any, ...]
    merges: int
    rank: int
    spans: tuple[tuple[int, int], ...] = ()
    indices: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def mask(self, deal: Deal) -> Mask:
        """Return for each sample whether this claim covers it."""
        mask = np.zeros(deal.order.length, dtype=np.bool_)
        mask[self.indices] = True
        shard = deal.shard(self.rank)
        for start, stop in self.spans:
            mask[shard[start:stop]] = True
        return mask


def merge_claims(deal: Deal, claims: Iterable[Claim], size: int) -> Deal:
    """Add `claims` to a deal, and deal the rest to `size` ranks.

    Parameters
    ----------
    deal : Deal
        The deal. Claims on other deals are ignored, and their samples are repeated.
    claims : iterable of Claim
        One of each present rank that had a shard of `deal`. Of the other ranks, those positions
        count as done that are done on all present ranks.
    size : int
        Number of ranks from now on.

    Notes
    -----
    The progress of ranks that are gone is exact in lockstep training. Otherwise they count as being
    as fast as the slowest present rank, so that samples are repeated rather than lost. Samples are
    lost only if a rank that is gone was slower than all others.
    """
    done = deal.done.copy()
    merges = deal.merges
    common = np.ones(deal.per_rank, dtype=np.bool_)
    absent = set(range(deal.size))
    for claim in claims:
        if claim.key == deal.key:
            mask = claim.mask(deal)
            done |= mask
            common &= mask[deal.shard(claim.rank)]
            absent.discard(claim.rank)
            merges = max(merges, claim.merges)
    if len(absent) < deal.size:
        for rank in absent:
            done[deal.shard(rank)[common]] = True
    return Deal(deal.order, done, size, merges + 1)


def choose_root(claims: Mapping[int, Sequence[Claim]], source: int) -> tuple[int, list[int]]:
    """Return the rank with the right deals, and the other ranks that have different ones.

    Parameters
    ----------
    claims : mapping of int to sequence of Claim
        For each rank with the newest state its claims, one per sampler.
    source : int
        The rank from which others receive their state.

    Returns
    -------
    root : int
        A rank with the most merges. After a generation that failed while it formed, some ranks of
        the same version have merged their claims, and others have gone back to before.
    apart : list of int
        Ranks that must take over the root's deals.
    """
    root = max(claims, key=lambda rank: ([c.merges for c in claims[rank]], rank == source, -rank))
    keys = [claim.key for claim in claims[root]]
    return root, [rank for rank in claims if [claim.key for claim in claims[rank]] != keys]

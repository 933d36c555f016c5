"""How an epoch is dealt to ranks, and what they have done of it: arithmetic, without any ranks.

A *deal* is what all members of a generation share: the order of the epoch's samples, which of them
were already done when the generation formed, and the number of ranks. It gives each rank its
*shard*. What a rank has done since is a *claim* on the deal: positions in its shard, and samples by
their index. :func:`settle` adds the claims of the ranks that are there to what was done, and makes
up for those of ranks that are gone: they are taken to have done the positions that all others have.
Where ranks train in lockstep that is exactly what they did.
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

__all__ = ["Claim", "Deal", "Order", "Wire", "choose_root", "settle"]

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
Wire = tuple[int, int, bytes, int, int, bool]
"""A deal as it travels: samples, epoch, which are done (packed), settlements, seed, shuffle."""

_SEED_LIMIT = 1 << 32


@dataclass(frozen=True)
class Order:
    """The order of an epoch's samples, the same on all ranks."""

    length: int
    epoch: int
    seed: int
    shuffle: bool

    @cached_property
    def indices(self) -> Indices:
        """Return the samples in their order. Made when first asked for."""
        indices = np.arange(self.length, dtype=np.int64)
        if self.shuffle:
            # The legacy generator: its stream is fixed for good, so ranks may differ in NumPy.
            words = [self.seed % _SEED_LIMIT, self.epoch % _SEED_LIMIT]
            np.random.RandomState(words).shuffle(indices)
        indices.setflags(write=False)
        return indices


@dataclass(frozen=True, eq=False)
class Deal:
    """An epoch's samples dealt to `size` ranks; never modified.

    Attributes
    ----------
    order : Order
        All samples of the epoch.
    done : array of bool
        For each sample (by index) whether it was done before the deal.
    size : int
        Number of ranks.
    settled : int
        How often claims were settled to arrive at `done`, on the rank that knows best.
    """

    order: Order
    done: Mask
    size: int
    settled: int = 0

    @staticmethod
    def new(order: Order, size: int, settled: int = 0) -> Deal:
        """Deal a full epoch."""
        return Deal(order, np.zeros(order.length, dtype=np.bool_), size, settled)

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
        """Return the samples of `rank`; the deal is padded from its start to come out even."""
        if self.per_rank * self.size == self.left:
            return self.remaining[rank :: self.size]
        positions = np.arange(rank, self.per_rank * self.size, self.size)
        return self.remaining[positions % self.left]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return what tells this deal from others: claims on equal deals are settled together."""
        digest = hashlib.blake2b(np.packbits(self.done).tobytes(), digest_size=16).digest()
        order = self.order
        return (order.length, order.epoch, order.seed, order.shuffle, self.size, digest)

    def pack(self) -> Wire:
        """Return the deal as plain values, without what each rank knows itself."""
        order = self.order
        done = np.packbits(self.done).tobytes()
        return (order.length, order.epoch, done, self.settled, order.seed, order.shuffle)

    @staticmethod
    def unpack(wire: Wire, known: Order, size: int) -> Deal:
        """Return the deal that was packed, to `size` ranks.

        Parameters
        ----------
        wire : tuple
            What :meth:`pack` returned.
        known : Order
            Used again if it is the same.
        size : int
            Number of ranks.
        """
        length, epoch, packed, settled, seed, shuffle = wire
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=length)
        order = Order(length, epoch, seed, shuffle)
        return Deal(known if order == known else order, bits.astype(np.bool_), size, settled)


@dataclass(frozen=True, eq=False)
class Claim:
    """What one rank has done of a deal.

    Attributes
    ----------
    key : tuple
        That of the deal.
    settled : int
        That of the deal.
    rank : int
        Whose shard of the deal it had.
    spans : tuple of (int, int)
        Positions in its shard: the first, and that after the last.
    indices : array of int
        Further samples, by index.
    """

    key: tuple[Any, ...]
    settled: int
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


def settle(deal: Deal, claims: Iterable[Claim], size: int) -> Deal:
    """Settle the `claims` on `deal` and deal what is left to `size` ranks.

    Parameters
    ----------
    deal : Deal
        What the claims are on. Claims on other deals are ignored: what they claim is done again.
    claims : iterable of Claim
        One of each rank that is there and had a shard of `deal`. At the rest of its ranks those
        positions count as done that are done on all that are there.
    size : int
        Number of ranks from now on.

    Notes
    -----
    What ranks that are gone have done is exact in lockstep training: a step of the others was a
    step of theirs. Out of lockstep they count as no faster than the slowest that is there, so that
    samples are repeated rather than lost; only one that was slower than all others takes with it
    what it lagged behind.
    """
    done = deal.done.copy()
    settled = deal.settled
    common = np.ones(deal.per_rank, dtype=np.bool_)
    absent = set(range(deal.size))
    for claim in claims:
        if claim.key == deal.key:
            mask = claim.mask(deal)
            done |= mask
            common &= mask[deal.shard(claim.rank)]
            absent.discard(claim.rank)
            settled = max(settled, claim.settled)
    if len(absent) < deal.size:
        for rank in absent:
            done[deal.shard(rank)[common]] = True
    return Deal(deal.order, done, size, settled + 1)


def choose_root(claims: Mapping[int, Sequence[Claim]], source: int) -> tuple[int, list[int]]:
    """Return whose deals are right, and which of the other ranks have different ones.

    Parameters
    ----------
    claims : mapping of int to sequence of Claim
        For each rank with the newest state its claims, one per sampler.
    source : int
        The rank that others receive their state from.

    Returns
    -------
    root : int
        A rank that has settled most often. After a generation that failed while it formed, some
        ranks have settled their claims and kept the result, others have gone back to before; of
        the same version, the former know the truth and the latter are about to infer it.
    apart : list of int
        Ranks that must take over the root's deals.
    """
    root = max(claims, key=lambda rank: ([c.settled for c in claims[rank]], rank == source, -rank))
    keys = [claim.key for claim in claims[root]]
    return root, [rank for rank in claims if [claim.key for claim in claims[rank]] != keys]

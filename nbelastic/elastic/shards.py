"""Shares of an epoch's samples, and samples that ranks have done; pure.

A *deal* is common to all members of a generation: the order of the epoch's samples, the samples
that were done when the generation formed, and the number of ranks. It gives each rank its *shard*.
A *claim* is what a rank has done of a deal since: positions in its shard, and samples by index.
:func:`merge_claims` adds the claims of the present ranks to what was done. It takes ranks that are
gone to have done the positions that all others have done, which is exact in lockstep.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.elastic.spans import Indices, Spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Wire = tuple[int, int, bytes, int, int, bool]
"""Packed deal: number of samples, epoch, spans of samples left, merges, seed, shuffle."""

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

    def positions_of(self, samples: Indices) -> Indices:
        """Return the positions of samples, each once; in a time that grows with the epoch."""
        chosen = np.zeros(self.length, dtype=np.bool_)
        chosen[samples] = True
        return np.flatnonzero(chosen[self.indices])


@dataclass(frozen=True, eq=False)
class Deal:
    """Epoch's samples dealt to `size` ranks; never modified.

    The samples that are left have *places*, from 0, in the order of the epoch. Rank ``r`` has the
    places ``r``, ``r + size``, and so on: a *row* of places is what all ranks have at the same
    position of their shards. So ranks in lockstep leave what follows a certain place.

    Attributes
    ----------
    order : Order
        All samples of the epoch.
    rest : Spans
        Positions in the order of the samples that are left.
    size : int
        Number of ranks.
    merges : int
        Number of merges of claims that have led to `rest`.
    """

    order: Order
    rest: Spans
    size: int
    merges: int = 0

    @staticmethod
    def new(order: Order, size: int, merges: int = 0) -> Deal:
        """Deal a full epoch."""
        return Deal(order, Spans.of([(0, order.length)]), size, merges)

    @staticmethod
    def after(order: Order, done: Indices, size: int, merges: int = 0) -> Deal:
        """Deal an epoch of which samples are done, by index."""
        rest = Spans.of_numbers(order.positions_of(done)).outside(order.length)
        return Deal(order, rest, size, merges)

    @cached_property
    def left(self) -> int:
        """Return how many samples are dealt, before padding."""
        return len(self.rest)

    @property
    def remaining(self) -> Indices:
        """Return the samples that are dealt, in their order."""
        return self._samples(np.arange(self.left))

    @property
    def done(self) -> Indices:
        """Return the samples that were done before the deal, by index."""
        return self.order.indices[self.rest.outside(self.order.length).numbers()]

    @property
    def per_rank(self) -> int:
        """Return the length of each shard."""
        return -(-self.left // self.size)

    def shard(self, rank: int, start: int = 0, stop: int | None = None) -> Indices:
        """Return the samples of `rank`, or those at some positions of its shard.

        The deal is padded from its start to divide evenly.
        """
        positions = range(self.per_rank)[start:stop]
        places = np.arange(positions.start, positions.stop) * self.size + rank
        if self.per_rank * self.size != self.left:
            places %= max(self.left, 1)
        return self._samples(places)

    def _samples(self, places: Indices) -> Indices:
        return self.order.indices[self.rest.at(places)]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return the identity of this deal: claims on equal deals can be merged."""
        digest = hashlib.blake2b(self._packed_rest(), digest_size=16).digest()
        order = self.order
        return (order.length, order.epoch, order.seed, order.shuffle, self.size, digest)

    def _packed_rest(self) -> bytes:
        return np.stack([self.rest.starts, self.rest.stops]).astype("<i8").tobytes()

    def pack(self) -> Wire:
        """Return the deal as plain values, without the number of ranks."""
        order = self.order
        rest = self._packed_rest()
        return (order.length, order.epoch, rest, self.merges, order.seed, order.shuffle)

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
        starts, stops = np.frombuffer(packed, dtype="<i8").astype(np.int64).reshape(2, -1)
        order = Order(length, epoch, seed, shuffle)
        return Deal(known if order == known else order, Spans(starts, stops), size, merges)

    # -- what is done of it ------------------------------------------------------------------------

    def places_of(self, samples: Indices) -> Indices:
        """Return the places of samples, by index. Those that were done before have none."""
        return self.rest.places_of(self.order.positions_of(samples)) if len(samples) else samples

    def places_in(self, rank: int, positions: Spans) -> Indices:
        """Return the places that a rank has at some positions of its shard."""
        return (positions.numbers() * self.size + rank) % max(self.left, 1)

    def places_of_rows(self, positions: Spans) -> Spans:
        """Return the places that all ranks have at some positions of their shards."""
        starts, stops = positions.starts * self.size, positions.stops * self.size
        padding = int(stops.max(initial=0)) - self.left  # done again, from the first place on
        stops = np.minimum(stops, self.left)
        return Spans.of([*zip(starts.tolist(), stops.tolist(), strict=True), (0, padding)])

    def samples_of(self, claim: Claim) -> Indices:
        """Return the samples that a claim covers, by index."""
        own = self.places_in(claim.rank, Spans.of(claim.spans))
        places = Spans.of_numbers(np.concatenate([own, self.places_of(claim.indices)]))
        return self._samples(places.numbers())

    def without(self, places: Spans, size: int, merges: int) -> Deal:
        """Deal what is left without some places, to `size` ranks."""
        return Deal(self.order, self.rest.within(places.outside(self.left)), size, merges)


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
    present = [claim for claim in claims if claim.key == deal.key]
    if not present:
        return Deal(deal.order, deal.rest, size, deal.merges + 1)
    merges = max(deal.merges, *(claim.merges for claim in present))
    by_index = [deal.places_of(claim.indices) for claim in present]
    positions = []
    for claim, places in zip(present, by_index, strict=True):
        spans = Spans.of(claim.spans)
        if len(places):
            spans |= Spans.of_numbers(places[places % deal.size == claim.rank] // deal.size)
        positions.append(spans)
    common = functools.reduce(operator.and_, positions)
    done = deal.places_of_rows(common)
    for claim, places, own_positions in zip(present, by_index, positions, strict=True):
        if len(places):
            done |= Spans.of_numbers(places)
        if len(own_positions) > len(common):  # in lockstep on none
            done |= Spans.of_numbers(deal.places_in(claim.rank, own_positions - common))
    return deal.without(done, size, merges + 1)


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

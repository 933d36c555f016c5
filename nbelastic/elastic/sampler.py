"""Sampler that deals the rest of an epoch anew when ranks come and go.

:class:`ShardSampler` is Horovod's ``ElasticSampler`` without PyTorch;
:mod:`nbelastic.torch.elastic` makes a ``torch.utils.data.Sampler`` of it. It records the samples
that one rank has done. The shares are computed in :mod:`nbelastic.elastic.shards`. Ranks agree on
their progress in :mod:`nbelastic.elastic.progress_agreement`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.elastic.context import current_or_none
from nbelastic.elastic.session import Session, warn
from nbelastic.elastic.shards import Claim, Deal, Order, Wire, merge_claims
from nbelastic.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sized

    from nbelastic.elastic.spans import Indices

NOT_IN_STATE = (
    "a sampler that records batches is in no state\n"
    "A commit does not say which samples are done: after a change of membership they are dealt "
    "again.\n"
    "Make it a value of the state: TorchState(model, optimizer, sampler=sampler)."
)

_AT_A_TIME = 4096
"""Samples of a share that are looked up at a time."""


@dataclass(frozen=True, eq=False)
class SamplerSnapshot:
    """Sampler at a commit: the lengths of its logs, not their contents."""

    deal: Deal
    rank: int
    spans: list[tuple[int, int]]
    n_spans: int
    last_span: tuple[int, int] | None
    indices: list[int]
    n_indices: int


class ShardSampler:
    """Deal the samples of a dataset to the ranks; after a change deal the rest again.

    `seed` and the epoch's number determine the order of an epoch. A rank's share is fixed from one
    change of membership to the next. All shares have the same length: samples that do not divide
    evenly are padded from their start. After a change the shares leave out all samples that any
    rank has recorded as done.

    Parameters
    ----------
    dataset : sized
        The dataset; only its length matters.
    shuffle : bool, default True
        Whether to shuffle, differently in each epoch.
    seed : int, default 0
        Seed of the shuffling; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self._resumed = False
        self._in_state = False  # until a state commits it, or a warning has said that none does
        self._rank, size = _place()
        self._start(Deal.new(self._order(0), size))

    def _order(self, epoch: int) -> Order:
        length, epoch = len(self.dataset), operator.index(epoch)
        return Order(length, epoch, operator.index(self.seed), bool(self.shuffle))

    def _start(self, deal: Deal) -> None:
        """Begin a deal. The logs are new lists, because snapshots keep the old ones."""
        self._deal = deal
        self._spans: list[tuple[int, int]] = []
        self._indices: list[int] = []

    # -- what users call -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the present epoch."""
        return self._deal.order.epoch

    @property
    def rank(self) -> int:
        """Rank that has this share."""
        return self._rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that the samples were dealt to."""
        return self._deal.size

    @property
    def num_samples(self) -> int:
        """Length of each rank's share, padding included, at the present number of ranks."""
        return -(-self._deal.left // _place()[1])

    @property
    def total_size(self) -> int:
        """Length of all shares together."""
        return self.num_samples * _place()[1]

    @property
    def remaining_indices(self) -> list[int]:
        """All samples that were dealt, in their order, without padding."""
        return _ints(self._deal.remaining)

    @property
    def processed_indices(self) -> set[int]:
        """Samples of this epoch that all ranks did before the deal, and this rank since."""
        return {*_ints(self._deal.done), *_ints(self._deal.samples_of(self.claim()))}

    @property
    def processed_num(self) -> int:
        """Number of samples in :attr:`processed_indices`."""
        deal = self._deal
        return deal.order.length - deal.left + len(deal.samples_of(self.claim()))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: deal all samples, of which none are done.

        Best called at the end of the epoch before. A training function may also call it at the
        start of each epoch: when the function is called again after a change of membership, its
        first call with the present epoch keeps the samples that are done.
        """
        if self._resumed and epoch == self.epoch:
            self._resumed = False
            return
        self._resumed = False
        self._rank, size = _place()
        self._start(Deal.new(self._order(epoch), size, self._deal.merges))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch of this rank's share."""
        start = batch_idx * batch_size
        return _ints(self._deal.shard(self._rank, start, start + batch_size))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch is done.

        Parameters
        ----------
        batch_idx : int
            Number of the batch, from 0 at the start of the iteration over the sampler.
        batch_size : int
            Number of samples in all batches but the last.
        """
        self._resumed = False
        start = max(batch_idx * batch_size, 0)
        stop = min((batch_idx + 1) * batch_size, self._deal.per_rank)
        if start >= stop:
            return
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        self._spans.append((start, stop))
        _count(stop - batch_idx * batch_size, in_state=self._told_or_in_state())

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that samples are done, by their indices."""
        self._resumed = False
        done = [operator.index(index) for index in indices]
        if done and not 0 <= min(done) <= max(done) < self._deal.order.length:
            raise ValueError(f"indices must be within 0 … {self._deal.order.length - 1}")
        self._indices.extend(done)
        _count(len(done), in_state=self._told_or_in_state())

    def _told_or_in_state(self) -> bool:
        before, self._in_state = self._in_state, True
        return before

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and its samples that this rank knows to be done."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state dict. Call it on all ranks alike, or before the elastic loop."""
        order = self._order(state_dict["epoch"])
        if "processed_indices" in state_dict:
            done = np.fromiter(state_dict["processed_indices"], dtype=np.int64)
        else:
            done = order.indices[: state_dict["processed_num"]]
        self._rank, size = _place()
        self._start(Deal.after(order, done, size, self._deal.merges))

    def reset(self) -> None:
        """Deal the rest again, to the present number of ranks.

        A :class:`~nbelastic.elastic.State` with this sampler does this better by itself, because
        its ranks first agree on their progress. Here a rank knows only of itself: samples that it
        has done are dealt to other ranks again.
        """
        own = self._deal.samples_of(self.claim())
        self._rank, size = _place()
        if self._deal.size == size == 1:
            self._start(merge_claims(self._deal, [self.claim()], size))
            return
        self._start(Deal(self._deal.order, self._deal.rest, size, self._deal.merges))
        self._indices.extend(_ints(own))

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's present share, unaffected by later changes."""
        self._resumed = False
        if (self._rank, self._deal.size) != _place():
            self.reset()
        return _iterate(self._deal, self._rank)

    def __len__(self) -> int:
        return self.num_samples

    # -- what states call ------------------------------------------------------------------------

    def snapshot(self) -> SamplerSnapshot:
        """Return a snapshot for :meth:`go_back`, at a cost that does not grow with progress."""
        self._in_state = True
        spans, indices = self._spans, self._indices
        last = spans[-1] if spans else None
        return SamplerSnapshot(
            self._deal, self._rank, spans, len(spans), last, indices, len(indices)
        )

    def go_back(self, to: SamplerSnapshot) -> None:
        """Restore the sampler exactly as at the snapshot."""
        # Logs only grow, except for their last span, so their beginnings are enough.
        self._start(to.deal)
        self._rank = to.rank
        if to.last_span is not None:
            self._spans = [*to.spans[: to.n_spans - 1], to.last_span]
        self._indices = to.indices[: to.n_indices]

    def claim(self) -> Claim:
        """Return the samples that this rank has done since the deal."""
        deal = self._deal
        indices = np.array(self._indices, dtype=np.int64)
        return Claim(deal.key, deal.merges, self._rank, tuple(self._spans), indices)

    def merge_claims(self, claims: Iterable[Claim], size: int) -> Deal:
        """Return the rest after `claims`, dealt to `size` ranks; change nothing."""
        return merge_claims(self._deal, claims, size)

    def unpack(self, wire: Wire, size: int) -> Deal:
        """Return the deal that another rank has packed; change nothing.

        Raises
        ------
        StateMismatch
            It has another number of samples.
        """
        if wire[0] != len(self.dataset):
            raise StateMismatch(
                f"this rank's sampler has a dataset of {len(self.dataset)} samples, that of the "
                f"others {wire[0]}: all ranks must build the same dataset"
            )
        return Deal.unpack(wire, self._deal.order, size)

    def install(self, deal: Deal, rank: int, *, resumed: bool = False) -> None:
        """Begin with a share of `deal`, on which all ranks have agreed.

        Parameters
        ----------
        deal : Deal
            The samples that are left.
        rank : int
            Rank of the share.
        resumed : bool, default False
            Whether the training function is about to be called again; see :meth:`set_epoch`.
        """
        order = deal.order
        if (order.seed, order.shuffle) != (self._deal.order.seed, self._deal.order.shuffle):
            self.seed, self.shuffle = order.seed, order.shuffle  # those of the sender
        self._start(deal)
        self._rank = rank
        self._resumed = resumed


def state_dict_of(wire: Wire) -> dict[str, Any]:
    """Return the state dict of a sampler that has this packed deal."""
    length, epoch, _, _, seed, shuffle = wire
    done = Deal.unpack(wire, Order(length, epoch, seed, shuffle), 1).done
    return {"epoch": epoch, "processed_indices": set(_ints(done))}


def _iterate(deal: Deal, rank: int) -> Iterator[int]:
    """Yield the samples of a share, some at a time: the first ones are needed at once."""
    for start in range(0, deal.per_rank, _AT_A_TIME):
        yield from _ints(deal.shard(rank, start, start + _AT_A_TIME))


def _place() -> tuple[int, int]:
    context = current_or_none()
    return (0, 1) if context is None else (context.rank, context.size)


def _ints(indices: Indices) -> list[int]:
    values: list[int] = indices.tolist()
    return values


def _count(samples: int, *, in_state: bool) -> None:
    """Count a batch in the rank's telemetry."""
    context = current_or_none()
    if context is not None:  # else a sampler by itself
        context.telemetry.recorded(samples)
        if not in_state and isinstance(context, Session) and context.loops:
            warn(context, NOT_IN_STATE)

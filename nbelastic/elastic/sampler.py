"""Sampler that deals the rest of an epoch again when ranks join or leave.

:class:`ShardSampler` is Horovod's ``ElasticSampler`` without PyTorch;
:mod:`nbelastic.torch.elastic` makes a ``torch.utils.data.Sampler`` of it. Ranks that have done the
same number of batches have the same progress. Otherwise the least counts, so samples are repeated
rather than lost.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple

from nbelastic.elastic.deal import Deal, Order
from nbelastic.elastic.ranks.context import Context, current_or_none
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import NbelasticError, StateMismatch

NOT_IN_STATE = (
    "a sampler that records batches is in no state\n"
    "A commit does not say which samples are done: after a change of membership they are dealt "
    "again.\n"
    "Make it a value of the state: TorchState(model, optimizer, sampler=sampler)."
)

_AT_A_TIME = 4096
"""Samples of a share that are looked up at a time: the first ones are needed at once."""


class SamplerProgress(NamedTuple):
    """Position in an epoch, agreed on by the ranks and kept in checkpoints."""

    length: int  # samples of the dataset
    seed: int
    shuffle: bool | None
    epoch: int
    done: int  # samples, from the start of the epoch's order

    @property
    def order(self) -> tuple[int, int, bool | None]:
        """What the orders of all epochs depend on."""
        return self[:3]


class SamplerSnapshot(NamedTuple):
    """Progress of a rank in its share of the deal."""

    deal: Deal
    rank: int
    rows: int = 0  # positions of the share that are done, from its start
    apart: frozenset[int] = frozenset()  # samples that are done, after one that is not

    @property
    def progress(self) -> SamplerProgress:
        """Samples that are done, if all ranks are as far."""
        order = self.deal.order
        done = min(self.deal.done + self.rows * self.deal.size, order.length)
        return SamplerProgress(order.length, order.seed, order.shuffle, order.epoch, done)


class ShardSampler:
    """Sampler of the dealt samples; :class:`~nbelastic.torch.elastic.ElasticSampler`'s base."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle: bool | None = shuffle
        self.seed = seed
        self._resumed = False
        self._in_state = False
        self._warned = False
        self._start(self._order(0))

    def _order(self, epoch: int) -> Order:
        length, epoch = len(self.dataset), operator.index(epoch)
        return Order(length, operator.index(self.seed), bool(self.shuffle), epoch)

    def _start(self, order: Order, done: int = 0, place: tuple[int, int] | None = None) -> None:
        rank, size = place or _place()
        self._at = SamplerSnapshot(Deal(order, done, size), rank)

    @property
    def _deal(self) -> Deal:
        return self._at.deal

    # -- what users call -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the present epoch."""
        return self._deal.order.epoch

    @property
    def rank(self) -> int:
        """Rank that has this share."""
        return self._at.rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that the samples were dealt to."""
        return self._deal.size

    @property
    def num_samples(self) -> int:
        """Length of each rank's share, padding included, at the present number of ranks."""
        return replace(self._deal, size=_place()[1]).per_rank

    @property
    def total_size(self) -> int:
        """Length of all shares together."""
        return self.num_samples * _place()[1]

    @property
    def remaining_indices(self) -> list[int]:
        """All samples that were dealt, in their order, without padding."""
        left: list[int] = self._deal.order.indices[self._deal.done :].tolist()
        return left

    @property
    def processed_indices(self) -> set[int]:
        """Samples done in this epoch, if all ranks are as far as this rank."""
        done: list[int] = self._deal.order.indices[: self.processed_num].tolist()
        return {*done, *self._at.apart}

    @property
    def processed_num(self) -> int:
        """Number of samples done by all ranks, if all are as far as this rank."""
        return self._at.progress.done

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: deal all samples, of which none are done.

        Best called at the end of the epoch before. A training function may also call it at the
        start of each epoch: when the function is called again after a change of membership, its
        first call with the present epoch keeps the samples that are done.
        """
        goes_on, self._resumed = self._resumed and epoch == self.epoch, False
        if not goes_on:
            self._start(self._order(epoch))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch of this rank's share."""
        start = batch_idx * batch_size
        return self._deal.shard(self.rank, start, start + batch_size)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch is done. All ranks record the same batches.

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
        if start > self._at.rows:
            self._add(self._deal.shard(self.rank, start, stop), self._at.rows)
        else:
            self._add((), max(self._at.rows, stop))
        self._recorded(stop - batch_idx * batch_size)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that samples of this rank's share are done, by their indices."""
        self._resumed = False
        done = [operator.index(index) for index in indices]
        if done and not 0 <= min(done) <= max(done) < self._deal.order.length:
            raise ValueError(f"indices must be within 0 … {self._deal.order.length - 1}")
        self._add(done, self._at.rows)
        self._recorded(len(done))

    def _add(self, done: Iterable[int], rows: int) -> None:
        """Add samples that are done, and go past those that follow the first rows of the share."""
        deal, rank, _, apart = self._at
        if done or apart:
            left = {*apart, *done}
            for sample in deal.shard(rank, rows, rows + len(left)):
                if sample not in left:
                    break
                left.remove(sample)
                rows += 1
            apart = frozenset(left)
        self._at = SamplerSnapshot(deal, rank, rows, apart)

    def _recorded(self, samples: int) -> None:
        context = current_or_none()
        if context is None:
            return
        context.telemetry.recorded(samples)
        known, self._warned = self._in_state or self._warned, True
        if context.loops and not known:
            context.warn(NOT_IN_STATE)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its samples are done."""
        return state_dict_of(self._at.progress)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state dict. Call it on all ranks alike, or before the elastic loop."""
        order = self._order(state_dict["epoch"])
        if "processed_num" in state_dict:
            done = min(operator.index(state_dict["processed_num"]), order.length)
        else:  # of older versions of Horovod
            known = set(state_dict["processed_indices"])
            missing = (n for n, sample in enumerate(order.indices.tolist()) if sample not in known)
            done = next(missing, order.length)
        self._start(order, done)

    def reset(self) -> None:
        """Deal the rest again, to the present number of ranks.

        A :class:`~nbelastic.elastic.State` with this sampler does this by itself, because its ranks
        first agree on their progress. A sampler in no state knows only of its own rank, and deals
        again what was dealt before.
        """
        alone = self._deal.size == _place()[1] == 1
        # A state has brought all ranks to one commit, so they count alike. Others may not.
        done = self.processed_num if alone or self._in_state else self._deal.done
        self._start(self._deal.order, done)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's present share, unaffected by later changes."""
        self._resumed = False
        if (self.rank, self._deal.size) != _place():
            self.reset()
        deal, rank = self._deal, self.rank
        starts = range(0, deal.per_rank, _AT_A_TIME)
        return (each for start in starts for each in deal.shard(rank, start, start + _AT_A_TIME))

    def __len__(self) -> int:
        return self.num_samples

    # -- what states call ------------------------------------------------------------------------

    def snapshot(self) -> SamplerSnapshot:
        """Return a snapshot for :meth:`go_back`, at a cost that does not grow with progress."""
        self._in_state = True
        return self._at

    def go_back(self, to: SamplerSnapshot) -> None:
        """Restore the sampler exactly as at the snapshot."""
        self._at = to

    def progress(self) -> SamplerProgress:
        """Return the progress of the epoch, if all ranks are as far as this rank."""
        return self._at.progress

    def install(
        self, progress: SamplerProgress, rank: int, size: int, *, resumed: bool = False
    ) -> None:
        """Begin with this rank's share of the remaining samples, as agreed by all ranks."""
        order, known = Order(*progress[:4]), self._deal.order
        if (order.seed, order.shuffle) != (known.seed, known.shuffle):
            self.seed, self.shuffle = order.seed, order.shuffle  # those of the sender
        if order == known:
            order = known  # whose samples may be in order already
        self._start(order, progress.done, (rank, size))
        self._resumed = resumed  # the function is about to be called again, see `set_epoch`


def agree_on_progress(
    mine: Sequence[SamplerProgress], context: Context, behind: Sequence[int] = ()
) -> list[SamplerProgress]:
    """Return for each sampler of a state the least progress of the ranks not `behind`."""
    if not mine:
        return []
    alone = context.size == 1
    everyone = [mine] if alone else allgather_object(context.communicator(), list(mine))
    if len({len(each) for each in everyone}) > 1:
        raise NbelasticError("the states of the ranks do not have the same samplers")
    for here, there in zip(mine, everyone[context.source], strict=True):
        if here.length != there.length and there.shuffle is not None:
            raise StateMismatch(
                f"this rank's sampler has a dataset of {here.length} samples, that of the "
                f"others {there.length}: all ranks must build the same dataset"
            )
    return least_progress(everyone, context.source, behind)


def least_progress(
    everyone: Sequence[Sequence[SamplerProgress]], source: int, behind: Collection[int]
) -> list[SamplerProgress]:
    """Return for each sampler the least progress of the ranks with the newest state."""
    # After a generation that failed while it formed, some of these ranks have dealt the rest again,
    # and others have gone back to before. The epoch's order and what is done of it are the same.
    newest = [each for rank, each in enumerate(everyone) if rank not in behind]
    return [
        min(each for each in column if each.order == there.order)
        for there, *column in zip(everyone[source], *newest, strict=True)
    ]


def state_dict_of(progress: SamplerProgress) -> dict[str, Any]:
    """Return the state dict of a sampler that is as far."""
    return {"epoch": progress.epoch, "processed_num": progress.done}


def _place() -> tuple[int, int]:
    context = current_or_none()
    return (0, 1) if context is None else (context.rank, context.size)

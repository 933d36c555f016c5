"""Sampler in the loader of a trainer; the integration begins its epochs."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.deal import Order
from nbelastic.elastic.followed import samplers_of, seeded
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import NbelasticError
from nbelastic.torch.elastic import ElasticSampler

NOT_DEALT = (
    "a loader begins its epoch again after each change of membership\n"
    "{why}, so nbelastic cannot deal its samples: those of the epoch under way are trained twice.\n"
    "{cure}"
)
_CURE = "Use a dataset with a length and an index, and a sampler or batch sampler with a length."


class DealtSampler(ElasticSampler):
    """A sampler that begins an epoch in :meth:`begin_epoch` only.

    Trainers and loaders call ``set_epoch`` several times for one epoch.

    It deals a loader's batch sampler. A permutation of the dataset is drawn anew. The items of any
    other `source`, a sampler or batch sampler of the user's, are dealt as it has them. It draws an
    epoch once, seeded alike on all ranks. Where it draws differently on some rank, all have the
    draw of the ranks that have begun the epoch, or of the first.
    """

    _source: Any = None
    _drawn: Order | None = None  # the latest that all ranks have agreed on
    _agreed_in = -1  # generation
    _begun = 0  # batches of the present iteration

    def __init__(self, dataset: Any, batches: Any, seed: int) -> None:
        source = source_of(batches)
        self.batched = source is batches  # its items are batches
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.width = 1 if self.batched else self.batch_size or 1  # items of a batch
        permutes = type(source).__name__ in ("RandomSampler", "SeedableRandomSampler")
        if type(source) is DistributedSampler:
            super().__init__(dataset, source.shuffle, source.seed)
        elif permutes and not source.replacement and len(source) == len(dataset):
            super().__init__(dataset, True, seed)
        else:
            super().__init__(dataset, seed=seed)
            self._source, self.shuffle = source, None
            self._start(Order(len(source), seed, None, -1))

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with it after a change of membership."""
        self._goes_on(epoch)
        super().set_epoch(epoch)
        self._begun = 0

    def record_next(self) -> None:
        """Record the next batch as done, when it begins.

        If it fails, the sampler goes back to its commit.
        """
        self.record_batch(self._begun, self.width)
        self._begun += 1

    def go_on(self, epoch: int, done: int) -> None:
        """Continue an epoch after so many samples."""
        self.load_state_dict({"epoch": epoch, "processed_num": done})
        self._resumed = True

    def left_in(self, epoch: int) -> int:
        """Return how many samples of an epoch are left, if it is begun now."""
        return self._deal.left if self._goes_on(epoch) else self._order(epoch).length

    def batches_left(self, epoch: int | None) -> tuple[int, float]:
        """Return the batches of each rank in the rest of an epoch, and the share done before."""
        if epoch is None:
            left = total = len(self.dataset if self._source is None else self._source)
        else:
            left, total = self.left_in(epoch), self._order(epoch).length
        rows = -(-left // current().size)
        drops = self.drop_last and not self.batched
        batches = rows // self.width if drops else -(-rows // self.width)
        return batches, 1.0 - left / max(total, 1)

    def position(self) -> dict[str, Any]:
        """Return the done part of the epoch, with the data to reproduce its order."""
        done, order = self.processed_num, self._deal.order
        drawn = "" if self._source is None else _digest(self._order(self.epoch))
        return {"done": done, "length": order.length, "seed": self.seed, "drawn": drawn}

    # -- epochs that a sampler of the user's draws -------------------------------------------------

    def _order(self, epoch: int) -> Order:
        if self._source is None:
            return super()._order(epoch)
        generation = current().generation
        known = [each for each in (self._drawn, self._deal.order) if each is not None]
        held = [each for each in known if each.epoch == epoch and "indices" in vars(each)]
        order = held[0] if held else self._draw(epoch)
        if not held or self._agreed_in != generation:
            order = self._agree(order, bool(held) and self._agreed_in > 0)
            self._agreed_in = generation
        self._drawn = order
        return order

    def _goes_on(self, epoch: int) -> bool:
        """Return whether an epoch is under way; draw it, if another rank has sent its position."""
        goes_on = self._resumed and epoch == self.epoch
        if goes_on and self._source is not None:
            order = self._order(epoch)
            if self._deal.order is not order:
                place = self.rank, self._deal.size
                self._start(order, min(self._deal.done, order.length), place)
        return goes_on

    def _draw(self, epoch: int) -> Order:
        source, stack = self._source, ExitStack()
        most = 2 * len(source) + 1000
        with stack, seeded(self.seed, epoch):
            for each in _within(source):
                if isinstance(each, DistributedSampler):
                    stack.enter_context(samplers_of(current()).whole(each))
                if callable(getattr(each, "set_epoch", None)):
                    each.set_epoch(epoch)
                generator = getattr(each, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(int(torch.randint(1 << 62, ()).item()))
            items = list(itertools.islice(iter(source), most + 1))
        if len(items) > most:
            raise NbelasticError(
                f"the {_name(source)} has a length of {len(source)} and yields more than {most} "
                "items, so nbelastic cannot deal an epoch of it: end its iteration, or leave out "
                "its __len__"
            )
        return Order.drawn(items, self.seed, epoch)

    def _agree(self, order: Order, held: bool) -> Order:
        """Return the common order of all ranks; an order already begun goes first."""
        context = current()
        if not context.generation or context.size == 1:
            return order
        link = context.communicator()
        everyones = allgather_object(link, (held, _digest(order)))
        if len({digest for _, digest in everyones}) == 1:
            return order
        first = next((rank for rank, (held, _) in enumerate(everyones) if held), 0)
        items = order.indices.tolist()
        theirs = allgather_object(link, items if context.rank == first else None)[first]
        alike = context.rank != first and not _rows(items).isdisjoint(_rows(theirs))
        if not any(allgather_object(link, alike)) and not any(held for held, _ in everyones):
            raise NbelasticError(
                f"the {_name(self._source)} gives each rank rows of its own, so nbelastic cannot "
                "deal them to ranks that change: let it give all rows, the same on each rank"
            )
        return Order.drawn(theirs, self.seed, order.epoch)


def source_of(batches: Any) -> Any:
    """Return the sampler of a loader's batch sampler, or itself if its batches are its own."""
    return batches.sampler if type(batches) is BatchSampler else batches


def obstacle_to(batches: Any) -> str:
    """Return why the output of a batch sampler cannot be dealt; empty if it can."""
    source = source_of(batches)
    for each in _within(source):
        ranks = isinstance(getattr(each, "rank", None), int)
        if ranks and not isinstance(each, (DistributedSampler, DealtSampler)):
            return f"its {_name(each)} gives each rank rows of its own"
    try:
        len(source)
    except TypeError:
        return f"its {_name(source)} has no length"
    return ""


def not_dealt(why: str, cure: str = _CURE) -> None:
    """Warn that the samples of a loader cannot be dealt."""
    current().warn(NOT_DEALT.format(why=why[0].upper() + why[1:], cure=cure))


def _within(source: Any) -> Iterator[Any]:
    """Yield a sampler, and its underlying samplers."""
    todo, seen = [source], set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for name in ("sampler", "batch_sampler", "_sampler", "base_sampler"):
            todo.append(getattr(each, name, None))
        if isinstance(each, DistributedSampler):
            todo.append(getattr(each.dataset, "_sampler", None))  # of Lightning's wrapper


def _digest(order: Order) -> str:
    return hashlib.sha1(pickle.dumps(order.indices.tolist()), usedforsecurity=False).hexdigest()


def _rows(items: list[Any]) -> set[Any]:
    return {row for each in items for row in (each if isinstance(each, (list, tuple)) else [each])}


def _name(source: Any) -> str:
    return f"sampler ({type(source).__name__})"

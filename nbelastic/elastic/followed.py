"""Samplers that shard by rank, like torch's, under changes of the ranks.

Such a sampler keeps the ranks with which it was made. Here it follows the ranks of the job, and
after a reset deals the rest of the epoch that was under way at the last commit. Its loader counts
the batches that it hands out; see :mod:`nbelastic.torch.distributed_sampler`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nbelastic.elastic.deal import SEED_LIMIT, Deal, Order, Tail
from nbelastic.elastic.ranks.telemetry import collector_off
from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.context import Context

UNKNOWN = (
    "a sampler begins its epoch again after each change of membership\n"
    "It is a {kind} that no DataLoader of torch's reads, or one with batches of its own. So it is "
    "not known how many of its rows are trained, and those of the epoch under way are trained "
    "twice.\n"
    "Use hvd.elastic.ElasticSampler(data), and record its batches."
)

_SIZES = ("num_replicas", "rank", "num_samples", "total_size")


class Position(NamedTuple):
    """Progress of a sampler in its epoch, at a commit."""

    made: int  # its number among those that were made before the first generation, or -1
    likeness: tuple[Any, ...]  # what all ranks' samplers of this data have in common
    epoch: int
    done: int  # rows of the epoch's order, on all ranks together; -1 if unknown
    under_way: bool  # a loader iterated over it
    trains: bool  # a loader has iterated over it at some commit
    order: Order | None = None  # of the epoch, with its rows unless all ranks draw the same


@dataclass(eq=False)
class Count:
    """Batches handed out by an iteration; the count lives as long as the iteration."""

    rows: int | None  # in a batch; None if unknown
    batches: int = 0


@dataclass(eq=False)
class _Followed:
    made: int
    made_for: int  # number of the job's ranks at the time
    follows: bool | None  # None until it is found out how
    tail: Tail = "pad"
    likeness: tuple[Any, ...] = ()
    resume: Position | None = None  # where its next iteration goes on
    named: bool = False  # the function has set the epoch since then
    begun: bool = False  # a loader has, and has not yet asked for the share
    drawing: bool = False
    trains: bool = False
    deal: Deal | None = None  # of the latest iteration
    count: Callable[[], Count | None] = lambda: None

    def position(self, epoch: int) -> Position:
        if self.resume is not None:
            return self.resume
        deal, count = self.deal, self.count()
        if deal is None or count is None:
            length = self.likeness[1] if deal else 0
            return Position(self.made, self.likeness, epoch, length, False, self.trains)
        self.trains = True
        done = -1 if count.rows is None else deal.done + count.batches * count.rows * deal.size
        return Position(self.made, self.likeness, deal.order.epoch, done, True, True, deal.order)


class FollowedSamplers:
    """Samplers of a rank that shard by rank, and follow the ranks of its job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._all: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        self._made = 0
        self._unclaimed: list[Position] = []
        self.saved: tuple[Position, ...] = ()  # positions at the last commit
        context.after_forming += (self.formed,)

    # -- what patches of torch call ------------------------------------------------------------

    def add(self, sampler: Any) -> None:
        """Follow the ranks with a new sampler, if made for the job's ranks."""
        context = self._context
        made = -1 if context.generation else self._made
        self._made += made >= 0
        follows = (sampler.rank, sampler.num_replicas) == (context.rank, context.size)
        self._all[sampler] = _Followed(made, context.size, None if follows else False)

    def find(self, sampler: Any) -> _Followed | None:
        """Return the record of a sampler; None for a sampler with ranks of its own."""
        if sampler not in self._all:  # it was pickled, with ranks of the notebook's kernel
            follows = None if sampler.num_replicas > 1 else False
            self._all[sampler] = _Followed(-1, self._context.size, follows)
        found = self._all[sampler]
        if found.follows is None:
            # Only now, because the constructor of its class may end after that of torch's.
            tail = None if resumes_itself(sampler) else _tail(sampler)
            found.follows, found.tail = tail is not None, tail or "pad"
            options = (getattr(sampler, name, None) for name in ("seed", "shuffle", "drop_last"))
            found.likeness = (type(sampler).__name__, len(sampler.dataset), *options)
            self._resize(sampler, found)
        if not found.follows and sampler.num_replicas > 1 and found.made_for != self._context.size:
            raise NbelasticError(
                f"a {type(sampler).__name__} was made for rank {sampler.rank} of "
                f"{sampler.num_replicas}, the job had {found.made_for} ranks then and has "
                f"{self._context.size} now, and the sampler cannot follow them. Use "
                "hvd.elastic.ElasticSampler(data), or a DistributedSampler of torch's with the "
                "job's own ranks"
            )
        return found if found.follows else None

    def named(self, sampler: Any) -> None:
        """Record that the training function has set the epoch."""
        found = self._all.get(sampler)
        if found is not None and found.follows:
            found.named = True
            self._resize(sampler, found)

    def begin(self, sampler: Any, found: _Followed, rows: int | None) -> Count:
        """Begin an iteration, whose batches have so many rows of each rank; return its count."""
        position = self._position_for(sampler, found)
        if position is not None and position.done < 0:
            self._context.warn(UNKNOWN.format(kind=type(sampler).__name__))
        found.deal = self._resize(sampler, found)
        if position in self._unclaimed:
            self._unclaimed.remove(position)
        found.resume, found.named, found.begun = None, False, True
        count = Count(rows)
        found.count = weakref.ref(count)
        return count

    def ended(self, sampler: Any, found: _Followed) -> None:
        """Record that an iteration has come to its end."""
        self.left(sampler)
        self._resize(sampler, found)

    def left(self, sampler: Any) -> None:
        """Record that an iteration, though perhaps still referred to, does not go on."""
        found = self._all.get(sampler)
        if found is not None:
            found.count = lambda: None

    def share(
        self, sampler: Any, found: _Followed, draw: Callable[[], Iterator[Any]], plain: bool
    ) -> Iterator[Any]:
        """Return the rows of this rank, of what is left of the epoch.

        The sampler's own iteration is `draw`. `plain` says that it depends on seed and epoch alone.
        """
        count = None if found.begun else self.begin(sampler, found, None)
        found.begun = False
        deal = found.deal
        assert deal is not None
        if plain and not deal.done:
            return _keeping(count, draw())
        if "indices" not in vars(deal.order):
            words = deal.order.seed, deal.order.epoch
            with self.whole(sampler), seeded(*words):
                deal = replace(deal, order=Order.drawn(list(draw()), *words))
            found.deal = found.deal if plain else deal
        return _keeping(count, iter(deal.shard(sampler.rank)))

    @contextlib.contextmanager
    def whole(self, sampler: Any) -> Iterator[None]:
        """Let a sampler yield the rows of all ranks, in the order of its epoch, for a while."""
        kept = {name: getattr(sampler, name) for name in _SIZES}
        length, found = len(sampler.dataset), self._all.get(sampler) or _Followed(-1, 0, False)
        vars(sampler).update(zip(_SIZES, (1, 0, length, length), strict=True))
        found.drawing = True
        try:
            yield
        finally:
            found.drawing = False
            vars(sampler).update(kept)

    # -- what states call ------------------------------------------------------------------------

    def save(self) -> None:
        """Keep the present positions as those of the last commit."""
        pairs = self._all.items() if self._all else ()  # items() is slow
        followed = [(each, found) for each, found in pairs if found.follows]
        now = [found.position(_epoch(sampler)) for sampler, found in followed]
        self.saved = (*now, *self._unclaimed)

    def go_back(self, positions: Sequence[Position]) -> None:
        """Go on with the positions of a commit, as iterations begin."""
        self.saved = tuple(positions)
        self._unclaimed = list(positions)
        for sampler in list(self._all):
            found = self._all[sampler]
            if found.follows is False or self.find(sampler) is None:
                continue
            self.left(sampler)
            found.resume, found.named, found.begun = None, False, False
            for position in list(self._unclaimed) if found.made >= 0 else ():
                if (position.made, position.likeness) == (found.made, found.likeness):
                    self._unclaimed.remove(position)
                    found.resume, found.trains = position, position.trains
                    if hasattr(sampler, "epoch"):
                        sampler.epoch = position.epoch
            self._resize(sampler, found)
        self._unclaimed = [each for each in self._unclaimed if each.under_way]

    def formed(self) -> None:
        """Follow the ranks of a generation that has formed."""
        self.go_back(self.saved)

    # -- inside ------------------------------------------------------------------------------------

    def _position_for(self, sampler: Any, found: _Followed) -> Position | None:
        """Return the position from which an iteration resumes now; None for a fresh start."""
        epoch, position = _epoch(sampler), found.resume
        if position is None and found.made < 0:
            wanted = (found.likeness, epoch)
            alike = (p for p in self._unclaimed if (p.likeness, p.epoch) == wanted)
            position = next(alike, None)
        if position is None or position.epoch != epoch:
            return None
        return position if position.under_way or (found.named and position.trains) else None

    def _resize(self, sampler: Any, found: _Followed) -> Deal | None:
        """Write the ranks and sizes of a new iteration into the fields of torch."""
        if not found.follows:
            return None
        position, rank = self._position_for(sampler, found), self._context.rank
        whole = Order(len(sampler.dataset), getattr(sampler, "seed", 0), None, _epoch(sampler))
        done, order = (0, None) if position is None else (max(position.done, 0), position.order)
        deal = Deal(order or whole, done, self._context.size, found.tail)
        sizes = (deal.size, rank, len(deal.places(rank)), deal.total)
        vars(sampler).update(zip(_SIZES, sizes, strict=True))
        return deal


def samplers_of(context: Context) -> FollowedSamplers:
    """Return the samplers of a rank that shard by rank."""
    return context.kept(FollowedSamplers)


def resumes_itself(sampler: Any) -> bool:
    """Whether a sampler keeps its progress in a state of its own; torchdata's need not."""
    return hasattr(sampler, "state_dict") and "torchdata" not in type(sampler).__module__


def generator_states() -> list[tuple[Callable[[Any], object], Any]]:
    """Return this process's global generators, as setters, and their states; they are not sent."""
    found: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state(legacy=False)),
    ]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # torch makes the tensor under the generator's lock. A collection there may free a tensor,
        # which lets another thread run; if that one asks for the lock, neither goes on.
        with collector_off():
            found.append((torch.set_rng_state, torch.get_rng_state()))
            if torch.cuda.is_initialized():
                device = torch.cuda.current_device()
                put = functools.partial(torch.cuda.set_rng_state, device=device)
                found.append((put, torch.cuda.get_rng_state(device)))
    return found


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    ``torch.manual_seed`` would take eighty times as long, because it visits all devices. Of
    accelerators, only CUDA's present device is seeded, once CUDA has been initialised.
    """
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the random generators of this process as they were before the block."""
    states = generator_states()
    try:
        yield
    finally:
        for put, state in states:
            put(state)


@contextlib.contextmanager
def seeded(*words: int) -> Iterator[None]:
    """Seed the random generators of this process for a while, from a few numbers."""
    state = np.random.SeedSequence([abs(word) % SEED_LIMIT for word in words])
    with generators_kept():
        seed_generators(int(state.generate_state(1)[0]))
        yield


def _keeping(count: Count | None, rows: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that lives as long as an iteration, and keeps its count alive."""
    return rows if count is None else (row for row in rows if count is not None)


def _epoch(sampler: Any) -> int:
    return int(getattr(sampler, "epoch", 0))


def _tail(sampler: Any) -> Tail | None:
    """Return how a sampler evens out its shares; None if it does so in a way of its own."""
    tails: list[Tail] = ["drop"] if getattr(sampler, "drop_last", False) else ["pad", "uneven"]
    if any("Unrepeated" in kind.__name__ for kind in type(sampler).__mro__):
        tails = ["uneven"]
    order = Order(len(sampler.dataset), 0, None, 0)
    for tail in tails:
        deal = Deal(order, 0, sampler.num_replicas, tail)
        sizes = len(deal.places(sampler.rank)), deal.total
        if (sampler.num_samples, sampler.total_size) == sizes:
            return tail
    return None

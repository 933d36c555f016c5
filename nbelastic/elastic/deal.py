"""Deal of an epoch's samples to ranks, and of the rest after a reset; pure.

Rank ``r`` has the samples ``r``, ``r + size``, and so on, of those that are left. So ranks in
lockstep have together done a beginning of the epoch's order, and one number says how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SEED_LIMIT = 1 << 32  # of NumPy's generators

Tail = Literal["pad", "drop", "uneven"]
"""How shares are made equally long: by samples from the start, by leaving some out, or not."""


@dataclass(frozen=True)
class Order:
    """Order of an epoch's samples, the same on all ranks."""

    length: int
    seed: int
    shuffle: bool | None  # None: drawn by a sampler of the user's
    epoch: int

    @classmethod
    def drawn(cls, items: list[Any], seed: int, epoch: int) -> Order:
        """Return the order in which a sampler of the user's has drawn its items."""
        order = cls(len(items), seed, None, epoch)
        kind: Any = np.int64 if all(type(item) is int for item in items) else object
        vars(order)["indices"] = np.fromiter(items, dtype=kind, count=len(items))
        return order

    @cached_property
    def indices(self) -> NDArray[Any]:
        """The samples in their order, made at the first use."""
        indices = np.arange(self.length, dtype=np.int64)
        if self.shuffle:
            # The legacy generator: its stream is fixed for good, so ranks may differ in NumPy.
            words = [self.seed % SEED_LIMIT, self.epoch % SEED_LIMIT]
            np.random.RandomState(words).shuffle(indices)
        indices.setflags(write=False)
        return indices


@dataclass(frozen=True)
class Deal:
    """The rest of an epoch, after `done` samples, dealt to `size` ranks."""

    order: Order
    done: int
    size: int
    tail: Tail = "pad"

    @property
    def left(self) -> int:
        """Number of samples that are left of the epoch."""
        return max(self.order.length - self.done, 0)

    @property
    def total(self) -> int:
        """Number of samples in all shares together."""
        if self.tail == "uneven":
            return self.left
        return (self.left // self.size if self.tail == "drop" else self.per_rank) * self.size

    @property
    def per_rank(self) -> int:
        """Length of the longest share, unless samples are dropped."""
        return -(-self.left // self.size)

    def places(self, rank: int) -> range:
        """Return the places of a share in the rest, the repeated ones after its end."""
        return range(rank, self.total, self.size)

    def shard(self, rank: int, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return the samples of `rank`, or those at some positions of its share."""
        places = self.places(rank)[start:stop]
        wrapped = np.arange(places.start, places.stop, places.step) % max(self.left, 1)
        found: list[Any] = self.order.indices[self.done + wrapped].tolist()
        return found

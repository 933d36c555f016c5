"""Sources of rows, and the micro-batches that are fetched from them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbelastic.data.comparison import sample_of
from nbelastic.data.dealing import BlockSchedule
from nbelastic.data.permutation import mix
from nbelastic.data.seeding import generators_in, seed_each, seed_generators
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from nbelastic.data.comparison import DataSample
    from nbelastic.data.dealing import Dealing
    from nbelastic.data.permutation import Rows
    from nbelastic.elastic.context import Context

COLLATING = -1
"""Number that takes the place of a row in the seed of ``collate_fn``."""

# Kind of seeds, apart from those of the loader.
_FETCHING = 1


class WorkItem(NamedTuple):
    """A micro-batch to be fetched.

    Attributes
    ----------
    seed : int
        Seed of the epoch, from which those of its rows are made.
    rows : list of int
        Rows of the micro-batch, by their indices in the source.
    """

    seed: int
    rows: list[int]


class RowSource(Protocol):
    """Rows that a loader deals to micro-batches.

    Which rows make up a micro-batch is decided by the loader alone. A source may fetch ahead.

    Attributes
    ----------
    name : str
        What the user calls it.
    is_open : bool
        Whether the end of an epoch is not known before it has come.
    """

    name: str
    is_open: bool = False

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the source."""

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a rank, in steps from `first` on.

        Micro-batches without rows are left out. The values of a batch depend on its rows and the
        seed, and nothing else. A second call may come before the iterator of the first has ended,
        which is not used any more: after a reset, or when the rank's block changes in one of the
        next steps. What has been fetched ahead and is still needed may be used again.
        """

    def has_step(self, dealing: Dealing, step: int) -> bool:
        """Return whether the epoch has a step."""
        return step < dealing.steps

    def rows_before(self, dealing: Dealing, step: int) -> int:
        """Return how many rows of the epoch come before a step."""
        return min(step * dealing.global_batch, dealing.rows_of_epoch)

    def counts(self, dealing: Dealing, step: int, block: range) -> list[int]:
        """Return the rows of each micro-batch of a step, of other blocks as far as is known."""
        return dealing.weights(step)

    def settle(
        self, dealing: Dealing, step: int, counts: list[int], context: Context | None
    ) -> None:
        """Agree with other ranks on the rows of a step whose micro-batches are done.

        All ranks call this together, if the source is open. It completes `counts`.
        """
        return

    def exchange_states(self, dealing: Dealing, step: int, context: Context | None) -> bool:
        """Have all ranks know from where others can go on in a step; return whether that is more.

        All ranks call this together, between two steps.
        """
        return False

    @property
    def remark(self) -> str:
        """Warning for the history, if there is one."""
        return ""

    def sample(self) -> DataSample | None:
        """Return digests of some rows; None where `requirements` describe them."""
        return None

    def requirements(self) -> dict[str, str]:
        """Return what must be equal on ranks that share a state, as names and texts."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, apart from the deal, in the source's own words."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over an order.

        Raises
        ------
        StateMismatch
            It is that of other rows. Nothing has changed.
        """


class MapSource(RowSource):
    """Map-style dataset, read by a ``DataLoader`` whose unit of work is one micro-batch.

    Random generators are seeded before each row, so what a dataset draws for it does not depend on
    the number of ranks or of workers.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        Anything with ``len()`` and ``[]``.
    collate_fn : callable, optional
        Makes a batch of a list of rows.
    **options
        Further options of ``DataLoader``, such as ``num_workers``.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None, **options: Any
    ) -> None:
        for name in _DECIDED & options.keys():
            raise OptionError(f"Loader({name}=…): the loader decides on this; leave it out")
        self._items = _Items()
        sliced = type(dataset) is TensorDataset and collate_fn is None
        rows = _SlicedRows(dataset) if sliced else _Rows(dataset)
        try:
            self._loader: DataLoader[Any] = DataLoader(
                rows,  # type: ignore[arg-type]
                batch_sampler=self._items,  # type: ignore[arg-type]
                collate_fn=_identity if sliced else collate_fn,
                generator=torch.Generator(),  # else it draws from the rank's, once per iteration
                **options,
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"Loader: {error}") from error
        self._dataset = dataset
        self.name = type(dataset).__name__
        # The iterators that are given out own it. With them, its worker processes end.
        self._running: weakref.ref[_Fetching] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the dataset."""
        return dealing.rows(step, number)

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a rank; see :class:`RowSource`."""
        running = None if self._running is None else self._running()
        if running is None or not running.can_turn(dealing, first):
            running = _Fetching(self._loader, self._items, dealing)
            self._running = weakref.ref(running)
        running.turn(first, blocks)
        return running.batches(first, blocks)

    def sample(self) -> DataSample:
        """Return digests of some rows, to be compared with those of other ranks."""
        return sample_of(self._dataset, fetches=self._loader.num_workers == 0)

    def requirements(self) -> dict[str, str]:
        """Return the number of rows, because nothing else is known of any dataset."""
        return {"dataset": f"{len(self)} rows"}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the order is that of the deal."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


_DECIDED = {
    "batch_size",
    "sampler",
    "batch_sampler",
    "drop_last",
    "generator",
    "shuffle",
    "in_order",  # batches are known by their order
}


class _Items:
    """Sampler of work items, those that are given for the next iteration."""

    def __init__(self) -> None:
        self.present: Iterable[WorkItem] = ()

    def __iter__(self) -> Iterator[WorkItem]:
        return iter(self.present)


_Key = tuple[int, int]
"""Step and number of a micro-batch."""

_END = object()


class _Orders:
    """Micro-batches in the order in which a ``DataLoader`` asks for them, and those that have come.

    Attributes
    ----------
    dealing : Dealing
        The epoch.
    taken : tuple of (int, int)
        The last one that was taken. They are taken in their order.
    came : dict
        Batches that have come and were not taken.
    """

    def __init__(self, dealing: Dealing) -> None:
        self.dealing = dealing
        self.taken: _Key = (-1, -1)
        self.came: dict[_Key, Any] = {}
        self._asked: deque[_Key] = deque()
        self._missing: Iterator[WorkItem] = iter(())
        self._blocks = BlockSchedule(range(0))

    @property
    def awaited(self) -> _Key | None:
        """The micro-batch that comes next, of those that were asked for."""
        return self._asked[0] if self._asked else None

    def turn(self, first: int, blocks: BlockSchedule) -> None:
        """Ask for the micro-batches of a schedule, from a step on, that are not on their way."""
        self._blocks = blocks
        self._missing = self._missing_from(first)

    def forget(self) -> None:
        """Ask again for all that has not come."""
        self._asked.clear()
        self.turn(max(self.taken[0], 0), self._blocks)

    def __iter__(self) -> Iterator[WorkItem]:
        return self

    def __next__(self) -> WorkItem:
        """Return what to fetch next. The ``DataLoader`` calls this in the rank's thread."""
        return next(self._missing)

    def _missing_from(self, first: int) -> Iterator[WorkItem]:
        dealing, blocks = self.dealing, self._blocks
        seed = mix(dealing.seed, _FETCHING, dealing.epoch)
        for step in range(first, dealing.steps):
            for number in blocks.at(step):
                key = (step, number)
                if key > self.taken and key not in self.came and key not in self._asked:
                    rows: list[int] = dealing.rows(step, number).tolist()
                    if rows:
                        self._asked.append(key)
                        yield WorkItem(seed, rows)

    def arrived(self, batch: Any) -> None:
        """Keep the next batch, unless its micro-batch has left the block."""
        step, number = key = self._asked.popleft()
        if number in self._blocks.at(step):
            self.came[key] = batch


class _Fetching:
    """Iteration of a ``DataLoader`` that goes on when the block of a rank changes.

    The ``DataLoader`` asks for work items ahead, and yields batches in the same order. So each
    batch is known by step and number. When the block changes, the micro-batches that are new in it
    are asked for next, and those that have left it are dropped as they arrive.
    """

    def __init__(self, loader: DataLoader[Any], items: _Items, dealing: Dealing) -> None:
        self._loader = loader
        self._items = items
        self._orders = _Orders(dealing)
        self._iterator: Iterator[Any] | None = None
        self._sound = True

    def can_turn(self, dealing: Dealing, first: int) -> bool:
        """Return whether to go on with another block from a step on, in the same epoch."""
        orders = self._orders
        return self._sound and dealing == orders.dealing and first > orders.taken[0]

    def turn(self, first: int, blocks: BlockSchedule) -> None:
        """Fetch the micro-batches of a schedule, from a step on, that are not on their way."""
        self._orders.turn(first, blocks)
        if self._iterator is None:
            self._start()

    def _start(self) -> None:
        self._items.present = self._orders
        self._iterator = iter(self._loader)
        self._items.present = ()

    def batches(self, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield the batches of a schedule."""
        dealing = self._orders.dealing
        for step in range(first, dealing.steps):
            for number in blocks.at(step):
                if dealing.places(step, number):
                    yield self._take((step, number))

    def _take(self, key: _Key) -> Any:
        orders = self._orders
        while key not in orders.came:
            self._sound = False  # unless a batch comes
            assert self._iterator is not None
            batch = next(self._iterator, _END)
            if batch is _END and orders.awaited is not None:
                # Only then would the iterator end by itself. It has let the error through.
                step, number = orders.awaited
                raise DataError(
                    f"micro-batch {number} of step {step} cannot be fetched: the dataset or "
                    "collate_fn raised StopIteration"
                )
            if batch is _END:  # it came to its end before the block changed
                orders.forget()
                self._start()
            else:
                orders.arrived(batch)
            self._sound = True
        orders.taken = key
        return orders.came.pop(key)


class _Rows:
    """Dataset as workers see it, indexed by whole work items."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._own: list[Any] | None = None  # generators that the dataset holds, in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None}

    def __len__(self) -> int:
        return len(self._dataset)

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        if self._own is None:
            self._own = generators_in(self._dataset)
        seed_each(self._own, seed)

    def __getitems__(self, item: WorkItem) -> list[Any]:
        dataset, (seed, rows) = self._dataset, item
        at_once = getattr(dataset, "__getitems__", None)
        if at_once is not None:
            self._seed(mix(seed, *rows[:1]))
            found: list[Any] = at_once(rows)
        else:
            found = []
            for row in rows:
                self._seed(mix(seed, row))
                found.append(dataset[row])
        seed_generators(mix(seed, rows[0], COLLATING))
        return found


class _SlicedRows(_Rows):
    """Tensors, of which a micro-batch is taken at once; they draw no random numbers."""

    def __getitems__(self, item: WorkItem) -> list[Any]:
        return [tensor[item.rows] for tensor in self._dataset.tensors]


def _identity(batch: Any) -> Any:
    return batch

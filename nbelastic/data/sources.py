"""Sources of rows, and the micro-batches that are fetched from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbelastic.data.comparison import sample_of
from nbelastic.data.permutation import mix
from nbelastic.data.seeding import generators_in, seed_each, seed_generators
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from nbelastic.data.comparison import DataSample
    from nbelastic.data.dealing import BlockSchedule, Dealing
    from nbelastic.data.permutation import Rows
    from nbelastic.elastic.ranks.context import Context

COLLATING = -1
"""Number that takes the place of a row in the seed of ``collate_fn``."""

# Kind of seeds, apart from those of the loader.
_FETCHING = 1


class WorkItem(NamedTuple):
    """A micro-batch to be fetched."""

    seed: int  # of the epoch, from which those of its rows are made
    rows: list[int]  # by their indices in the source


class RowSource(Protocol):
    """Rows that a loader deals to micro-batches.

    Which rows make up a micro-batch is decided by the loader alone. A source may fetch ahead.
    """

    name: str  # what the user calls it
    is_open: bool = False  # the end of an epoch is not known before it has come

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the source."""

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a rank, in steps from `first` on.

        Micro-batches without rows are left out. The values of a batch depend on its rows and the
        seed, and nothing else. After a reset, or when the rank's block changes in one of the next
        steps, a second call takes the place of the first one's iterator.
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
        """Tell all ranks from where others can go on in a step; return whether that is more.

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
        """Take over an order; StateMismatch, and no change, if it is that of other rows."""


class MapSource(RowSource):
    """Map-style dataset, read by a ``DataLoader`` whose unit of work is one micro-batch.

    Random generators are seeded before each row, so what a dataset draws for it does not depend on
    the number of ranks or of workers. `options` are those of ``DataLoader``.
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

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the dataset."""
        return dealing.rows(step, number)

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a rank; see :class:`RowSource`."""
        self._items.present = self._work(dealing, first, blocks)
        iterator = iter(self._loader)
        self._items.present = ()  # a loader may be pickled
        for step, number in _filled(dealing, first, blocks):
            batch = next(iterator, _END)
            if batch is _END:  # only then would the loop over the steps end without an error
                raise DataError(
                    f"micro-batch {number} of step {step} cannot be fetched: the dataset or "
                    "collate_fn raised StopIteration"
                )
            yield batch

    @staticmethod
    def _work(dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[WorkItem]:
        """Yield what to fetch. The ``DataLoader`` asks for it ahead, in the rank's thread."""
        seed = mix(dealing.seed, _FETCHING, dealing.epoch)
        for step, number in _filled(dealing, first, blocks):
            yield WorkItem(seed, dealing.rows(step, number).tolist())

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


_END = object()


def _filled(dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[tuple[int, int]]:
    """Yield step and number of a rank's micro-batches that have rows."""
    for step in range(first, dealing.steps):
        for number in blocks.at(step):
            if dealing.places(step, number):
                yield step, number


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

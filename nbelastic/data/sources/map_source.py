"""Map-style datasets as sources of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbelastic.data.plan import mix
from nbelastic.data.sources.row_source import COLLATING, RowSource, sample_of
from nbelastic.data.sources.seeding import generators_in, seed_each, seed_generators
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from nbelastic.data.plan import BlockSchedule, Dealing, Rows
    from nbelastic.data.sources.row_source import DataSample

# Kind of seeds, apart from those of the loader.
_FETCHING = 1


class WorkItem(NamedTuple):
    """A micro-batch to be fetched."""

    seed: int  # of the epoch, from which those of its rows are made
    rows: list[int]  # by their indices in the source


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
        return dealing.rows(step, number)

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
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
        """Yield work items. The ``DataLoader`` asks for items ahead, in the rank's thread."""
        seed = mix(dealing.seed, _FETCHING, dealing.epoch)
        for step, number in _filled(dealing, first, blocks):
            yield WorkItem(seed, dealing.rows(step, number).tolist())

    def sample(self) -> DataSample:
        return sample_of(self._dataset, fetches=self._loader.num_workers == 0)

    def requirements(self) -> dict[str, str]:
        return {"dataset": f"{len(self)} rows"}

    def state_dict(self) -> dict[str, Any]:
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
    """Sampler of the work items given for the next iteration."""

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

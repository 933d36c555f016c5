"""Map-style datasets as sources: fetched, seeded, compared between ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from nbelastic.data.plan.dealing import Dealing, mix
from nbelastic.data.sources.row_source import COLLATING, DataSample, RowSource
from nbelastic.data.sources.stream_reader import row_digest
from nbelastic.elastic.deal import SEED_LIMIT
from nbelastic.elastic.followed import generators_kept, seed_generators
from nbelastic.errors import DataError, OptionError

# Kind of seeds, apart from those of the loader.
_FETCHING = 1


WorkItem: TypeAlias = tuple[int, list[int]]
"""A micro-batch to be fetched: the seed of the epoch, and rows by their indices in the source."""


class MapSource(RowSource):
    """Map-style dataset, read by a ``DataLoader`` whose unit of work is one micro-batch."""

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
                collate_fn=list if sliced else collate_fn,
                generator=torch.Generator(),  # else it draws from the rank's, once per iteration
                **options,
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"Loader: {error}") from error
        self._dataset = dataset
        self.name = type(dataset).__name__

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, dealing: Dealing, first: int, block: range) -> Iterator[Any]:
        # The ``DataLoader`` asks for items ahead, in the rank's thread.
        seed, filled = mix(dealing.seed, _FETCHING, dealing.epoch), _filled(dealing, first, block)
        self._items.present = ((seed, dealing.rows(*each).tolist()) for each in filled)
        iterator = iter(self._loader)
        self._items.present = ()  # a loader may be pickled
        for step, number in _filled(dealing, first, block):
            batch = next(iterator, _END)
            if batch is _END:  # only then would the loop over the steps end without an error
                raise DataError(
                    f"micro-batch {number} of step {step} cannot be fetched: the dataset or "
                    "collate_fn raised StopIteration"
                )
            yield batch

    def sample(self) -> DataSample:
        return sample_of(self._dataset, fetches=self._loader.num_workers == 0)

    def describe(self) -> dict[str, str]:
        return {"dataset": f"{len(self)} rows"}


# What the loader decides on; batches are known by their order.
_DECIDED = {"batch_size", "sampler", "batch_sampler", "generator", "in_order"}


class _Items:
    """Sampler of the work items given for the next iteration."""

    def __init__(self) -> None:
        self.present: Iterable[WorkItem] = ()

    def __iter__(self) -> Iterator[WorkItem]:
        return iter(self.present)


_END = object()


def _filled(dealing: Dealing, first: int, block: range) -> Iterator[tuple[int, int]]:
    """Yield step and number of a rank's micro-batches that have rows."""
    for step in range(first, dealing.steps):
        for number in block:
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
                self._seed(mix(seed, row))  # what it draws depends on neither ranks nor workers
                found.append(dataset[row])
        seed_generators(mix(seed, rows[0], COLLATING))
        return found


class _SlicedRows(_Rows):
    """Tensors, of which a micro-batch is taken at once; they draw no random numbers."""

    def __getitems__(self, item: WorkItem) -> list[Any]:
        return [tensor[item[1]] for tensor in self._dataset.tensors]


_KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, type, types.ModuleType)

_LOOKED_AT = 2000  # most objects that are looked at for generators
_LONGEST = 100  # longest container that is looked through: a longer one holds rows


def generators_in(dataset: object) -> list[Any]:
    """Return the random generators that a dataset and its transforms hold, in a fixed order."""
    found: list[Any] = []
    waiting, seen = deque([dataset]), set[int]()
    while waiting and len(seen) < _LOOKED_AT:
        value = waiting.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            found.append(value)
        else:
            waiting.extend(_held_by(value))
    return found


_HELD = {
    types.MethodType: ("__self__",),
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__closure__"),
    functools.partial: ("func", "args", "keywords"),
}


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, tuple)):
        held = value.values() if isinstance(value, dict) else value
        return [*held] if len(held) <= _LONGEST else []
    if isinstance(value, types.CellType):
        with contextlib.suppress(ValueError):  # it is empty
            return [value.cell_contents]
    for kind, names in _HELD.items():
        if isinstance(value, kind):
            return [getattr(value, name) for name in names]
    return [*getattr(value, "__dict__", {}).values()]


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed generators, each differently."""
    for number, generator in enumerate(generators):
        own = mix(seed, number)
        if isinstance(generator, np.random.Generator):
            bits: Any = generator.bit_generator
            bits.state = type(bits)(own).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own % SEED_LIMIT)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)


ROWS = 12  # rows that are compared, at places that are the same on all ranks

LONGEST_S = 0.02
"""Seconds after which no further row is fetched. Only rows that both ranks have are compared."""

_INDICES = 1 << 17  # most indices of a subset that are looked at, evenly spread

USUAL_CAUSES = (
    "The usual causes: random_split or a shuffle without a generator of a fixed seed, labels "
    "numbered from a set, a folder's listing without sorted(), or a generator seeded by the rank. "
    "Build the same dataset on all ranks"
)


def sample_of(dataset: Any, *, fetches: bool) -> DataSample:
    """Return digests of a dataset, of rows that are fast and the same from call to call.

    If worker processes fetch the rows, this one must not: workers would share files it opens.
    """
    found, inner = {"length": str(len(dataset)).encode()}, dataset
    while isinstance(inner, Subset):
        said = "the indices of its Subset differ"
        found[said] = found.get(said, b"") + _digest_of(inner.indices)
        inner = inner.dataset
    in_memory = isinstance(inner, (TensorDataset, list, tuple, np.ndarray))
    return {**found, **_rows_of(dataset)} if in_memory or fetches else found


def difference(mine: DataSample, theirs: DataSample) -> str:
    """Return what differs between the samples of two ranks; nothing if they may be equal."""
    if mine["length"] != theirs["length"]:
        return ""  # said elsewhere
    differing = (name for name in mine if theirs.get(name, mine[name]) != mine[name])
    return next(differing, "")


def _digest_of(indices: Any) -> bytes:
    try:
        every = len(indices) // _INDICES + 1
        seen = np.asarray(indices[::every], dtype=np.int64)
    except Exception:  # of any class, with indices of any kind
        return b""
    return hashlib.blake2b(seen.tobytes(), digest_size=16).digest()


def _rows_of(dataset: Any) -> DataSample:
    length = len(dataset)
    if not length or generators_in(dataset):
        return {}
    found: DataSample = {}
    begun = time.monotonic()
    with generators_kept():
        for number in dict.fromkeys([0, length - 1, *(mix(n) % length for n in range(ROWS))]):
            try:
                first, again = _fetched(dataset, number), _fetched(dataset, number)
            except Exception:  # the training will find it
                return found
            if first == again:
                found[f"row {number} differs"] = first
            if time.monotonic() > begun + LONGEST_S:
                break
    return found


def _fetched(dataset: Any, row: int) -> bytes:
    seed_generators(mix(row))
    return row_digest(dataset[row])

"""Ranks as threads that run one at a time, and take turns where they exchange something.

Threads share torch's random generators. A rank is interrupted at exchanges only, after which a
loader seeds them again. So ranks do not disturb each other, as if each had a process of its own.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dask.dataframe as dd
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import nbelastic.torch as hvd
from nbelastic.collectives import Rendezvous, SoloCommunicator
from nbelastic.data import Batch, Dask, Loader, Parquet, Shards, Stateful, Step
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks


class TurnsCommunicator(SoloCommunicator):
    """The operations that sources of unknown length use."""

    def __init__(self, rendezvous: Rendezvous, turns: threading.Barrier, values: Any) -> None:
        super().__init__(rendezvous.generation)
        self.rank, self.size = rendezvous.rank, rendezvous.size  # type: ignore[misc]
        self._turns, self._values, self._number = turns, values, 0

    def _exchange(self, value: Any) -> list[Any]:
        found = self._values[self._number]
        found[self.rank], self._number = value, self._number + 1
        _running.release()
        try:
            self._turns.wait()
        finally:
            _running.acquire()
        return [found[rank] for rank in range(self.size)]

    def agree(self, text: str, number: int = 0) -> list[int]:
        found = self._exchange((text, number))
        assert len({each for each, _ in found}) == 1
        return [each for _, each in found]

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        return self._exchange(record)

    def abort(self, reason: str) -> None:
        self._turns.abort()


_running = threading.Lock()


def run_in_turns(size: int, function: Callable[[StaticContext], Any]) -> list[Any]:
    """Run `function(context)` on `size` ranks; return what each returned, or raise the first."""
    turns, values = threading.Barrier(size), defaultdict[int, dict[int, Any]](dict)

    def main(context: StaticContext) -> Any:
        with _running:
            return function(context)

    return run_ranks(size, main, make=lambda its: TurnsCommunicator(its, turns, values))


LENGTHS = [13, 0, 32, 7, 8, 2, 18, 24, 3, 12]
STREAMS = [29, 17, 0, 40, 33, 12]  # rows of each stream
EPOCHS = 2
reads: Counter[str] = Counter()
"""Rows that were read of each kind of data set."""


def drawn() -> float:
    """Return a sum of numbers from all generators."""
    return random.random() + float(np.random.random()) + float(torch.rand(()))


def noisy(unit: int, row: int, opened: float) -> tuple[int, float]:
    """Return a row, and what was drawn for it and for its unit, as augmentation does."""
    return unit * 1000 + row, opened + drawn()


def rows_of(unit: int) -> Iterator[tuple[int, float]]:
    opened = drawn()
    return (noisy(unit, row, opened) for row in range(LENGTHS[unit]))


def collated(rows: list[Any]) -> list[Any]:
    """Return a batch, and what was drawn for it."""
    return [*default_collate(rows), torch.tensor(drawn())]


class Resumable(IterableDataset):
    """A stream that keeps its place, as data sets of torchdata and Hugging Face do."""

    def __init__(self, stream: int, streams: int) -> None:
        assert streams == len(STREAMS)
        self.stream, self.row, self.epoch = stream, 0, 0
        self.opened = drawn()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        while self.row < STREAMS[self.stream]:
            reads["states"] += 1
            row = self.row
            self.row += 1
            yield noisy(self.stream, row, self.opened)

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.row = state_dict["row"]


class StateInIterator:
    """The same, with the state in the iterator."""

    def __init__(self, stream: int, streams: int) -> None:
        self.arguments = stream, streams

    def __iter__(self) -> Any:
        return _Rows(*self.arguments)


class _Rows(Resumable):
    def __init__(self, stream: int, streams: int) -> None:
        super().__init__(stream, streams)
        self.rows = super().__iter__()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> tuple[int, float]:
        return next(self.rows)


class Plain(IterableDataset):
    """The same without states."""

    def __init__(self, stream: int, streams: int) -> None:
        self.stream, self.opened = stream, drawn()

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for row in range(STREAMS[self.stream]):
            reads["plain"] += 1
            yield noisy(self.stream, row, self.opened)


class Noisy(Dataset[Any]):
    """Rows with noise from generators of all kinds: the process's, and the dataset's own."""

    def __init__(self) -> None:
        generator, rng = torch.Generator(), random.Random()
        generator.seed()
        self.own = [np.random.default_rng(), np.random.RandomState()]
        self.transform = functools.partial(
            lambda own: rng.random() + float(torch.rand((), generator=own)), generator
        )

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, float]:
        own = sum(float(each.random()) for each in self.own)
        return row, drawn() + own + self.transform()


def training(
    loader: Loader, width: int = 1, epochs: int = 1, passed_over: int = -1
) -> Iterator[tuple[TorchState, Step]]:
    """Train a small model, and yield the state and the step after each commit."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():  # ranks are threads, which share torch's generators
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    state = TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)
    for state.epoch in range(epochs):
        for step in loader:
            if step.number == passed_over:
                continue
            optimizer.zero_grad()
            for x, *_ in step:
                model(x.view(len(x), -1) / 1000).square().mean().backward()
            optimizer.step()
            state.commit()
            yield state, step


def table() -> pa.Table:
    return pa.table({"id": np.arange(ROWS), "y": np.arange(ROWS) * 0.5})


PARTITIONS: dict[str, Any] = {}
"""The partitions that :func:`fetching` fetches, by their keys."""


def held(source: Dask) -> Dask:
    """Return a source as a job holds it."""
    collections = source.collections or ()
    views = [each.blocks if hasattr(each, "chunks") else each.partitions for each in collections]
    units = [[view[n].compute() for view in views] for n in range(collections[0].npartitions)]
    first = len(PARTITIONS)
    keys = [[f"{first} {n} {place}" for place in range(len(views))] for n in range(len(units))]
    for names, parts in zip(keys, units, strict=True):
        PARTITIONS.update(zip(names, parts, strict=True))
    rows = [[*map(len, parts)] for parts in units]
    source.hold(keys, rows, 24 * sum(counts[0] for counts in rows))
    return source


def fetching() -> Any:
    """Let readers of all threads fetch partitions, as the one rank of a process does."""
    fake = SimpleNamespace(fetch_partition=PARTITIONS.__getitem__)
    return patch("nbelastic.data.sources.partitions.current_or_none", lambda: fake)


@functools.cache
def partitions() -> Dask:
    return held(Dask(dd.from_pandas(table().to_pandas(), 9), ["id", "y"]))


@functools.cache
def parquet() -> Parquet:
    with fsspec.open("memory://rows.parquet", "wb") as file:
        pq.write_table(table(), file, row_group_size=9)
    return Parquet("memory://rows.parquet", ["id", "y"])


ROWS = 117
WEIGHTS = [0.0] * 10 + [1.0] * 50 + [5.0] * 57
TENSORS = TensorDataset(torch.arange(ROWS), torch.arange(ROWS) * 0.5)
SOURCES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "shards": lambda: (Shards(range(len(LENGTHS)), rows_of), {"collate_fn": collated}),
    "states": lambda: (Stateful(Resumable, states_every=3), {"collate_fn": collated}),
    "iterator": lambda: (Stateful(StateInIterator, states_every=2), {"collate_fn": collated}),
    "plain": lambda: (Stateful(Plain, states_every=4), {"collate_fn": collated}),
    "unmarked": lambda: (Stateful(Resumable, states_every=None), {"collate_fn": collated}),
    "noisy": lambda: (Noisy(), {"collate_fn": collated}),
    "workers": lambda: (Noisy(), {"collate_fn": collated, "num_workers": 1, "prefetch_factor": 9}),
    "tensors": lambda: (TENSORS, {}),
    "one by one": lambda: (TENSORS, {"collate_fn": default_collate}),
    "in order": lambda: (TENSORS, {"shuffle": False, "drop_last": True}),
    "steps": lambda: (TENSORS, {"steps": 3}),
    "weights": lambda: (TENSORS, {"weights": WEIGHTS}),
    "parquet": lambda: (parquet(), {}),
    "dask": lambda: (partitions(), {}),
}
STREAMED = ("states", "iterator", "plain", "unmarked")


def loader_of(kind: str, seed: int = 3) -> Loader:
    source, options = SOURCES[kind]()
    if isinstance(source, Parquet):  # windows are those of the state, whatever a newcomer's are
        source = copy.copy(source)
        source.shuffle_rows = 61 + seed
    micro_batches = len(STREAMS) if kind in STREAMED else 4
    batch = Batch(5 * micro_batches, micro=5)
    return Loader(source, batch, seed=seed, balance="speed", **options)


@dataclass
class World:
    """Generations of ranks, each from the last commit of the one before."""

    make: Callable[[int], Loader]  # gets a seed
    # Micro-batches by epoch, step and number: whenever they were read, they were equal. Number -1
    # is what was drawn after the step.
    seen: dict[tuple[int, int, int], Any]
    loaders: list[Loader]
    saved: dict[str, Any]  # the last commit

    @classmethod
    def of(cls, kind: str | Callable[[int], Loader]) -> World:
        make = functools.partial(loader_of, kind) if isinstance(kind, str) else kind
        return cls(make, {}, [], make(3).state_dict())

    def train(
        self,
        size: int,
        *,
        steps: int = 1000,
        commit_every: int = 1,
        slow: bool = False,
    ) -> bool:
        """Train for so many steps; return whether all is done.

        Then a rank fails, and what is not committed is lost. A `slow` last rank gives micro-batches
        away in the first commit.
        """
        kept, self.loaders = self.loaders, []

        def main(context: StaticContext) -> tuple[bool, Any, Loader]:
            rank = context.rank
            # The order of a newcomer is that of the state, whatever its own seed is.
            loader = kept[rank] if rank < len(kept) else self.make(rank)
            saved = self.saved
            loader.load_state_dict(copy.deepcopy(saved))
            number = 0
            while loader.epoch < EPOCHS:
                for step in loader:
                    if loader.epoch == EPOCHS:
                        break
                    begun = drawn() if loader._source.is_open else 0.0
                    for micro_batch, batch in zip(step.numbers, step, strict=True):
                        parts = [batch["id"]] if isinstance(batch, dict) else batch
                        found = (*(part.tolist() for part in parts), begun, drawn())
                        self._note((step.epoch, step.number, micro_batch), found)
                    self._note((step.epoch, step.number, -1), drawn())
                    number += 1
                    if number % commit_every == 0:
                        saved = copy.deepcopy(loader.state_dict())
                        share = loader.balancer.timed
                        assert share is not None
                        share.times = (1.0,) * (size - 1) + (3.0,) if slow else ()
                        loader.balancer.committed()  # as the reduction of gradients says
                    if number == steps:
                        return False, saved, loader
            return True, saved, loader

        results = run_in_turns(size, main)
        states = [saved for _, saved, _ in results]
        assert all(saved == states[0] for saved in states)
        self.saved = states[0]
        self.loaders = [loader for _, _, loader in results]
        return results[0][0]

    def _note(self, key: tuple[int, int, int], found: Any) -> None:
        assert self.seen.setdefault(key, found) == found

"""Ranks that have built different data find out before they train."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from nbelastic.data.sources.map_source import difference, generators_in, sample_of
from nbelastic.errors import StateMismatch
from nbelastic.torch.elastic import ElasticSampler
from nbelastic.torch.state.torch_state import TorchState
from tests.data.worlds import Noisy
from tests.support.world import StaticContext, run_ranks


class Rows(Dataset):
    def __init__(self, function: Callable[[int], Any], length: int = 50) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        return self.function(row)


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(50.0).view(-1, 1), torch.arange(50.0))


def split(rank: int) -> Any:
    return random_split(numbers(), [40, 10], generator=torch.Generator().manual_seed(rank))[0]


def split_in_parts(rank: int) -> Any:
    return Subset(split(rank), range(20))


def labels(rank: int) -> Any:
    words = ["cat", "dog", "owl"][:: -1 if rank else 1]
    return Rows(lambda row: (float(row), words.index("cat")))


def by_rank(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(50, 3))


def trained(dataset_of: Callable[[int], Any], of: str) -> list[Any]:
    def main(context: StaticContext) -> None:
        dataset = dataset_of(context.rank)
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = Loader(dataset, Batch(8, micro=4)) if of == "loader" else ElasticSampler(dataset)
        state = TorchState(model, optimizer, data=data)
        if context.rank == 0:
            sent.append(state._pack())
        context.communicator().barrier()
        if context.rank == 1:
            state._unpack(sent[0])

    sent: list[Any] = []
    return run_ranks(2, main)


@pytest.mark.parametrize(
    ("dataset_of", "of", "what"),
    [
        (split, "sampler", "the indices of its Subset differ"),
        (split_in_parts, "loader", "the indices of its Subset differ"),
        (by_rank, "sampler", "row 0 differs"),
        (labels, "loader", "row 0 differs"),
    ],
)
def test_other_data_are_refused(dataset_of: Any, of: str, what: str) -> None:
    said = f"not the same on ranks 0 and 1: {what}.*random_split.*same dataset on all ranks"
    with pytest.raises(StateMismatch, match=said):
        trained(dataset_of, of)


@pytest.mark.parametrize(
    "dataset_of",
    [
        lambda rank: split(0),
        lambda rank: Noisy(),
        lambda rank: Rows(lambda row: time.perf_counter()),
        lambda rank: Rows(lambda row: object()),
        lambda rank: Rows(lambda row: 1 / 0),
    ],
)
def test_the_same_data_and_augmentation_are_not(dataset_of: Any) -> None:
    trained(dataset_of, "loader")


def test_rows_are_fetched_here_without_worker_processes_and_draw_from_nothing() -> None:
    fetched = []
    rows = Rows(fetched.append)
    sample = Loader(rows, Batch(8, micro=4), num_workers=1).data_sample()
    assert (sample, fetched) == ({"length": b"50"}, [])
    assert difference(sample_of([1], fetches=True), sample_of([2, 3], fetches=True)) == ""
    before = random.getstate(), torch.get_rng_state().tolist()
    sample_of(Rows(lambda row: (random.random(), torch.rand(()))), fetches=True)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_generators_are_found_once_and_rows_are_not_searched() -> None:
    rng = random.Random(0)
    holder = SimpleNamespace(rng=rng, again=[rng, (rng,)], rows=[random.Random(0)] * 500)
    holder.me, holder.more = holder, dict(enumerate(holder.rows))
    assert generators_in(holder) == [rng]
    assert generators_in(random.random) == []


STATES = """
import gc, threading, torch
from nbelastic.elastic.followed import generator_states
gc.set_threshold(20, 2, 2)
def take():
    for _ in range(5_000):
        garbage = [torch.ones(1)]
        garbage.append(garbage)
        generator_states()
threads = [threading.Thread(target=take) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_threads_take_the_states_of_generators_while_tensors_are_collected() -> None:
    subprocess.run([sys.executable, "-c", STATES], check=True, timeout=60)  # a deadlock of torch's

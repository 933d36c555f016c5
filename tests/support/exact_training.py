"""A small training whose bits depend on the data, the steps and the order of every sum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import nbelastic
import nbelastic.torch as hvd
from nbelastic.data import balancer

ROWS, GLOBAL_BATCH, MICRO, EPOCHS = 26, 10, 2, 2
STEPS = EPOCHS * -(-ROWS // GLOBAL_BATCH)

Ledger = dict[tuple[int, int, int], list[int]]
"""Rows by epoch, step and number of the micro-batch."""


class _Rows(Dataset[tuple[int, torch.Tensor, int]]):
    """Rows, which are augmented by random numbers as they are read."""

    def __init__(self, count: int) -> None:
        self._values = torch.randn(count, 6, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, int]:
        values = self._values[row]
        noise = torch.randn(6) + random.random() + np.random.rand()
        return row, values + 0.1 * noise, row % 3


class ExactTraining:
    """Batch norm, AdamW, clipping and a scheduler, in steps of micro-batches.

    The ledger gets the rows of each, which may be computed again, by any rank, but not with other
    rows. A `source` has other rows: their numbers, six values, and a label.
    """

    def __init__(
        self,
        ledger: Ledger,
        rows: int = ROWS,
        batch: int = GLOBAL_BATCH,
        source: Any = None,
        **options: Any,
    ) -> None:
        self._ledger = ledger
        self.model = nn.Sequential(
            nn.Linear(6, 9),
            nn.BatchNorm1d(9),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(9, 3),
        )
        dice = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=dice)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.02), self.model.named_parameters()
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        size = hvd.elastic.Batch(batch, micro=MICRO, exact=True)
        self.loader = hvd.elastic.Loader(source or _Rows(rows), size, seed=3, **options)
        self.state = hvd.elastic.TorchState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            epoch=0,
            steps=0,
        )

    def backward(self, step: Any) -> None:
        """Compute the gradients of this rank's micro-batches."""
        self.optimizer.zero_grad()
        for number, (rows, x, y) in zip(step.numbers, step, strict=True):
            nn.functional.cross_entropy(self.model(x), y).backward()
            place = (step.epoch, step.number, number)
            known = self._ledger.setdefault(place, rows.tolist())
            assert known == rows.tolist(), f"{place}: {rows.tolist()}, before {known}"

    def update(self) -> None:
        """Step with the mean over all ranks."""
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.scheduler.step()
        self.state.steps += 1

    def digest(self) -> str:
        """Return a digest of parameters, statistics, moments and the rate."""
        tensors = [*self.model.state_dict().values()]
        tensors += [each for kept in self.optimizer.state.values() for each in kept.values()]
        return f"{digest(tensors)} {self.optimizer.param_groups[0]['lr']}"


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of all bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: several take a hundred times as long for so few numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train_alone(epochs: int = EPOCHS, **options: Any) -> tuple[str, Ledger]:
    """Train on one rank, without a job or a fault; return the digest, and all rows."""
    ledger: Ledger = {}
    nbelastic.init()
    try:
        training = ExactTraining(ledger, **options)
        for training.state.epoch in range(epochs):
            for step in training.loader:
                training.backward(step)
                training.update()
        assert training.state.steps == epochs * len(training.loader)
        assert training.loader.why_not_exact == ""
        return training.digest(), ledger
    finally:
        nbelastic.shutdown()


SIZES = {"rows": 108, "batch": 16}
LONG = 4  # epochs


@dataclass(frozen=True)
class SameResult:
    """A longer training for a job; ranks keep the rows of micro-batches in files."""

    marks: Path
    seconds: float = 0.0  # of a step
    slow: int | None = None  # a rank that takes three times as long by the loader's clock
    hold: int | None = None  # a step after which ranks wait for the file "go"
    processes: int = 0  # of each rank's loader

    @one_thread()
    def __call__(self, source: Any = None) -> tuple[str, str, list[int]]:
        ledger: Ledger = {}
        quotas, ticks = set(), 0.0
        options = {"balance": "even" if self.slow is None else "speed"}
        options |= {"source": source} if source else {"num_workers": self.processes}
        training = ExactTraining(ledger, **SIZES, **options)

        def tick() -> float:
            nonlocal ticks
            ticks += 3.0 if hvd.rank() == self.slow else 1.0
            return ticks

        @hvd.elastic.run
        def train(state: Any) -> None:
            for state.epoch in range(state.epoch, LONG):
                for step in training.loader:
                    quotas.add(len(training.loader.block))
                    ledger.clear()
                    training.backward(step)
                    with (self.marks / f"ledger-{os.getpid()}").open("a") as file:
                        print(json.dumps([*ledger.items()]), file=file)
                    training.update()
                    while state.steps == self.hold and not (self.marks / "go").exists():
                        time.sleep(0.01)
                    state.commit()
                    time.sleep(self.seconds)

        with mock.patch.object(balancer, "clock", tick):
            train(training.state)
        return training.digest(), training.loader.why_not_exact, sorted(quotas)

    def check(self, results: list[Any], expected: tuple[str, Ledger]) -> None:
        """Check digests, and that whoever has computed a micro-batch had the same rows."""
        assert {result[:2] for result in results} == {(expected[0], "")}
        assert self.ledger() == expected[1]

    def ledger(self) -> Ledger:
        """Return the rows of micro-batches; each epoch has each row once."""
        ledger: Ledger = {}
        for path in self.marks.glob("ledger-*"):
            for line in path.read_text().splitlines():
                for place, rows in json.loads(line):
                    assert ledger.setdefault(tuple(place), rows) == rows
        for epoch in range(LONG):
            rows = [row for place, each in ledger.items() if place[0] == epoch for row in each]
            assert sorted(rows) == list(range(SIZES["rows"]))
        return ledger

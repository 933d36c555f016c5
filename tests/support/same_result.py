"""A training in which all that could depend on the number of ranks does its worst."""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 108


@dataclass(frozen=True)
class SameResult:
    """Convolutions, batch norm, dropout, augmentation, AdamW, clipping and a scheduler."""

    marks: Path  # a directory that all workers see; ranks keep their ledgers there
    epochs: int = 4
    seconds: float = 0.0  # least length of a step
    commit_every: int = 1
    slow: int | None = None  # a rank that takes three times as long by the loader's clock
    hold: int | None = None  # a step after which ranks wait for the file "go" among the marks
    loader_processes: int = 0  # of each rank

    def __call__(self) -> dict[str, Any]:
        """Train, on every rank; return digests and what ranks have seen."""
        from unittest import mock

        import torch
        from torch import nn

        import nbelastic.torch as hvd
        from nbelastic.data import balancer
        from nbelastic.elastic.ranks.context import current

        hvd.init()
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(6 * 36, 20),
            nn.BatchNorm1d(20),
            nn.Dropout(0.5),
            nn.Linear(20, 4),
        )
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters()
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        batch = hvd.elastic.Batch(16, micro=2, exact=True)
        balance = "even" if self.slow is None else "speed"
        loader = hvd.elastic.Loader(
            _images(), batch, seed=3, balance=balance, num_workers=self.loader_processes
        )
        state = hvd.elastic.TorchState(
            model, optimizer, scheduler=scheduler, loader=loader, epoch=0, steps=0
        )
        quotas: set[int] = set()
        ticks = 0.0

        def tick() -> float:
            nonlocal ticks
            ticks += 3.0 if hvd.rank() == self.slow else 1.0
            return ticks

        @hvd.elastic.run
        def train(state: Any) -> None:
            for state.epoch in range(state.epoch, self.epochs):
                for step in loader:
                    began = time.monotonic()
                    optimizer.zero_grad()
                    quotas.add(len(loader.block))
                    seen = {}
                    for number, (rows, x, y) in zip(step.numbers, step, strict=True):
                        nn.functional.cross_entropy(model(x), y).backward()
                        seen[number] = rows.tolist()
                    self._write_down(current().rank, step, seen)  # before any rank can go on
                    optimizer.synchronize()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                    scheduler.step()
                    state.steps += 1
                    while state.steps == self.hold and not (self.marks / "go").exists():
                        time.sleep(0.01)
                    if state.steps % self.commit_every == 0:
                        state.commit()
                    time.sleep(max(0.0, self.seconds - (time.monotonic() - began)))

        with mock.patch.object(balancer, "clock", tick):
            train(state)
        tensors = [*model.state_dict().values()]
        tensors += [each for kept in optimizer.state.values() for each in kept.values()]
        return {
            "digest": digest(tensors),
            "steps": state.steps,
            "rate": optimizer.param_groups[0]["lr"],
            "quotas": sorted(quotas),
            "exact": loader.why_not_exact,
        }

    def _write_down(self, rank: int, step: Any, seen: dict[int, list[int]]) -> None:
        with (self.marks / f"ledger-{rank}-{os.getpid()}").open("a") as file:
            for number, rows in seen.items():
                file.write(json.dumps([step.epoch, step.number, number, rows]) + "\n")


def _images() -> Any:
    import torch

    class Images(torch.utils.data.Dataset):
        """Images that are augmented by random numbers, as they are read."""

        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(2)
            self.images = torch.randn(ROWS, 1, 6, 6, generator=generator)

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, row: int) -> tuple[int, torch.Tensor, int]:
            noise = torch.randn(1, 6, 6) + random.random() + np.random.rand()
            return row, self.images[row] + 0.1 * noise, row % 4

    return Images()


def digest(tensors: Any) -> str:
    """Return a digest of all bits of some tensors."""
    import hashlib

    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def ledger_of(marks: Path) -> dict[tuple[int, int, int], list[int]]:
    """Return the rows of each micro-batch by epoch, step and number; assert that none differ."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for path in sorted(marks.glob("ledger-*")):
        for line in path.read_text().splitlines():
            if not line.endswith("]]"):
                continue  # its writer was killed
            *key, rows = json.loads(line)
            assert found.setdefault((key[0], key[1], key[2]), rows) == rows
    return found


def check_ledger(marks: Path, epochs: int) -> None:
    """Assert that each epoch has had each row once, step by step."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for (epoch, _, _), rows in sorted(ledger_of(marks).items()):
        rows_of[epoch] += rows
    assert sorted(rows_of) == list(range(epochs))
    for rows in rows_of.values():
        assert sorted(rows) == list(range(ROWS))

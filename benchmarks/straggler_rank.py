"""A rank of benchmarks/straggler.py: a model whose forward pass is mostly a sleep."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.meet import Place, meet, meet_over_gloo
from benchmarks.training_models import CLASSES, parameters_of, perceptron
from benchmarks.training_rank import Member
from nbelastic.data import Batch, Loader, Step
from nbelastic.elastic.ranks.context import activate
from nbelastic.torch import DistributedOptimizer
from nbelastic.torch.elastic import TorchState

MICRO_BATCHES = 16
MICRO = 4
WIDTHS = (64, 128, 128)


class Sleepy(nn.Module):
    """A perceptron on an accelerator that is simulated."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__()
        self.perceptron = perceptron(*WIDTHS)
        self._seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds())
        found: torch.Tensor = self.perceptron(inputs)
        return found


class Candidate:
    """A model, trained by one candidate with a commit after each step."""

    def __init__(self, balance: Any, context: Member, seconds: Callable[[], float]) -> None:
        self._context = context
        torch.manual_seed(0)
        self.model = Sleepy(seconds)
        self.forward: nn.Module = self.model
        dice = torch.Generator().manual_seed(1)
        rows = 64 * MICRO_BATCHES * MICRO
        data = TensorDataset(
            torch.randn(rows, WIDTHS[0], generator=dice),
            torch.randint(CLASSES, (rows,), generator=dice),
        )
        with activate(context):
            batch = Batch(MICRO_BATCHES * MICRO, micro=MICRO)
            self.loader = Loader(data, batch, balance=balance)
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.model.parameters(), lr=0.01, momentum=0.9
            )
            self.prepare()
        self._steps = self._endless()

    def prepare(self) -> None:
        names = self.model.named_parameters()
        self.optimizer = DistributedOptimizer(self.optimizer, names)
        self._state = TorchState(self.model, self.optimizer, loader=self.loader)

    def _endless(self) -> Iterator[Step]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> None:
        with activate(self._context):
            for _ in range(steps):
                step = next(self._steps)
                self.optimizer.zero_grad()
                self.backward(step)
                self.optimizer.step()
                self.commit()

    def backward(self, step: Step) -> None:
        for inputs, labels in step:
            functional.cross_entropy(self.forward(inputs), labels).backward()

    def commit(self) -> None:
        self._state.commit()


class Ddp(Candidate):
    """Torch's DDP, which accumulates the gradients of its micro-batches."""

    def prepare(self) -> None:
        self.forward = DistributedDataParallel(self.model)

    def backward(self, step: Step) -> None:
        share = self._context.size / MICRO_BATCHES
        for number, (inputs, labels) in enumerate(step, 1):
            last = number == len(step)
            silent: Any = contextlib.nullcontext() if last else self.forward.no_sync()  # type: ignore[operator]
            with silent:
                (functional.cross_entropy(self.forward(inputs), labels) * share).backward()

    def commit(self) -> None:
        """Do nothing; DDP has no commits."""


class Trainer:
    """One rank of all candidates."""

    def __init__(self, rank: int, size: int, forward_s: float, place: Place) -> None:
        self._rank = rank
        self._forward_s = forward_s
        self._times = 1.0
        self._dist = meet_over_gloo(rank, size, place)
        self._communicator = meet(rank, size, "gloo", place)
        kinds: dict[str, tuple[type[Candidate], str]] = {
            "speed": (Candidate, "speed"),
            "even": (Candidate, "even"),
            "ddp": (Ddp, "even"),
        }
        self._candidates = {
            name: kind(balance, Member(self._communicator), lambda: self._forward_s * self._times)
            for name, (kind, balance) in kinds.items()
        }

    def names(self) -> list[str]:
        return [*self._candidates]

    def slow_down(self, rank: int, times: float) -> None:
        """Make a rank slower than the others, or as fast as they are."""
        self._times = times if self._rank == rank else 1.0

    def train(self, name: str, steps: int) -> None:
        self._candidates[name].train(steps)

    def quota(self, name: str) -> int:
        """Return how many micro-batches this rank computes."""
        with activate(self._candidates[name]._context):
            return len(self._candidates[name].loader.block)

    def digest(self, name: str) -> str:
        """Return a hash of the parameters."""
        parameters: Any = parameters_of(self._candidates[name].model).numpy()
        return hashlib.sha256(parameters.tobytes()).hexdigest()[:12]

    def close(self) -> None:
        self._candidates.clear()
        gc.collect()
        self._communicator.close()
        self._dist.destroy_process_group()

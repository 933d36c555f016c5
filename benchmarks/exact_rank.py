"""A rank of benchmarks/exact.py: one model, trained in steps of micro-batches by each candidate."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.meet import Place, meet, meet_over_gloo
from benchmarks.training_models import CLASSES, parameters_of, perceptron
from benchmarks.training_rank import Member
from nbelastic.cluster.worker.rank.main import keep_freed_memory
from nbelastic.data import Batch, Loader, Step
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from nbelastic.torch import DistributedOptimizer
from nbelastic.torch.elastic import TorchState

MICRO_BATCHES = 8
MICRO = 32
WIDTHS = {"mlp-1m": (256, 800, 800), "mlp-25m": (1024, 3400, 3400, 2800)}


class Candidate:
    """A model, trained by one candidate."""

    def __init__(self, name: str, context: Member) -> None:
        self._context = context
        torch.manual_seed(0)
        widths = WIDTHS[name]
        self.model = perceptron(*widths)
        dice = torch.Generator().manual_seed(1)
        rows = 4 * MICRO_BATCHES * MICRO
        data = TensorDataset(
            torch.randn(rows, widths[0], generator=dice),
            torch.randint(CLASSES, (rows,), generator=dice),
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9
        )
        with activate(context):
            self.prepare(data)
        self._steps = self._endless()

    def prepare(self, data: TensorDataset) -> None:
        raise NotImplementedError

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

    def backward(self, step: Step) -> None:
        for inputs, labels in step:
            functional.cross_entropy(self.model(inputs), labels).backward()

    loader: Loader


class Ours(Candidate):
    """Steps of micro-batches, added along the tree or in the order of ranks."""

    exact = True
    micro = MICRO

    def prepare(self, data: TensorDataset) -> None:
        batch = Batch(MICRO_BATCHES * MICRO, micro=self.micro, exact=self.exact)
        self.loader = Loader(data, batch)
        self.optimizer = DistributedOptimizer(self.optimizer, self.model.named_parameters())


class InJob(Ours):
    """The same, with a state that survives failures."""

    def prepare(self, data: TensorDataset) -> None:
        super().prepare(data)
        self.state = TorchState(self.model, self.optimizer, loader=self.loader)

    def train_in(self, context: Member, steps: int, *, fails: bool = False) -> None:
        """Train in a generation. With `fails`, the rank ends it before its next update."""
        with activate(context):
            left = self._endless()  # after the last commit
            for _ in range(steps):
                self.optimizer.zero_grad()
                self.backward(next(left))
                self.optimizer.step()
                self.state.commit()
            if fails:
                self.optimizer.zero_grad()
                self.backward(next(left))
                context.communicator().abort("this rank fails")


class Plain(Ours):
    """The same, added in the order of ranks."""

    exact = False


class OnePass(Plain):
    """All rows of a rank in one pass: what micro-batches cost."""

    def prepare(self, data: TensorDataset) -> None:
        self.micro = MICRO_BATCHES * MICRO // self._context.size
        super().prepare(data)


class Ddp(Candidate):
    """Torch's DDP, which accumulates the gradients of its micro-batches."""

    def prepare(self, data: TensorDataset) -> None:
        self.loader = Loader(data, Batch(MICRO_BATCHES * MICRO, micro=MICRO, exact=False))
        self.forward = DistributedDataParallel(self.model)

    def backward(self, step: Step) -> None:
        share = self._context.size / MICRO_BATCHES
        for number, (inputs, labels) in enumerate(step, 1):
            last = number == len(step)
            with contextlib.nullcontext() if last else self.forward.no_sync():
                (functional.cross_entropy(self.forward(inputs), labels) * share).backward()


def digest_of(model: torch.nn.Module) -> str:
    """Return a hash of a model's parameters."""
    parameters: Any = parameters_of(model).numpy()
    return hashlib.sha256(parameters.tobytes()).hexdigest()[:12]


class Trainer:
    """One rank of all candidates."""

    def __init__(self, rank: int, size: int, backends: Sequence[str], place: Place) -> None:
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")
        keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        self._rank, self._size, self._place = rank, size, place
        self._dist = meet_over_gloo(rank, size, place)
        self._communicators = {each: meet(rank, size, each, place) for each in backends}
        self._candidates: dict[str, Candidate] = {}
        self._generations = 1

    def prepare(self, name: str, backend: str) -> int:
        """Build a model for all candidates over a backend; return its number of parameters."""
        self._candidates.clear()
        gc.collect()
        communicator = self._communicators[backend]
        kinds: dict[str, type[Candidate]] = {"exact": Ours, "plain": Plain, "ddp": Ddp}
        if MICRO_BATCHES % communicator.size == 0:
            kinds["one pass"] = OnePass
        for kind, candidate in kinds.items():
            self._candidates[f"{kind}, {backend}"] = candidate(name, Member(communicator))
        return parameters_of(self._candidates[f"exact, {backend}"].model).numel()

    def digest_after_faults(self, name: str, backend: str, steps: int) -> str:
        """Train while a rank fails and another joins; return a hash of the parameters.

        After a third of the steps, the last rank fails between its gradients and its update. The
        others go back to their commit and train on. After another third a rank without state joins.
        """
        self._candidates.clear()
        part, last = steps // 3, self._size - 1
        fails = self._rank == last
        with self._generation(self._size, backend) as context:
            trained = InJob(name, context)
            if fails:
                trained.train_in(context, part, fails=True)
            else:
                with contextlib.suppress(CollectiveError):
                    trained.train_in(context, part + 1)
                trained.state.restore()
        if fails:
            self._generations += 1
        else:
            with self._generation(last, backend) as context:
                trained.train_in(context, part)
        with self._generation(self._size, backend) as context:
            if fails:
                trained = InJob(name, context)
            with activate(context):
                trained.state.align([last])
                trained.state.save()
            trained.train_in(context, steps - 2 * part)
        return digest_of(trained.model)

    @contextlib.contextmanager
    def _generation(self, size: int, backend: str) -> Iterator[Member]:
        self._generations += 1
        communicator = meet(self._rank, size, backend, self._place, self._generations)
        try:
            context = Member(communicator)
            context.generation = self._generations
            yield context
        finally:
            communicator.close()

    def names(self) -> list[str]:
        return [*self._candidates]

    def train(self, name: str, steps: int) -> None:
        self._candidates[name].train(steps)

    def digest(self, name: str) -> str:
        """Return a hash of the parameters."""
        return digest_of(self._candidates[name].model)

    def close(self) -> None:
        self._candidates.clear()
        gc.collect()
        for communicator in self._communicators.values():
            communicator.close()
        self._dist.destroy_process_group()

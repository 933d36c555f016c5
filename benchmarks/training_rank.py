"""A rank of benchmarks/training_step.py: one model, trained by several candidates in turns."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.meet import Place, meet, meet_over_gloo, meet_over_nccl
from benchmarks.training_models import TASKS, parameters_of
from nbelastic.cluster.worker.rank.main import keep_freed_memory
from nbelastic.elastic.ranks.context import Context, activate
from nbelastic.torch import DistributedOptimizer
from nbelastic.torch.process_group import ElasticProcessGroup

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator

ALONE, DDP, BARRIER = "alone", "ddp", "barrier"
OVER = "ddp-"
"""Begins the name of a candidate that is DDP over a communicator of ours: ddp-gloo, ddp-shm."""
BATCHES = 8


class Member(Context):
    """A rank in a world that never changes, outside a job."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.rank = self.local_rank = communicator.rank
        self.size = self.local_size = communicator.size
        self._communicator: Any = communicator


class Way:
    """A model, trained by one candidate."""

    def __init__(self, name: str, way: str, context: Context | None, device: str) -> None:
        task = TASKS[name]
        torch.manual_seed(0)
        self.model = task.model().to(device)
        self.forward: Any = self.model
        self.optimizer = task.optimizer(self.model.parameters())
        self._context = context
        self.meet: Callable[[], object] = lambda: None
        if way == DDP:
            # Each rank keeps its own buffers of norm layers, as with the other candidates.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # its name has changed in torch 2.13
                self.forward = DistributedDataParallel(self.model, broadcast_buffers=False)
        elif context is not None and way.startswith(OVER):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.forward = DistributedDataParallel(
                    self.model, process_group=ElasticProcessGroup(context), broadcast_buffers=False
                )
        elif context is not None:
            with activate(context):
                names = self.model.named_parameters()
                self.optimizer = DistributedOptimizer(self.optimizer, names)
        self._done = 0

    def train(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], steps: int) -> None:
        context = self._context
        with contextlib.nullcontext() if context is None else activate(context):
            for step in range(self._done, self._done + steps):
                inputs, labels = batches[step % len(batches)]
                self.optimizer.zero_grad()
                functional.cross_entropy(self.forward(inputs), labels).backward()
                self.optimizer.step()
                self.meet()
        self._done += steps


class Trainer:
    """One rank of all candidates."""

    def __init__(
        self, rank: int, size: int, backends: Sequence[str], place: Place, device: str = "cpu"
    ) -> None:
        self._rank = rank
        self._device = device
        # All candidates use memory as a rank of a job does, in a process that Dask's nanny started.
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")
        keep_freed_memory()
        # So that the candidates differ in nothing else.
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
        if device == "cuda":
            torch.zeros(1, device=device)  # ranks that have not used a GPU do not reduce there
            self._dist = meet_over_nccl(rank, size, place)
        else:
            self._dist = meet_over_gloo(rank, size, place)
        self._communicators = {
            each: meet(rank, size, each.removeprefix(OVER), place, 1 + each.startswith(OVER))
            for each in backends
        }
        self._ways: dict[str, Way] = {}
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._start = torch.empty(0)

    def prepare(self, name: str) -> int:
        """Build a model for all candidates; return its number of parameters."""
        self._ways.clear()
        gc.collect()
        dice = torch.Generator().manual_seed(self._rank)
        batches = [TASKS[name].batch(dice) for _ in range(BATCHES)]
        device = self._device
        self._batches = [(inputs.to(device), labels.to(device)) for inputs, labels in batches]
        for way in (ALONE, DDP, BARRIER):
            self._ways[way] = Way(name, way, None, device)
        self._ways[BARRIER].meet = next(reversed(self._communicators.values())).barrier
        for backend, communicator in self._communicators.items():
            self._ways[backend] = Way(name, backend, Member(communicator), device)
        self._start = parameters_of(self._ways[DDP].model)
        return self._start.numel()

    def train(self, way: str, steps: int) -> None:
        self._ways[way].train(self._batches, steps)
        if self._device == "cuda":
            torch.cuda.synchronize()

    def digest(self, way: str) -> str:
        """Return a hash of the parameters."""
        parameters = parameters_of(self._ways[way].model).cpu().numpy()
        return hashlib.sha256(parameters.tobytes()).hexdigest()

    def apart(self, way: str) -> float:
        """Return the distance of its parameters from DDP's, relative to how far both have moved."""
        reached = parameters_of(self._ways[DDP].model)
        distance = (parameters_of(self._ways[way].model) - reached).norm()
        return float(distance / (reached - self._start).norm())

    def close(self) -> None:
        self._ways.clear()
        gc.collect()
        for communicator in self._communicators.values():
            communicator.close()
        self._dist.destroy_process_group()

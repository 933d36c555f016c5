"""Strategies of Lightning's Trainer and of Fabric over the ranks of a job."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.ranks.context import current, current_or_none, initialize
from nbelastic.lightning.progress import BatchRecorder, callbacks_of
from nbelastic.torch.device import device
from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.ops.broadcast import broadcast_parameters
from nbelastic.torch.process_group import NAME, default_group
from nbelastic.trainers import by_itself

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Environment(ClusterEnvironment):
    """The ranks of the job at the time of each question."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the job has started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """No address: the ranks find each other by the job."""
        return "nbelastic"

    @property
    def main_port(self) -> int:
        """No port."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank."""
        return current_or_none() is not None

    def world_size(self) -> int:
        """Return the number of ranks."""
        group = default_group()
        return current().size if group is None else group.size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job decides."""

    def global_rank(self) -> int:
        """Return the position of this rank; during set-up, the foreseen position."""
        return current().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job decides."""

    def local_rank(self) -> int:
        """Return the position of this rank on its host."""
        return current().local_rank

    def node_rank(self) -> int:
        """Return the position of this rank's host."""
        return current().cross_rank


class _Elastic:
    """What both kinds of strategy have in common; the first base of each."""

    parallel_devices: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        initialize()
        kwargs["cluster_environment"] = Environment()
        kwargs["process_group_backend"] = NAME
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices = self.parallel_devices
        if devices and devices[0].type == "cpu":
            first: torch.device = devices[0]
            return first
        return device()

    @property
    def num_processes(self) -> int:
        """Number of ranks; all hosts count as a single node."""
        return Environment().world_size()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a sampler of this rank's share."""
        size = Environment().world_size()  # in the set-up 1
        return {"num_replicas": size, "rank": current().rank if size > 1 else 0}

    def _configure_launcher(self) -> None:
        """Launch nothing: the job has started the ranks."""

    def follow(self) -> None:
        """Tell Lightning's helpers which rank this is now."""
        rank = Environment().global_rank()
        rank_zero_only.rank = fabric_rank_zero_only.rank = rank

    set_world_ranks = _set_world_ranks = follow


class ElasticStrategy(_Elastic, trainer_strategies.DDPStrategy):
    """Strategy of ``lightning.Trainer``: DistributedDataParallel over ranks that change.

    Parameters are those of Lightning's ``DDPStrategy``.
    """

    strategy_name = NAME

    def setup_environment(self) -> None:
        """Make the process group, of this rank alone until training begins."""
        super().setup_environment()
        self._alone = contextlib.ExitStack()
        if current().generation == 0:
            self._alone.enter_context(by_itself())
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.callbacks = callbacks_of(trainer)
        self.recorder = BatchRecorder()
        trainer.callbacks.insert(0, self.recorder)

    def begin(self) -> None:
        """End the set-up; until then a rank waits for no other rank."""
        self._alone.close()

    def leave(self) -> None:
        """Wait for no other rank any more: callbacks save files after an error."""
        self._alone.enter_context(by_itself())

    def synchronize(self) -> None:
        """Give all ranks the module of rank 0, which they are about to evaluate."""
        module = self.lightning_module
        assert module is not None
        broadcast_parameters([*module.named_parameters(), *module.named_buffers()])

    def setup(self, trainer: Any) -> None:
        """Set up the module, and have the training loop be an elastic loop."""
        super().setup(trainer)
        from nbelastic.lightning.fit import make_elastic

        make_elastic(trainer, self)

    def teardown(self) -> None:
        """End the set-up, if it has failed, and give devices back."""
        self.begin()
        callbacks = self.lightning_module.trainer.callbacks if self.lightning_module else []
        callbacks[:] = [each for each in callbacks if not isinstance(each, BatchRecorder)]
        super().teardown()


class ElasticFabricStrategy(_Elastic, fabric_strategies.DDPStrategy):
    """Strategy of ``lightning.Fabric``; the loop is the user's own elastic loop."""


def _around_fabric_loader(original: Callable[..., Any], loader: Any) -> Any:
    """Begin an iteration of a loader of Fabric's, which names its epochs by their count."""
    context, sampler = current_or_none(), getattr(loader.batch_sampler, "sampler", None)
    if context is not None and isinstance(sampler, DistributedSampler):
        epoch = context.samplers.epoch_of(sampler)
        loader._num_iter_calls = loader._num_iter_calls if epoch is None else epoch
    return original(loader)


def register() -> None:
    """Register both strategies by the name "nbelastic"; idempotent."""
    wrap(_FabricDataLoader, "__iter__", _around_fabric_loader)
    for registry, kind in (
        (trainer_strategies.StrategyRegistry, ElasticStrategy),
        (fabric_strategies.STRATEGY_REGISTRY, ElasticFabricStrategy),
    ):
        if NAME not in registry:
            registry.register(NAME, kind, description="the ranks of an nbelastic job")

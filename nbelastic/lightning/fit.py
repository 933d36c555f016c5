"""Strategy of Lightning's Trainer over the ranks of a job."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from nbelastic.elastic.ranks.context import current, initialize
from nbelastic.errors import OptionError
from nbelastic.lightning.loop import ElasticFit
from nbelastic.torch.environment import device
from nbelastic.torch.process_group import NAME, default_group
from nbelastic.trainers.callbacks import by_itself


def fit(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Train a module on ranks that join, leave and fail: ``trainer.fit(module, …)``.

    The trainer has ``strategy="nbelastic"``; with another one there is an OptionError. Further
    arguments are those of ``trainer.fit``: loaders, ``datamodule``, ``ckpt_path``.
    """
    if not isinstance(trainer.strategy, ElasticStrategy):
        raise OptionError(
            "nbelastic.lightning.fit(trainer, …): the trainer has "
            f'{type(trainer.strategy).__name__}; make it as Trainer(strategy="nbelastic", …)'
        )
    trainer.fit(module, *args, **kwargs)


class Environment(TorchElasticEnvironment):
    """The ranks of the job at the time of each question."""

    def world_size(self) -> int:
        group = default_group()
        return current().size if group is None else group.size()

    def global_rank(self) -> int:
        """Return the position of this rank; during set-up, the foreseen position."""
        return current().rank

    def local_rank(self) -> int:
        return current().local_rank

    def node_rank(self) -> int:
        return current().cross_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept all: the job decides."""


class ElasticStrategy(DDPStrategy):
    """Strategy of ``lightning.Trainer``: DistributedDataParallel over ranks that change.

    Parameters are those of Lightning's ``DDPStrategy``.
    """

    strategy_name = NAME

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        initialize()
        kwargs["cluster_environment"] = Environment()
        kwargs["process_group_backend"] = NAME
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices = self.parallel_devices
        return devices[0] if devices and devices[0].type == "cpu" else device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a sampler of this rank's share."""
        size = Environment().world_size()  # in the set-up 1
        return {"num_replicas": size, "rank": current().rank if size > 1 else 0}

    def _configure_launcher(self) -> None:
        """Launch nothing: the job has started the ranks."""

    def set_world_ranks(self) -> None:
        """Tell Lightning's helpers which rank this is now."""
        rank = Environment().global_rank()
        rank_zero_only.rank = fabric_rank_zero_only.rank = rank

    def setup_environment(self) -> None:
        super().setup_environment()
        self._alone = contextlib.ExitStack()
        if current().generation == 0:
            self._alone.enter_context(by_itself())
        assert self.lightning_module is not None
        self.training = ElasticFit(self.lightning_module.trainer)

    def begin(self) -> None:
        """End the set-up; until then a rank waits for no other rank."""
        self._alone.close()

    def leave(self) -> None:
        """Wait for no other rank any more: callbacks save files after an error."""
        self._alone.enter_context(by_itself())

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.training.replace_stage()

    def teardown(self) -> None:
        self.begin()
        callbacks = self.lightning_module.trainer.callbacks if self.lightning_module else []
        callbacks[:] = [each for each in callbacks if not isinstance(each, ElasticFit)]
        super().teardown()


StrategyRegistry.register(NAME, ElasticStrategy, "the ranks of an nbelastic job", override=True)

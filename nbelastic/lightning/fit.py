"""Strategies of Lightning over the ranks of a job, and its elastic loop.

The epochs are those of Lightning's own loops, called one by one. A commit follows each step of the
optimizer, with its validation, logs and checkpoints. The last step of an epoch is committed with
the epoch's end. In a new generation the loaders are made anew, and the epoch under way goes on with
the samples that are left.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.ranks.context import current, current_or_none, initialize
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import OptionError
from nbelastic.lightning.progress import BatchRecorder, LightningProgress, callbacks_of, settle
from nbelastic.torch.device import device
from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.elastic import TorchState, run
from nbelastic.torch.functions import broadcast_parameters
from nbelastic.torch.process_group import NAME, default_group
from nbelastic.trainers.callbacks import averages_of, by_itself
from nbelastic.trainers.sampler import DealtSampler, dealt, not_dealt, obstacle_to, source_of


def fit(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Train a module on ranks that join, leave and fail: ``trainer.fit(module, …)``.

    Parameters
    ----------
    trainer : lightning.Trainer
        With ``strategy="nbelastic"``.
    module : lightning.LightningModule
        What to train.
    *args, **kwargs
        As of ``trainer.fit``: loaders, ``datamodule``, ``ckpt_path``.

    Raises
    ------
    OptionError
        The trainer has another strategy.

    Examples
    --------
    >>> trainer = L.Trainer(strategy="nbelastic", max_epochs=3)  # doctest: +SKIP
    >>> nbelastic.lightning.fit(trainer, module, datamodule=data)  # doctest: +SKIP
    """
    if not isinstance(trainer.strategy, ElasticStrategy):
        raise OptionError(
            "nbelastic.lightning.fit(trainer, …): the trainer has "
            f'{type(trainer.strategy).__name__}; make it as Trainer(strategy="nbelastic", …)'
        )
    trainer.fit(module, *args, **kwargs)


class Environment(TorchElasticEnvironment):
    """The ranks of the job at the time of each question."""

    @staticmethod
    def detect() -> bool:
        return current_or_none() is not None

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


class _Elastic:
    """What both kinds of strategy have in common; the first base of each."""

    parallel_devices: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        initialize()
        os.environ.setdefault("MASTER_ADDR", "nbelastic.invalid")  # asked for, and used by none
        os.environ.setdefault("MASTER_PORT", "29500")
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
        """Train with the trainer, which is set up now, in an elastic loop."""
        super().setup(trainer)
        plain: Callable[[], Any] = type(trainer)._run_stage.__get__(trainer)

        def run_stage() -> Any:
            vars(trainer).pop("_run_stage", None)
            fits = trainer.state.fn == TrainerFn.FITTING
            if fits and isinstance(current_or_none(), Session):
                return ElasticFit(trainer, self).run()
            self.begin()
            if not fits:
                self.synchronize()
            return plain()

        trainer._run_stage = run_stage

    def teardown(self) -> None:
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


class ElasticFit:
    """Training of a Trainer, from the first generation to the last."""

    def __init__(self, trainer: Any, strategy: ElasticStrategy) -> None:
        self.trainer = trainer
        self.strategy = strategy
        self.loop = trainer.fit_loop
        self.progress = LightningProgress(trainer, strategy.callbacks)
        self.progress.callbacks.main = trainer.is_global_zero  # as those they were set up
        self._started = False  # callbacks know here that training has begun
        self.samplers: list[DealtSampler | None] = []
        self._batches = 0  # begun in the present share
        module = trainer.lightning_module
        module.zero_grad()
        vars(module).setdefault("forward", module.forward)  # as Lightning does in its first step
        self.loop.setup_data()
        if self.loop._combined_loader is not None:
            self.samplers = [_dealt(each) for each in self.loop._combined_loader.flattened]
        self._resumes = self.loop._loaded_from_state_dict
        if self._resumes:
            self._resume()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.state = TorchState(
            strategy.model,
            list(strategy.optimizers),
            scheduler=schedulers,
            sampler=self.samplers,
            progress=self.progress,
            averages=averages_of(trainer.callbacks),
            epoch=trainer.current_epoch,
            batch=0,
        )

    def _resume(self) -> None:
        """Go on where a checkpoint of the trainer's has ended, perhaps within an epoch."""
        loop, batches = self.loop, self.loop.epoch_loop
        loop.reset()
        epoch = loop.epoch_progress.current
        self.progress.in_epoch = loop.restarted_mid_epoch and epoch.processed < epoch.ready
        if self.progress.in_epoch:
            with warnings.catch_warnings():  # of what has no progress of its own
                warnings.simplefilter("ignore")
                batches.reset()
            done = batches.batch_progress.current.ready * current().size
            found = [*self.strategy.recorder.found, *[None] * len(self.samplers)]
            for sampler, known in zip(self.samplers, found, strict=False):
                if sampler is not None and known is not None:
                    sampler.go_on(epoch.processed, known["processed_num"])
                elif sampler is not None:
                    sampler.go_on(epoch.processed, done * sampler.width)
        settle(loop)

    def run(self) -> None:
        """Train to the end."""
        self.strategy.recorder.training = self
        self.loop.epoch_loop.run = self._train_batches
        try:
            run(self._train)(self.state)
        except BaseException:
            self.strategy.leave()
            raise
        finally:
            self.strategy.recorder.training = None
            vars(self.loop.epoch_loop).pop("run", None)
            self.progress.files.close()

    def _train(self, _: TorchState) -> None:
        """Train with the present ranks."""
        trainer, loop, progress = self.trainer, self.loop, self.progress
        self._enter_generation()
        with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
            if not progress.begun:
                if not self._resumes:
                    with isolate_rng():
                        trainer._run_sanity_check()
                trainer.training = True
                if loop.skip:
                    return
                loop.reset()
            progress.callbacks.begin(trainer.is_global_zero, self._begin)
            progress.begun = True
            while not loop.done:
                try:
                    self._train_epoch()
                except StopIteration:
                    break
                finally:
                    loop.on_iteration_done()
                progress.in_epoch = False
                self._commit()
            loop._restarting = False
            loop.on_run_end()

    def _begin(self, again: bool, goes_on: bool) -> None:
        """Tell callbacks of the beginning, on this rank alone if others are in the middle."""
        trainer, module = self.trainer, self.trainer.lightning_module
        mine = [each for each in trainer.callbacks if self.progress.callbacks.begins_again(each)]
        with by_itself():
            for callback in mine if again else ():
                callback.setup(trainer, module, stage="fit")
                callback.on_fit_start(trainer, module)
            if goes_on:
                for callback in mine if self._started else trainer.callbacks:
                    callback.on_train_start(trainer, module)
                if not self._started:
                    _call_lightning_module_hook(trainer, "on_train_start")
        if not goes_on:
            self.loop.on_run_start()
        self._started = True

    def _train_epoch(self) -> None:
        loop, progress = self.loop, self.progress
        if not progress.in_epoch:
            loop.on_advance_start()
            self._deal()  # it may have made the loaders anew
        if loop.max_batches > loop.epoch_loop.batch_progress.current.ready or not progress.in_epoch:
            loop.advance()  # checks loaders, profiles, and calls `_train_batches`
        loop.on_advance_end()

    def _train_batches(self, _: Any) -> None:
        """Train what is left of the epoch, as Lightning's loop over batches does."""
        loop, progress = self.loop, self.progress
        batches, fetcher = loop.epoch_loop, loop._data_fetcher
        if not progress.in_epoch:
            batches.reset()
            progress.in_epoch = True
        for sampler in self.samplers:
            if sampler is not None:
                sampler.begin_epoch(loop.epoch_progress.current.processed)
        self._batches = 0
        iter(fetcher)
        fetcher._start_profiler = batches._on_before_fetch
        fetcher._stop_profiler = batches._on_after_fetch
        while not batches.done:
            try:
                batches.advance(fetcher)
                batches.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                batches.on_iteration_done()
            if not batches._should_accumulate() and not batches.done:
                self._commit()

    def batch_begins(self) -> None:
        """Record the next batch in each sampler."""
        for sampler in self.samplers:
            if sampler is not None:
                sampler.record_batch(self._batches, sampler.width)
        self._batches += 1

    def _commit(self) -> None:
        trainer = self.trainer
        state: Any = self.state
        state.epoch, state.batch = trainer.current_epoch, trainer.global_step
        validation = self.loop.epoch_loop.val_loop._combined_loader
        for loader in () if validation is None else validation.flattened:
            # A validation, also the one before training, always begins with its first row.
            current().samplers.left(getattr(loader.batch_sampler, "sampler", loader.sampler))
        state.commit()
        self.progress.files.committed()

    # -- generations -------------------------------------------------------------------------------

    def _enter_generation(self) -> None:
        """Bring trainer, loops and loaders to the present ranks."""
        trainer, loop = self.trainer, self.loop
        self.strategy.begin()
        self.strategy.follow()
        trainer.training = True
        torch.set_grad_enabled(True)
        for each in (loop, loop.epoch_loop.val_loop):  # their loaders are of the ranks before
            if each._combined_loader is not None:
                each._combined_loader.reset()
                each._combined_loader = each._data_fetcher = None
        loop.setup_data()
        self._deal()
        self.progress.show()

    def _deal(self) -> None:
        """Give the loaders the samplers of the state, and count the batches of the epoch."""
        trainer, loop = self.trainer, self.loop
        if loop._combined_loader is None:
            return
        epoch = loop.epoch_progress.current.processed
        lengths: list[float] = []
        for index, loader in enumerate(loop._combined_loader.flattened):
            sampler = self.samplers[index]
            if sampler is None:
                lengths.append(loop._combined_loader.limits[index])
                continue
            if sampler.batched:
                loader.__dict__["batch_sampler"] = sampler
            else:
                loader.batch_sampler.sampler = loader.__dict__["sampler"] = sampler
            left, whole = (sampler.batches_left(each)[0] for each in (epoch, None))
            done = loop.epoch_loop.batch_progress.current.ready if self.progress.in_epoch else 0
            limit = trainer.limit_train_batches
            most = limit if isinstance(limit, int) else int(whole * limit)
            lengths.append(min(done + left, most) if limit != 1.0 else done + left)
        longest = max(lengths)
        if any(sampler is not None for sampler in self.samplers):
            loop.max_batches = longest
            interval = trainer.val_check_interval
            if isinstance(interval, float) and getattr(trainer, "val_check_batch", 0) is not None:
                trainer.val_check_batch = max(1, int(longest * interval))


def _dealt(loader: Any) -> DealtSampler | None:
    """Return a sampler that deals the samples of a training loader; None where none can."""
    if not isinstance(loader, DataLoader):
        not_dealt(f"it is a {type(loader).__name__}, and no DataLoader")
        return None
    batches = loader.batch_sampler
    sampler, why = getattr(batches, "sampler", None), obstacle_to(batches)
    if not why and not isinstance(sampler, DistributedSampler):
        kind = type(source_of(batches)).__name__
        why = f"it has a {kind} that Lightning does not share among the ranks"
    if why:
        not_dealt(why)
        return None
    assert isinstance(sampler, DistributedSampler)
    return dealt(loader.dataset, batches, sampler.seed)

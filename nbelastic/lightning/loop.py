"""Lightning's fit loop on ranks that change, and its progress in commits.

The epochs are those of Lightning's own loops, called one by one. A commit follows each step of the
optimizer, with its validation, logs and checkpoints. The last step of an epoch is committed with
the epoch's end. In a new generation the loaders are made anew, and the epoch under way goes on with
the samples that are left.

Of this package, only this module names what is private to Lightning.
"""

from __future__ import annotations

import contextlib
import csv
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.ranks.context import current, current_or_none
from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.elastic import TorchState, run
from nbelastic.trainers.callbacks import Callbacks, TrainingProgress, averages_of
from nbelastic.trainers.sampler import DealtSampler, dealt, not_dealt, obstacle_to, source_of

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_LOGGERS = (
    *("_version", "_name", "_save_dir", "_root_dir"),
    *("_id", "_run_id", "_experiment_id"),  # of the runs that all ranks go on with
)
_OF_METRICS = ("has_reset", "_update_count", "_forward_cache")


def replace_stage(trainer: Any, run_stage: Callable[[Callable[[], Any]], Any]) -> None:
    """Call a function in the place of the trainer's next stage, with the stage as its argument."""

    def call() -> Any:
        del trainer._run_stage
        return run_stage(trainer._run_stage)

    trainer._run_stage = call


def follow_epochs_of_fabric() -> None:
    """Let loaders of Fabric's, which count their epochs, go on with the epoch of a sampler."""

    def around(original: Callable[..., Any], loader: Any) -> Any:
        context, sampler = current_or_none(), getattr(loader.batch_sampler, "sampler", None)
        if context is not None and isinstance(sampler, DistributedSampler):
            epoch = context.samplers.epoch_of(sampler)
            loader._num_iter_calls = loader._num_iter_calls if epoch is None else epoch
        return original(loader)

    wrap(_FabricDataLoader, "__iter__", around)


class BatchRecorder(Callback):
    """The first callback, to record batches as they begin, and samplers in checkpoints."""

    samplers: Sequence[DealtSampler | None] = ()  # of the loaders in training
    found: Sequence[Any] = ()  # of samplers, in the checkpoint that training goes on from

    def on_train_batch_start(self, *_: Any) -> None:
        for each in self.samplers:
            if each is not None:
                each.record_next()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.samplers:
            checkpoint["nbelastic"] = [each and each.state_dict() for each in self.samplers]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint.get("nbelastic", ())


def callbacks_of(trainer: Any) -> Callbacks:
    """Return the callbacks of a trainer, as they are before they are set up."""
    return Callbacks(
        lambda: [
            each for each in trainer.callbacks if not isinstance(each, (ProgressBar, BatchRecorder))
        ],
        begins_again=lambda each: not type(each).__module__.startswith("lightning."),
    )


class ElasticFit:
    """Training of a Trainer, from the first generation to the last."""

    def __init__(self, trainer: Any, strategy: Any) -> None:
        self.trainer = trainer
        self.strategy = strategy
        self.loop = trainer.fit_loop
        self.progress = LightningProgress(trainer, strategy.callbacks)
        self.progress.callbacks.main = trainer.is_global_zero  # as those they were set up
        self._started = False  # callbacks know here that training has begun
        self.samplers: list[DealtSampler | None] = []
        module = trainer.lightning_module
        module.zero_grad()
        vars(module).setdefault("forward", module.forward)  # as Lightning does in its first step
        self.loop.setup_data()
        if self.loop._combined_loader is not None:
            self.samplers = [_dealt(each) for each in self.loop._combined_loader.flattened]
        self._dealt = [each for each in self.samplers if each is not None]
        self._resumes = self.loop._loaded_from_state_dict
        if self._resumes:
            self._resume()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.state = TorchState(
            strategy.model,
            list(strategy.optimizers),
            scheduler=schedulers,
            sampler=self._dealt,
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
        self.strategy.recorder.samplers = self.samplers
        self.loop.epoch_loop.run = self._train_batches
        try:
            run(self._train)(self.state)
        except BaseException:
            self.strategy.leave()
            raise
        finally:
            self.strategy.recorder.samplers = ()
            vars(self.loop.epoch_loop).pop("run", None)
            self.progress.close()

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
                    if not progress.in_epoch:
                        loop.on_advance_start()
                        self._deal()  # it may have made the loaders anew
                    ready = loop.epoch_loop.batch_progress.current.ready
                    if loop.max_batches > ready or not progress.in_epoch:
                        loop.advance()  # checks loaders, profiles, calls `_train_batches`
                    loop.on_advance_end()
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
        for callback in mine if again else ():
            callback.setup(trainer, module, stage="fit")
            callback.on_fit_start(trainer, module)
        if goes_on:
            for callback in mine if self._started else trainer.callbacks:
                callback.on_train_start(trainer, module)
            if not self._started:
                _call_lightning_module_hook(trainer, "on_train_start")
        else:
            self.loop.on_run_start()
        self._started = True

    def _train_batches(self, _: Any) -> None:
        """Train what is left of the epoch, as Lightning's loop over batches does."""
        loop, progress = self.loop, self.progress
        batches, fetcher = loop.epoch_loop, loop._data_fetcher
        if not progress.in_epoch:
            batches.reset()
            progress.in_epoch = True
        for sampler in self._dealt:
            sampler.begin_epoch(loop.epoch_progress.current.processed)
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

    def _commit(self) -> None:
        trainer = self.trainer
        state: Any = self.state
        state.epoch, state.batch = trainer.current_epoch, trainer.global_step
        validation = self.loop.epoch_loop.val_loop._combined_loader
        for loader in () if validation is None else validation.flattened:
            # A validation, also the one before training, always begins with its first row.
            current().samplers.left(getattr(loader.batch_sampler, "sampler", loader.sampler))
        state.commit()
        self.progress.committed()

    # -- generations -------------------------------------------------------------------------------

    def _enter_generation(self) -> None:
        """Bring trainer, loops and loaders to the present ranks."""
        trainer, loop = self.trainer, self.loop
        self.strategy.begin()
        self.strategy.set_world_ranks()
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
        if not self._dealt:
            return
        epoch = loop.epoch_progress.current.processed
        done = loop.epoch_loop.batch_progress.current.ready if self.progress.in_epoch else 0
        limit, lengths = trainer.limit_train_batches, []
        loaders = loop._combined_loader
        for sampler, loader, length in zip(
            self.samplers, loaders.flattened, loaders.limits, strict=True
        ):
            if sampler is None:
                lengths.append(length)
                continue
            if sampler.batched:
                loader.__dict__["batch_sampler"] = sampler
            else:
                loader.batch_sampler.sampler = loader.__dict__["sampler"] = sampler
            left, whole = (sampler.batches_left(each)[0] for each in (epoch, None))
            most = limit if isinstance(limit, int) else int(whole * limit)
            lengths.append(min(done + left, most) if limit != 1.0 else done + left)
        loop.max_batches = max(lengths)
        interval = trainer.val_check_interval
        if isinstance(interval, float) and getattr(trainer, "val_check_batch", 0) is not None:
            trainer.val_check_batch = max(1, int(loop.max_batches * interval))


def _dealt(loader: Any) -> DealtSampler | None:
    """Return a sampler that deals the samples of a training loader; None where none can."""
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        sampler, why = getattr(batches, "sampler", None), obstacle_to(batches)
        if isinstance(sampler, DistributedSampler) and not why:
            return dealt(loader.dataset, batches, sampler.seed)
        kind = type(source_of(batches)).__name__
        why = why or f"it has a {kind} that Lightning does not share among the ranks"
    else:
        why = f"it is a {type(loader).__name__}, and no DataLoader"
    not_dealt(why)
    return None


class LightningProgress(TrainingProgress):
    """Progress of a Trainer."""

    callbacks: Callbacks

    def __init__(self, trainer: Any, callbacks: Callbacks) -> None:
        connector = trainer._logger_connector
        self._trainer = trainer
        self.callbacks = callbacks
        session: Any = current()
        self._start = session.spec.start  # its number, which no other rank of the job has
        # Files that ModelCheckpoint has written in a failed step. Where the step is repeated, they
        # are written again, under the same names. Others are removed at the next commit.
        self._taken_back: set[str] = set()
        self._savers = [e for e in trainer.checkpoint_callbacks if isinstance(e, ModelCheckpoint)]
        for each in self._savers:
            vars(each)["file_exists"] = self._exists
        self.begun = False  # callbacks know that training has begun
        self.in_epoch = False  # an epoch has begun, and not ended
        super().__init__(
            (self, ("begun", "in_epoch")),
            (trainer, ["should_stop"]),
            (connector, ("_current_fx", "_first_loop_iter", *_LOGGED)),
        )

    def show(self) -> None:
        """Show the bar of progress on rank 0, and continue files of metrics there."""
        trainer = self._trainer
        if trainer.is_global_zero and self.begun:
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    go_on_with_rows(logger, trainer.fit_loop.epoch_loop._batches_that_stepped)
        for callback in trainer.callbacks:
            if not isinstance(callback, ProgressBar):
                continue
            if not trainer.is_global_zero:
                callback.disable()
            elif self.begun and getattr(callback, "is_disabled", False):
                callback.enable()
                callback.on_train_start(trainer, trainer.lightning_module)

    def content(self) -> dict[str, Any]:
        """Return the content of a commit."""
        trainer = self._trainer
        return {
            **super().content(),
            "loops": trainer.fit_loop.state_dict(),
            "own": [_own_state(each) for each in trainer.callbacks],
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "loggers": [_settings_of(each) for each in trainer.loggers],
            "precision": trainer.precision_plugin.state_dict(),
            "rank": self._start,
            "metrics": [_metric_state(each) for each in self._metrics()],
            "results": {name: _metric_state(each) for name, each in self._counted.items()},
        }

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Go back, or forward, to a progress."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(found["loops"])
        settle(trainer.fit_loop)  # an epoch under way goes on by other means
        files = self._files()
        super().take(found, own=own)
        for callback, state in zip(trainer.callbacks, found["own"], strict=True):
            if state:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    callback.load_state_dict(state)
                if isinstance(callback, StochasticWeightAveraging):
                    self._follow(callback, state["scheduler_state"])
        self._taken_back |= files - self._files()
        if found["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(found["datamodule"])
        for logger, attributes in zip(trainer.loggers, found["loggers"], strict=True):
            vars(logger).update(attributes)
            if attributes.get("_id") and hasattr(logger, "_wandb_init"):
                logger._wandb_init["id"] = attributes["_id"]
        trainer.precision_plugin.load_state_dict(found["precision"])
        trainer.lightning_module._current_fx_name = None  # of a hook that has failed
        trainer.fit_loop.epoch_loop.val_loop._results.clear()  # a validation begins again
        # What another rank has counted is in its own metric: all are added up at the end.
        same = found["rank"] == self._start
        for metric, state in zip(self._metrics(), found["metrics"], strict=False):
            _restore(metric, state if same else {})
        for name, result in [*self._counted.items()]:
            if same and name in found["results"]:
                _restore(result, found["results"][name])
            else:
                del self._counted[name]

    def _files(self) -> set[str]:
        found: set[str] = set()
        for each in self._savers:
            found.update((each.last_model_path, each.best_model_path, *each.best_k_models))
        return found - {""}

    def _exists(self, path: str, trainer: Any) -> bool:
        known = trainer.is_global_zero and path not in self._taken_back
        mine = known and get_filesystem(path).exists(path)
        return bool(trainer.strategy.reduce_boolean_decision(mine, all=False))

    def committed(self) -> None:
        """Remove files written in a failed step, and not written again."""
        for path in self._taken_back - self._files() if self._taken_back else ():
            self._trainer.strategy.remove_checkpoint(path)
        self._taken_back = set()

    def close(self) -> None:
        """Give callbacks their own methods back."""
        for each in self._savers:
            vars(each).pop("file_exists", None)

    def _follow(self, averaging: Any, state: Any) -> None:
        """Give an averaging callback the schedule of the commit's rank."""
        trainer = self._trainer
        if state is not None and averaging._swa_scheduler is not None:
            averaging._swa_scheduler.load_state_dict(state)
        elif state is not None:  # on a rank that has joined since
            groups = [group for each in trainer.optimizers for group in each.param_groups]
            rates = [{n: v for n, v in group.items() if n != "params"} for group in groups]
            latest, averaging._latest_update_epoch = averaging._latest_update_epoch, math.inf
            averaging._initialized = False
            averaging.on_train_epoch_start(trainer, trainer.lightning_module)
            averaging._latest_update_epoch = latest
            for group, values in zip(groups, rates, strict=True):
                group.update(values)

    def _metrics(self) -> list[Any]:
        modules = self._trainer.lightning_module.modules()
        return [each for each in modules if hasattr(each, "metric_state")]

    @property
    def _counted(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results


def settle(loop: Any) -> None:
    """Clear the restart flags of a loop and of its inner loops."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            settle(each)


def _settings_of(logger: Any) -> dict[str, Any]:
    found = {name: vars(logger)[name] for name in _OF_LOGGERS if name in vars(logger)}
    if hasattr(logger, "_wandb_init"):
        found["_id"] = logger.version
    return found


def _own_state(callback: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # a callback of a user's that is not set up yet
        return dict(callback.state_dict())
    return {}


def _metric_state(metric: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        kept = {name: vars(metric)[name] for name in _OF_METRICS if name in vars(metric)}
        return {**metric.metric_state, **kept}
    return {}


def _restore(metric: Any, state: dict[str, Any]) -> None:
    metric.reset()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value = value.clone()  # noqa: PLW2901 - metrics add to it in place
        setattr(metric, name, list(value) if isinstance(value, list) else value)


def go_on_with_rows(logger: Any, step: int) -> None:
    """Continue a file of metrics on rank 0, without rows of steps that a failure has taken back."""
    path = Path(logger.log_dir) / "metrics.csv"
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    writer = logger.experiment  # it may remove the file
    names = list(rows[0]) if rows else []
    for each in (writer.metrics, rows):
        while each and str(each[-1]["step"]).isdigit() and int(each[-1]["step"]) >= step:
            each.pop()
        if each:
            break
    path.unlink(missing_ok=True)
    if rows:
        writer.metrics_keys = names
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, names)
            out.writeheader()
            out.writerows(rows)

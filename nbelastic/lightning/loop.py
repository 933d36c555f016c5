"""Lightning's fit loop on ranks that change, and its progress in commits.

The epochs are those of Lightning's own loops, called one by one. A commit follows each step of the
optimizer, with its validation, logs and checkpoints. The last step of an epoch is committed with
the epoch's end. In a new generation the loaders are made anew, and the epoch under way goes on with
the samples that are left.

Of this package, only this module names what is private to Lightning.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.followed import samplers_of
from nbelastic.elastic.ranks.context import current, current_or_none
from nbelastic.elastic.ranks.session import Session
from nbelastic.torch.elastic import run
from nbelastic.torch.functions import broadcast_parameters
from nbelastic.trainers.callbacks import Callbacks, Training
from nbelastic.trainers.sampler import DealtSampler, not_dealt, obstacle_to, source_of

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_LOGGERS = ("_version", "_name", "_save_dir", "_root_dir")
_OF_METRICS = ("has_reset", "_update_count", "_forward_cache")


class ElasticFit(Training, Callback):
    """Training of a Trainer, from the first generation to the last.

    It is the Trainer's first callback, which records batches as they begin, and samplers in
    checkpoints.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.loop = trainer, trainer.fit_loop
        self.begun = False  # callbacks know that training has begun
        self.in_epoch = False  # an epoch has begun, and not ended
        self._started = False  # callbacks know here that training has begun
        self._samplers: list[DealtSampler | None] = []  # of the loaders, in training
        self._found: Sequence[Any] = ()  # of samplers, in the checkpoint that training goes on from
        self.callbacks = Callbacks(  # as they are before they are set up
            lambda: [e for e in trainer.callbacks if not isinstance(e, (ProgressBar, ElasticFit))],
            begins_again=lambda each: not type(each).__module__.startswith("lightning."),
        )
        super().__init__(
            (self, ("begun", "in_epoch")),
            (trainer, ["should_stop"]),
            (trainer._logger_connector, ("_current_fx", "_first_loop_iter", *_LOGGED)),
        )
        trainer.callbacks.insert(0, self)

    def on_train_batch_start(self, *_: Any) -> None:
        for each in self._dealt:
            each.record_next()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._samplers:
            checkpoint["nbelastic"] = [each and each.state_dict() for each in self._samplers]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._found = checkpoint.get("nbelastic", ())

    @property
    def _dealt(self) -> list[DealtSampler]:
        return [each for each in self._samplers if each is not None]

    # -- training ----------------------------------------------------------------------------------

    def replace_stage(self) -> None:
        """Train in the place of the trainer's next stage; others run as they are."""
        trainer = self.trainer

        def run_stage() -> Any:
            del trainer._run_stage
            fits = trainer.state.fn == TrainerFn.FITTING
            if fits and isinstance(current_or_none(), Session):
                return self._fit()
            trainer.strategy.begin()
            if not fits:  # all ranks evaluate the module of rank 0
                module = trainer.lightning_module
                broadcast_parameters([*module.named_parameters(), *module.named_buffers()])
            return trainer._run_stage()

        trainer._run_stage = run_stage

    def _fit(self) -> None:
        """Train to the end."""
        trainer, strategy, loop = self.trainer, self.trainer.strategy, self.loop
        module = trainer.lightning_module
        session: Any = current()
        self._rank = session.spec.start  # its number, which no other rank of the job has
        self.callbacks.main = trainer.is_global_zero  # as those they were set up
        module.zero_grad()
        vars(module).setdefault("forward", module.forward)  # as Lightning does in its first step
        loop.setup_data()
        if loop._combined_loader is not None:
            self._samplers = [_dealt(each) for each in loop._combined_loader.flattened]
        self._resumes = loop._loaded_from_state_dict
        if self._resumes:
            self._resume()
        self.make_state(
            trainer.callbacks,
            trainer.current_epoch,
            model=strategy.model,
            optimizer=list(strategy.optimizers),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            sampler=self._dealt,
        )
        loop.epoch_loop.run = self._train_batches
        try:
            run(self._train)(self.state)
        except BaseException:
            strategy.leave()
            raise
        finally:
            self._samplers = []
            del loop.epoch_loop.run

    def _resume(self) -> None:
        """Go on where a checkpoint of the trainer's has ended, perhaps within an epoch."""
        loop, batches = self.loop, self.loop.epoch_loop
        loop.reset()
        epoch = loop.epoch_progress.current
        self.in_epoch = loop.restarted_mid_epoch and epoch.processed < epoch.ready
        if self.in_epoch:
            with warnings.catch_warnings():  # of what has no progress of its own
                warnings.simplefilter("ignore")
                batches.reset()
            done = batches.batch_progress.current.ready * current().size
            known = [*self._found, *[None] * len(self._samplers)]
            for sampler, found in zip(self._samplers, known, strict=False):
                if sampler is not None:
                    rows = found["processed_num"] if found else done * sampler.width
                    sampler.go_on(epoch.processed, rows)
        _settle(loop)

    def _train(self, _: Any) -> None:
        """Train with the present ranks."""
        trainer, loop = self.trainer, self.loop
        self._enter_generation()
        with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
            if not self.begun:
                if not self._resumes:
                    with isolate_rng():
                        trainer._run_sanity_check()
                trainer.training = True
                if loop.skip:
                    return
                loop.reset()
            self.callbacks.begin(trainer.is_global_zero, self._begin)
            self.begun = True
            with contextlib.suppress(StopIteration):
                while not loop.done:
                    self._train_epoch()
            loop.on_run_end()

    def _begin(self, again: bool, goes_on: bool) -> None:
        """Tell callbacks of the beginning, on this rank alone if others are in the middle."""
        trainer, module = self.trainer, self.trainer.lightning_module
        mine = [each for each in trainer.callbacks if self.callbacks.begins_again(each)]
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

    def _train_epoch(self) -> None:
        loop = self.loop
        if not self.in_epoch:
            loop.on_advance_start()
            self._deal()  # it may have made the loaders anew
        if not self.in_epoch or loop.max_batches > loop.epoch_loop.batch_progress.current.ready:
            loop.advance()  # checks loaders, profiles, calls `_train_batches`
        loop.on_advance_end()
        self.in_epoch = False
        self._commit()

    def _train_batches(self, fetcher: Any) -> None:
        """Train what is left of the epoch, as Lightning's loop over batches does."""
        loop, batches = self.loop, self.loop.epoch_loop
        if not self.in_epoch:
            batches.reset()
            self.in_epoch = True
        for sampler in self._dealt:
            sampler.begin_epoch(loop.epoch_progress.current.processed)
        iter(fetcher)
        fetcher._start_profiler = batches._on_before_fetch
        fetcher._stop_profiler = batches._on_after_fetch
        with contextlib.suppress(StopIteration):
            while not batches.done:
                batches.advance(fetcher)
                batches.on_advance_end(fetcher)
                if not batches._should_accumulate() and not batches.done:
                    self._commit()

    def _commit(self) -> None:
        trainer = self.trainer
        validation = self.loop.epoch_loop.val_loop._combined_loader
        for loader in () if validation is None else validation.flattened:
            # A validation, also the one before training, always begins with its first row.
            samplers_of(current()).left(getattr(loader.batch_sampler, "sampler", loader.sampler))
        self.commit(trainer.current_epoch, trainer.global_step)

    # -- generations -------------------------------------------------------------------------------

    def _enter_generation(self) -> None:
        """Bring trainer, loops, loaders, logs and bars to the present ranks."""
        trainer, loop = self.trainer, self.loop
        trainer.strategy.begin()
        trainer.strategy.set_world_ranks()
        trainer.training = True
        torch.set_grad_enabled(True)
        for each in (loop, loop.epoch_loop.val_loop):  # their loaders are of the ranks before
            if each._combined_loader is not None:
                each._combined_loader.reset()
                each._combined_loader = each._data_fetcher = None
        loop.setup_data()
        self._deal()
        shown = trainer.is_global_zero and self.begun
        for logger in trainer.loggers if shown else ():
            if isinstance(logger, CSVLogger):
                _go_on_with_rows(logger)
        for callback in trainer.callbacks:
            if not isinstance(callback, ProgressBar):
                continue
            if not trainer.is_global_zero:
                callback.disable()
            elif shown and getattr(callback, "is_disabled", False):
                callback.enable()
                callback.on_train_start(trainer, trainer.lightning_module)

    def _deal(self) -> None:
        """Give the loaders the samplers of the state, and count the batches of the epoch."""
        trainer, loop = self.trainer, self.loop
        if not self._dealt:
            return
        epoch = loop.epoch_progress.current.processed
        done = loop.epoch_loop.batch_progress.current.ready if self.in_epoch else 0
        limit, lengths = trainer.limit_train_batches, []
        loaders = loop._combined_loader
        for sampler, loader, length in zip(
            self._samplers, loaders.flattened, loaders.limits, strict=True
        ):
            if sampler is None:
                lengths.append(length)
                continue
            if sampler.batched:
                loader.__dict__["batch_sampler"] = sampler
            else:
                loader.batch_sampler.sampler = loader.__dict__["sampler"] = sampler
            left, whole = (sampler.batches_left(each)[0] for each in (epoch, None))
            if isinstance(limit, int):
                lengths.append(min(done + left, limit))
            else:
                lengths.append(min(done + left, int(whole * limit)) if limit < 1.0 else done + left)
        loop.max_batches = max(lengths)
        interval = trainer.val_check_interval
        if isinstance(interval, float) and getattr(trainer, "val_check_batch", 0) is not None:
            trainer.val_check_batch = max(1, int(loop.max_batches * interval))

    # -- in commits --------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return the content of a commit."""
        return {
            **super().content(),
            "parts": [_state_of(each) for each in self._parts],
            "loggers": [
                {name: vars(each)[name] for name in _OF_LOGGERS if name in vars(each)}
                for each in self.trainer.loggers
            ],
            "rank": self._rank,
            "metrics": {name: _metric_state(each) for name, each in self._metrics.items()},
        }

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Go back, or forward, to a progress."""
        trainer = self.trainer
        super().take(found, own=own)
        for part, state in zip(self._parts, found["parts"], strict=True):
            if state:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    part.load_state_dict(state)
                if isinstance(part, StochasticWeightAveraging):
                    self._follow(part, state["scheduler_state"])
        _settle(self.loop)  # an epoch under way goes on by other means
        for logger, attributes in zip(trainer.loggers, found["loggers"], strict=True):
            vars(logger).update(attributes)
        trainer.lightning_module._current_fx_name = None  # of a hook that has failed
        self.loop.epoch_loop.val_loop._results.clear()  # a validation begins again
        # What another rank has counted is in its own metric: all are added up at the end.
        counted = found["metrics"] if found["rank"] == self._rank else {}
        for name, metric in self._metrics.items():
            _restore(metric, counted.get(name, {}))

    @property
    def _parts(self) -> list[Any]:
        trainer = self.trainer
        data = [] if trainer.datamodule is None else [trainer.datamodule]
        return [self.loop, trainer.precision_plugin, *data, *trainer.callbacks]

    @property
    def _metrics(self) -> dict[Any, Any]:
        """Metrics of an epoch, the logged ones first, because they reset the module's own."""
        modules = enumerate(self.trainer.lightning_module.modules())
        own = {number: each for number, each in modules if hasattr(each, "metric_state")}
        return {**self.loop.epoch_loop._results, **own}

    def _follow(self, averaging: Any, state: Any) -> None:
        """Give an averaging callback the schedule of the commit's rank."""
        trainer = self.trainer
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


def _dealt(loader: Any) -> DealtSampler | None:
    """Return a sampler that deals the samples of a training loader; None where none can."""
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        sampler, why = getattr(batches, "sampler", None), obstacle_to(batches)
        if isinstance(sampler, DistributedSampler) and not why:
            return DealtSampler(loader.dataset, batches, sampler.seed)
        kind = type(source_of(batches)).__name__
        why = why or f"it has a {kind} that Lightning does not share among the ranks"
    else:
        why = f"it is a {type(loader).__name__}, and no DataLoader"
    not_dealt(why)
    return None


def _settle(loop: Any) -> None:
    """Clear the restart flags of a loop and of its inner loops."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            _settle(each)


def _state_of(part: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # a callback of a user's that is not set up yet
        return dict(part.state_dict())
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


def _go_on_with_rows(logger: Any) -> None:
    """Continue the file of metrics that an earlier main rank has written."""
    path = Path(logger.log_dir) / "metrics.csv"
    rows = path.read_bytes() if path.exists() else b""
    writer = logger.experiment  # the first access removes the file
    if rows:
        path.write_bytes(rows)
        writer.metrics_keys = rows.splitlines()[0].decode().split(",")

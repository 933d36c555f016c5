"""Training loop of Hugging Face's ``Trainer``, as an elastic loop.

The loop is the Trainer's own: an epoch, or what is left of one, is a call of its ``_run_epoch``.
A commit follows each step with its logs, evaluation and checkpoint. The last step of an epoch is
committed together with the epoch's end, so that the end is never half done.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from nbelastic.accelerate.state import deal, is_of_this_process, obstacle, refuse_pickled
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import NbelasticError, OptionError
from nbelastic.torch.elastic import run
from nbelastic.trainers.callbacks import Callbacks, Frozen, Training, report_logs
from nbelastic.trainers.sampler import not_dealt

_POSITION = "nbelastic"  # in the TrainerState of a checkpoint, among the states of callbacks
_COUNTS = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
_PARTS = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch")
_NOT_KEPT = {  # fields of a TrainerState
    "log_history",
    "is_local_process_zero",
    "is_world_process_zero",
    "stateful_callbacks",
    "trial_params",
}


def elastic(trainer: type[Any]) -> type[Any]:
    """Return a class derived from a Trainer's, whose training survives changes of membership.

    `trainer` is ``transformers.Trainer`` or derived from it; one with a training loop of another
    version is an NbelasticError. Outside of a job the result does what `trainer` does.

    Each sample is trained once an epoch, whatever happens to the ranks, if the dataset has a length
    and an index. Ranks that join or leave change the number of steps in an epoch;
    ``state.max_steps`` follows, and the schedule of the learning rate ends with the last step.
    Optimizer, schedule, ``TrainerState``, the control and plain attributes of callbacks, and the
    logs are rolled back and sent to newcomers. Logs go to the notebook's panel, too.
    """
    if not isinstance(trainer, type):
        kind = type(trainer).__name__
        raise OptionError(
            f"nbelastic.transformers.elastic({kind}(…)): takes the class; write {kind} = "
            f"nbelastic.transformers.elastic({kind}) before {kind}(…) is made"
        )
    missing = [name for name in _PARTS if not hasattr(trainer, name)]
    if missing:
        raise NbelasticError(
            f"nbelastic.transformers.elastic({trainer.__name__}): it has no {missing[0]}, which "
            f"Trainer has from transformers 5 on; this is {transformers.__version__}"
        )
    return type(trainer.__name__, (_ElasticTrainer, trainer), {})


def renew(arguments: Any) -> None:
    """Give arguments made in another process the ranks of this process."""
    state = arguments.distributed_state if "_setup_devices" in vars(arguments) else None
    if state is not None and not is_of_this_process(state):
        del vars(arguments)["_setup_devices"]
        arguments.device  # noqa: B018  # it finds them


class _ElasticTrainer:
    """Methods of an elastic Trainer; the first base of its class."""

    _elastic: TrainerLoop | None = None

    if TYPE_CHECKING:
        control: Any

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *arguments: Any, **named: Any) -> None:
        for each in (*arguments, *named.values()):
            if isinstance(each, transformers.TrainingArguments):
                renew(each)
        super().__init__(*arguments, **named)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        if not isinstance(current_or_none(), Session):
            return super()._inner_training_loop(*arguments, **named)  # type: ignore[misc]
        try:
            return self._train_elastically(*arguments, **named)
        finally:
            self._elastic = None

    def _train_elastically(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> Any:
        refuse_pickled(self.accelerator, "this Trainer")
        self.accelerator.free_memory()
        if self.args.auto_find_batch_size:
            self._update_auto_batch_size(batch_size)
        loader = self._training_loader()
        epochs, updates, _, samples, _, _, max_steps = self.set_initial_training_values(
            self.args, loader
        )
        self._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        model, loader = self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self.state.global_step
        model.zero_grad()
        self._elastic = training = TrainerLoop(self, model, loader, max_steps, samples)
        training.trial, training.ignored_keys = trial, ignore_keys_for_eval
        if resume_from_checkpoint is not None:
            training.resume(resume_from_checkpoint)
        self.callback_handler.callbacks.insert(0, training)
        try:
            return run(lambda _: training.train())(training.state)
        finally:
            self.pop_callback(training)

    def _training_loader(self) -> Any:
        """Return the loader of the Trainer; a user's own loader is prepared like the Trainer's."""
        loader = self.get_train_dataloader()
        if type(loader) is DataLoader:
            loader = self.accelerator.prepare(loader)
        return loader

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._elastic is not None:
            self.state.stateful_callbacks[_POSITION] = self._elastic.position()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **named)  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.after_step()

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Log, and report numbers to the job."""
        super().log(logs, *arguments, **named)  # type: ignore[misc]
        if isinstance(current_or_none(), Session):
            numbers = {name: each for name, each in logs.items() if name != "epoch"}
            report_logs(numbers, self.state.global_step)


class TrainerLoop(Training, TrainerCallback):
    """Training of a Trainer, from the first generation to the last.

    It is the Trainer's first callback, which corrects the epoch of a training resumed within one.
    """

    trial: Any = None
    ignored_keys: Sequence[str] | None = None

    def __init__(
        self, trainer: Any, model: Any, loader: DataLoader[Any], steps: int, samples: float
    ) -> None:
        self.trainer = trainer
        self.model = model
        self.loader = loader
        self.epoch = 0
        self.in_step = False
        self.before = 0.0  # share of the epoch that was done when its rest was dealt
        self._samples = samples
        self._since = time.time()
        self._left = 0  # steps of the epoch
        self.begun = False  # callbacks know that the epoch has begun
        self.evaluated = False  # before the first step
        # The learning rate's schedule was built for so many steps. Its place is a share of it: from
        # step `start` on it moves from `at` by `slope`.
        self._built, self.start, self.at, self.slope = steps, 0, 0.0, 1 / max(steps, 1)
        handler = trainer.callback_handler
        self.callbacks = Callbacks(lambda: [e for e in handler.callbacks if e is not self])
        place = ("epoch", "begun", "evaluated", "start", "at", "slope")
        kept = {each.name for each in dataclasses.fields(trainer.state)} - _NOT_KEPT
        super().__init__((self, place), (trainer, _COUNTS), (trainer.state, sorted(kept)))
        scheduler, args = trainer.lr_scheduler, trainer.args
        if trainer._created_lr_scheduler and hasattr(scheduler, "lr_lambdas"):
            scheduler.lr_lambdas = [self._stretched(each) for each in scheduler.lr_lambdas]
        if why := obstacle(loader):
            not_dealt(why)
        seed = args.seed if args.data_seed is None else args.data_seed
        self.sampler = None if why else deal(loader, seed)
        self.make_state(
            handler.callbacks,
            0,
            model=model,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            sampler=self.sampler,
        )

    # -- the schedule of the learning rate ---------------------------------------------------------

    def _share(self, step: float) -> float:
        return self.at + (step - self.start) * self.slope

    def _stretched(self, schedule: Callable[[float], float]) -> Callable[[float], float]:
        def at(step: float) -> float:
            place = self._share(step) * self._built
            return schedule(round(place) if abs(place - round(place)) < 1e-6 else place)

        return at

    # -- checkpoints of the Trainer ----------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return where training stands, for whatever number of ranks resumes it."""
        rows = {} if self.sampler is None else self.sampler.position()
        share = self._share(self.trainer.state.global_step)
        return {"epoch": self.epoch, "schedule": share, **rows}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.in_step = True
        state.epoch = self.epoch + self.before + (1 - self.before) * (state.epoch - self.epoch)

    def resume(self, checkpoint: str) -> None:
        """Go on with the rows that are left of the epoch of a checkpoint."""
        trainer = self.trainer
        sampler = None if trainer.args.ignore_data_skip else self.sampler
        found: dict[str, Any] = trainer.state.stateful_callbacks.get(_POSITION, {})
        within, epoch = math.modf(round(trainer.state.epoch or 0.0, 6))
        self.epoch = found.get("epoch", int(epoch))
        if "schedule" in found:
            self.start, self.at = trainer.state.global_step, found["schedule"]
        done = found.get("done")
        ended = bool(done) and done == found["length"]
        if sampler is not None and done is None and within:
            raise NbelasticError(
                f"resume_from_checkpoint={checkpoint!r}: it was saved within epoch {int(epoch)}, "
                "and not by an elastic Trainer, so it is not known which of its rows are trained. "
                "Resume from the end of an epoch, or pass ignore_data_skip=True to begin it again"
            )
        if sampler is not None and done:
            sampler.go_on(self.epoch, done)
            now = sampler.position()
            if any(found.get(name) != value for name, value in now.items()):
                raise NbelasticError(
                    f"resume_from_checkpoint={checkpoint!r}: the rows of epoch {self.epoch} "
                    "are in another order now, so it is not known which of them are trained "
                    f"({now}; there {found}). Use the same dataset, sampler and seed, or pass "
                    "ignore_data_skip=True to begin the epoch again"
                )
            ended = self._batches_left(self.epoch)[0] == 0
        self.epoch += ended
        self.state.epoch, self.state.batch = self.epoch, trainer.state.global_step
        self.state.save()

    # -- training ----------------------------------------------------------------------------------

    def train(self) -> Any:
        """Train with the present ranks to the end; return the Trainer's outcome."""
        trainer = self.trainer
        epochs = self._enter_generation()
        if trainer.args.eval_on_start and not self.evaluated:
            trainer._evaluate(self.trial, self.ignored_keys, skip_scheduler=True)
        self.evaluated = True
        while self.epoch < epochs and not trainer.control.should_training_stop:
            self._train_epoch()
        return trainer._finalize_training(self.trial, self._samples, self._since)

    def _train_epoch(self) -> None:
        trainer = self.trainer
        if not self.begun:
            self._tell("on_epoch_begin")
            self.begun = True
        batches, self.before = self._batches_left(self.epoch)
        self._left = self._updates(batches)
        self.in_step = False
        common = {
            "model": self.model,
            "epoch": self.epoch,
            "trial": self.trial,
            "ignore_keys_for_eval": self.ignored_keys,
            "start_time": self._since,
        }
        if batches:
            trainer._run_epoch(
                train_dataloader=self.loader,
                steps_in_epoch=batches,
                num_update_steps_per_epoch=self._left,
                resume_from_checkpoint=None,
                epochs_trained=0,
                steps_trained_in_current_epoch=0,
                **common,
            )
        else:  # with drop_last nothing may be left
            self._tell("on_epoch_end")
            trainer._maybe_log_save_evaluate(trainer._tr_loss, None, **common)
        self.epoch += 1
        self.begun = False
        self.commit(self.epoch, trainer.state.global_step)

    def after_step(self) -> None:
        """Commit a step, unless it is the last of its epoch."""
        if self.in_step:
            self.in_step = False
            self._left -= 1
            control = self.trainer.control
            if self._left > 0 and not (control.should_epoch_stop or control.should_training_stop):
                self.commit(self.epoch, self.trainer.state.global_step)

    def _tell(self, what: str) -> None:
        trainer = self.trainer
        tell = getattr(trainer.callback_handler, what)
        trainer.control = tell(trainer.args, trainer.state, trainer.control)

    # -- generations -------------------------------------------------------------------------------

    def _enter_generation(self) -> int:
        """Bring the Trainer to the present ranks; return the number of epochs."""
        trainer, args = self.trainer, self.trainer.args
        gradients = trainer.accelerator.gradient_state
        gradients.dataloader_references = [None]  # of iterations that have been left
        vars(trainer).pop("_eval_dataloaders", None)  # shared out among ranks that have changed
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        if self.sampler is None:
            self.loader = trainer._training_loader()  # its shares are those of the present ranks
        if args.max_steps > 0 or not has_length(self.loader):
            epochs = trainer.set_initial_training_values(args, self.loader)[0]
        else:
            epochs = math.ceil(args.num_train_epochs)
            self._set_steps(epochs)
        self._begin_callbacks()
        self.state.set_total(epoch=min(epochs, 10**9), batch=trainer.state.max_steps)
        return int(epochs)

    def _set_steps(self, epochs: int) -> None:
        """Count the steps that are left with the present ranks; the schedule ends with the last."""
        trainer = self.trainer
        args, done = trainer.args, trainer.state.global_step
        batches, self.before = self._batches_left(self.epoch)
        rest, whole = self._updates(batches), self._updates(self._batches_left(None)[0])
        if args.num_train_epochs == epochs:
            left = rest + whole * (epochs - self.epoch - 1) if self.epoch < epochs else 0
        else:
            left = math.ceil((args.num_train_epochs - self.epoch - self.before) * whole)
        trainer.state.max_steps = done + max(left, 0)
        if trainer._created_lr_scheduler:
            now = int(trainer.lr_scheduler.last_epoch)
            self.start, self.at = now, self._share(now)
            self.slope = (1 - self.at) / max(trainer.state.max_steps - now, 1)

    def _batches_left(self, epoch: int | None) -> tuple[int, float]:
        """Return the batches of each rank in the rest of an epoch, and the share done before."""
        if self.sampler is not None:
            return self.sampler.batches_left(epoch)
        args, loader = self.trainer.args, self.loader
        batches = args.max_steps * args.gradient_accumulation_steps
        return len(loader) if has_length(loader) else int(batches), 0.0

    def _updates(self, batches: int) -> int:
        return -(-batches // int(self.trainer.args.gradient_accumulation_steps))

    def _begin_callbacks(self) -> None:
        """Tell callbacks of the beginning where they have not begun, or not as the main rank's."""
        state = self.trainer.state
        self.callbacks.begin(state.is_world_process_zero, self._begin)
        for callback in self.trainer.callback_handler.callbacks:
            for name in ("training_bar", "training_tracker"):
                bar: Any = getattr(callback, name, None)
                if getattr(bar, "total", None) is not None:
                    bar.total = state.max_steps
                if hasattr(bar, "n"):
                    bar.n = state.global_step

    def _begin(self, _: bool, goes_on: bool) -> None:
        trainer = self.trainer
        control = dict(vars(trainer.control))
        self._tell("on_train_begin")
        if goes_on:
            vars(trainer.control).update(control)

    # -- in commits --------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return the content of a commit."""
        trainer = self.trainer
        history, control = Frozen([*trainer.state.log_history]), dict(vars(trainer.control))
        return {**super().content(), "history": history, "control": control}

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Go back, or forward, to a progress."""
        trainer = self.trainer
        trainer.state.log_history[:] = found["history"].value
        vars(trainer.control).update(found["control"])
        super().take(found, own=own)

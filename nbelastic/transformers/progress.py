"""Progress of a Trainer: what a commit keeps beyond model and optimizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbelastic.trainers.callbacks import Callbacks, Runs, TrainingProgress

_NOT_KEPT = {
    "log_history",
    "is_local_process_zero",
    "is_world_process_zero",
    "stateful_callbacks",
    "trial_params",
}
_FOLDER = "TENSORBOARD_LOGGING_DIR"


class TrainerProgress(TrainingProgress):
    """Progress of a Trainer."""

    callbacks: Callbacks

    def __init__(self, trainer: Any, counts: Sequence[str], steps: int, stretches: bool) -> None:
        self._trainer = trainer
        self.callbacks = Callbacks(lambda: trainer.callback_handler.callbacks)
        self._runs = Runs()
        self.epoch = 0
        self.begun = False  # callbacks know that the epoch has begun
        self.evaluated = False  # before the first step
        self.foreseen = self._built = steps
        self.start, self.at, self.slope = 0, 0.0, 1.0
        place = ("epoch", "begun", "evaluated", "foreseen", "start", "at", "slope")
        kept = {each.name for each in dataclasses.fields(trainer.state)} - _NOT_KEPT
        super().__init__(
            (self, place), (self._runs, ["ids"]), (trainer, counts), (trainer.state, sorted(kept))
        )
        self._text, self._entries = "", 0
        if stretches and hasattr(trainer.lr_scheduler, "lr_lambdas"):
            scheduler = trainer.lr_scheduler
            scheduler.lr_lambdas = [self._stretched(each) for each in scheduler.lr_lambdas]

    # -- the schedule of the learning rate ---------------------------------------------------------

    def stretch(self, steps: int) -> None:
        """Stretch the rest of the schedule, to end after `steps` steps."""
        now = int(self._trainer.lr_scheduler.last_epoch)
        at = self._place(now)
        self.slope = (self.foreseen - at) / max(steps - now, 1)
        self.start, self.at = now, at

    @property
    def share(self) -> float:
        """Share of the schedule that is done."""
        return self._place(self._trainer.state.global_step) / max(self.foreseen, 1)

    def resume(self, share: float) -> None:
        """Go on with the schedule after a share of it."""
        self.start, self.at = self._trainer.state.global_step, share * self.foreseen

    def _place(self, step: float) -> float:
        return self.at + (step - self.start) * self.slope

    def _stretched(self, schedule: Callable[[float], float]) -> Callable[[float], float]:
        def at(step: float) -> float:
            place = self._place(step) * (self._built / max(self.foreseen, 1))
            return schedule(round(place) if abs(place - round(place)) < 1e-9 else place)

        return at

    # -- callbacks ---------------------------------------------------------------------------------

    def begin_callbacks(self) -> None:
        """Tell callbacks of the beginning where they have not begun, or not as the main rank's."""
        trainer = self._trainer
        state = trainer.state
        self.callbacks.begin(state.is_world_process_zero, self._begin)
        callbacks = trainer.callback_handler.callbacks
        writers = [each for each in callbacks if hasattr(each, "tb_writer")]
        folders = [each.logging_dir for each in writers if getattr(each, "logging_dir", None)]
        self._runs.share(**({_FOLDER: folders[0]} if folders else {}))
        for callback in callbacks:
            for name in ("training_bar", "training_tracker"):
                bar: Any = getattr(callback, name, None)
                if getattr(bar, "total", None) is not None:
                    bar.total = state.max_steps
                if hasattr(bar, "n"):
                    bar.n = state.global_step

    def _begin(self, again: bool, goes_on: bool) -> None:
        trainer = self._trainer
        control = dict(vars(trainer.control))
        for each in trainer.callback_handler.callbacks if again else ():
            if hasattr(each, "logging_dir") and _FOLDER in self._runs.ids:
                each.logging_dir = self._runs.ids[_FOLDER]
        with self._runs.go_on():
            trainer.control = trainer.callback_handler.on_train_begin(
                trainer.args, trainer.state, trainer.control
            )
        if goes_on:
            vars(trainer.control).update(control)

    # -- in commits --------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return the content of a commit."""
        control = dict(vars(self._trainer.control))
        return {**super().content(), "history": self._history(), "control": control}

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Go back, or forward, to a progress."""
        trainer = self._trainer
        if found["history"] != self._history():
            trainer.state.log_history[:] = map(json.loads, found["history"].splitlines())
            self._text, self._entries = "", 0
        vars(trainer.control).update(found["control"])
        super().take(found, own=own)

    def _history(self) -> str:
        """Return the logs as a growing text, because copies of a text cost nothing."""
        history = self._trainer.state.log_history
        if len(history) < self._entries:
            self._text, self._entries = "", 0
        for entry in history[self._entries :]:
            self._text += json.dumps(entry, default=_number) + "\n"
        self._entries = len(history)
        return self._text


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) or hasattr(value, "item") else str(value)

"""State of training with an ``Accelerator``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from nbelastic.accelerate.loaders import deal, obstacle, share_anew, shuffles
from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError
from nbelastic.torch.elastic import TorchState
from nbelastic.trainers import Runs, by_itself, not_dealt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OWN = ("model", "optimizer", "scheduler", "scaler", "sampler", "progress", "registered")


_NAME_IT = "Name it: AccelerateState(accelerator, loaders=[loader]). Its own sampler stays."


def refuse_pickled(accelerator: Any, what: str) -> None:
    """Refuse an accelerator that was made in another process, as in an earlier cell."""
    if vars(accelerator.state) is not type(accelerator.state)._shared_state:
        raise OptionError(
            f"{what} was made in another process, such as the notebook's kernel, and has its "
            "number of ranks: with it each rank would train alone. Make it, and call prepare(), in "
            "the function that the ranks run"
        )


class AccelerateState(TorchState):
    """State of all that an ``Accelerator`` has prepared.

    These are models, optimizers, schedulers, the gradient scaler, objects that were registered for
    checkpoints, and the progress in loaders. A loader that shuffles, or draws at random in another
    way, deals what its sampler draws once an epoch, whatever happens to the ranks. Other loaders
    begin again after a change of membership.

    Make it after ``accelerator.prepare(…)``, before the elastic loop. A rank that becomes the main
    process calls ``accelerator.init_trackers(…)`` as it was called before.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The accelerator.
    loaders : sequence of loaders, optional
        Those to deal the samples of, as their samplers or batch samplers have them; by default all
        prepared ones that shuffle or draw at random.
    seed : int, default 0
        Of their order.
    **values
        Further values, as of :class:`~nbelastic.torch.elastic.TorchState`.

    Examples
    --------
    >>> state = nbelastic.accelerate.AccelerateState(accelerator, epoch=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        loaders: Sequence[Any] | None = None,
        seed: int = 0,
        **values: Any,
    ) -> None:
        taken = [name for name in _OWN if name in values]
        if taken:
            raise OptionError(
                f"nbelastic.accelerate.AccelerateState({taken[0]}=…): the accelerator's own go by "
                "that name; choose another"
            )
        refuse_pickled(accelerator, "the Accelerator of this AccelerateState")
        if not accelerator._models and not accelerator._optimizers:
            raise OptionError(
                "nbelastic.accelerate.AccelerateState(accelerator): nothing is prepared yet; call "
                "accelerator.prepare(model, optimizer, …) before"
            )
        self._accelerator = accelerator
        self._begins_again: Any = None  # a loader within which a commit was made
        self._prepared = list(accelerator._dataloaders)
        samplers = [deal(each, seed) for each in self._to_deal(loaders)]
        optimizers = [each.optimizer for each in accelerator._optimizers]
        schedulers = [each.scheduler for each in accelerator._schedulers]
        scaler = accelerator.scaler
        self._progress = _Progress(accelerator, self._prepared)
        super().__init__(
            model=list(accelerator._models),
            optimizer=optimizers,
            scheduler=schedulers,
            scaler=None if scaler is None else scaler,
            sampler=samplers,
            progress=self._progress,
            registered=list(accelerator._custom_objects),
            **values,
        )

    def _to_deal(self, loaders: Sequence[Any] | None) -> list[Any]:
        chosen = []
        for loader in self._prepared if loaders is None else loaders:
            why = obstacle(loader)
            if not why:
                if loaders is not None or shuffles(loader):
                    chosen.append(loader)
            elif loaders is not None or not hasattr(loader.dataset, "__getitem__"):
                not_dealt(why)
        return chosen

    def commit(self) -> None:
        if self._accelerator.sync_gradients:
            active = self._accelerator.gradient_state.active_dataloader
            if active is not None and "_nbelastic_sampler" not in vars(active):
                self._begins_again = active
            super().commit()

    def align(self, behind: Sequence[int]) -> None:
        gradients = self._accelerator.gradient_state
        gradients.dataloader_references = [None]  # of iterations that have been left
        context, again = current(), self._begins_again
        if again is not None and not obstacle(again):
            not_dealt("it is none that is known to be for training", _NAME_IT)
        self._begins_again = None
        for loader in self._prepared:
            share_anew(loader, context.rank, context.size)
        super().align(behind)
        self._begin_trackers(is_main=context.rank == 0)

    def _begin_trackers(self, *, is_main: bool) -> None:
        """Begin trackers on a rank that becomes the main one, in the runs of that before."""
        accelerator, runs = self._accelerator, self._progress.runs
        begun = vars(accelerator).get(_BEGUN)
        if is_main and not accelerator.trackers and begun is not None:
            with by_itself(), runs.go_on():
                accelerator.init_trackers(*begun[0], **begun[1])
        if accelerator.log_with:
            runs.share()


_BEGUN = "_nbelastic_trackers"


def _remember(init_trackers: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the arguments of ``init_trackers`` on ranks where it does nothing yet."""

    @functools.wraps(init_trackers)
    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_BEGUN] = args, kwargs
        return init_trackers(self, *args, **kwargs)

    return remember


Accelerator.init_trackers = _remember(Accelerator.init_trackers)


class _Progress:
    """Counts of an accelerator and of its loaders, which are in no state dict of theirs."""

    def __init__(self, accelerator: Any, loaders: Sequence[Any]) -> None:
        self._accelerator = accelerator
        self._loaders = loaders
        self.runs = Runs()

    def state_dict(self) -> dict[str, Any]:
        return {
            "runs": dict(self.runs.ids),
            "step": self._accelerator.step,
            "iterations": [getattr(each, "iteration", 0) for each in self._loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self.runs.ids.update(state["runs"])
        for loader, iteration in zip(self._loaders, state["iterations"], strict=True):
            if hasattr(loader, "iteration"):
                loader.iteration = iteration

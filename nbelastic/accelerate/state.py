"""State of training with an ``Accelerator``, and its prepared loaders.

A loader that draws at random is for training: what its sampler draws is dealt by nbelastic, once an
epoch, whatever happens to the ranks. All others, as for evaluation, are shared out by accelerate,
anew with each generation, and begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError
from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.elastic import TorchState
from nbelastic.trainers.callbacks import TrainingProgress, by_itself
from nbelastic.trainers.sampler import DealtSampler, not_dealt, obstacle_to, source_of


def obstacle(loader: Any) -> str:
    """Return why a loader's samples cannot be dealt; empty where they can."""
    if not isinstance(loader, DataLoaderShard):
        return "its batches are read by one rank and sent to the others (dispatch_batches)"
    shard = _shard(loader)
    if isinstance(shard, BatchSamplerShard) and shard.split_batches:
        return "its batches are split among the ranks (split_batches)"
    if isinstance(loader.dataset, IterableDataset) or shard is None:
        return "it has an iterable dataset, or no batches"
    return obstacle_to(_batches(loader))


def deal(loader: Any, seed: int) -> DealtSampler:
    """Deal the samples of a loader to the ranks by a sampler, which is returned."""
    inner, batches = getattr(loader, "base_dataloader", loader), _batches(loader)
    sampler = DealtSampler(loader.dataset, batches, seed)
    name = "sampler" if inner.sampler is _shard(loader) else "batch_sampler"
    if not sampler.batched:
        batches.sampler = sampler
    # The guard of DataLoader is against changes by users.
    object.__setattr__(inner, name, sampler if sampler.batched else batches)
    loader._drop_last = True  # else gather_for_metrics() drops rows that are not repetitions
    vars(loader)["_nbelastic_sampler"] = sampler
    return sampler


def share_anew(loader: Any, rank: int, size: int) -> None:
    """Make accelerate shard a loader over the present ranks."""
    if "_nbelastic_sampler" in vars(loader):
        return
    shard, dataset = _shard(loader), getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDatasetShard):
        dataset.num_processes, dataset.process_index = size, rank
    elif isinstance(shard, BatchSamplerShard):
        shard.num_processes, shard.process_index = size, rank
    elif isinstance(loader, DataLoaderShard) and isinstance(shard, BatchSampler) and size > 1:
        # It was prepared by a rank alone.
        shard = BatchSamplerShard(shard, size, rank)
        object.__setattr__(loader.base_dataloader, "batch_sampler", shard)


def _shard(loader: Any) -> Any:
    """Return the batch sampler of a loader, which accelerate may have sharded."""
    inner = getattr(loader, "base_dataloader", loader)
    sampler = inner.sampler
    return sampler if isinstance(sampler, BatchSampler) else inner.batch_sampler


def _batches(loader: Any) -> Any:
    """Return the batch sampler that was given to accelerate."""
    shard = _shard(loader)
    return shard.batch_sampler if isinstance(shard, BatchSamplerShard) else shard


def _around_iteration(original: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
    """Iterate over a loader; of a dealt one record the batches, and count each epoch once."""
    sampler, epoch = vars(loader).get("_nbelastic_sampler"), loader.iteration
    if sampler is None:
        yield from original(loader)
        return
    sampler.begin_epoch(epoch)
    for batch in original(loader):
        sampler.record_next()
        yield batch
    loader.iteration = epoch + 1


_NAME_IT = "Name it: AccelerateState(accelerator, loaders=[loader]). Its own sampler stays."
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BEGUN = "_nbelastic_trackers"


def is_of_this_process(state: Any) -> bool:
    """Whether a state of accelerate's was made in this process, and not pickled to it."""
    return vars(state) is type(state)._shared_state


def refuse_pickled(accelerator: Any, what: str) -> None:
    """Refuse an accelerator that was made in another process, as in an earlier cell."""
    if not is_of_this_process(accelerator.state):
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

    `loaders` are those to deal the samples of, as their samplers or batch samplers have them; by
    default all prepared ones that shuffle or draw at random. `seed` is that of their order. Further
    values are as of :class:`~nbelastic.torch.elastic.TorchState`.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        loaders: Sequence[Any] | None = None,
        seed: int = 0,
        **values: Any,
    ) -> None:
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
        counted = [(each, ["iteration"]) for each in self._prepared if hasattr(each, "iteration")]
        super().__init__(
            model=list(accelerator._models),
            optimizer=optimizers,
            scheduler=schedulers,
            scaler=accelerator.scaler,
            sampler=samplers,
            progress=TrainingProgress((accelerator, ["step"]), *counted),
            registered=list(accelerator._custom_objects),
            **values,
        )

    def _to_deal(self, loaders: Sequence[Any] | None) -> list[Any]:
        chosen, named = [], loaders is not None
        for loader in self._prepared if loaders is None else loaders:
            if why := obstacle(loader):
                if named or not hasattr(loader.dataset, "__getitem__"):
                    not_dealt(why)
                continue
            source = source_of(_batches(loader))
            if named or isinstance(getattr(source, "sampler", source), _RANDOM):
                chosen.append(loader)
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
        accelerator = self._accelerator
        begun = vars(accelerator).get(_BEGUN)
        if context.rank == 0 and not accelerator.trackers and begun is not None:
            with by_itself():
                accelerator.init_trackers(*begun[0], **begun[1])


def _around_trackers(original: Callable[..., Any], accelerator: Any, *args: Any, **kw: Any) -> Any:
    """Keep the arguments of ``init_trackers`` on ranks where it does nothing yet."""
    vars(accelerator)[_BEGUN] = args, kw
    return original(accelerator, *args, **kw)


wrap(Accelerator, "init_trackers", _around_trackers)
wrap(DataLoaderShard, "__iter__", _around_iteration)

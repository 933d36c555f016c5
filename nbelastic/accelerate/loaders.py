"""Loaders that accelerate has prepared, under changes of membership.

A loader that shuffles is for training: its samples are dealt by nbelastic, each once an epoch,
whatever happens to the ranks. All others, as for evaluation, are shared out by accelerate, anew
with each generation, and begin again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    IterableDatasetShard,
)
from torch.utils.data import BatchSampler, RandomSampler

from nbelastic.trainers import DealtSampler

if TYPE_CHECKING:
    from collections.abc import Iterator


def shuffles(loader: Any) -> bool:
    """Return whether a loader deals its samples in random order."""
    batches = _batches(loader)
    inner = getattr(batches, "batch_sampler", batches)
    return isinstance(getattr(inner, "sampler", None), RandomSampler)


def obstacle(loader: Any) -> str:
    """Return why a loader's samples cannot be dealt; empty where they can."""
    if not isinstance(loader, DataLoaderShard):
        return "its batches are read by one rank and sent to the others (dispatch_batches)"
    batches = _batches(loader)
    if isinstance(batches, BatchSamplerShard):
        if batches.split_batches:
            return "its batches are split among the ranks (split_batches)"
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return f"it has batches of its own ({type(batches).__name__}), or an iterable dataset"
    sampler = batches.sampler
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples):
        return "its sampler draws with replacement, or a part of the dataset"
    return ""


def deal(loader: Any, seed: int) -> DealtSampler:
    """Deal the samples of a loader to the ranks by a sampler, which is returned.

    The loader, without an :func:`obstacle`, is changed in place. All ranks have the same `seed`.
    """
    batches = _batches(loader)
    if isinstance(batches, BatchSamplerShard):
        batches.num_processes, batches.process_index = 1, 0
        batches.even_batches = False  # shares are equally long as they are
        batches = batches.batch_sampler
    sampler = DealtSampler(loader.dataset, shuffle=shuffles(loader), seed=seed)
    batches.sampler = sampler
    loader._drop_last = True  # else gather_for_metrics() drops rows that are not repetitions
    kind = type(loader)
    loader.__dict__["_nbelastic_sampler"] = sampler
    # The adapter's own ``__class__`` is a property, which says that it is a DataLoader.
    object.__dict__["__class__"].__set__(loader, _recording(kind))
    return sampler


def batches_left(loader: Any, epoch: int | None) -> tuple[int, float]:
    """Return how many batches each rank has of the rest of an epoch, and the share done before.

    The `epoch` is None for a whole one.
    """
    batches = loader.base_dataloader.batch_sampler
    sampler: DealtSampler = loader._nbelastic_sampler
    return sampler.batches_left(epoch, batches.batch_size, getattr(batches, "drop_last", False))


def share_anew(loader: Any, rank: int, size: int) -> None:
    """Make accelerate shard a loader over the present ranks."""
    if "_nbelastic_sampler" in vars(loader):
        return
    batches = _batches(loader)
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDatasetShard):
        dataset.num_processes, dataset.process_index = size, rank
    elif isinstance(batches, BatchSamplerShard):
        batches.num_processes, batches.process_index = size, rank
    elif isinstance(loader, DataLoaderShard) and isinstance(batches, BatchSampler) and size > 1:
        # It was prepared by a rank alone. The guard of DataLoader is against changes by users.
        shard = BatchSamplerShard(batches, size, rank)
        object.__setattr__(loader.base_dataloader, "batch_sampler", shard)


def _batches(loader: Any) -> Any:
    inner = getattr(loader, "base_dataloader", loader)
    sampler = inner.sampler
    return sampler if isinstance(sampler, BatchSampler) else inner.batch_sampler


_kinds: dict[type, type] = {}


def _recording(kind: type) -> type:
    """Return a kind of loader that records each batch as it is handed out."""
    if kind not in _kinds:
        _kinds[kind] = type(kind.__name__, (_Recording, kind), {})
    return _kinds[kind]


class _Recording:
    """Iteration that records batches, and counts each epoch once.

    A batch is recorded before it is trained. If that fails, the sampler goes back to its commit.
    """

    def __iter__(self: Any) -> Iterator[Any]:
        epoch, sampler = self.iteration, self._nbelastic_sampler
        inner = getattr(self, "base_dataloader", self)
        size = inner.batch_sampler.batch_size
        sampler.begin_epoch(epoch)
        for index, batch in enumerate(super().__iter__()):  # type: ignore[misc]
            sampler.record_batch(index, size)
            yield batch
        self.iteration = epoch + 1

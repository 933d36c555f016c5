"""Loaders that accelerate has prepared, under changes of membership.

A loader that draws at random is for training: what its sampler draws is dealt by nbelastic, once an
epoch, whatever happens to the ranks. All others, as for evaluation, are shared out by accelerate,
anew with each generation, and begin again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    IterableDatasetShard,
)
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbelastic.trainers import DealtSampler, dealt, obstacle_to

if TYPE_CHECKING:
    from collections.abc import Iterator


def shuffles(loader: Any) -> bool:
    """Return whether a loader deals its samples in random order."""
    sampler = getattr(_source(loader)[0], "sampler", _source(loader)[0])
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def obstacle(loader: Any) -> str:
    """Return why a loader's samples cannot be dealt; empty where they can."""
    if not isinstance(loader, DataLoaderShard):
        return "its batches are read by one rank and sent to the others (dispatch_batches)"
    batches = _batches(loader)
    if isinstance(batches, BatchSamplerShard) and batches.split_batches:
        return "its batches are split among the ranks (split_batches)"
    if isinstance(loader.dataset, IterableDataset) or batches is None:
        return "it has an iterable dataset, or no batches"
    return obstacle_to(_source(loader)[0])


def deal(loader: Any, seed: int) -> DealtSampler:
    """Deal the samples of a loader to the ranks by a sampler, which is returned.

    The loader, without an :func:`obstacle`, is changed in place. All ranks have the same `seed`.
    """
    source, batched = _source(loader)
    sampler = dealt(loader.dataset, source, seed, batched)
    batches = _batches(loader)
    if batched:
        inner = getattr(loader, "base_dataloader", loader)
        name = "sampler" if inner.sampler is batches else "batch_sampler"
        # The guard of DataLoader is against changes by users.
        object.__setattr__(inner, name, sampler)
    else:
        if isinstance(batches, BatchSamplerShard):
            batches.num_processes, batches.process_index = 1, 0
            batches.even_batches = False  # shares are equally long as they are
            batches = batches.batch_sampler
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
    batches = _batches(loader)
    sampler: DealtSampler = loader._nbelastic_sampler
    return sampler.batches_left(
        epoch, getattr(batches, "batch_size", None) or 1, getattr(batches, "drop_last", False)
    )


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
        # It was prepared by a rank alone.
        shard = BatchSamplerShard(batches, size, rank)
        object.__setattr__(loader.base_dataloader, "batch_sampler", shard)


def _source(loader: Any) -> tuple[Any, bool]:
    """Return a loader's sampler, or its batch sampler and True if that has batches of its own."""
    batches = _batches(loader)
    if isinstance(batches, BatchSamplerShard):
        batches = batches.batch_sampler
    return (batches.sampler, False) if type(batches) is BatchSampler else (batches, True)


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
        size = getattr(_batches(self), "batch_size", None) or 1
        sampler.begin_epoch(epoch)
        for index, batch in enumerate(super().__iter__()):  # type: ignore[misc]
            sampler.record_batch(index, size)
            yield batch
        self.iteration = epoch + 1

"""Data that ``fit`` can deal to ranks, one way for each kind."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.data import Loader
from nbelastic.elastic.ranks.ranks import rank, size
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import OptionError
from nbelastic.keras.dataset import ElasticDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

CANNOT_BE_DEALT = (
    "elastic.fit({kind}): these data cannot be dealt to ranks: which samples a batch has, only the "
    "{kind} knows, so after a change of membership nothing could say which ones are left. Pass "
    "arrays, hvd.elastic.ElasticDataset (with read= for data that are not in memory), a DataLoader "
    "with an ElasticSampler, or a Loader"
)


class Feed:
    """Data of a training, dealt to the ranks."""

    part: Any  # what of them belongs to the state

    @property
    def epoch(self) -> int:
        """Number of the epoch that was dealt."""
        return int(self.part.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Deal an epoch, unless it is the present one."""
        if epoch != self.epoch:
            self.part.set_epoch(epoch)

    def left(self) -> int | None:
        """Return the number of this rank's batches that are left; None if it is not known."""
        raise NotImplementedError

    def source(self) -> Any:
        """Return what Keras iterates over: the batches that are left."""
        raise NotImplementedError

    def record(self, first: int, count: int) -> None:
        """Record that batches are done, by their numbers since :meth:`source`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the iteration, which an error's frames may keep alive."""

    def sample(self) -> Any:
        """Return a batch like those of the training, without a change of what was dealt."""
        raise NotImplementedError


class SamplerFeed(Feed):
    """Data in the order of a sampler, which deals the rest of an epoch again."""

    def __init__(self, data: Any, sampler: ShardSampler, batch_size: int) -> None:
        self.part = sampler
        self._data = data
        self._batch_size = batch_size

    def sample(self) -> Any:
        """Return a batch of the first samples."""
        data, count = self._data, min(self._batch_size, len(self.part.dataset))
        if isinstance(data, DataLoader):
            return data.collate_fn([data.dataset[n] for n in range(count)])
        return data.batch_of(range(count))

    def left(self) -> int:
        """Return the number of batches of this rank's share."""
        if isinstance(self._data, DataLoader):
            return len(self._data)
        return int(self._data.num_batches)

    def source(self) -> Any:
        """Return the data, which begin with what is left."""
        return self._data

    def record(self, first: int, count: int) -> None:
        """Record samples, by their places in the share."""
        for number in range(first, first + count):
            self.part.record_batch(number, self._batch_size)


class LoaderFeed(Feed):
    """Steps of micro-batches, each of which is one batch to Keras."""

    def __init__(self, loader: Loader) -> None:
        self.part = loader
        self.loader = loader
        self._steps = _Steps(loader)

    def left(self) -> int | None:
        """Return the number of steps that are left."""
        try:
            return len(self.loader) - self.loader.step
        except TypeError:
            return None

    def source(self) -> Any:
        """Return the steps."""
        return self._steps

    def record(self, first: int, count: int) -> None:
        """Do nothing: the loader counts its steps."""

    def close(self) -> None:
        """End the step under way."""
        self._steps.close()

    def sample(self) -> Any:
        """Return a micro-batch of this rank, without a change of the loader."""
        return self.loader.sample()


class _Steps(DataLoader[Any]):
    """Steps of a loader, in the shape in which Keras takes batches of PyTorch."""

    def __init__(self, loader: Loader) -> None:
        self._steps_of = loader
        self._iteration: Any = None
        try:
            dataset: Any = _Known(len(loader))
        except TypeError:
            dataset = _Endless()
        super().__init__(dataset, batch_size=None)

    def __iter__(self) -> Any:
        self.close()
        self._iteration = iter(self._steps_of)
        return self._iteration

    def close(self) -> None:
        """End the iteration."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.close()

    def __len__(self) -> int:
        return len(self._steps_of) - self._steps_of.step


class _Endless(torch.utils.data.IterableDataset[Any]):
    """Stand-in for a dataset whose length Keras does not ask for."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Known(_Endless):
    """The same for one whose length it asks for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def feed_of(
    data: Any,
    y: Any = None,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    sample_weight: Any = None,
) -> Feed:
    """Return data in a form that can be dealt; an OptionError says what to pass instead."""
    kind = type(data).__name__
    if isinstance(data, (Loader, DataLoader, keras.utils.PyDataset)) and y is not None:
        raise OptionError(f"elastic.fit({kind}, y=…): the {kind} has the targets; leave y out")
    if isinstance(data, Loader):
        return LoaderFeed(data)
    if isinstance(data, DataLoader):
        sampler: Any = data.sampler
        if not isinstance(sampler, ShardSampler) or not data.batch_size:
            raise OptionError(
                "elastic.fit(DataLoader): its sampler must be an ElasticSampler, with batch_size=, "
                "so that the rest of an epoch can be dealt again: "
                "sampler = hvd.elastic.ElasticSampler(dataset); "
                "DataLoader(dataset, batch_size=64, sampler=sampler)"
            )
        if data.drop_last:
            raise OptionError(
                "elastic.fit(DataLoader(drop_last=True)): after a change of membership other "
                "samples would be dropped; leave drop_last out"
            )
        return SamplerFeed(data, sampler, data.batch_size)
    if isinstance(data, ElasticDataset):
        return SamplerFeed(data, data.sampler, data.batch_size)
    module = type(data).__module__.partition(".")[0]
    is_undealable = (
        isinstance(data, (keras.utils.PyDataset, types.GeneratorType))
        or (module in ("tensorflow", "grain") and not hasattr(data, "shape"))
        or not keras.tree.flatten(data)
    )
    if is_undealable:
        raise OptionError(CANNOT_BE_DEALT.format(kind=kind))
    dataset = ElasticDataset(
        data, y, sample_weight, batch_size=batch_size or 32, shuffle=shuffle, seed=seed
    )
    return SamplerFeed(dataset, dataset.sampler, dataset.batch_size)


class _Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """Every n-th batch of a dataset."""

    def __init__(self, data: Any, place: int, count: int) -> None:
        super().__init__()
        self._data = data
        self._numbers = range(place, data.num_batches, count)

    @property
    def num_batches(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._numbers[index]]


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of arrays, every n-th sample, each once."""

    def __init__(self, arrays: tuple[Any, ...], place: int, count: int, batch_size: int) -> None:
        super().__init__()
        self._arrays = arrays
        length = keras.tree.flatten(arrays)[0].shape[0]
        self._places = range(place, length, count)
        self._batch_size = batch_size

    @property
    def num_batches(self) -> int:
        return -(-len(self._places) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        start = index * self._batch_size
        places = self._places[start : start + self._batch_size]
        part = slice(places.start, places.stop, places.step)
        return tuple(
            None if each is None else keras.tree.map_structure(lambda a: a[part], each)
            for each in self._arrays
        )


def shard_of(data: Any, batch_size: int) -> tuple[Any, int | None]:
    """Return this rank's part of data for validation, and its number of batches.

    All parts together have each sample once, so that sums over ranks are those of all samples.
    """
    place, count = rank(), size()
    if isinstance(data, keras.utils.PyDataset):
        shard = _Shard(data, place, count)
        return shard, shard.num_batches
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, (ShardSampler, DistributedSampler)):
            return data, len(data)
        part = _EveryNth(data, place, count)
        return part, len(part)
    if isinstance(data, (Loader, types.GeneratorType)):
        raise OptionError(
            f"elastic.fit(validation_data={type(data).__name__}): pass arrays, a DataLoader, a "
            "PyDataset or a tf.data.Dataset"
        )
    if hasattr(data, "shard") and type(data).__module__.startswith("tensorflow."):
        part = data.shard(count, place)
        length = int(part.cardinality())
        return part, length if length >= 0 else None
    arrays = data if isinstance(data, (tuple, list)) else (data,)
    shards = _Batches(tuple(arrays), place, count, batch_size)
    return shards, shards.num_batches


class _EveryNth(DataLoader[Any]):
    """Every n-th batch of a loader, which is read whole on each rank."""

    def __init__(self, data: DataLoader[Any], place: int, count: int) -> None:
        self._data, self._place, self._count = data, place, count
        super().__init__(_Endless(), batch_size=None)

    def __iter__(self) -> Any:
        numbered = enumerate(self._data)
        return (batch for number, batch in numbered if number % self._count == self._place)

    def __len__(self) -> int:
        return len(range(self._place, len(self._data), self._count))

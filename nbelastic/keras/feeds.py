"""Data that ``fit`` can deal to ranks, one way for each kind."""

from __future__ import annotations

import itertools
import math
import sys
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
from nbelastic.keras.dataset import ElasticDataset, length_of

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

    def go_on(self) -> None:
        """Deal what is left, or all data again where nothing is; all ranks call this together."""
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
        data, count = self._data, min(self._batch_size, len(self.part.dataset))
        if isinstance(data, DataLoader):
            batch = data.collate_fn([data.dataset[n] for n in range(count)])
            return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
        return data.batch_of(range(count))

    def left(self) -> int:
        if isinstance(self._data, DataLoader):
            return len(self._data)
        return int(self._data.num_batches)

    def source(self) -> Any:
        return self._data

    def go_on(self) -> None:
        self.part.reset()
        if not self.left():
            self.part.set_epoch(self.epoch + 1)

    def record(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.part.record_batch(number, self._batch_size)


class LoaderFeed(Feed):
    """Steps of micro-batches, each of which is one batch to Keras."""

    def __init__(self, loader: Loader) -> None:
        self.part = loader
        self.loader = loader
        self._steps = _Steps(loader)

    def left(self) -> int | None:
        try:
            return len(self.loader) - self.loader.step
        except TypeError:
            return None

    def source(self) -> Any:
        return self._steps

    def record(self, first: int, count: int) -> None:
        """Do nothing: the loader counts its steps."""

    def close(self) -> None:
        self._steps.close()

    def sample(self) -> Any:
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


def split_off(fraction: float, *arrays: Any) -> tuple[Any, ...]:
    """Return arrays without a fraction of their samples, and then these, as one tuple."""
    if not 0 < fraction < 1:
        raise OptionError(f"elastic.fit(validation_split={fraction!r}): must be between 0 and 1")
    given = tuple(each for each in arrays if each is not None)
    if any(isinstance(each, (Loader, DataLoader, keras.utils.PyDataset)) for each in given):
        raise OptionError(
            "elastic.fit(validation_split=…): only for arrays; pass validation_data instead"
        )
    count = length_of(given)
    first = math.floor(count * (1 - fraction))
    if first in (0, count):
        raise OptionError(
            f"elastic.fit(validation_split={fraction!r}): {count} samples cannot be split so"
        )

    def part(begin: int, end: int) -> tuple[Any, ...]:
        return tuple(
            each if each is None else keras.tree.map_structure(lambda a: a[begin:end], each)
            for each in arrays
        )

    return *part(0, first), tuple(each for each in part(first, count) if each is not None)


class _Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """Every n-th batch of a dataset."""

    def __init__(self, data: Any, place: int, count: int, batches: int) -> None:
        super().__init__()
        self._data = data
        number = data.num_batches
        if isinstance(data, ElasticDataset):  # whose own batches are those of a share
            number = -(-len(data.sampler.dataset) // data.batch_size)
        self._numbers = range(place, min(number, batches), count)

    @property
    def num_batches(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        data, number = self._data, self._numbers[index]
        if not isinstance(data, ElasticDataset):
            return data[number]
        samples = range(len(data.sampler.dataset))
        return data.batch_of(samples[number * data.batch_size :][: data.batch_size])


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of arrays, every n-th sample, each once."""

    def __init__(
        self, arrays: tuple[Any, ...], place: int, count: int, batch_size: int, batches: int
    ) -> None:
        super().__init__()
        self._arrays = arrays
        length = keras.tree.flatten(arrays)[0].shape[0]
        self._places = range(place, min(length, batches * batch_size), count)
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


def shard_of(data: Any, batch_size: int, steps: int | None = None) -> tuple[Any, int | None]:
    """Return this rank's part of data for validation, and its number of batches.

    All parts together have each sample once, so that sums over ranks are those of all samples; or
    those of the first batches, if there are so many `steps`.
    """
    place, count = rank(), size()
    limit = sys.maxsize if steps is None else steps
    if isinstance(data, keras.utils.PyDataset):
        shard = _Shard(data, place, count, limit)
        return shard, shard.num_batches
    if isinstance(data, DataLoader):
        apart = isinstance(data.sampler, (ShardSampler, DistributedSampler))
        part = _EveryNth(data, *((0, 1, -(-limit // count)) if apart else (place, count, limit)))
        return part, len(part)
    if isinstance(data, (Loader, types.GeneratorType)):
        raise OptionError(
            f"elastic.fit(validation_data={type(data).__name__}): pass arrays, a DataLoader, a "
            "PyDataset or a tf.data.Dataset"
        )
    if hasattr(data, "shard") and type(data).__module__.startswith("tensorflow."):
        part = (data if steps is None else data.take(steps)).shard(count, place)
        length = int(part.cardinality())
        return part, length if length >= 0 else None
    arrays = data if isinstance(data, (tuple, list)) else (data,)
    shards = _Batches(tuple(arrays), place, count, batch_size, limit)
    return shards, shards.num_batches


class _EveryNth(DataLoader[Any]):
    """Every n-th of the first batches of a loader, which is read whole on each rank."""

    def __init__(self, data: DataLoader[Any], place: int, count: int, batches: int) -> None:
        self._data = data
        self._numbers = range(place, min(len(data), batches), count)
        super().__init__(_Known(len(self._numbers)), batch_size=None)

    def __iter__(self) -> Any:
        return itertools.islice(
            self._data, self._numbers.start, self._numbers.stop, self._numbers.step
        )

    def __len__(self) -> int:
        return len(self._numbers)

"""Feeds of data for ``fit`` to deal to ranks, by kind of data."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.data import Loader
from nbelastic.elastic.ranks.context import rank, size
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import OptionError
from nbelastic.torch.elastic import ElasticSampler

CANNOT_BE_DEALT = (
    "elastic.fit({kind}): these data cannot be dealt to ranks: which samples a batch has, only the "
    "{kind} knows, so after a change of membership nothing could say which ones are left. Pass "
    "arrays, hvd.elastic.ElasticDataset (with read= for data that are not in memory), a DataLoader "
    "with an ElasticSampler, or a Loader"
)


class ElasticDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Deal arrays to the ranks, and the rest of an epoch again when ranks join or leave.

    Parameters
    ----------
    x : array, or dict, list or tuple of arrays
        Inputs, whose first axis counts the samples. Or their number, with `read`.
    y, sample_weight : array, or dict, list or tuple of arrays, optional
        Targets and weights.
    batch_size : int, default 32
        Samples of a batch of each rank.
    shuffle : bool, default True
        Whether to shuffle, differently in each epoch.
    seed : int, default 0
        Of the shuffling; the same on all ranks.
    read : callable, optional
        Gets the indices of the samples of a batch, and returns the batch: ``(x,)``, ``(x, y)`` or
        ``(x, y, sample_weight)``. For data that are not in memory.
    **options
        Options of ``keras.utils.PyDataset``: ``workers``, ``use_multiprocessing``,
        ``max_queue_size``.

    Attributes
    ----------
    sampler : ElasticSampler
        Make it part of the state, unless the data are for
        :func:`nbelastic.keras.elastic.fit`, which does that: ``KerasState(model, data=d.sampler)``.

    Raises
    ------
    OptionError
        Arrays have different lengths, or none.

    Examples
    --------
    >>> data = ElasticDataset(x, y, batch_size=64)  # doctest: +SKIP
    >>> data = ElasticDataset(len(files), batch_size=64, read=read_images)  # doctest: +SKIP
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        read: Callable[[np.ndarray[Any, Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.batch_size = whole("ElasticDataset", "batch_size", batch_size)
        if read is None:
            self._arrays = tuple(each for each in (x, y, sample_weight) if each is not None)
            if y is None and sample_weight is not None:
                raise OptionError("ElasticDataset(sample_weight=…): needs y, too")
            count = length_of(self._arrays)
            self._read: Callable[[np.ndarray[Any, Any]], Any] = self._take
        else:
            if isinstance(x, bool) or not isinstance(x, int):
                raise OptionError(
                    f"ElasticDataset({type(x).__name__}, read=…): with read=, pass the number of "
                    "samples"
                )
            count, self._read = x, read
        if count < 1:
            raise OptionError("ElasticDataset: there are no samples")
        self.sampler = ElasticSampler(range(count), shuffle=shuffle, seed=seed)

    def _take(self, indices: np.ndarray[Any, Any]) -> Any:
        return tuple(keras.tree.map_structure(lambda each: each[indices], a) for a in self._arrays)

    def __len__(self) -> int:
        """Return the number of this rank's batches in the present deal of the epoch."""
        return math.ceil(self.sampler.num_samples / self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Return a batch of this rank's share."""
        return self.batch_of(self.sampler.get_indices(index, self.batch_size))

    def batch_of(self, indices: Iterable[int]) -> Any:
        """Return a batch of samples."""
        return self._read(np.asarray([*indices], dtype=np.int64))


def whole(call: str, name: str, value: Any) -> int:
    """Return an argument of a call, which must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{call}({name}={value!r}): must be a whole number, at least 1")
    return value


def length_of(arrays: Any) -> int:
    """Return the number of samples."""
    leaves = keras.tree.flatten(arrays)
    lengths = set()
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            raise OptionError(
                f"ElasticDataset: {type(leaf).__name__} is no array with samples; pass arrays, or "
                "the number of samples and read="
            )
        lengths.add(int(shape[0]))
    if len(lengths) != 1:
        raise OptionError(f"ElasticDataset: arrays have different lengths: {sorted(lengths)}")
    return lengths.pop()


class Feed:
    """Data of a training in the order of a sampler, which deals the rest of an epoch again."""

    def __init__(self, source: Any, part: Any, batch_size: int = 1) -> None:
        self.source = source  # what Keras iterates over: the batches that are left
        self.part = part  # what of the data belongs to the state
        self._batch_size = batch_size

    def set_epoch(self, epoch: int) -> None:
        """Deal an epoch, unless already present."""
        if epoch != self.part.epoch:
            self.part.set_epoch(epoch)

    def left(self) -> int | None:
        """Return the number of remaining batches of this rank; None if unknown."""
        try:
            return len(self.source)
        except TypeError:
            return None

    def go_on(self) -> None:
        """Deal what is left, or all data again where nothing is; all ranks call this together."""
        self.part.reset()
        if not self.left():
            self.part.set_epoch(self.part.epoch + 1)

    def record(self, first: int, count: int) -> None:
        """Record that batches are done, by their numbers since the beginning of the iteration."""
        for number in range(first, first + count):
            self.part.record_batch(number, self._batch_size)

    def close(self) -> None:
        """End the iteration, which an error's frames may keep alive."""

    def sample(self) -> Any:
        """Return a batch like the training's, without a change of the dealt data."""
        data, numbers = self.source, range(min(self._batch_size, len(self.part.dataset)))
        if isinstance(data, ElasticDataset):
            return data.batch_of(numbers)
        batch = data.collate_fn([data.dataset[n] for n in numbers])
        return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)


class LoaderFeed(Feed):
    """Steps of micro-batches, each a batch to Keras."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(_Batches(loader.__iter__, lambda: len(loader) - loader.step), loader)

    def record(self, first: int, count: int) -> None:
        """Do nothing: the loader counts its steps."""

    def close(self) -> None:
        self.source.close()

    def sample(self) -> Any:
        return self.part.sample()


class _Batches(DataLoader[Any]):
    """Batches of an iteration, wrapped as a ``DataLoader`` for Keras."""

    def __init__(self, begin: Callable[[], Iterator[Any]], length: Callable[[], int]) -> None:
        self._begin, self._length = begin, length
        self._iteration: Any = None
        try:
            dataset: Any = range(length())
        except TypeError:
            dataset = iter(())  # Keras asks a dataset with a length for it, and not this one
        super().__init__(dataset, batch_size=None)

    def __iter__(self) -> Any:
        self.close()
        self._iteration = self._begin()
        return self._iteration

    def close(self) -> None:
        """End the iteration."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.close()

    def __len__(self) -> int:
        return self._length()


def feed_of(
    data: Any,
    y: Any = None,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    sample_weight: Any = None,
) -> Feed:
    """Return the feed of data; an OptionError names the kinds of data to pass instead."""
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
        return Feed(data, sampler, data.batch_size)
    if not isinstance(data, ElasticDataset):
        module = type(data).__module__.partition(".")[0]
        if (
            isinstance(data, (keras.utils.PyDataset, types.GeneratorType))
            or (module in ("tensorflow", "grain") and not hasattr(data, "shape"))
            or not keras.tree.flatten(data)
        ):
            raise OptionError(CANNOT_BE_DEALT.format(kind=kind))
        more: dict[str, Any] = {"batch_size": batch_size or 32, "shuffle": shuffle, "seed": seed}
        data = ElasticDataset(data, y, sample_weight, **more)
    return Feed(data, data.sampler, data.batch_size)


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
    rest = _slice(given, range(first, count))
    return *_slice(arrays, range(first)), rest


class _Part(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of numbered items: samples, or single batches of another dataset."""

    def __init__(
        self, numbers: range, batch_of: Callable[[range], Any], batch_size: int = 1
    ) -> None:
        super().__init__()
        self._numbers, self._batch_of, self._batch_size = numbers, batch_of, batch_size

    @property
    def num_batches(self) -> int:
        return -(-len(self._numbers) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        start = index * self._batch_size
        return self._batch_of(self._numbers[start : start + self._batch_size])


def shard_of(data: Any, batch_size: int, steps: int | None = None) -> tuple[Any, int | None]:
    """Return this rank's part of data for validation, and its number of batches.

    All parts together have each sample once, so that sums over ranks are those of all samples; or
    those of the first batches, if there are so many `steps`.
    """
    place, count = rank(), size()
    limit = sys.maxsize if steps is None else steps
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, (ShardSampler, DistributedSampler)):  # a part already
            place, count, limit = 0, 1, -(-limit // count)
        numbers = range(place, min(len(data), limit), count)

        def every_nth() -> Iterator[Any]:
            yield from itertools.islice(data, numbers.start, numbers.stop, numbers.step)

        return _Batches(every_nth, lambda: len(numbers)), len(numbers)
    if isinstance(data, (Loader, types.GeneratorType)):
        raise OptionError(
            f"elastic.fit(validation_data={type(data).__name__}): pass arrays, a DataLoader, a "
            "PyDataset or a tf.data.Dataset"
        )
    if hasattr(data, "shard") and type(data).__module__.startswith("tensorflow."):
        part = (data if steps is None else data.take(steps)).shard(count, place)
        length = int(part.cardinality())
        return part, length if length >= 0 else None
    batch_of: Callable[[range], Any]
    if isinstance(data, ElasticDataset):  # whose own batches are those of a share
        length, batch_of, batch_size = len(data.sampler.dataset), data.batch_of, data.batch_size
    elif isinstance(data, keras.utils.PyDataset):
        length, batch_of, batch_size = data.num_batches, lambda numbers: data[numbers[0]], 1
    else:
        arrays = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        length, batch_of = keras.tree.flatten(arrays)[0].shape[0], functools.partial(_slice, arrays)
    part = _Part(range(place, min(length, limit * batch_size), count), batch_of, batch_size)
    return part, part.num_batches


def _slice(arrays: tuple[Any, ...], at: range) -> tuple[Any, ...]:
    """Return some samples of arrays, which need not know indices by numbers."""
    part = slice(at.start, at.stop, at.step)
    return tuple(
        each if each is None else keras.tree.map_structure(lambda array: array[part], each)
        for each in arrays
    )

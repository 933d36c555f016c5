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
from nbelastic.data.sources.row_source import is_count
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


_WITH_TARGETS = (Loader, DataLoader, keras.utils.PyDataset)


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
        check_counts("ElasticDataset", batch_size=batch_size)
        self.batch_size = batch_size
        if read is None:
            if y is None and sample_weight is not None:
                raise OptionError("ElasticDataset(sample_weight=…): needs y, too")
            arrays = tuple(each for each in (x, y, sample_weight) if each is not None)
            count, read = length_of(arrays), functools.partial(_rows, arrays)
        elif isinstance(x, int) and not isinstance(x, bool):
            count = x
        else:
            raise OptionError(
                f"ElasticDataset({type(x).__name__}, read=…): with read=, pass the number of "
                "samples"
            )
        if count < 1:
            raise OptionError("ElasticDataset: there are no samples")
        self._read = read
        self.sampler = ElasticSampler(range(count), shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Return the number of this rank's batches in the present deal of the epoch."""
        return math.ceil(self.sampler.num_samples / self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Return a batch of this rank's share."""
        return self.batch_of(self.sampler.get_indices(index, self.batch_size))

    def batch_of(self, indices: Iterable[int]) -> Any:
        """Return a batch of samples."""
        return self._read(np.asarray([*indices], dtype=np.int64))


def check_counts(call: str, **counts: Any) -> None:
    """Refuse arguments of a call that are no whole numbers from 1 on."""
    for name, value in counts.items():
        if value is not None and not is_count(value):
            raise OptionError(f"{call}({name}={value!r}): must be a whole number, at least 1")


def length_of(arrays: Any) -> int:
    """Return the number of samples."""
    lengths = set()
    for leaf in keras.tree.flatten(arrays):
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
    """Data of a training in the order of a sampler, which deals the rest of an epoch again.

    Or in that of a loader. Its steps of micro-batches are batches to Keras.
    """

    def __init__(self, source: Any, part: Any, batch_size: int = 0) -> None:
        self.source = source  # what Keras iterates over: the batches that are left
        self.part = part  # what of the data belongs to the state
        self._batch_size = batch_size  # 0 of a loader, which counts its steps itself

    def deal(self, epoch: int | None) -> int | None:
        """Deal an epoch, unless already present; for None the rest of the data, or all again.

        Return the number of this rank's batches, None if unknown. All ranks call this together.
        """
        if epoch is None:
            self.part.reset()
            epoch = self.part.epoch + (len(self.source) == 0)
        if epoch != self.part.epoch:
            self.part.set_epoch(epoch)
        try:
            return len(self.source)
        except TypeError:
            return None

    def record(self, numbers: range) -> None:
        """Record that batches are done, by their numbers since the beginning of the iteration."""
        for number in numbers if self._batch_size else ():
            self.part.record_batch(number, self._batch_size)

    def close(self) -> None:
        """End the iteration, which an error's frames may keep alive."""
        if isinstance(self.source, _Batches):
            self.source.close()

    def sample(self) -> Any:
        """Return a batch like the training's, without a change of the dealt data."""
        if isinstance(self.part, Loader):
            return self.part.sample()
        data, numbers = self.source, range(min(self._batch_size, len(self.part.dataset)))
        if isinstance(data, ElasticDataset):
            return data.batch_of(numbers)
        batch = data.collate_fn([data.dataset[n] for n in numbers])
        return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)


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
        if self._iteration is not None:
            self._iteration.close()
        self._iteration = None

    def __len__(self) -> int:
        return self._length()


def feed_of(
    data: Any, y: Any, sample_weight: Any, *, batch_size: int | None, shuffle: bool, seed: int
) -> Feed:
    """Return the feed of data; an OptionError names the kinds of data to pass instead."""
    kind = type(data).__name__
    if isinstance(data, _WITH_TARGETS) and y is not None:
        raise OptionError(f"elastic.fit({kind}, y=…): the {kind} has the targets; leave y out")
    if isinstance(data, Loader):
        return Feed(_Batches(data.__iter__, lambda: len(data) - data.step), data)
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
        size = batch_size or 32
        data = ElasticDataset(data, y, sample_weight, batch_size=size, shuffle=shuffle, seed=seed)
    return Feed(data, data.sampler, data.batch_size)


def split_off(fraction: float, *arrays: Any) -> tuple[Any, ...]:
    """Return arrays without a fraction of their samples, and then these, as one tuple."""
    if not 0 < fraction < 1:
        raise OptionError(f"elastic.fit(validation_split={fraction!r}): must be between 0 and 1")
    given = tuple(each for each in arrays if each is not None)
    if any(isinstance(each, _WITH_TARGETS) for each in given):
        raise OptionError(
            "elastic.fit(validation_split=…): only for arrays; pass validation_data instead"
        )
    count = length_of(given)
    first = math.floor(count * (1 - fraction))
    if first in (0, count):
        raise OptionError(
            f"elastic.fit(validation_split={fraction!r}): {count} samples cannot be split so"
        )
    return *_rows(arrays, slice(first)), _rows(given, slice(first, count))


class _Part(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of numbered items: samples, or single batches of another dataset."""

    def __init__(self, numbers: range, batch_of: Callable[[range], Any], batch_size: int) -> None:
        super().__init__()
        self._numbers, self._batch_of, self._batch_size = numbers, batch_of, batch_size

    @property
    def num_batches(self) -> int:
        return -(-len(self._numbers) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        start = index * self._batch_size
        return self._batch_of(self._numbers[start : start + self._batch_size])


def shard_of(data: Any, batch_size: int, steps: int | None = None) -> Any:
    """Return this rank's part of data for validation; None if the part is empty.

    All parts together have each sample once, so that sums over ranks are those of all samples; or
    those of the first batches, if there are so many `steps`.
    """
    place, count = rank(), size()
    limit = sys.maxsize if steps is None else steps
    if isinstance(data, (Loader, types.GeneratorType)):
        raise OptionError(
            f"elastic.fit(validation_data={type(data).__name__}): pass arrays, a DataLoader, a "
            "PyDataset or a tf.data.Dataset"
        )
    if hasattr(data, "shard") and type(data).__module__.startswith("tensorflow."):
        part = (data if steps is None else data.take(steps)).shard(count, place)
        return part if int(part.cardinality()) else None
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, (ShardSampler, DistributedSampler)):  # a part already
            place, count, limit = 0, 1, -(-limit // count)
        numbers = range(place, min(len(data), limit), count)

        def every_nth() -> Iterator[Any]:
            yield from itertools.islice(data, numbers.start, numbers.stop, numbers.step)

        return _Batches(every_nth, lambda: len(numbers)) if numbers else None
    batch_of: Callable[[range], Any]
    if isinstance(data, ElasticDataset):  # whose own batches are those of a share
        length, batch_of, batch_size = len(data.sampler.dataset), data.batch_of, data.batch_size
    elif isinstance(data, keras.utils.PyDataset):
        length, batch_of, batch_size = data.num_batches, lambda numbers: data[numbers[0]], 1
    else:
        arrays = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        length = keras.tree.flatten(arrays)[0].shape[0]
        batch_of = lambda at: _rows(arrays, slice(at.start, at.stop, at.step))  # noqa: E731
    numbers = range(place, min(length, limit * batch_size), count)
    return _Part(numbers, batch_of, batch_size) if numbers else None


def _rows(arrays: tuple[Any, ...], at: Any) -> tuple[Any, ...]:
    """Return some samples of arrays, by a slice where these need not know indices by numbers."""
    return tuple(
        each if each is None else keras.tree.map_structure(lambda array: array[at], each)
        for each in arrays
    )

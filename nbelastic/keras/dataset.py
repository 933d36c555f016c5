"""Data of arrays, dealt to the ranks batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nbelastic.errors import OptionError
from nbelastic.torch.elastic import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(
                f"ElasticDataset(batch_size={batch_size!r}): must be a whole number, at least 1"
            )
        self.batch_size = batch_size
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

    @property
    def num_batches(self) -> int:
        """Number of this rank's batches in the present deal of the epoch."""
        return -(-self.sampler.num_samples // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Return a batch of this rank's share."""
        return self.batch_of(self.sampler.get_indices(index, self.batch_size))

    def batch_of(self, indices: Iterable[int]) -> Any:
        """Return a batch of samples."""
        return self._read(np.asarray([*indices], dtype=np.int64))


def length_of(arrays: Any) -> int:
    """Return the number of samples.

    Raises
    ------
    OptionError
        Arrays differ in it.
    """
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

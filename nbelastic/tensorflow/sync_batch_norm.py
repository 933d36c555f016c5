"""Batch normalisation with the statistics of all ranks, for TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from nbelastic.tensorflow.ops import allreduce
from nbelastic.torch.ops.reductions import Sum


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation with mean and variance over all ranks, in training.

    Each sample counts once, however many a rank has. All ranks call the layer equally often.

    Parameters
    ----------
    fused : False
        For Horovod's signature.
    **options
        As for ``keras.layers.BatchNormalization``.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if mask is None:
            count = tf.size(inputs) / tf.size(mean)
        else:
            places = tf.size(inputs) / (tf.size(mask) * tf.size(mean))
            count = tf.cast(tf.math.count_nonzero(mask), places.dtype) * places
        count = tf.cast(count, mean.dtype)
        sums = tf.stack([mean * count, (variance + mean**2) * count, tf.ones_like(mean) * count])
        total, squares, count = tf.unstack(allreduce(sums, op=Sum))
        mean = total / count
        return mean, squares / count - mean**2

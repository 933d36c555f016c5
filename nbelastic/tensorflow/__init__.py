"""Horovod's TensorFlow 2 interface: ``import nbelastic.tensorflow as hvd``.

For loops of your own: ``hvd.DistributedGradientTape`` and ``hvd.elastic.TensorFlowKerasState``. Of
Keras' ``fit``, see :mod:`nbelastic.keras`, which ``nbelastic.tensorflow.keras`` is another name of.
"""

import importlib.util as _util

if _util.find_spec("tensorflow") is None:
    raise ModuleNotFoundError(
        "nbelastic.tensorflow needs TensorFlow; install tensorflow or tensorflow-cpu",
        name="tensorflow",
    )

from nbelastic.keras import names as _names
from nbelastic.keras.names import *  # noqa: F403
from nbelastic.keras.ops import broadcast_global_variables
from nbelastic.keras.optimizer import DistributedOptimizer
from nbelastic.tensorflow import elastic, keras
from nbelastic.tensorflow.ops import (
    Compression,
    SyncBatchNormalization,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from nbelastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "keras",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += _names.__all__

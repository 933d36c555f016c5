"""Horovod's Keras interface for Keras 3: ``import nbelastic.keras as hvd``.

It works with the back ends torch, TensorFlow and JAX. ``hvd.elastic.fit`` is Keras' ``fit`` on
ranks that come and go.
"""

try:
    import keras as _keras
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "nbelastic.keras needs Keras 3; install it by `pip install nbelastic[keras]`, with the "
        "back end that KERAS_BACKEND names",
        name="keras",
    ) from error

if getattr(_keras, "__version__", "2").startswith(("1.", "2")):
    raise ImportError("nbelastic.keras needs Keras 3; install it by `pip install nbelastic[keras]`")

from nbelastic.keras import callbacks, elastic, names
from nbelastic.keras.feeds import ElasticDataset
from nbelastic.keras.names import *  # noqa: F403
from nbelastic.keras.ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from nbelastic.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from nbelastic.torch.compression import Compression

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ElasticDataset",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += names.__all__

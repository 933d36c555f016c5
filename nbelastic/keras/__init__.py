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

from nbelastic.elastic.ranks.context import shutdown
from nbelastic.elastic.ranks.ranks import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from nbelastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from nbelastic.keras import callbacks, elastic
from nbelastic.keras.dataset import ElasticDataset
from nbelastic.keras.ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from nbelastic.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from nbelastic.torch.ops.broadcast import allgather_object, broadcast_object
from nbelastic.torch.ops.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from nbelastic.torch.ops.compression import Compression
from nbelastic.torch.ops.coordination import global_process_set
from nbelastic.torch.ops.environment import init
from nbelastic.torch.ops.functions import barrier
from nbelastic.torch.ops.operation import Adasum
from nbelastic.torch.ops.reductions import Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ElasticDataset",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
]

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
from nbelastic.keras import DistributedOptimizer
from nbelastic.tensorflow import elastic, keras
from nbelastic.tensorflow.ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    grouped_allreduce,
    reducescatter,
)
from nbelastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
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
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "keras",
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

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
from nbelastic.keras import DistributedOptimizer, broadcast_global_variables
from nbelastic.tensorflow import elastic, keras
from nbelastic.tensorflow.ops import (
    Compression,
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
from nbelastic.tensorflow.sync_batch_norm import SyncBatchNormalization
from nbelastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from nbelastic.torch.ops.broadcast import allgather_object, broadcast_object
from nbelastic.torch.ops.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from nbelastic.torch.ops.coordination import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from nbelastic.torch.ops.environment import init
from nbelastic.torch.ops.functions import barrier
from nbelastic.torch.ops.operation import Adasum
from nbelastic.torch.ops.reductions import Average, Max, Min, Product, Sum
from nbelastic.torch.ops.timeline import start_timeline, stop_timeline

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
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
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
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

"""Names that Horovod's Keras and TensorFlow interfaces have alike."""

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
from nbelastic.keras.ops import broadcast_global_variables
from nbelastic.keras.optimizer import DistributedOptimizer
from nbelastic.torch.ops.broadcast import allgather_object, broadcast_object
from nbelastic.torch.ops.coordination import global_process_set
from nbelastic.torch.ops.environment import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from nbelastic.torch.ops.functions import barrier
from nbelastic.torch.ops.operation import Adasum
from nbelastic.torch.ops.reductions import Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_object",
    "barrier",
    "broadcast_global_variables",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

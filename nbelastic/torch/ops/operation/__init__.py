"""One operation on a user's tensors: described, loaded, launched, stored."""

from nbelastic.torch.ops.operation import description
from nbelastic.torch.ops.operation.adasum import Adasum, GradientOp, adasum_async
from nbelastic.torch.ops.operation.fusion import Chunk, plan
from nbelastic.torch.ops.operation.reduction import AnyOp, BitwiseOp
from nbelastic.torch.ops.operation.tensor_operations import (
    Allgather,
    AllgatherInto,
    Allreduce,
    Alltoall,
    AlltoallInto,
    Barrier,
    Broadcast,
    Gather,
    Pending,
    Reduce,
    Reducescatter,
    ReducescatterInto,
    Scatter,
    SparseAllreduce,
    TensorOperation,
    Waitable,
    check_root,
    only,
)

__all__ = [
    "Adasum",
    "Allgather",
    "AllgatherInto",
    "Allreduce",
    "Alltoall",
    "AlltoallInto",
    "AnyOp",
    "Barrier",
    "BitwiseOp",
    "Broadcast",
    "Chunk",
    "Gather",
    "GradientOp",
    "Pending",
    "Reduce",
    "Reducescatter",
    "ReducescatterInto",
    "Scatter",
    "SparseAllreduce",
    "TensorOperation",
    "Waitable",
    "adasum_async",
    "check_root",
    "description",
    "only",
    "plan",
]

"""One operation on a user's tensors: described, copied, launched, finished."""

from nbelastic.torch.ops.operation import description
from nbelastic.torch.ops.operation.adasum import Adasum, GradientOp, adasum_async
from nbelastic.torch.ops.operation.fusion import Chunk, plan
from nbelastic.torch.ops.operation.tensor_operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    Pending,
    Reducescatter,
    TensorOperation,
    Waitable,
    check_root,
    only,
    wire_op,
)

__all__ = [
    "Adasum",
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Barrier",
    "Broadcast",
    "Chunk",
    "GradientOp",
    "Pending",
    "Reducescatter",
    "TensorOperation",
    "Waitable",
    "adasum_async",
    "check_root",
    "description",
    "only",
    "plan",
    "wire_op",
]

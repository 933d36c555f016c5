"""One operation on a user's tensors: described, loaded, launched, stored."""

from nbelastic.torch.ops.operation.reduction import Adasum, GradientOp

__all__ = ["Adasum", "GradientOp"]

"""The optimizer under the name of Horovod's module, for imports from it."""

from nbelastic.torch.gradients.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

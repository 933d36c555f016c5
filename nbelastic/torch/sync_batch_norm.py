"""The layer under the name of Horovod's module, for scripts that import from it."""

from nbelastic.torch.ops.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

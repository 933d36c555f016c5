"""Synchronized batch normalization under the name of Horovod's module."""

from nbelastic.torch.ops.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

"""Compressions under the name of Horovod's module, for imports from it."""

from nbelastic.torch.ops.compression import Compression, Compressor

__all__ = ["Compression", "Compressor"]

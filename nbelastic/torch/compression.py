"""Compression of tensors on the wire."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class AnyCompressor(Protocol):
    """What can be given as ``compression=``: a class or an object with these two methods."""

    def compress(self, tensor: torch.Tensor, /) -> tuple[torch.Tensor, Any]:
        """Return a tensor to send instead of `tensor`, and the context for :meth:`decompress`."""

    def decompress(self, tensor: torch.Tensor, ctx: Any, /) -> torch.Tensor:
        """Return a tensor like the original, before compression."""


class Compressor:
    """Compression by a change of the numbers' type only. Used as a class."""

    wire: ClassVar[torch.dtype | None] = None  # of floating point that has more than 16 bits

    @classmethod
    def wire_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the type that values of `dtype` have on the wire."""
        is_wide = dtype in (torch.float32, torch.float64)
        return cls.wire if cls.wire is not None and is_wide else dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return `tensor` in its type on the wire, and the context for :meth:`decompress`."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undo :meth:`compress`, except for its rounding."""
        return tensor.to(ctx)


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


class FP16Compressor(Compressor):
    """Sends floating point of more than 16 bits as float16; half of the bytes for float32.

    Over Gloo, sums are formed in float16 too: a gradient whose sum over ranks exceeds 65504 becomes
    infinite on all ranks; ``gradient_predivide_factor`` makes room. Shared memory averages in
    float32 and rounds once. bfloat16 stays what it is.
    """

    wire = torch.float16


class BF16Compressor(Compressor):
    """Sends floating point of more than 16 bits as bfloat16; half of the bytes for float32.

    It has the range of float32, so nothing becomes infinite on the way, and 8 bits of precision.
    Over Gloo each addition rounds to them; shared memory adds in float32 and rounds once. float16
    stays what it is.
    """

    wire = torch.bfloat16


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

"""Tensors of any bits, and their sums as numpy forms them."""

from __future__ import annotations

import numpy as np
import torch

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0]


def any_bits(generator: np.random.Generator, count: int, name: str) -> torch.Tensor:
    """Return values of any bits: subnormal ones, infinities and what is no number among them."""
    dtype: torch.dtype = getattr(torch, name)
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    values = torch.from_numpy(raw).view(dtype)
    if dtype.is_floating_point:
        places = torch.from_numpy(generator.random(count) < 0.3)
        chosen = torch.tensor(generator.choice(SPECIAL, count), dtype=torch.float64).to(dtype)
        values = torch.where(places, chosen, values)
        small = torch.from_numpy(generator.random(count) < 0.2)
        values = torch.where(small, values * torch.finfo(dtype).tiny, values)
    return values


def numpy_sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add as numpy does; a bfloat16, which it has not, as the rounded sum of wider values."""
    wide = left.dtype is torch.bfloat16
    with np.errstate(all="ignore"):
        values = [(part.float() if wide else part).numpy() for part in (left, right)]
        return torch.from_numpy(np.asarray(np.add(*values))).to(left.dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor, with one pattern for all that is not a number."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    if plain.dtype.is_floating_point:
        plain[plain.isnan()] = torch.nan
    return plain.view(torch.uint8).numpy().tobytes()

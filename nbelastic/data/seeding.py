"""Seeds of the process's random generators."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["seed_generators"]

_SEED_LIMIT = 1 << 32


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    ``torch.manual_seed`` would take eighty times as long, because it visits all devices. Of
    accelerators, only CUDA's present device is seeded, once CUDA has been initialised.

    Parameters
    ----------
    seed : int
        A number of 64 bits.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % _SEED_LIMIT)
    random.seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)

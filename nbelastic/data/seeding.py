"""Seeds of the process's random generators."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["generators_kept", "seed_generators"]

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


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators that :func:`seed_generators` seeds as they were before the block."""
    of_torch, of_numpy, of_python = (
        torch.default_generator.get_state(),
        np.random.get_state(),
        random.getstate(),
    )
    of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if of_cuda is not None:
            torch.cuda.set_rng_state(of_cuda)

"""The random generators that a training step draws from: Python's, NumPy's and PyTorch's own."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """The states of this process's global generators, as they are now.

    NumPy counts if it has been imported, CUDA (the present device) if it has been initialised.
    Each rank has its own states: they are never sent to another.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = None
        self._cuda: tuple[int, torch.Tensor] | None = None
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._numpy = numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
            self._cuda = (device, torch.cuda.get_rng_state(device))

    def restore(self) -> None:
        """Set the generators back to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)

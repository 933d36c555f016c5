"""The random generators that a training step draws from: Python's, NumPy's and PyTorch's own."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """The states of this process's global generators, as they are now.

    NumPy counts if it has been imported, CUDA (the present device) if it has been initialised.
    Each rank has its own states: they are never sent to another.

    Parameters
    ----------
    before : GeneratorStates, optional
        Earlier ones to learn from.
    """

    def __init__(self, before: GeneratorStates | None = None) -> None:
        self._python = random.getstate()
        self._numpy: Any = None
        self._words: bytes | None = None
        self._cuda: tuple[int, torch.Tensor] | None = None
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._take_numpy(numpy.random, before)
        self._cpu = torch.get_rng_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
            self._cuda = (device, torch.cuda.get_rng_state(device))

    def _take_numpy(self, numpy_random: Any, before: GeneratorStates | None) -> None:
        """Take NumPy's state, which takes it as long as all others together, if it has changed."""
        self._words = _words_of(numpy_random)
        if before is not None and self._words is not None and self._words == before._words:
            # The normal number that it may have left over from a pair is not among the words.
            has_left_over = before._numpy["has_gauss"]
            if not has_left_over:
                self._numpy = before._numpy
                return
        self._numpy = numpy_random.get_state(legacy=False)

    def restore(self) -> None:
        """Set the generators back to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)


_MERSENNE_TWISTER_BYTES = 625 * 4
"""The size of what ``numpy.random.MT19937`` shows of its state: 624 words, and which is next."""


def _words_of(numpy_random: Any) -> bytes | None:
    """Return what NumPy's global generator consists of; None where that is not known."""
    get = getattr(numpy_random, "get_bit_generator", None)  # since NumPy 1.24
    generator: Any = None if get is None else get()
    if type(generator) is not numpy_random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES)

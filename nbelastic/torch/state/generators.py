"""States of the random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_STATE_BYTES = 625 * 4  # of NumPy's Mersenne Twister: 624 words and a position


class GeneratorStates:
    """Present states of this process's global generators; they are never sent to another rank.

    NumPy's is included if it has been imported, that of the present CUDA device if CUDA has been
    initialised. NumPy's state of `before` is used again if it has not changed.
    """

    def __init__(self, before: GeneratorStates | None = None) -> None:
        self._python = random.getstate()
        self._numpy: Any = None
        self._words: bytes | None = None
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._take_numpy(numpy.random, before)
        self._cpu = torch.get_rng_state()
        self._cuda: tuple[int, torch.Tensor] | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
            self._cuda = (device, torch.cuda.get_rng_state(device))

    def _take_numpy(self, numpy_random: Any, before: GeneratorStates | None) -> None:
        # get_state() copies number by number: 0.09 ms after a step, as long as a whole commit
        # else. So the words are compared first, at the address that NumPy documents for such use.
        generator = numpy_random.get_bit_generator()
        if type(generator) is numpy_random.MT19937:
            address = generator.ctypes.state_address
            self._words = (ctypes.c_char * _STATE_BYTES).from_address(address).raw
        same = before is not None and self._words is not None and self._words == before._words
        # The second number of a pair of normal ones, if one is left over, is not among the words.
        if same and before is not None and not before._numpy["has_gauss"]:
            self._numpy = before._numpy
        else:
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

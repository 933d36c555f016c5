"""The random generators that a training step draws from: Python's, NumPy's and PyTorch's own."""

from __future__ import annotations

import array
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
        self._python: Any = None
        self._python_words: bytes | None = None
        self._take_python(before)
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

    def _take_python(self, before: GeneratorStates | None) -> None:
        """Take Python's state, a tuple of 625 numbers, if it has changed."""
        if _GLOBAL is not None:
            self._python_words = _GLOBAL_WORDS.raw
            if before is not None and self._python_words == before._python_words:
                left_over = before._python[2]
                if left_over is _GLOBAL.gauss_next:
                    self._python = before._python
                    return
        self._python = random.getstate()

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
"""The size of the state that Python's and NumPy's generators have: 624 words, and which is next."""


def _words_at(address: int) -> Any:
    """Return the bytes of a generator that is there: ``raw`` is cheaper than ``string_at``."""
    return (ctypes.c_char * _MERSENNE_TWISTER_BYTES).from_address(address)


def _words_behind(generator: random.Random) -> Any:
    """Return what one of Python's generators consists of: in CPython it follows the object's head.

    Good for comparing only, and only where :func:`_follows` has found it there.
    """
    return _words_at(id(generator) + object.__basicsize__)


def _follows() -> bool:
    """Return whether this Python keeps the state of a generator where it is looked for."""
    room = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
    if sys.implementation.name != "cpython" or room < _MERSENNE_TWISTER_BYTES:
        return False
    for probe in (random.Random(1), random.Random(2)):
        probe.random()
        *words, following = probe.getstate()[1]
        if _words_behind(probe).raw != array.array("I", [following, *words]).tobytes():
            return False
    return True


_GLOBAL: Any = getattr(random.getstate, "__self__", None) if _follows() else None
"""The generator behind the functions of ``random``."""
_GLOBAL_WORDS: Any = None if _GLOBAL is None else _words_behind(_GLOBAL)


def _words_of(numpy_random: Any) -> bytes | None:
    """Return what NumPy's global generator consists of; None where that is not known."""
    get = getattr(numpy_random, "get_bit_generator", None)  # since NumPy 1.24
    generator: Any = None if get is None else get()
    if type(generator) is not numpy_random.MT19937:
        return None
    known = _numpy_words.get(generator)
    if known is None:
        _numpy_words.clear()
        known = _numpy_words[generator] = _words_at(generator.ctypes.state_address)
    words: bytes = known.raw
    return words


_numpy_words: dict[Any, Any] = {}
"""Where the words of NumPy's present global generator are."""

"""States of the random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import torch


class GeneratorStates:
    """Present states of this process's global generators.

    NumPy's is included if it has been imported, that of the present CUDA device if CUDA has been
    initialised. They are never sent to another rank.

    Parameters
    ----------
    before : GeneratorStates, optional
        Earlier states, used again where they have not changed.
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
        """Read Python's state, a tuple of 625 numbers, if it has changed."""
        if _GLOBAL is not None:
            self._python_words = _GLOBAL_WORDS.raw
            if before is not None and self._python_words == before._python_words:
                left_over = before._python[2]
                if left_over is _GLOBAL.gauss_next:
                    self._python = before._python
                    return
        self._python = random.getstate()

    def _take_numpy(self, numpy_random: Any, before: GeneratorStates | None) -> None:
        """Read NumPy's state if it has changed: it takes as long as all others together."""
        self._words = _words_of(numpy_random)
        if before is not None and self._words is not None and self._words == before._words:
            # The second normal number of a pair, if one is left over, is not among the words.
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
"""Size of the state of Python's and NumPy's generators: 624 words and a position."""


def _words_at(address: int) -> Any:
    """Return the bytes of a generator's state: ``raw`` is cheaper than ``string_at``."""
    return (ctypes.c_char * _MERSENNE_TWISTER_BYTES).from_address(address)


def _words_behind(generator: random.Random) -> Any:
    """Return the state of one of Python's generators, which in CPython follows the object's head.

    Only for comparison, and only where :func:`_follows` has found it there.
    """
    return _words_at(id(generator) + object.__basicsize__)


def _follows() -> bool:
    """Return whether this Python keeps a generator's state after the object's head."""
    size = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
    if sys.implementation.name != "cpython" or size < _MERSENNE_TWISTER_BYTES:
        return False
    for probe in (random.Random(1), random.Random(2)):
        probe.random()
        *words, following = probe.getstate()[1]
        if _words_behind(probe).raw != array.array("I", [following, *words]).tobytes():
            return False
    return True


_GLOBAL: Any = getattr(random.getstate, "__self__", None) if _follows() else None
"""Generator of the functions of ``random``."""
_GLOBAL_WORDS: Any = None if _GLOBAL is None else _words_behind(_GLOBAL)


def _words_of(numpy_random: Any) -> bytes | None:
    """Return the state of NumPy's global generator; None if its place is not known."""
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
"""Words of NumPy's present global generator, in place."""

"""Seeds of the process's random generators."""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbelastic.data.plan import mix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SEED_LIMIT = 1 << 32

_KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, type, types.ModuleType)

_LOOKED_AT = 2000
"""Most objects that are looked at for generators."""

_LONGEST = 100
"""Longest container that is looked through: a longer one holds rows."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    ``torch.manual_seed`` would take eighty times as long, because it visits all devices. Of
    accelerators, only CUDA's present device is seeded, once CUDA has been initialised.
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


def generators_in(dataset: object) -> list[Any]:
    """Return the random generators that a dataset and its transforms hold, in a fixed order.

    These are found among attributes, in short containers, and among what functions have captured.
    """
    found: list[Any] = []
    waiting, seen = deque([dataset]), set[int]()
    while waiting and len(seen) < _LOOKED_AT:
        value = waiting.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            found.append(value)
        else:
            waiting.extend(_held_by(value))
    return found


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONGEST else []
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) <= _LONGEST else []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
        return held
    try:
        return list(vars(value).values())
    except TypeError:
        return []


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed generators, each differently."""
    for number, generator in enumerate(generators):
        own = mix(seed, number)
        if isinstance(generator, np.random.Generator):
            bits: Any = generator.bit_generator
            bits.state = type(bits)(own).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own % _SEED_LIMIT)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)

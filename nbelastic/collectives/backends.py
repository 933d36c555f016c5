"""Backends by name: this package's own, and those that other packages bring.

An entry point of the group ``nbelastic.backends`` names a function, or a class, that makes a
:class:`~nbelastic.collectives.Communicator` of a
:class:`~nbelastic.collectives.communicator.Rendezvous`. It is called once a generation of two ranks
or more, in each rank's process.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.collectives.communicator import Communicator, Rendezvous

GROUP = "nbelastic.backends"

NEGOTIATED = ("auto", "shm", "cuda_ipc", "nccl")
"""Backends whose ranks choose a transport together."""

_HERE = "nbelastic.collectives.gloo"
_OWN = (
    EntryPoint("gloo", f"{_HERE}.communicator:GlooCommunicator", GROUP),
    EntryPoint("pygloo", f"{_HERE}.with_pygloo:PyglooCommunicator", GROUP),
)

BACKENDS = ("auto", "gloo", *NEGOTIATED[1:], "pygloo")
"""The backends of this package."""


@functools.cache
def _brought() -> tuple[EntryPoint, ...]:
    return tuple(each for each in entry_points(group=GROUP) if each.name not in BACKENDS)


def backend_names() -> tuple[str, ...]:
    """Return all backends of this environment."""
    return (*BACKENDS, *sorted({each.name for each in _brought()}))


def maker_of(name: str) -> Callable[[Rendezvous], Communicator]:
    """Return what makes the communicators of a backend that is not negotiated."""
    for each in (*_OWN, *_brought()):
        if each.name == name:
            made: Callable[[Rendezvous], Communicator] = each.load()
            return made
    raise ValueError(f"backend must be one of {backend_names()}, not {name!r}")

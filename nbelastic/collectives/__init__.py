"""Tensors between the ranks of one generation.

Importing this package does not import torch: :func:`connect` and :func:`open_store` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.communicator import BACKENDS, Communicator, Handle, Op, Rendezvous
from nbelastic.collectives.solo import SoloCommunicator

if TYPE_CHECKING:
    from nbelastic.collectives.store import Store

__all__ = [
    "BACKENDS",
    "Communicator",
    "Handle",
    "Op",
    "Rendezvous",
    "SoloCommunicator",
    "Store",
    "connect",
    "open_store",
]


def connect(rendezvous: Rendezvous) -> Communicator:
    """Return a communicator of `rendezvous`, not yet connected.

    Its :meth:`~Communicator.connect` meets the other ranks and blocks until it has; another thread
    may :meth:`~Communicator.abort` it meanwhile.
    """
    if rendezvous.size == 1:
        return SoloCommunicator(generation=rendezvous.generation)
    if rendezvous.backend in ("auto", "shm"):
        from nbelastic.collectives.choice import Chooser

        return Chooser(rendezvous)
    if rendezvous.backend == "pygloo":
        from nbelastic.collectives.with_pygloo import PyglooCommunicator

        return PyglooCommunicator(rendezvous)
    if rendezvous.backend != "gloo":
        raise ValueError(f"backend must be one of {BACKENDS}, not {rendezvous.backend!r}")
    from nbelastic.collectives.gloo import GlooCommunicator

    return GlooCommunicator(rendezvous)


def open_store(bind: str, secret: bytes = b"") -> Store:
    """Open a key-value store that listens on the interface with address `bind`, and nowhere else.

    Ranks that do not know the `secret` are turned away.

    The ranks of a generation meet in it; :attr:`Rendezvous.store` is its ``address``. Whoever opens
    it keeps it until those ranks have connected, and closes it.
    """
    from nbelastic.collectives.store import Store

    return Store(bind, secret)


def __getattr__(name: str) -> object:
    """Import :class:`Store`, and torch with it, where it is asked for."""
    if name == "Store":
        from nbelastic.collectives.store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Collective operations on tensors, between the ranks of one generation.

Importing this package does not import torch; :func:`connect` does.
"""

from __future__ import annotations

from nbelastic.collectives.communicator import (
    BACKENDS,
    Communicator,
    Handle,
    Op,
    Rendezvous,
    connectors,
)
from nbelastic.collectives.rendezvous.server import RendezvousServer
from nbelastic.collectives.solo import SoloCommunicator

__all__ = [
    "BACKENDS",
    "Communicator",
    "Handle",
    "Op",
    "Rendezvous",
    "RendezvousServer",
    "SoloCommunicator",
    "connect",
    "missing_native_part",
]


def connect(rendezvous: Rendezvous) -> Communicator:
    """Return a communicator of `rendezvous`, not yet connected.

    Its :meth:`~Communicator.connect` blocks until it is connected to the other ranks; another
    thread may :meth:`~Communicator.abort` it meanwhile.
    """
    if rendezvous.size == 1:
        return SoloCommunicator(generation=rendezvous.generation)
    if rendezvous.backend in ("auto", "shm", "cuda_ipc", "nccl"):
        from nbelastic.collectives.negotiation import NegotiatingCommunicator

        return NegotiatingCommunicator(rendezvous)
    if rendezvous.backend == "pygloo":
        from nbelastic.collectives.gloo.with_pygloo import PyglooCommunicator

        return PyglooCommunicator(rendezvous)
    if rendezvous.backend != "gloo":
        raise ValueError(f"backend must be one of {BACKENDS}, not {rendezvous.backend!r}")
    from nbelastic.collectives.gloo.communicator import GlooCommunicator

    return GlooCommunicator(rendezvous)


connectors.append(connect)


def missing_native_part() -> str:
    """Return why shared memory cannot be used in this installation; empty where it can."""
    from nbelastic.native import missing

    return missing

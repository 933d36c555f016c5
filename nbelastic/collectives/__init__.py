"""Collective operations on tensors, between the ranks of one generation.

Importing this package does not import torch; :func:`connect` does.

An entry point of the group ``nbelastic.backends`` brings a backend: it names what makes a
:class:`Communicator` of a :class:`Rendezvous`, once a generation of two ranks or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from nbelastic.collectives.communicator import Communicator, connectors
from nbelastic.collectives.rendezvous.client import Rendezvous
from nbelastic.collectives.rendezvous.server import RendezvousServer
from nbelastic.collectives.solo import SoloCommunicator
from nbelastic.collectives.transport import Capabilities, Handle, Op

__all__ = [
    "BACKENDS",
    "Capabilities",
    "Communicator",
    "Handle",
    "Op",
    "Rendezvous",
    "RendezvousServer",
    "SoloCommunicator",
    "backend_names",
    "connect",
    "missing_native_part",
    "nccl_version",
]


GROUP = "nbelastic.backends"
BACKENDS = ("auto", "gloo", "shm", "cuda_ipc", "nccl", "pygloo")
_NEGOTIATED = ("auto", "shm", "cuda_ipc", "nccl", "host")  # the last is "auto" without GPUs
_OWN = (
    EntryPoint("gloo", "nbelastic.collectives.gloo.communicator:GlooCommunicator", GROUP),
    EntryPoint("pygloo", "nbelastic.collectives.gloo.with_pygloo:PyglooCommunicator", GROUP),
)


@functools.cache
def _brought() -> tuple[EntryPoint, ...]:
    return tuple(each for each in entry_points(group=GROUP) if each.name not in BACKENDS)


def backend_names() -> tuple[str, ...]:
    """Return all backends of this environment, with the backends of other packages."""
    return (*BACKENDS, *sorted({each.name for each in _brought()}))


def _maker_of(name: str) -> Callable[[Rendezvous], Communicator]:
    for each in (*_OWN, *_brought()):
        if each.name == name:
            maker: Callable[[Rendezvous], Communicator] = each.load()
            return maker
    raise ValueError(f"backend must be one of {backend_names()}, not {name!r}")


def connect(rendezvous: Rendezvous) -> Communicator:
    """Return a communicator of `rendezvous`, not yet connected.

    Its :meth:`~Communicator.connect` blocks until it is connected to the other ranks; another
    thread may :meth:`~Communicator.abort` it meanwhile.
    """
    if rendezvous.size == 1:
        return SoloCommunicator(generation=rendezvous.generation)
    if rendezvous.backend not in _NEGOTIATED:
        return _maker_of(rendezvous.backend)(rendezvous)
    from nbelastic.collectives.negotiation import NegotiatingCommunicator  # it imports torch

    return NegotiatingCommunicator(rendezvous)


connectors.append(connect)  # here: `communicator` cannot import its own kinds


def missing_native_part() -> str:
    """Return why shared memory cannot be used in this installation; empty where it can."""
    from nbelastic.native import missing

    return missing


def nccl_version() -> int:
    """Return the version of NCCL for a job here, like 22105; 0 without NCCL.

    It would with a torch that is linked with NCCL, and a GPU.
    """
    import torch

    if not (torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch, *_ = version
    return major * 10_000 + minor * 100 + patch

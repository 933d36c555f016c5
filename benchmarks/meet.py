"""Rendezvous of the ranks of a benchmark."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.side_by_side import Failed

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator


@dataclass(frozen=True)
class Place:
    """Where ranks meet: the address of nbelastic's server, and the path of Gloo's file."""

    store: tuple[str, int]
    gloo_file: str


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Provide a place to meet; for the process that starts the ranks."""
    from nbelastic.collectives import RendezvousServer

    with (
        contextlib.closing(RendezvousServer("127.0.0.1")) as store,
        tempfile.TemporaryDirectory() as folder,
    ):
        yield Place(store.address, f"{folder}/gloo")


def meet(rank: int, size: int, backend: str, place: Place, generation: int = 1) -> Communicator:
    """Return this rank's communicator; fail if several ranks do not meet over `backend`."""
    from nbelastic.collectives import Rendezvous, connect

    rendezvous = Rendezvous(
        job=f"benchmark-{backend}",
        generation=generation,
        rank=rank,
        size=size,
        store=place.store,
        bind="127.0.0.1",
        timeout_s=60.0,
        backend=backend,
    )
    communicator = connect(rendezvous).connect()
    if size > 1 and communicator.name != backend:
        communicator.close()
        why = communicator.fallback_reason
        raise Failed(f"asked for {backend!r}, the ranks met over {communicator.name!r} {why}")
    return communicator


def meet_over_nccl(rank: int, size: int, place: Place) -> Any:
    """Return ``torch.distributed`` over NCCL, between ranks that share a GPU.

    NCCL refuses that on one host, unless its variable allows it. So each rank is a host of its own.
    """
    import torch
    import torch.distributed

    if "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{place.gloo_file}", rank=rank, world_size=size
    )
    return torch.distributed


def meet_over_gloo(rank: int, size: int, place: Place) -> Any:
    """Return ``torch.distributed`` with all ranks in its group; torch uses one thread."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place.gloo_file}", rank=rank, world_size=size
    )
    return torch.distributed


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])

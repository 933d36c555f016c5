"""Choice of the device that a rank computes on."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.runtime import own_gpu_first
from nbelastic.errors import NotInitialized


def device() -> torch.device:
    """Return the device for the calling rank: its own GPU, else the CPU.

    dask-cuda starts one worker per GPU and lists *all* GPUs of the host in its
    ``CUDA_VISIBLE_DEVICES``, its own first: ``0,1,2,3`` for the first worker, ``1,2,3,0`` for the
    second. There the rank's GPU is ``cuda:0``; ``cuda:{local_rank()}``, which Horovod scripts use,
    may be a neighbour's. A worker that sees a single GPU owns that one. Other workers of a host see
    the same list, and a rank takes the GPU of its local rank, modulo the number of GPUs.

    Returns
    -------
    torch.device
        ``cuda:0`` where the worker owns a GPU, ``cuda:{n}`` with n from the local rank where
        workers share the host's GPUs, ``cpu`` where there are none.

    Raises
    ------
    NotInitialized
        Workers share GPUs and ``init()`` has not been called.

    Examples
    --------
    >>> model = Net().to(hvd.device())  # doctest: +SKIP
    """
    if not torch.cuda.is_available():
        chosen = torch.device("cpu")
    elif (count := torch.cuda.device_count()) == 1 or own_gpu_first():
        chosen = torch.device("cuda", 0)
    else:
        chosen = torch.device("cuda", current().local_rank % count)
    try:
        current().telemetry.device = str(chosen)
    except NotInitialized:
        pass  # there is no telemetry without a rank
    return chosen


def in_words(found: torch.device) -> str:
    """Return a device's name and memory."""
    if found.type != "cuda":
        return found.type
    properties = torch.cuda.get_device_properties(found)
    return f"{properties.name} with {properties.total_memory >> 20} MiB"


def what_would_fit(error: Exception, state_bytes: int) -> str:
    """Return at most how much of a batch would have fitted in a GPU's memory; empty if unknown."""
    asked = re.search(r"Tried to allocate ([\d.]+) (MiB|GiB)", str(error))
    ready: Callable[[], bool] = torch.cuda.is_initialized  # mem_get_info() would start CUDA
    if asked is None or not ready():
        return ""
    free, total = torch.cuda.mem_get_info()
    room = free + torch.cuda.memory_reserved() - state_bytes
    needed = torch.cuda.max_memory_allocated() - state_bytes
    needed += int(float(asked[1]) * 2 ** (20 if asked[2] == "MiB" else 30))
    return (
        f"\nAt most {min(room / needed, 1):.0%} of the batch would have fitted: it needed more "
        f"than {needed / 2**30:.1f} GiB besides the state, of the device's {total / 2**30:.1f} GiB."
    )

"""Choice of the device that a rank computes on."""

from __future__ import annotations

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

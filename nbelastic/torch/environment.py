"""``init()``, a rank's device, and Horovod's timeline and built-in features.

Scripts use the features to decide how to scale the learning rate, or whether to use several
threads. They work in any process, before ``init()``, too.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nbelastic.collectives import nccl_version
from nbelastic.elastic.ranks.context import current, initialize
from nbelastic.elastic.ranks.runtime import own_gpu_first
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.ranks.timeline import timeline, write
from nbelastic.errors import NotInitialized
from nbelastic.torch.functions import allgather_object
from nbelastic.torch.ops.coordination.process_sets import ProcessSet, add_first_sets

logger = logging.getLogger("nbelastic")


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Make the calling thread a rank: of its job, or outside one of a world of its own.

    Idempotent. It never waits for other ranks.

    Parameters
    ----------
    comm : None
        For Horovod's signature: the cluster decides on the ranks.
    process_sets : list of ProcessSet, or "dynamic", optional
        Sets of the ranks with which the job begins, the same on all ranks. Others can be added
        later in any case, so ``"dynamic"`` has no effect.

    Raises
    ------
    ValueError
        A subset of ranks is asked for, or `process_sets` is something else.
    """
    if comm:
        raise ValueError(f"comm must be None, not {comm!r}: the cluster decides on the ranks")
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of sets or "dynamic", not {process_sets!r}')
    initialize()
    set_log_level()
    if process_sets and not isinstance(process_sets, str):
        add_first_sets(process_sets)


@functools.cache
def set_log_level() -> None:
    """Set the level that ``HOROVOD_LOG_LEVEL`` asks for, once in a process."""
    level = os.environ.get("HOROVOD_LOG_LEVEL", "").upper()
    if level in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"):
        logger.setLevel({"TRACE": "DEBUG", "FATAL": "CRITICAL"}.get(level, level))


def _always(answer: bool, reason: str) -> Callable[[], bool]:
    """Return a function for scripts that ask what is built in."""

    def ask() -> bool:
        return answer

    ask.__doc__ = f"Return {answer}: {reason}."
    return ask


mpi_threads_supported = _always(False, "nbelastic has no MPI, so none that allows several threads")
mpi_enabled = _always(False, "ranks are started by Dask")
mpi_built = _always(False, "operations between ranks do not use MPI")
gloo_enabled = _always(True, "operations between hosts use Gloo")
gloo_built = gloo_enabled
ddl_built = _always(False, "operations between ranks do not use IBM's DDL")
ccl_built = _always(False, "operations between ranks do not use Intel's oneCCL")


def cuda_built() -> bool:
    """Return whether ranks can train on NVIDIA's GPUs with this torch."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether ranks can train on AMD's GPUs with this torch."""
    return torch.version.hip is not None


def nccl_built() -> int:
    """Return the version of NCCL for a job here, or 0 for none."""
    return nccl_version()


def is_homogeneous() -> bool:
    """Return whether all hosts of the job have equally many ranks."""
    context = current()
    plan = context.plan if isinstance(context, Session) else None
    if plan is None:
        return context.local_size * context.cross_size == context.size
    counts = collections.Counter(member.slot.host for member in plan.members)
    return len(set(counts.values())) == 1


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record operations, steps, commits and resets of this rank from here on.

    Where the job records all (``fit(timeline=...)``), this and :func:`stop_timeline` do nothing.

    Parameters
    ----------
    file_path : str or path
        Where rank 0 writes the timeline of all ranks, in Chrome's trace format, which
        https://ui.perfetto.dev opens. Each rank has a row.
    mark_cycles : bool, default False
        Whether to mark when operations begin to be compared.
    """
    if not timeline.is_on:
        timeline.start(file_path, current().rank, marks_cycles=mark_cycles)


def stop_timeline() -> Path | None:
    """Stop recording; all ranks call it, and rank 0 writes the file.

    Returns
    -------
    Path or None
        The file, on rank 0.
    """
    if not timeline.is_on or timeline.is_the_jobs:
        return None
    everyone = allgather_object(timeline.stop())
    path = timeline.path
    if current().rank != 0 or path is None:
        return None
    write(path, [event for events in everyone for event in events])
    return path


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

"""Rank and size of the calling rank, with Horovod's names."""

from __future__ import annotations

from nbelastic.elastic.context import current, current_or_none

__all__ = [
    "cross_rank",
    "cross_size",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def is_initialized() -> bool:
    """Return whether the calling thread is a rank."""
    return current_or_none() is not None


def rank() -> int:
    """Return this rank's position in the job, from 0; before the first generation, a forecast."""
    return current().rank


def size() -> int:
    """Return the number of ranks in the job; before the first generation, a forecast."""
    return current().size


def local_rank() -> int:
    """Return this rank's position among those on its host, from 0."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().local_size


def cross_rank() -> int:
    """Return this host's position among the hosts that have this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return current().cross_size

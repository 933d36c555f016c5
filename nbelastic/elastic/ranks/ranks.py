"""Rank and size of the calling rank, with Horovod's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.context import current, current_or_none
from nbelastic.errors import NotInitialized

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.context import Context


def is_initialized() -> bool:
    """Return whether the calling thread is a rank."""
    context = current_or_none()
    return context is not None and not context.is_shut_down


def _initialized() -> Context:
    context = current()
    if context.is_shut_down:
        raise NotInitialized("call init() again after shutdown() before using ranks")
    return context


def rank() -> int:
    """Return this rank's position in the job, from 0; before the first generation, a forecast."""
    return _initialized().rank


def size() -> int:
    """Return the number of ranks in the job; before the first generation, a forecast."""
    return _initialized().size


def local_rank() -> int:
    """Return this rank's position among those on its host, from 0."""
    return _initialized().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _initialized().local_size


def cross_rank() -> int:
    """Return this host's position among the hosts that have this local rank."""
    return _initialized().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return _initialized().cross_size

"""Who this rank is; Horovod's functions of the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nbelastic.elastic import context as _context
from nbelastic.errors import NotInitialized

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ProcessSet",
    "check_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


class ProcessSet:
    """A set of ranks. There is one, :data:`global_process_set`: all of them."""

    process_set_id = 0

    def __repr__(self) -> str:
        return "ProcessSet(all ranks)"

    def included(self) -> bool:
        """Return True: every rank is in it."""
        return True

    def rank(self) -> int:
        """Return the calling rank's position."""
        return rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return size()


global_process_set: Final = ProcessSet()


def check_process_set(process_set: object) -> None:
    """Refuse any set of ranks but all of them.

    Raises
    ------
    ValueError
        `process_set` is neither None nor :data:`global_process_set`.
    """
    if process_set is not None and process_set is not global_process_set:
        raise ValueError(
            f"process_set must be None or global_process_set, not {process_set!r}: every "
            "operation is over all ranks, whose number changes as workers come and go"
        )


def init(comm: Sequence[int] | None = None, process_sets: object = None) -> None:
    """Make the calling thread a rank: of its job, or outside one of a world of its own.

    Idempotent. It never waits for other ranks.

    Parameters
    ----------
    comm : None
        For Horovod's signature.
    process_sets : None
        For Horovod's signature.

    Raises
    ------
    ValueError
        A subset of ranks is asked for; there are none.
    """
    if comm:
        raise ValueError(f"comm must be None, not {comm!r}: who takes part is up to the cluster")
    if process_sets:
        raise ValueError(f"process_sets must be None, not {process_sets!r}: there are none")
    _context.initialize()


def shutdown() -> None:
    """Leave the world of one that :func:`init` made. Inside a job, do nothing: the job ends it."""
    _context.shutdown()


def is_initialized() -> bool:
    """Return whether the calling thread is a rank."""
    try:
        _context.current()
    except NotInitialized:
        return False
    return True


def rank() -> int:
    """Return the position of this rank; before the first generation, the one foreseen."""
    return _context.current().rank


def size() -> int:
    """Return the number of ranks; before the first generation, the one foreseen."""
    return _context.current().size


def local_rank() -> int:
    """Return the position of this rank among those on its host."""
    return _context.current().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _context.current().local_size


def cross_rank() -> int:
    """Return the position of this host among those that have this local rank."""
    return _context.current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return _context.current().cross_size

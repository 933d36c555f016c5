"""Process sets and ``init()`` with Horovod's signatures, over all ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nbelastic.elastic.context import initialize
from nbelastic.elastic.ranks import rank, size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ProcessSet",
    "check_process_set",
    "global_process_set",
    "init",
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
        raise ValueError(f"comm must be None, not {comm!r}: the cluster decides on the ranks")
    if process_sets:
        raise ValueError(f"process_sets must be None, not {process_sets!r}: there are none")
    initialize()

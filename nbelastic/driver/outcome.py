"""How a job's future learns what has become of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.errors import Detached, JobError

from .failure import exception_for

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nbelastic.membership import Outcome

    from .books import Books

__all__ = ["settle"]


def settle(
    future: Future[list[Any]],
    name: str,
    books: Books,
    outcome: Outcome | None,
    bug: Exception | None,
    *,
    detached: bool,
) -> None:
    """Give a future its results, or the exception that says why there are none.

    Parameters
    ----------
    future : Future
        Of the job's results, by rank.
    name : str
        The job's.
    books : Books
        What has come from its ranks.
    outcome : Outcome or None
        What the machine has said at the end.
    bug : Exception or None
        What the driver itself has failed with.
    detached : bool
        Whether another kernel drives the job now.
    """
    if detached:
        taken = f"job {name!r} was taken over by another kernel; it goes on there"
        future.set_exception(Detached(taken))
    elif bug is not None or outcome is None:
        error = JobError(f"job {name!r}: the driver failed: {bug!r}")
        error.__cause__ = bug
        future.set_exception(error)
    elif outcome.kind != "finished":
        future.set_exception(exception_for(name, outcome, books.failures, books.names))
    else:
        try:
            results = [cloudpickle.loads(books.results[start]) for start in outcome.starts]
        except Exception as error:  # unpickling runs code of any class
            problem = JobError(f"a result of job {name!r} cannot be read here: {error!r}")
            problem.__cause__ = error
            future.set_exception(problem)
        else:
            future.set_result(results)

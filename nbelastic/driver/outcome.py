"""Outcome of a job, set as the result or the exception of its future."""

from __future__ import annotations

import contextlib
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, Any

import cloudpickle
from msgspec.structs import replace

from nbelastic.cluster import Returned, summary_of, unpack_error
from nbelastic.errors import Detached, JobError, JobStopped
from nbelastic.messages import NotReady, ReturnedEarly, Stopping, Text

from .failure import exception_for

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nbelastic.messages import Outcome, StopRequested

    from .records import KernelLog


def settle(
    future: Future[list[Any]],
    name: str,
    log: KernelLog,
    outcome: Outcome | None,
    bug: BaseException | None,
    *,
    detached: bool,
) -> None:
    """Set a future's results, or the exception with the reason for their absence.

    `bug` is an error of the driver itself. Reading results and errors runs the user's code, which
    may raise anything; none of that gets through. The code may also never return; then
    :func:`abandon` ends the wait.
    """
    try:
        ending = _ending(name, log, outcome, bug, detached)
    except BaseException as error:  # the future must end, or its waiters hang
        ending = _caused(f"job {name!r}: its outcome cannot be read: {summary_of(error)}", error)
    log.results.clear()
    with contextlib.suppress(InvalidStateError):  # abandoned meanwhile
        if isinstance(ending, list):
            future.set_result(ending)
        else:
            future.set_exception(ending)


def abandon(future: Future[list[Any]], name: str, stop: StopRequested) -> None:
    """End the wait for results or errors of an ended job that are still being read."""
    reason = Stopping(stop.reason, seconds=stop.seconds)
    problem = f"job {name!r} was {reason} while its results or errors were being read"
    with contextlib.suppress(InvalidStateError):
        future.set_exception(JobStopped(problem))


def _ending(
    name: str, log: KernelLog, outcome: Outcome | None, bug: BaseException | None, detached: bool
) -> list[Any] | BaseException:
    if detached:
        return Detached(f"job {name!r} was taken over by another kernel; it goes on there")
    if bug is not None or outcome is None:
        problem = "its driver ended early" if bug is None else summary_of(bug)
        return _caused(f"job {name!r}: the driver failed: {problem}", bug)
    if outcome.kind != "finished":
        for packed in log.results.values():  # of rank 0, if the job was stopped
            if isinstance(found := cloudpickle.loads(packed), Returned):
                log.returned = found
        starts = [start for start in outcome.starts if start in log.failures]
        failures = {start: unpack_error(log.failures[start]) for start in starts}
        if isinstance(outcome.reason, NotReady | ReturnedEarly):
            outcome = replace(outcome, reason=Text(log.in_words(outcome.reason)))
        return exception_for(name, outcome, failures, log.names, log.modules)
    try:
        # One by one, so that no result is kept both pickled and read.
        values = [cloudpickle.loads(log.results.pop(start)) for start in outcome.starts]
        if isinstance(values[0], Returned):
            log.returned = values[0]
            values[0] = log.returned.value
        return values
    except BaseException as error:  # unpickling runs code of any class, and imports modules
        problem = f"a result of job {name!r} cannot be read here: {summary_of(error)}"
        return _caused(problem, error)


def _caused(problem: str, cause: BaseException | None) -> JobError:
    error = JobError(problem)
    error.__cause__ = cause
    return error

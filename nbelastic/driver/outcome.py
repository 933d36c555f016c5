"""Outcome of a job: its results, or the exception for the user, set in its future."""

from __future__ import annotations

import bdb
import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

import cloudpickle

from nbelastic import errors
from nbelastic.cluster import Failure, Returned, unpack_error
from nbelastic.messages import FailureKind, Outcome, StopRequested

from . import display
from .kernel_log import KernelLog

MOST_SHOWN = 4

MISSING = (
    "install it there, or, if it is yours, import it by name in the function, so that it travels; "
    "print(job.modules.describe()) lists what has travelled, and what has not, with the reason"
)

_CAUSE: Any = BaseException.__dict__["__cause__"]

_KINDS: dict[FailureKind | None, type[errors.JobError]] = {
    FailureKind.NOT_ENOUGH_WORKERS: errors.NotEnoughWorkers,
    FailureKind.RESET_LIMIT: errors.ResetLimitExceeded,
    FailureKind.NO_PROGRESS: errors.NoProgress,
    FailureKind.CLUSTER_LOST: errors.ClusterLost,
}


def settle(
    future: Future[list[Any]],
    name: str,
    log: KernelLog,
    outcome: Outcome | None,
    bug: BaseException | None,
    *,
    detached: bool,
) -> None:
    """Set a future's results, or the exception with the reason for their absence."""
    # Reading results runs the user's code, which may raise anything, or never return: then
    # abandon() ends the wait.
    try:
        ending = _ending(name, log, outcome, bug, detached)
    except BaseException as error:  # the future must end, or its waiters hang
        ending = _caused(
            f"job {name!r}: its outcome cannot be read: {errors.summary_of(error)}", error
        )
    log.results.clear()
    with contextlib.suppress(InvalidStateError):  # abandoned meanwhile
        if isinstance(ending, list):
            future.set_result(ending)
        else:
            future.set_exception(ending)


def abandon(future: Future[list[Any]], name: str, stop: StopRequested) -> None:
    """End the wait for results or errors of an ended job that are still being read."""
    problem = f"job {name!r} was {stop.reason} while its results or errors were being read"
    with contextlib.suppress(InvalidStateError):
        future.set_exception(errors.JobStopped(problem))


def _ending(
    name: str, log: KernelLog, outcome: Outcome | None, bug: BaseException | None, detached: bool
) -> list[Any] | BaseException:
    if detached:
        return errors.Detached(f"job {name!r} was taken over by another kernel; it goes on there")
    if bug is not None or outcome is None:
        problem = "its driver ended early" if bug is None else errors.summary_of(bug)
        return _caused(f"job {name!r}: the driver failed: {problem}", bug)
    if outcome.kind != "finished":
        for packed in log.results.values():  # of rank 0, if the job was stopped
            if isinstance(found := cloudpickle.loads(packed), Returned):
                log.returned = found
        return _failed(name, log, outcome)
    try:
        # One by one, so that no result is kept both pickled and read.
        values = [cloudpickle.loads(log.results.pop(start)) for start in outcome.starts]
        if isinstance(values[0], Returned):
            log.returned = values[0]
            values[0] = log.returned.value
        return values
    except BaseException as error:  # unpickling runs code of any class, and imports modules
        problem = f"a result of job {name!r} cannot be read here: {errors.summary_of(error)}"
        return _caused(problem, error)


def _caused(problem: str, cause: BaseException | None) -> errors.JobError:
    error = errors.JobError(problem)
    error.__cause__ = cause
    return error


def _failed(job: str, log: KernelLog, outcome: Outcome) -> BaseException:
    if outcome.kind == "stopped":
        return errors.JobStopped(f"job {job!r} was {outcome.reason or ''}")
    starts = [start for start in outcome.starts if start in log.failures]
    if outcome.error == FailureKind.RANK_FAILED and starts:
        failures = {start: unpack_error(log.failures[start]) for start in starts}
        return _rank_failed(job, log, failures)
    kind = _KINDS.get(outcome.error, errors.RankFailed)
    words = "" if outcome.reason is None else log.in_words(outcome.reason)
    return kind(f"job {job!r} failed: {words}")


def _rank_failed(job: str, log: KernelLog, raised: Mapping[int, Failure]) -> BaseException:
    """Return an error with equal errors grouped, which is also an instance of the user's error."""
    names = {start: f"rank {rank} on {worker}" for start, (rank, worker) in log.ranks.items()}
    groups: dict[tuple[str, str], list[int]] = {}
    for start, failure in raised.items():
        groups.setdefault((failure.summary, failure.where(display.label)), []).append(start)
    parts = []
    for (summary, where), starts in list(groups.items())[:MOST_SHOWN]:
        ranks = ", ".join(sorted(names.get(s, f"start {s}") for s in starts)[:MOST_SHOWN])
        more = "" if len(starts) <= MOST_SHOWN else f" and {len(starts) - MOST_SHOWN} more"
        parts.append(f"{summary}\n{where}\nraised on {ranks}{more}, job {job!r}")
        first: Any = raised[starts[0]].exception
        # isinstance() would ask the error for its class, which may raise anything.
        if issubclass(type(first), ModuleNotFoundError) and first.name:
            parts[-1] += f"\n{first.name} is not on that worker: {MISSING}"
    if len(groups) > MOST_SHOWN:
        parts.append(f"+ {len(groups) - MOST_SHOWN} other errors")
    message = "\n\n".join(parts)
    original = next((f.exception for f in raised.values() if f.exception is not None), None)
    error = _as_instance_of(type(original), message) if original is not None else None
    if error is None:
        error = errors.RankFailed(message)
    _CAUSE.__set__(error, original)
    return error


def _as_instance_of(kind: type[BaseException], message: str) -> errors.RankFailed | None:
    """Return a RankFailed that is also a `kind`, or None if Python cannot combine the two."""
    if not issubclass(kind, Exception) or issubclass(kind, (errors.RankFailed, bdb.BdbQuit)):
        return None  # IPython shows nothing of a BdbQuit
    namespace = {
        "__init__": Exception.__init__,
        "__setattr__": Exception.__setattr__,
        "__delattr__": Exception.__delattr__,
        "__str__": lambda self: str(self.args[0]),
        "__module__": errors.__name__,
        "__doc__": errors.RankFailed.__doc__,
    }
    if issubclass(kind, SyntaxError):
        namespace["msg"] = message  # which tracebacks show instead of the text
    try:
        both: type[errors.RankFailed] = type(
            f"RankFailed({kind.__name__})", (errors.RankFailed, kind), namespace
        )
        error = both(message)
        return error if type(error) is both and str(error) == message else None
    except BaseException:  # runs code of the user's class and its metaclass
        return None

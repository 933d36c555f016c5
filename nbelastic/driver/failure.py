"""From the outcome of a job to the exception that its user meets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic import errors

from . import display

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbelastic.cluster import Failure
    from nbelastic.membership import Outcome

__all__ = ["exception_for"]

MOST_SHOWN = 4

_KINDS: dict[str, type[errors.JobError]] = {
    "not_enough_workers": errors.NotEnoughWorkers,
    "reset_limit": errors.ResetLimitExceeded,
    "no_progress": errors.NoProgress,
    "cluster_lost": errors.ClusterLost,
    "rank_lost": errors.RankFailed,
    "returned_early": errors.RankFailed,
}


def exception_for(
    job: str, outcome: Outcome, failures: Mapping[int, Failure], names: Mapping[int, str]
) -> BaseException:
    """Return what ``result()`` raises for a job that did not finish.

    Parameters
    ----------
    job : str
        The job's name.
    outcome : Outcome
        How it ended.
    failures : mapping of int to Failure
        What was raised in each start of the function.
    names : mapping of int to str
        What to call each start: its rank and worker.
    """
    if outcome.kind == "stopped":
        return errors.JobStopped(f"job {job!r} was {outcome.reason}")
    raised = {start: failures[start] for start in outcome.starts if start in failures}
    if outcome.error == "rank_failed" and raised:
        return _rank_failed(job, raised, names)
    kind = _KINDS.get(outcome.error, errors.JobError)
    return kind(f"job {job!r} failed: {outcome.reason}")


def _rank_failed(
    job: str, raised: Mapping[int, Failure], names: Mapping[int, str]
) -> BaseException:
    """Group equal errors, the user's lines first; the result is what was raised, too."""
    groups: dict[tuple[str, str], list[int]] = {}
    for start, failure in raised.items():
        groups.setdefault((failure.summary, failure.where(display.label)), []).append(start)
    parts = []
    for (summary, where), starts in list(groups.items())[:MOST_SHOWN]:
        who = ", ".join(sorted(names.get(s, f"start {s}") for s in starts)[:MOST_SHOWN])
        more = "" if len(starts) <= MOST_SHOWN else f" and {len(starts) - MOST_SHOWN} more"
        parts.append(f"{summary}\n{where}\nraised on {who}{more}, job {job!r}")
    if len(groups) > MOST_SHOWN:
        parts.append(f"+ {len(groups) - MOST_SHOWN} other errors")
    message = "\n\n".join(parts)
    original = next((f.exception for f in raised.values() if f.exception is not None), None)
    error = _as_instance_of(type(original), message) if original is not None else None
    if error is None:
        return errors.RankFailed(message)
    error.__cause__ = original
    return error


def _as_instance_of(kind: type[BaseException], message: str) -> errors.RankFailed | None:
    """Return a RankFailed that is also a `kind`, or None where Python cannot combine them."""
    if not issubclass(kind, Exception) or issubclass(kind, errors.RankFailed):
        return None
    namespace = {
        "__init__": Exception.__init__,
        "__str__": lambda self: str(self.args[0]),
        "__module__": errors.__name__,
        "__doc__": errors.RankFailed.__doc__,
    }
    try:
        both: type[errors.RankFailed] = type(
            f"RankFailed({kind.__name__})", (errors.RankFailed, kind), namespace
        )
        return both(message)
    except TypeError:
        return None

"""Every exception a user can meet, in one tree.

::

    NbelasticError
    ├── OptionError                 an option of fit() is wrong (also a ValueError)
    │   └── UnknownOption           there is no such option (also a TypeError)
    ├── PreflightError              refused before anything was sent to the cluster
    │   ├── NotPicklable            the function, or something it captures, cannot travel
    │   ├── VersionMismatch         kernel, scheduler and workers differ
    │   └── NoSuitableWorkers       the cluster has no slot that fits and promises none
    ├── JobError                    the job ended without a result
    │   ├── RankFailed              user code raised; also an instance of what it raised
    │   ├── NotEnoughWorkers        fewer than min_np for elastic_timeout
    │   ├── ResetLimitExceeded      more membership changes than reset_limit allows
    │   ├── NoProgress              ranks could not form, or stood still again and again
    │   ├── ClusterLost             the scheduler or the connection to it is gone
    │   ├── JobStopped              stopped or cancelled by its user
    │   └── Detached                another kernel drives it now
    ├── CollectiveError             an operation between ranks failed; HorovodInternalError
    ├── StateMismatch               a state does not fit the values of a checkpoint or another rank
    ├── HostsUpdatedInterrupt       the membership is about to change, as planned
    └── NotInitialized              a rank's function was called before init()

    RankExit (BaseException)        ends a rank's function from outside; ``finally`` runs
    ├── Leaving                     its worker was asked to leave
    ├── Stopped                     the job was stopped or cancelled
    └── Evicted                     the others go on without this rank

    JobInterrupted (KeyboardInterrupt)   the cell that ran the job was interrupted

The notebook's magics add ``CellError`` (a cell that cannot be a training function; a
``PreflightError``) and ``MagicOptionError`` (an ``OptionError``).

``RankExit`` is not an ``Exception``, so that an ``except Exception`` in user code cannot keep a
rank alive that the job has parted with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ClusterLost",
    "CollectiveError",
    "Detached",
    "Evicted",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JobError",
    "JobInterrupted",
    "JobStopped",
    "Leaving",
    "NbelasticError",
    "NoProgress",
    "NoSuitableWorkers",
    "NotEnoughWorkers",
    "NotInitialized",
    "NotPicklable",
    "OptionError",
    "PreflightError",
    "RankExit",
    "RankFailed",
    "ResetLimitExceeded",
    "StateMismatch",
    "Stopped",
    "UnknownOption",
    "VersionMismatch",
]


class NbelasticError(Exception):
    """Base of all errors that nbelastic raises."""


class OptionError(NbelasticError, ValueError):
    """An option has a value it cannot have; the message names option, value and range."""

    _render_traceback_: Callable[[], list[str]]
    """What a notebook shows, where it is other than for any error."""


class UnknownOption(OptionError, TypeError):
    """An option that does not exist; the message names those that were probably meant."""


class _Headline(BaseException):
    """An error that says all that there is to say: a notebook shows no lines of code with it."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows."""
        return [f"{type(self).__name__}: {self}"]


class PreflightError(_Headline, NbelasticError):
    """The job was refused before anything was sent to the cluster."""


class NotPicklable(PreflightError):
    """The function, or a variable that it captures, cannot be pickled; the message names it."""


class VersionMismatch(PreflightError):
    """Kernel, scheduler and workers do not run the same versions of what matters."""


class NoSuitableWorkers(PreflightError):
    """No worker fits ``workers=`` and ``resources=``, and none can be expected."""


class JobError(_Headline, NbelasticError):
    """The job ended without a result."""


class RankFailed(JobError):
    """User code raised on one or more ranks.

    What :meth:`nbelastic.Job.result` raises is also an instance of the exception that user code
    raised, so that ``except ValueError`` catches a remote ``ValueError``; the original, where it
    could be pickled, is its ``__cause__``.
    """


class NotEnoughWorkers(JobError):
    """Fewer than ``min_np`` slots were there for ``elastic_timeout`` seconds."""


class ResetLimitExceeded(JobError):
    """The membership changed more often than ``reset_limit`` allows."""


class NoProgress(JobError):
    """The ranks could not form a generation, or stood still, several times in a row."""


class ClusterLost(JobError):
    """The scheduler, or the connection to it, is gone."""


class JobStopped(JobError):
    """The job was stopped or cancelled before its function returned."""


class Detached(JobError):
    """Another kernel has attached to the job, which goes on; this one hears of it no more."""


class CollectiveError(NbelasticError, RuntimeError):
    """An operation between ranks failed: a peer is gone, or the generation is over.

    Inside :func:`nbelastic.elastic.run` it is caught: the state is restored to the last commit and
    the ranks that are left form a new generation.
    """


HorovodInternalError = CollectiveError


class StateMismatch(NbelasticError):
    """A state does not fit the values of a checkpoint or of another rank; nothing was changed.

    The message names what was expected and what came.
    """


class HostsUpdatedInterrupt(NbelasticError, RuntimeError):
    """Raised by ``commit()`` and ``check_host_updates()`` when ranks are about to join or leave.

    Parameters
    ----------
    skip_sync : bool, default False
        Kept for Horovod's signature; who synchronises is decided by the plan.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the membership of the job is about to change")
        self.skip_sync = skip_sync


class NotInitialized(NbelasticError, RuntimeError):
    """``rank()``, ``size()`` or a collective was used before ``init()``."""


class RankExit(BaseException):
    """Ends a rank's function from outside. Raised by nbelastic, never to be caught for good."""


class Leaving(RankExit):
    """The rank's worker was asked to leave; the others go on without it."""


class Stopped(RankExit):
    """The job was stopped, cancelled, or has ended."""


class Evicted(RankExit):
    """The job has gone on without this rank; nothing it does counts any more."""


class JobInterrupted(_Headline, KeyboardInterrupt):
    """A blocking ``fit`` was interrupted; its workers are free again."""

"""Exceptions of nbelastic.

An operation between ranks raises ``CollectiveError``, Horovod's ``HorovodInternalError``; a call of
the kernel a ``JobError``, a ``PreflightError`` or an ``OptionError``. The notebook's magics add
``CellError`` (a cell that cannot be a training function; a ``PreflightError``) and
``MagicOptionError`` (an ``OptionError``).

``RankExit`` ends a rank's function from outside; ``finally`` runs. It is not an ``Exception``, so
that an ``except Exception`` in user code cannot stop a rank from ending.

``JobInterrupted`` is a ``KeyboardInterrupt``.
"""

from __future__ import annotations

import traceback

LONGEST_SUMMARY = 20_000  # most characters of an error's message that go into the history


def summary_of(error: BaseException) -> str:
    """Return the type and the message of an error, whatever its class does when it is shown.

    A message that is too long for history and panel is cut. The error itself travels as it is.
    """
    kind = type(error)
    try:
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        if len(text) <= LONGEST_SUMMARY:
            return text
        return f"{text[:LONGEST_SUMMARY]} … ({len(text):,} characters)"
    except BaseException:  # runs code of the user's class, which may raise anything
        return f"{type.__repr__(kind)}: its message cannot be shown"


class NbelasticError(Exception):
    """Base of all errors that nbelastic raises."""


class OptionError(NbelasticError, ValueError):
    """An option has an invalid value; the message names option, value and range."""


class UnknownOption(OptionError, TypeError):
    """An option does not exist; the message names similar ones."""


class Headline(BaseException):
    """An error with a complete message: a notebook shows no lines of code with it."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows."""
        return [f"{type(self).__name__}: {self}"]


class PreflightError(Headline, NbelasticError):
    """The job was refused before anything was sent to the cluster."""


class NotPicklable(PreflightError):
    """The function, or a captured variable, cannot be pickled; the message names it."""


class VersionMismatch(PreflightError):
    """Kernel, scheduler and workers run different versions of Python, torch or nbelastic."""


class JobError(Headline, NbelasticError):
    """The job ended without a result."""


class RankFailed(JobError):
    """User code raised on one or more ranks.

    The error that :meth:`nbelastic.Job.result` raises is also an instance of the exception that
    user code raised, so that ``except ValueError`` catches a remote ``ValueError``. The original
    is its ``__cause__``, if it could be pickled.
    """


class NotEnoughWorkers(JobError):
    """The job had fewer than ``min_np`` workers for ``elastic_timeout`` seconds."""


class ResetLimitExceeded(JobError):
    """The ranks of the job changed more often than ``reset_limit`` allows."""


class NoProgress(JobError):
    """The ranks could not connect, or failed or stalled several times without progress."""


class ClusterLost(JobError):
    """The scheduler, or the connection to it, is gone."""


class JobStopped(JobError):
    """The job was stopped or cancelled before its function returned."""


class Detached(JobError):
    """Another kernel has attached to the job, and drives it now."""


class CollectiveError(NbelasticError, RuntimeError):
    """An operation between ranks failed: a peer is gone, or the generation has ended.

    :func:`nbelastic.elastic.run` catches it. The state is restored to the last commit, and the
    ranks that are left form a new generation.
    """


HorovodInternalError = CollectiveError


class RanksDisagree(CollectiveError):
    """Ranks called different operations at the same point, or with other types, shapes or roots.

    It is raised on all ranks before any data is sent, with the same message, which names both
    sides. The ranks can go on with their next operation. It is an error of the program, so an
    elastic loop does not catch it. If the function does not catch it either, the job ends.
    """

    sides: tuple[tuple[str, int], ...] = ()  # each rank's description and number, where compared


class DataError(NbelasticError, RuntimeError):
    """Rows of a dataset cannot be read; the message names file and row group, or partition."""


class StateMismatch(NbelasticError):
    """A state does not fit the values of a checkpoint or of another rank; nothing was changed.

    The message names the expected value and the one that was received.
    """


class HostsUpdatedInterrupt(NbelasticError, RuntimeError):
    """Raised by ``commit()`` and ``check_host_updates()`` when ranks are about to join or leave.

    Parameters
    ----------
    skip_sync : bool, default False
        Ignored; it is part of Horovod's signature.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks are about to join or leave the job")
        self.skip_sync = skip_sync


class NotInitialized(NbelasticError, RuntimeError, ValueError):
    """``rank()``, ``size()`` or a collective was used before ``init()``."""


class NotTheRank(NbelasticError, RuntimeError):
    """An operation between ranks was called in a forked process, or in a second thread of a rank.

    Operations of a group are matched by their order, so all must run in one thread of one process.
    """


class RankExit(BaseException):
    """Base of exceptions that end a rank's function from outside. Do not suppress these."""


class Leaving(RankExit):
    """The rank's worker was asked to leave; training goes on without it."""


class Stopped(RankExit):
    """The job was stopped, cancelled, or has ended."""


class Evicted(RankExit):
    """The job has gone on without this rank, and ignores it from now on."""


class JobInterrupted(Headline, KeyboardInterrupt):
    """A blocking ``fit`` was interrupted."""

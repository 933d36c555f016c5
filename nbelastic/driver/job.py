"""Represent a job to its owner: future, status, history and control."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Generator, MutableMapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from nbelastic.cluster import LARGE, Modules, put
from nbelastic.errors import JobStopped, OptionError
from nbelastic.messages import CANCELLED, StopRequested
from nbelastic.status import HistoryEvent, JobStatus, Output

from . import display
from .loggers import MetricsLogger, Send
from .options import changed_limits, count
from .parser import with_hints
from .thread import Driver
from .why import explain

logger = logging.getLogger(__name__)

AWAY = "no connection to the scheduler; if it lives, the job goes on there"
"""Why nothing new is known of a job while its driver tries to connect again."""


class Job:
    """An elastic training job. Made by :func:`nbelastic.fit`.

    It speaks like a :class:`concurrent.futures.Future`, and has a status, a history and logs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loggers: list[MetricsLogger] = []

    def __repr__(self) -> str:
        status = self.status
        facts = [status.state_in_words, f"{status.size} rank{'s' * (status.size != 1)}"]
        facts.append(f"{status.commits} commits")
        return f"<Job {status.name}: {', '.join([*facts, *status.headlines])}>"

    @property
    def name(self) -> str:
        """The job's name, unique on its cluster while it runs."""
        return self._driver.name

    # -- like a future -------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job; return the value of the function on rank 0.

        Parameters
        ----------
        timeout : float, optional
            Longest wait in seconds; without it, until the job ends.

        Raises
        ------
        TimeoutError
            The job has not ended in time. It goes on.
        JobError
            It ended without a result: :class:`~nbelastic.errors.RankFailed` (also an instance of
            what user code raised), :class:`~nbelastic.errors.NotEnoughWorkers`, and others.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return what the function returned on every rank, by rank.

        Parameters
        ----------
        timeout : float, optional
            As for :meth:`result`.
        """
        try:
            results = self._driver.future.result(timeout)
            while self._loggers:
                self._loggers.pop().finish()
            return results
        except FutureTimeoutError:
            if self.done():
                raise  # user code raised a TimeoutError of its own
            message = f"job {self.name!r} has not ended after {timeout:g} s; it goes on"
            raise TimeoutError(message) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the exception of :meth:`result`, or None."""
        return self._driver.future.exception(timeout)

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._driver.future.done()

    def running(self) -> bool:
        """Return whether the job has not ended."""
        return not self.done()

    def cancelled(self) -> bool:
        """Return whether the job has ended because it was stopped or cancelled."""
        return self.done() and isinstance(self.exception(), JobStopped)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in a coroutine, or in a cell of a notebook: ``await job`` is :meth:`result`.

        The kernel's event loop goes on meanwhile. Giving up the wait leaves the job alone.
        """
        results = yield from asyncio.shield(asyncio.wrap_future(self._driver.future)).__await__()
        return results[0]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it has come."""
        try:
            self._driver.future.exception(timeout)
        except FutureTimeoutError:
            return False
        return True

    def add_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Call ``callback(job)`` at the end, in another thread; now if it is over."""

        def call(_: object) -> None:
            try:
                callback(self)
            except BaseException:  # another thread's: the other callbacks must be called, too
                logger.exception("a callback of job %r failed", self.name)

        self._driver.future.add_done_callback(call)

    def cancel(self) -> bool:
        """End the job now, wherever its ranks are; return False if it has ended already."""
        if self.done():
            return False
        self._driver.tell(StopRequested(now=True, reason=CANCELLED))
        return True

    def log_to(self, send: Send) -> None:
        """Send the metrics that ranks report to an experiment logger, in this kernel.

        Each step is sent once, when it is committed: what a fault takes back is sent when it is
        done again. A kernel that attaches to the job begins with its first step. :meth:`result`
        waits until all is sent, at most a minute. A logger that raises or is slow does not disturb
        the training; ``status.warnings`` says so.

        Parameters
        ----------
        send : callable
            It is called with a step and a dict of its metrics, in another thread.

        Raises
        ------
        OptionError
            `send` is no function.

        Examples
        --------
        >>> run = wandb.init(project="digits")  # doctest: +SKIP
        >>> job.log_to(lambda step, values: run.log(values, step=int(step)))  # doctest: +SKIP
        """
        self._loggers.append(MetricsLogger(self._driver, send))

    def pull(
        self, into: MutableMapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Bring back the variables that ``fit(pull=…)`` names, waiting for the end of the job.

        Parameters
        ----------
        into : mapping, optional
            Where the names are looked up and set, such as ``globals()``; without it, the variables
            of the function. A kernel that has attached to the job has none.
        timeout : float, optional
            As for :meth:`result`.

        Returns
        -------
        dict
            The objects by name, with the values of rank 0.

        Raises
        ------
        OptionError
            The job has no ``pull``, or a variable could not be sent or does not fit.
        JobError
            The job failed, as :meth:`result` says; one that was stopped has values.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"job {self.name!r} has not ended after {timeout:g} s; it goes on")
        pulled = self._driver.log.returned.pulled
        if not pulled:
            self.result()
            raise OptionError("fit(pull=…) names the variables of a job that come back; none here")
        variables = self._driver.variables if into is None else into
        for name, each in pulled.items():
            if len(each.data) > LARGE:
                display.say(f"{name}: {len(each.data) / 1e9:,.1f} GB")
            put(variables, name, each)
        return {name: variables[name] for name in pulled}

    # -- more than a future --------------------------------------------------------------------

    def stop(self) -> None:
        """End the job at the next commit. :meth:`result` then raises ``JobStopped``."""
        self._driver.tell(StopRequested())

    @with_hints
    def scale(
        self,
        *,
        min_np: int | None = None,
        max_np: int | None = None,
        priority: int | None = None,
        weight: float | None = None,
    ) -> None:
        """Change how many ranks the job may have, from the next commit on.

        Parameters
        ----------
        min_np, max_np : int, optional
            The new limits; what is left out stays.
        priority : int, optional
            Its priority among the jobs of the cluster.
        weight : float, optional
            Its part of what jobs of its priority share.

        Raises
        ------
        OptionError
            ``min_np`` would be above ``max_np``, or a value is not possible.
        """
        given = {"min_np": min_np, "max_np": max_np, "priority": priority, "weight": weight}
        self._driver.tell(changed_limits(self.status, **given))

    @with_hints
    def logs(self, rank: int | None = None, *, follow: bool = False) -> str:
        """Return the output of ranks, or only the newest part of a large output.

        The kernel keeps as much of it as the environment variable ``NBELASTIC_LOG_BYTES`` says, by
        default 64 MB.

        Parameters
        ----------
        rank : int, optional
            Only what was printed by the workers whose latest rank this is; without it, everything,
            each worker's lines together, under a heading.
        follow : bool, default False
            Whether to print what there is, and then what comes, until the job has ended. An
            interrupt ends that, and the job goes on. The return value is empty then.

        Raises
        ------
        OptionError
            `rank` is no number that a rank of this job has had.
        """
        rank = count(0).check("rank", rank)
        highest = self._driver.log.highest_rank
        if rank is not None and highest is not None and rank > highest:
            had = "rank 0 alone" if highest == 0 else f"ranks 0 to {highest}"
            raise OptionError(f"rank={rank}: so far this job has had {had}")
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                self._print_output(rank)
            return ""
        texts: dict[int, list[str]] = {}
        for piece in self.output()[1]:
            texts.setdefault(piece.start, []).append(piece.text)
        dropped = self._driver.log.remark()
        parts = [f"[{dropped}]\n"] if dropped else []
        for start, pieces in sorted(texts.items()):
            latest = self._driver.log.latest_rank(start)
            if rank is None:
                parts.append(f"[rank {latest}, start {start}]\n")
            if rank in (None, latest):
                parts += pieces
        return "".join(parts)

    def _print_output(self, rank: int | None) -> None:
        cursor, ended = 0, False
        while not ended:
            ended = self.done()
            cursor, pieces = self.output(cursor)
            for piece in pieces:
                if rank in (None, piece.rank):
                    sys.stdout.write(piece.text)
            sys.stdout.flush()
            self.wait(0.2)

    def output(self, since: int = 0) -> tuple[int, tuple[Output, ...]]:
        """Return the output of ranks, in pieces in the order of arrival.

        Parameters
        ----------
        since : int, default 0
            The cursor that an earlier call returned: only what has come since then.

        Returns
        -------
        cursor : int
        pieces : tuple of Output
        """
        return self._driver.log.printed.since(since)

    @property
    def modules(self) -> Modules:
        """Modules of the user's own that travelled with the function."""
        return self._driver.log.modules

    @property
    def metrics(self) -> Any:
        """What ranks reported with :func:`nbelastic.report`, the mean over ranks, by step.

        A :class:`pandas.DataFrame` where pandas is installed, else a list of dicts. Columns:
        ``step``, ``time`` (seconds since the start), ``ranks`` (how many reported), and the
        metrics.
        """
        rows = self._driver.log.metrics.rows()
        if importlib.util.find_spec("pandas") is None:
            return rows
        return importlib.import_module("pandas").DataFrame(rows)

    @property
    def started(self) -> float:
        """When the job was started, in seconds since the epoch."""
        return self._driver.log.started

    @property
    def status(self) -> JobStatus:
        """A snapshot of the job."""
        view = self._driver.view()
        log = self._driver.log
        elapsed = log.elapsed if self._driver.ended is None else self._driver.ended
        state = view.state
        if state in ("finished", "failed", "stopped") and not self.done():
            state = "stopping" if state == "stopped" else "running"
        elif self._driver.detached:
            state = "detached"
        future, returned = self._driver.future, 0  # of ranks; none if results cannot be read
        if state == "finished" and future.exception() is None:
            returned = len(future.result())
        metrics = log.metrics
        members = [rank.start for rank in view.ranks if rank.rank is not None]
        micro_batches, why_not_exact = metrics.micro_batches(members)
        return dataclasses.replace(
            view,
            name=self.name,
            state=state,
            size=view.size or returned,
            elapsed=elapsed,
            reason=AWAY if self._driver.away else view.reason,
            samples_per_s=metrics.total(members),
            progress=metrics.progress(elapsed, members, finished=state == "finished"),
            warnings=log.warnings(),
            micro_batches=micro_batches,
            why_not_exact=why_not_exact,
            data=metrics.data(members),
        )

    @property
    def history(self) -> tuple[HistoryEvent, ...]:
        """Everything that has happened to the job, oldest first."""
        return self._driver.log.history()

    def why(self, rank: int | None = None) -> str:
        """Explain the decisions on the job, or on a rank: the events and the reporting processes.

        Parameters
        ----------
        rank : int, optional
            The number of a rank; without it, all ranks and the job itself.

        Returns
        -------
        str
            The newest twenty decisions of :attr:`history`, each with what was seen.

        Examples
        --------
        >>> job.why(rank=3)  # doctest: +SKIP
        """
        return explain(self.name, self.history, rank)

    def _ipython_display_(self) -> None:
        if not display.show(self):
            sys.stdout.write(f"{self!r}\n")


def driver_of(job: Job) -> Driver:
    """Return the driver of a job, for other rooms of the package."""
    return job._driver

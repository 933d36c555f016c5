"""The job: what ``fit`` returns, and all that its owner can ask and tell it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from nbelastic.errors import JobInterrupted, OptionError
from nbelastic.membership import LimitsChanged, StopRequested

from . import display
from .hints import with_hints
from .options import count_option
from .status import JobStatus, RankStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.membership import RankView

    from .shell import Driver
    from .status import HistoryEvent, Output

__all__ = ["Job"]

TICK = 0.1
"""Seconds between two looks of a waiting caller at what it shows."""


class Job:
    """An elastic training job. Made by :func:`nbelastic.fit`.

    It speaks like a :class:`concurrent.futures.Future`, and has a status, a history and logs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __repr__(self) -> str:
        status = self.status
        return f"<Job {status.name}: {status.state}, {status.size} ranks, {status.commits} commits>"

    @property
    def name(self) -> str:
        """The job's name, unique on its cluster while it runs."""
        return self._driver.name

    # -- like a future -------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Return what the function returned on rank 0, waiting for it.

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
            return self._driver.future.result(timeout)
        except FutureTimeoutError:
            if self.done():
                raise  # user code raised a TimeoutError of its own
            message = f"job {self.name!r} has not ended after {timeout:g} s; it goes on"
            raise TimeoutError(message) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what :meth:`result` would raise, or None; wait for the end as it does."""
        return self._driver.future.exception(timeout)

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._driver.future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it has come."""
        try:
            self._driver.future.exception(timeout)
        except FutureTimeoutError:
            return False
        return True

    def add_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Have ``callback(job)`` called at the end, in another thread; now if it is over."""
        self._driver.future.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        """End the job now, wherever its ranks are; return False if it has ended already."""
        if self.done():
            return False
        self._driver.tell(StopRequested(now=True, reason="cancelled by its user"))
        return True

    # -- more than a future --------------------------------------------------------------------

    def stop(self) -> None:
        """End the job at the next commit. :meth:`result` then raises ``JobStopped``."""
        self._driver.tell(StopRequested(reason="stopped by its user"))

    @with_hints
    def scale(self, *, min_np: int | None = None, max_np: int | None = None) -> None:
        """Change how many ranks the job may have, from the next commit on.

        Parameters
        ----------
        min_np, max_np : int, optional
            The new limits; what is left out stays.

        Raises
        ------
        OptionError
            ``min_np`` would be above ``max_np``, or one is below 1.
        """
        min_np = count_option("min_np", min_np, least=1)
        max_np = count_option("max_np", max_np, least=1)
        status = self.status
        low = status.min_np if min_np is None else min_np
        high = status.max_np if max_np is None else max_np
        if high is not None and low > high:
            raise OptionError(f"min_np={low} would be above max_np={high}")
        self._driver.tell(LimitsChanged(min_np=min_np, max_np=max_np))

    @with_hints
    def logs(self, rank: int | None = None) -> str:
        """Return what ranks printed.

        Parameters
        ----------
        rank : int, optional
            Only what was printed by the workers whose latest rank this is; without it, everything,
            each worker's lines together, under a heading.

        Raises
        ------
        OptionError
            `rank` is no number that a rank of this job has had.
        """
        rank = count_option("rank", rank, least=0)
        highest = self._driver.books.highest_rank
        if rank is not None and highest is not None and rank > highest:
            had = "rank 0 alone" if highest == 0 else f"ranks 0 to {highest}"
            raise OptionError(f"rank={rank}: so far this job has had {had}")
        texts: dict[int, list[str]] = {}
        for piece in self._driver.books.output():
            texts.setdefault(piece.start, []).append(piece.text)
        parts = []
        for start, pieces in sorted(texts.items()):
            latest = self._driver.books.latest_rank(start)
            if rank is None:
                parts.append(f"[rank {latest}, start {start}]\n")
            if rank in (None, latest):
                parts += pieces
        return "".join(parts)

    def output(self, since: int = 0) -> tuple[int, tuple[Output, ...]]:
        """Return what ranks printed, piece by piece as it came.

        Parameters
        ----------
        since : int, default 0
            The cursor that an earlier call returned: only what has come since then.

        Returns
        -------
        cursor : int
        pieces : tuple of Output
        """
        pieces = self._driver.books.output(since)
        return since + len(pieces), pieces

    @property
    def metrics(self) -> Any:
        """What ranks reported with :func:`nbelastic.report`, the mean over ranks, by step.

        A :class:`pandas.DataFrame` where pandas is installed, else a list of dicts. Columns:
        ``step``, ``time`` (seconds since the start), ``ranks`` (how many reported), and the
        metrics.
        """
        rows = self._driver.books.gauges.rows()
        if importlib.util.find_spec("pandas") is None:
            return rows
        return importlib.import_module("pandas").DataFrame(rows)

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return each metric as points ``(step, mean over ranks)``, to be drawn.

        At most 500 points, evenly chosen, the newest among them; :attr:`metrics` has them all.
        """
        return self._driver.books.gauges.curves(500)

    def pace(self) -> tuple[tuple[float, float], ...]:
        """Return how fast the job went: points ``(seconds since the start, samples/s)``."""
        return self._driver.books.gauges.pace()

    @property
    def started(self) -> float:
        """When the job was started, in seconds since the epoch."""
        return self._driver.books.started

    @property
    def status(self) -> JobStatus:
        """A snapshot of the job."""
        view = self._driver.view()
        end = self._driver.ended or time.time()
        state = view.state
        if state in ("finished", "failed", "stopped") and not self.done():
            state = "running"
        elif self._driver.detached:
            state = "detached"
        gauges = self._driver.books.gauges
        members = [rank.start for rank in view.ranks if rank.rank is not None]
        return JobStatus(
            name=self.name,
            state=state,
            generation=view.generation,
            size=view.size or (len(self._driver.future.result()) if state == "finished" else 0),
            min_np=view.min_np,
            max_np=view.max_np,
            resets=view.resets,
            commits=view.commits,
            elapsed=end - self._driver.books.started,
            reason=view.reason,
            ranks=tuple(self._rank_status(rank) for rank in view.ranks),
            samples_per_s=gauges.total(members),
            progress=gauges.progress(
                end - self._driver.books.started, members, finished=state == "finished"
            ),
            backend=view.backend,
        )

    def _rank_status(self, rank: RankView) -> RankStatus:
        gauge = self._driver.books.gauges.rank(rank.start)
        return RankStatus(
            rank=rank.rank,
            worker=rank.worker,
            host=rank.host,
            state=rank.state,
            commits=rank.commits,
            step=gauge.step,
            samples_per_s=gauge.samples_per_s,
            device=gauge.device,
            state_bytes=gauge.state_bytes,
            copied_bytes=gauge.copied_bytes,
        )

    @property
    def history(self) -> tuple[HistoryEvent, ...]:
        """Everything that has happened to the job, oldest first."""
        return self._driver.books.history()

    def _ipython_display_(self) -> None:
        if not display.show(self):
            sys.stdout.write(f"{self!r}\n")

    # -- for fit -------------------------------------------------------------------------------

    def wait_interruptibly(self) -> None:
        """Wait for the end; an interrupt stops the job at its next commit, a second one now.

        Raises
        ------
        JobInterrupted
            The job has ended because of an interrupt; its workers are free.
        """
        interrupts = 0
        with display.watching(self) as watch:
            while True:
                try:
                    if self.wait(TICK):
                        break
                    watch.tick()
                except KeyboardInterrupt:
                    interrupts += 1
                    if interrupts == 1:
                        self.stop()
                        watch.say("stopping at the next commit; interrupt again to stop now")
                    else:
                        self.cancel()
        if interrupts:
            raise JobInterrupted(f"job {self.name!r} was interrupted; its workers are free")

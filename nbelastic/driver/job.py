"""The job: what ``fit`` returns, and all that its owner can ask and tell it."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from nbelastic.errors import JobInterrupted, OptionError
from nbelastic.membership import LimitsChanged, StopRequested

from .status import JobStatus, RankStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from .shell import Driver
    from .status import HistoryEvent

__all__ = ["Job"]


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
        status = self.status
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise OptionError(f"{name}={value!r}: must be a whole number, at least 1")
        low = status.min_np if min_np is None else min_np
        high = status.max_np if max_np is None else max_np
        if high is not None and low > high:
            raise OptionError(f"min_np={low} would be above max_np={high}")
        self._driver.tell(LimitsChanged(min_np=min_np, max_np=max_np))

    def logs(self, rank: int | None = None) -> str:
        """Return what ranks printed.

        Parameters
        ----------
        rank : int, optional
            Only what was printed by the workers whose latest rank this is; without it, everything,
            each worker's lines together, under a heading.
        """
        parts = []
        for start, (latest, text) in self._driver.output().items():
            if rank is None:
                parts.append(f"[rank {latest}, start {start}]\n{text}")
            elif latest == rank:
                parts.append(text)
        return "".join(parts)

    @property
    def status(self) -> JobStatus:
        """A snapshot of the job."""
        view = self._driver.view()
        end = self._driver.ended or time.time()
        state = view.state
        if state in ("finished", "failed", "stopped") and not self.done():
            state = "running"
        return JobStatus(
            name=self.name,
            state=state,
            generation=view.generation,
            size=view.size,
            min_np=view.min_np,
            max_np=view.max_np,
            resets=view.resets,
            commits=view.commits,
            elapsed=end - self._driver.started,
            reason=view.reason,
            ranks=tuple(
                RankStatus(r.rank, r.worker, r.host, r.state, r.commits) for r in view.ranks
            ),
        )

    @property
    def history(self) -> tuple[HistoryEvent, ...]:
        """Everything that has happened to the job, oldest first."""
        return self._driver.history()

    # -- for fit -------------------------------------------------------------------------------

    def wait_interruptibly(self) -> None:
        """Wait for the end; an interrupt stops the job at its next commit, a second one now.

        Raises
        ------
        JobInterrupted
            The job has ended because of an interrupt; its workers are free.
        """
        interrupts = 0
        while True:
            try:
                if self.wait():
                    break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    self.stop()
                else:
                    self.cancel()
        if interrupts:
            raise JobInterrupted(f"job {self.name!r} was interrupted; its workers are free")

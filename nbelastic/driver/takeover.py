"""``jobs`` and ``attach``: finding jobs on a cluster, and taking one over from another kernel."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import Link, check_versions, open_jobs
from nbelastic.errors import OptionError

from .attachment import attach_client
from .fit import hand_out
from .hints import with_hints
from .options import Options
from .shell import Driver
from .status import JobInfo

if TYPE_CHECKING:
    from .job import Job

__all__ = ["attach", "jobs"]


@with_hints
def jobs(cluster: Any) -> tuple[JobInfo, ...]:
    """Return the jobs on a cluster, also those whose kernel is gone.

    Parameters
    ----------
    cluster : Client, Cluster or str
        A Dask client, a cluster, or a scheduler's address.

    Raises
    ------
    OptionError
        `cluster` is none of these.
    ClusterLost
        No scheduler answers.
    """
    client, cleanup = attach_client(_given(cluster), Options())
    try:
        return tuple(JobInfo(**found) for found in open_jobs(client))
    finally:
        cleanup()


@with_hints
def attach(name: str, *, cluster: Any, block: bool = False) -> Job:
    """Take over a job that another kernel has started.

    The job's status, history, logs, metrics and results are those of the whole job, also if it has
    ended meanwhile; it can be stopped and scaled. A job has one kernel at a time: one that had it
    before raises :class:`~nbelastic.errors.Detached` where it waits for a result.

    Parameters
    ----------
    name : str
        The job's name; :func:`nbelastic.jobs` tells which there are.
    cluster : Client, Cluster or str
        A Dask client, a cluster, or a scheduler's address.
    block : bool, default False
        Wait for the end, as :func:`nbelastic.fit` does.

    Returns
    -------
    Job

    Raises
    ------
    OptionError
        There is no such job; the message names those there are.
    VersionMismatch
        This kernel does not run what the cluster runs.
    ClusterLost
        No scheduler answers.
    JobError, JobInterrupted
        With ``block=True``, as :func:`nbelastic.fit` does.

    Examples
    --------
    >>> job = nbelastic.attach("night-run", cluster="tcp://10.0.0.5:8786")  # doctest: +SKIP
    >>> job.result()  # doctest: +SKIP
    """
    client, cleanup = attach_client(_given(cluster), Options())
    link: Link | None = None
    try:
        check_versions(client)
        inbox = _Inbox()
        link = Link(client, name, inbox.receive)
        packed = link.attach()
        if "problem" in packed:
            there = ", ".join(packed.get("jobs", ())) or "none"
            raise OptionError(f"name={name!r}: no such job on this cluster; there are: {there}")
        driver = Driver(name, Options.unpack(packed["options"]), cleanup)
        driver.adopt(packed)
        inbox.hand_over(driver)
        driver.start(link)
    except BaseException:
        if link is not None:
            link.give_up()
        cleanup()
        raise
    return hand_out(driver, block=block)


def _given(cluster: Any) -> Any:
    if cluster is None:
        raise OptionError(
            "cluster=None: must be a Dask Client, a cluster, or a scheduler's address"
        )
    return cluster


class _Inbox:
    """Keeps messages for a driver that is still being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._driver: Driver | None = None

    def receive(self, message: Any) -> None:
        with self._lock:
            if self._driver is None:
                self._kept.append(message)
            else:
                self._driver.receive(message)

    def hand_over(self, driver: Driver) -> None:
        with self._lock:
            for message in self._kept:
                driver.receive(message)
            self._driver = driver

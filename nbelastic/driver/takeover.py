"""Find jobs on a cluster; look at a job, change its limits, or take it over."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import (
    JobClient,
    check_versions,
    look_at_job,
    lost_while,
    open_jobs,
    send_wish,
)
from nbelastic.errors import OptionError
from nbelastic.messages import AttachRefusal, LimitsChanged, StopReason, StopRequested

from .attachment import attach_client
from .fit import hand_out
from .job import Job
from .options import Options, changed_limits, check_name, with_hints
from .status import JobTable
from .thread import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client


@with_hints
def jobs(cluster: Any) -> JobTable:
    """Return the jobs on a cluster, with or without a kernel, and the last ended jobs.

    The value is a tuple of :class:`~nbelastic.JobInfo`, which a notebook shows as a table.

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
    with _client(cluster) as client:
        return JobTable(open_jobs(client))


@with_hints
def attach(name: str, *, cluster: Any, block: bool = False) -> Job:
    """Take over a job that another kernel has started.

    Status, history, logs, metrics and results are those of the whole job, also if it has ended
    meanwhile. It can be stopped and scaled. A job has one kernel at a time: a former kernel that
    waits for a result gets :class:`~nbelastic.errors.Detached`.

    Parameters
    ----------
    name : str
        The job's name; :func:`nbelastic.jobs` lists them.
    cluster : Client, Cluster or str
        A Dask client, a cluster, or a scheduler's address.
    block : bool, default False
        Whether to wait for the end, as :func:`nbelastic.fit` does.

    Returns
    -------
    Job

    Raises
    ------
    OptionError
        There is no such job; the message names the existing ones.
    VersionMismatch
        Kernel and cluster run different versions.
    ClusterLost
        No scheduler answers.
    JobError, JobInterrupted
        With ``block=True``, as :func:`nbelastic.fit` does.

    Examples
    --------
    >>> job = nbelastic.attach("night-run", cluster="tcp://10.0.0.5:8786")  # doctest: +SKIP
    >>> job.result()  # doctest: +SKIP
    """
    name = _name_of_job(name)
    client, cleanup = attach_client(_given(cluster), Options())
    job_client: JobClient | None = None
    try:
        with lost_while(client, "versions were compared"):
            check_versions(client)
        driver = Driver(name, Options(), cleanup)  # those of the job come with the answer
        job_client = JobClient(client, name, driver.receive)
        answer = job_client.attach()
        if isinstance(answer, AttachRefusal):
            raise _unknown(name, answer)
        driver.options = pickle.loads(answer.options)
        driver.adopt(answer)  # before its thread reads what has come since
        driver.start(job_client)
        driver.settle()
    except BaseException:
        if job_client is not None:
            job_client.give_up()
        cleanup()
        raise
    return hand_out(driver, block=block)


def look(name: str, *, cluster: Any) -> Job:
    """Return the present or final state of a job, which stays with its kernel.

    Its status, history, logs and metrics are those of this moment, and do not change. To wait for
    it, :func:`attach`.
    """
    name = _name_of_job(name)
    with _client(cluster) as client:
        with lost_while(client, "versions were compared"):
            check_versions(client)
        answer = look_at_job(client, name)
    if isinstance(answer, AttachRefusal):
        raise _unknown(name, answer)
    driver = Driver(name, pickle.loads(answer.options), lambda: None)
    driver.adopt(answer)
    return Job(driver)


def ask_to_stop(name: str, *, cluster: Any, now: bool = False) -> None:
    """Ask a job to end: at its next commit, or `now`. Its kernel keeps it."""
    event = StopRequested(now=True, reason=StopReason.CANCELLED) if now else StopRequested()
    _send(name, cluster, event)


def ask_to_scale(
    name: str,
    *,
    cluster: Any,
    min_np: int | None = None,
    max_np: int | None = None,
    priority: int | None = None,
    weight: float | None = None,
) -> None:
    """Ask a job to change its limits from the next commit on. Its kernel keeps it.

    What is left out stays.
    """
    status = look(name, cluster=cluster).status
    _send(name, cluster, changed_limits(status, min_np, max_np, priority, weight))


def _send(name: str, cluster: Any, event: StopRequested | LimitsChanged) -> None:
    name = _name_of_job(name)
    with _client(cluster) as client:
        refusal = send_wish(client, name, event)
    if refusal is not None:
        raise _unknown(name, refusal)


def _name_of_job(name: str | None) -> str:
    """Return the valid name of a job, before the cluster is asked for this job."""
    if name is None:
        raise OptionError("name=None: must be the name of a job; nbelastic.jobs() lists them")
    return check_name(name)


def _unknown(name: str, refusal: AttachRefusal) -> OptionError:
    if refusal.problem == "ended":
        return OptionError(
            f"name={name!r}: the job has ended; dask elastic status|why|logs {name} show what the "
            "scheduler remembers of it"
        )
    there = ", ".join(refusal.jobs) or "none"
    return OptionError(f"name={name!r}: no such job on this cluster; there are: {there}")


@contextlib.contextmanager
def _client(cluster: Any) -> Iterator[Client]:
    """Yield a client for the value of ``cluster=``, and close a client opened here."""
    client, cleanup = attach_client(_given(cluster), Options())
    try:
        yield client
    finally:
        cleanup()


def _given(cluster: Any) -> Any:
    if cluster is None:
        raise OptionError(
            "cluster=None: must be a Dask Client, a cluster, or a scheduler's address"
        )
    return cluster

"""Start a job, list the jobs of a cluster, and take a job over."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from distributed import Client

from nbelastic.cluster import (
    HeldPartitions,
    JobClient,
    check_pulled,
    check_versions,
    look_at_job,
    lost_while,
    open_jobs,
    own_versions,
    pack_function,
    send_wish,
    variables_of,
    with_sources,
)
from nbelastic.errors import ClusterLost, JobInterrupted, OptionError
from nbelastic.membership import Machine, pack_machine
from nbelastic.messages import AttachRefusal, JobPayload, JobTerms, LimitsChanged, StopRequested
from nbelastic.status import JobTable

from . import display
from .attachment import attach_client
from .job import Job
from .loggers import Send, check_logger
from .options import Options, check_name, described, flag
from .parser import call_arguments, with_hints
from .thread import Driver

Duration: TypeAlias = "float | str | datetime.timedelta"
"""Seconds, text that Dask reads (``"2 minutes"``), or a timedelta."""

TICK = 0.1  # seconds between two looks of a waiting caller at what it shows


@with_hints
def fit(
    fn: Callable[..., Any],
    *,
    cluster: Any = None,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    check_every: int | None = None,
    workers: str | Iterable[str] | None = None,
    resources: Mapping[str, float] | None = None,
    slots_per_host: int | None = None,
    priority: int | None = None,
    weight: float | None = None,
    preemptible: bool | None = None,
    reset_limit: int | None = None,
    elastic_timeout: Duration | None = None,
    stall_timeout: Duration | None = None,
    heartbeat_timeout: Duration | None = None,
    exit_timeout: Duration | None = None,
    blacklist_cooldown: tuple[Duration, Duration] | None = None,
    lease: Duration | None = None,
    notices: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    timeline: str | os.PathLike[str] | None = None,
    pull: str | Iterable[str] | None = None,
    name: str | None = None,
    log_to: Send | None = None,
    block: bool = True,
) -> Job:
    """Train elastically on a Dask cluster.

    Parameters
    ----------
    fn : callable
        The training function. It runs on every rank, from the top, with ``args`` and ``kwargs``.
        A Dask dataframe or array among them arrives as a ``hvd.elastic.Dask``, which a ``Loader``
        reads.
    cluster : Client, Cluster or str, optional
        A Dask client, a cluster, or a scheduler's address. Without it a ``LocalCluster`` is
        started for the job, with ``np`` (or ``max_np``, or as many as cores) workers, and closed at
        its end.
    args, kwargs : iterable, mapping, optional
        What to call the function with.
    np, min_np, max_np, ... : optional
        See the fields of ``nbelastic.driver.options.Options``, which stand here when it runs.
    name : str, optional
        Name of the job, unique on the cluster; made up if not given.
    log_to : callable, optional
        Gets the metrics that ranks report: see :meth:`Job.log_to`.
    block : bool, default True
        Wait for the end and raise what went wrong. An interrupt then stops the job at its next
        commit, a second one at once.

    Notes
    -----
    A duration is a number of seconds, a :class:`~datetime.timedelta`, or text as Dask reads it:
    ``"90 s"``, ``"2 minutes"``. What is not given, or None, is what ``dask.config`` has under
    ``nbelastic``, such as ``nbelastic.stall_timeout``; the package's file is ``nbelastic.yaml``.

    Returns
    -------
    Job
        With ``block=True`` after its end.

    Raises
    ------
    OptionError
        An option has a value that it cannot have.
    PreflightError
        ``NotPicklable`` or ``VersionMismatch``: nothing was started.
    JobError
        With ``block=True``: why the job has no result; see :meth:`Job.result`.
    JobInterrupted
        With ``block=True``: the job ended because it was interrupted.

    Examples
    --------
    >>> job = nbelastic.fit(train, cluster=client, min_np=2, max_np=8)  # doctest: +SKIP
    >>> job.result()  # doctest: +SKIP
    """
    options = Options.given(locals())
    flag.check("block", block)
    if not callable(fn):
        raise OptionError(f"fn={fn!r}: must be a function")
    check_pulled(fn, options.pull)
    if log_to is not None:
        check_logger(log_to)
    job_name = check_name(name)
    positional, named, sources = with_sources(fn, *call_arguments(fn, args, kwargs))
    # What cannot be sent is refused before a cluster starts, unless that has to compute first.
    packed = None if sources else pack_function(fn, positional, named)
    client, cleanup = attach_client(cluster, options)
    job_client: JobClient | None = None
    held = HeldPartitions()
    try:
        with lost_while(client, "versions were compared"):
            check_versions(client)
        if packed is None:
            with lost_while(client, "partitions were computed"):
                held.hold(client, sources)
            packed = pack_function(fn, positional, named)
        payload, modules = packed
        driver = Driver(job_name, options, cleanup)
        driver.log.modules = modules
        driver.variables = variables_of(fn)
        job_client = JobClient(client, job_name, driver.receive)
        job_client.open(terms_of(payload, options, held))
        driver.start(job_client)
    except BaseException as error:
        if job_client is not None and not isinstance(error, ClusterLost):
            job_client.close()  # interrupted half-way, it may have been opened
        if job_client is not None:
            job_client.give_up()  # should the connection come back, it is not opened
        cleanup()
        raise
    finally:
        held.release()
    return hand_out(driver, block=block, log_to=log_to)


fit.__doc__ = re.sub(
    r"np, min_np.*\n.*",
    lambda _: described(fit.__annotations__).replace("Duration", "duration"),
    inspect.cleandoc(str(fit.__doc__)),
)


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on all ranks and return what each returned: ``horovod.run``.

    Parameters
    ----------
    func : callable
        The training function.
    args, kwargs : iterable, mapping, optional
        What to call it with.
    np, min_num_proc, max_num_proc : int, optional
        ``np``, ``min_np`` and ``max_np`` of :func:`fit`.
    **options
        Other options of :func:`fit`, such as ``cluster``. Horovod's options of hosts and of its
        launcher do not exist, because the cluster decides where ranks run.

    Returns
    -------
    list
        The result of each rank, in the order of the ranks.
    """
    job = fit(
        func,
        args=args,
        kwargs=kwargs,
        np=np,
        min_np=min_num_proc,
        max_np=max_num_proc,
        block=True,
        **options,
    )
    return job.results()


def terms_of(payload: JobPayload, options: Options, held: HeldPartitions | None = None) -> JobTerms:
    """Return the terms of a job for the scheduler."""
    return JobTerms(
        payload=payload,
        workers=options.workers,
        resources={name: float(need) for name, need in options.resources.items()},
        versions=own_versions(),
        heartbeat_timeout=float(options.heartbeat_timeout),
        lease=float(options.lease),
        options=pickle.dumps(options),
        machine=pack_machine(Machine(options.limits())),
        partitions=() if held is None else held.keys,
        notices=options.notices == "auto",
    )


def hand_out(driver: Driver, *, block: bool, log_to: Send | None = None) -> Job:
    """Return the job of a driver that has started, at once or after its end."""
    job = Job(driver)
    if log_to is not None:
        job.log_to(log_to)
    if block:
        if threading.current_thread() is threading.main_thread():
            wait_interruptibly(job)
        if driver.options.pull and (job.exception() is None or job.cancelled()):
            try:
                job.pull()
            except Exception as error:  # of the user's classes, too; the job has its result
                warnings.warn(f"{error}; job.pull() tries it again", stacklevel=3)
        job.results()
    return job


def wait_interruptibly(job: Job) -> None:
    """Wait for the end; an interrupt stops the job at its next commit, a second one now."""
    interrupts = handled = 0
    watch = None
    with contextlib.ExitStack() as stack:
        while True:
            try:  # all of it: the next interrupt may come while this one is handled
                if watch is None:
                    watch = stack.enter_context(display.watching(job))
                if handled < interrupts:
                    handled = interrupts
                    if interrupts == 1:
                        job.stop()
                        watch.say("stopping at the next commit; interrupt again to stop now")
                    else:
                        job.cancel()
                if job.wait(TICK):
                    break
                watch.tick()
            except KeyboardInterrupt:
                interrupts += 1
    if interrupts:
        raise JobInterrupted(f"job {job.name!r} was interrupted; it has ended")


# -- jobs that others have started ----------------------------------------------------------------


@with_hints
def jobs(cluster: Any) -> JobTable:
    """Return the jobs on a cluster, with or without a kernel.

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
    with connected(cluster) as client:
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
    client, cleanup = attach_client(cluster)
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
    """Return the state of a job at this moment; the job stays with its kernel."""
    name = _name_of_job(name)
    with connected(cluster) as client:
        with lost_while(client, "versions were compared"):
            check_versions(client)
        answer = look_at_job(client, name)
    if isinstance(answer, AttachRefusal):
        raise _unknown(name, answer)
    driver = Driver(name, pickle.loads(answer.options), lambda: None)
    driver.adopt(answer)
    return Job(driver)


def ask(name: str, event: StopRequested | LimitsChanged, *, cluster: Any) -> None:
    """Ask a job to end, or to change its limits. Its kernel keeps it."""
    name = _name_of_job(name)
    with connected(cluster) as client:
        refusal = send_wish(client, name, event)
    if refusal is not None:
        raise _unknown(name, refusal)


def _name_of_job(name: str | None) -> str:
    if name is None:
        raise OptionError("name=None: must be the name of a job; nbelastic.jobs() lists them")
    return check_name(name)


def _unknown(name: str, refusal: AttachRefusal) -> OptionError:
    there = ", ".join(refusal.jobs) or "none"
    return OptionError(f"name={name!r}: no such job on this cluster; there are: {there}")


@contextlib.contextmanager
def connected(cluster: Any) -> Iterator[Client]:
    """Yield a client for the value of ``cluster=``, and close a client opened here."""
    client, cleanup = attach_client(cluster)
    try:
        yield client
    finally:
        cleanup()

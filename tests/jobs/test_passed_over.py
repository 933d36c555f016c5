"""Workers that a job does not get: each has its reason, and those that it could have, it gets."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from distributed.core import Status

import nbelastic.torch as hvd
from nbelastic.errors import NotEnoughWorkers
from tests.support.clusters import a_crew, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def add_up():
    hvd.init()
    return hvd.allreduce(torch.ones(3), op=hvd.Sum).sum().item()


def wait_for(path):
    import os
    import time

    while not os.path.exists(path):
        time.sleep(0.01)


@contextlib.contextmanager
def workers_by_name(scheduler: str, count: int) -> Iterator[list[str]]:
    """Run workers whose contact addresses have a host's name in them."""
    with contextlib.ExitStack() as stack:
        contacts = []
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            contacts.append(f"tcp://localhost:{port}")
            command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler]
            options = ["--no-nanny", "--no-dashboard", "--nthreads", "1"]
            options += ["--listen-address", f"tcp://127.0.0.1:{port}"]
            options += ["--contact-address", contacts[-1]]
            worker = stack.enter_context(
                subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
            )
            stack.callback(worker.kill)
        yield contacts


def test_workers_with_a_host_name_as_contact_address_are_used():
    with (
        a_crew(n_workers=0) as crew,
        workers_by_name(crew.cluster.scheduler_address, 2) as contacts,
    ):
        crew.client.wait_for_workers(2)
        assert crew.fit(add_up, np=2, elastic_timeout=30).results() == [6.0, 6.0]
        job = crew.fit(add_up, np=1, workers=contacts[0], elastic_timeout=30)
        assert job.results() == [3.0]


def test_each_worker_that_a_job_does_not_get_has_its_reason(crew, tmp_path):
    first = crew.fit(wait_for, args=[str(tmp_path / "go")], np=3, name="first", block=False)
    until(lambda: len(first.status.ranks) == 3 or first.done(), "the first job has its workers")
    second = crew.fit(wait_for, args=[str(tmp_path / "go")], np=2, name="second", block=False)
    until(lambda: "3 taken by job 'first' (tcp://" in second.status.reason, "the reason")
    until(lambda: "1 beyond the share of this job (tcp://" in second.status.reason, "another")
    with pytest.raises(NotEnoughWorkers, match="3 taken by job 'first'"):
        crew.fit(add_up, np=2, elastic_timeout=0.7)
    (tmp_path / "go").touch()
    first.results(60)
    second.results(60)


def test_a_rank_that_waits_for_other_tasks_says_so(crew, tmp_path):
    go = str(tmp_path / "go")
    tasks = crew.client.map(wait_for, [go] * 8, pure=False)  # two for each worker
    job = crew.fit(add_up, np=2, block=False)
    until(lambda: "not used: 2 busy with other tasks" in job.status.reason, "the reason")
    (tmp_path / "go").touch()
    assert job.results(60) == [6.0, 6.0]
    crew.client.gather(tasks)


def set_status(status):
    def change(dask_scheduler):
        for worker in dask_scheduler.workers.values():
            worker.status = status

    return change


def test_a_worker_that_was_paused_is_used_once_dask_lets_it_go_on(crew):
    crew.fit(add_up, np=2)  # agents are there
    crew.client.run_on_scheduler(set_status(Status.paused))
    try:
        job = crew.fit(add_up, np=2, block=False)
        until(lambda: "not used: 4 paused by Dask" in job.status.reason, "the reason")
    finally:
        crew.client.run_on_scheduler(set_status(Status.running))
    assert job.results(60) == [6.0, 6.0]


def test_a_worker_that_was_paused_from_the_start_is_used_too():
    with a_crew(n_workers=1) as crew:
        crew.client.run_on_scheduler(set_status(Status.paused))
        job = crew.fit(add_up, np=1, block=False)
        until(lambda: "not used: 1 paused by Dask" in job.status.reason, "the reason")
        crew.client.run_on_scheduler(set_status(Status.running))
        assert job.results(60) == [3.0]

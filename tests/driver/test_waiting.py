"""Interrupts of a wait, whenever they come, and a job whose connection is lost."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from nbelastic.cluster import JobClient
from nbelastic.driver import display
from nbelastic.driver.fit import wait_interruptibly
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.errors import JobInterrupted
from nbelastic.messages import AttachRefusal


class Waited(Job):
    """A job whose parts raise a `KeyboardInterrupt` when it is their turn."""

    def __init__(self, *interrupted: str) -> None:
        self._driver = SimpleNamespace(name="a", owns_cluster=True)
        self._interrupted = list(interrupted)
        self.calls: list[str] = []

    status = SimpleNamespace(ranks=())

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._interrupted and self._interrupted[0] == call:
            del self._interrupted[0]
            raise KeyboardInterrupt

    def wait(self, timeout=None) -> bool:
        self._note("wait")
        return self.calls.count("wait") > 5

    def stop(self) -> None:
        self._note("stop")

    def cancel(self) -> None:
        self._note("cancel")

    def tick(self) -> None:
        self._note("tick")

    def say(self, text: str) -> None:
        self._note("say")


@pytest.mark.parametrize(
    ("interrupted", "asked"),
    [
        (("wait",), ["stop"]),
        (("open",), ["stop"]),
        (("tick", "wait"), ["stop", "cancel"]),
        (("wait", "stop"), ["stop", "cancel"]),
        (("wait", "say"), ["stop", "cancel"]),
        (("wait", "wait", "cancel"), ["stop", "cancel", "cancel"]),
    ],
)
def test_no_interrupt_leaves_a_job_to_itself(monkeypatch, interrupted, asked):
    @contextlib.contextmanager
    def watching(job):
        job._note("open")
        yield job

    monkeypatch.setattr(display, "watching", watching)
    job = Waited(*interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        wait_interruptibly(job)
    assert raised.type is JobInterrupted, job.calls
    assert "the cluster that was started for it is closed" in str(raised.value)
    assert [call for call in job.calls if call in ("stop", "cancel")] == asked


def test_a_lost_connection_is_the_reason_until_it_is_back() -> None:
    driver = Driver("away", Options(np=2), lambda: None)
    job_client: Any = SimpleNamespace(status="running", attach=lambda: AttachRefusal("taken"))
    driver.job_client = job_client
    job = Job(driver)
    before = job.status.reason
    job_client.status = "connecting"
    driver._look_at_connection()
    assert job.status.reason == "no connection to the scheduler; if it lives, the job goes on there"
    job_client.status = "running"
    driver._look_at_connection()
    assert job.status.reason == before


def cluster_of(names: Any, wanted: Any) -> Any:
    return SimpleNamespace(workers=dict.fromkeys(names), worker_spec=dict.fromkeys(wanted))


@pytest.mark.parametrize("own", [False, True])
def test_a_worker_that_dask_has_closed_for_good_is_said_once_or_started_again(own: bool) -> None:
    driver, asked = Driver("closed", Options(np=2), lambda: None), list[int]()
    driver.owns_cluster = own
    client: Any = SimpleNamespace(cluster=cluster_of((0, 1), (0, 1)))
    client.cluster.scale = asked.append
    driver.job_client = JobClient(client, "closed", lambda _: None)

    def look() -> None:
        driver._look_at = 0.0
        driver._look_at_workers()

    look()
    del client.cluster.worker_spec[0], client.cluster.workers[0]  # scaled down
    client.cluster.worker_spec[2] = None  # about to start
    look()
    assert not driver.log.warnings() and not asked
    del client.cluster.workers[1]
    look()
    look()
    assert asked == [2] * own
    assert [each.split("\n")[0] for each in driver.log.warnings()] == (
        [] if own else ["Dask's cluster has closed worker 1 for good"]
    )
    client.cluster = None  # an address
    look()

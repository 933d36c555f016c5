"""Status of a job while its driver has no connection to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.messages import AttachRefusal


def test_a_lost_connection_is_the_reason_until_it_is_back() -> None:
    driver = Driver("away", Options(np=2), lambda: None)
    job_client: Any = SimpleNamespace(status="running", attach=lambda: AttachRefusal("taken"))
    driver.adopt_client(job_client)
    job = Job(driver)
    before = job.status.reason
    job_client.status = "connecting"
    driver._look_at_connection()
    assert job.status.reason == "no connection to the scheduler; if it lives, the job goes on there"
    job_client.status = "running"
    driver._look_at_connection()
    assert job.status.reason == before

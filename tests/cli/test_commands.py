"""Commands for the jobs of a cluster: they leave a job to its kernel, but for ``attach``."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner

from nbelastic.cli.entry import elastic
from nbelastic.cluster.wire import pack
from nbelastic.driver import display
from nbelastic.errors import JobStopped
from nbelastic.messages import JobWish, RankLeft
from tests.support.clusters import kinds, until


def train(seconds=60.0):
    import nbelastic.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(step=0, until=0.0)

    @hvd.elastic.run
    def loop(state):
        while not state.until or time.time() < state.until:
            state.until = state.until or time.time() + seconds
            state.step += 1
            if state.step == 5:
                print(f"hello from {hvd.rank()}")
            time.sleep(0.02)
            state.commit()

    loop(state)


@pytest.fixture
def job(crew):
    job = crew.fit(train, np=2, min_np=1, max_np=2, name="night", block=False)
    until(lambda: "hello" in job.logs() and job.status.size == 2, "two ranks train")
    yield job
    job.cancel()
    job.wait(30)


@pytest.fixture
def call(crew):
    before = display._display

    def run(*words: str, code: int = 0) -> str:
        place = ["--scheduler", crew.cluster.scheduler_address]
        result = CliRunner().invoke(elastic, [*words, *place], standalone_mode=True)
        assert result.exit_code == code, result.output
        return result.output

    yield run
    display.set_display(before)


def test_jobs_status_logs_and_cancel_are_for_a_job_of_another_kernel(job, call):
    for command in ("status", "stop", "logs"):
        assert "no such job on this cluster; there are: night" in call(command, "dawn", code=2)
    assert call("jobs").splitlines()[1].split()[:2] == ["night", "running"]
    status = call("status", "night")
    assert status.startswith("night: running · 2 ranks")
    assert "Rank 1 has joined" in status and status.count("running  ") == 2
    assert "hello from 0" in call("logs") and "hello from 1" not in call("logs", "--rank", "0")
    why = call("why", "night", "1")
    assert "joined rank 1 on" in why
    assert "joined rank 0 on" in call("why", "night")
    assert not job.done() and "attached" not in kinds(job)
    assert "ends now" in call("cancel")
    with pytest.raises(JobStopped, match="cancelled"):
        job.result(30)


def test_scale_and_stop_change_a_job_of_another_kernel(job, call):
    place = ("--priority", "-2", "--weight", "2.5")
    assert "from the next commit on" in call("scale", "night", "--max-np", "1", *place)
    until(lambda: job.status.size == 1, "one rank trains")
    limits = job._driver._machine.roster.limits
    assert (limits.max_np, limits.priority, limits.weight) == (1, -2, 2.5)
    assert "would be above" in call("scale", "night", "--min-np", "3", code=2)
    assert "'0' must be a number above 0" in call("scale", "--weight", "0", code=2)
    assert "give --min-np, --max-np, --priority or --weight" in call("scale", "night", code=2)
    assert "ends at its next commit" in call("stop", "night")
    with pytest.raises(JobStopped, match="stopped"):
        job.result(30)
    assert "attached" not in kinds(job)


def test_attach_takes_a_job_over_and_waits_for_its_end(crew, call):
    job = crew.fit(train, kwargs={"seconds": 1.0}, np=1, name="short", block=False)
    until(lambda: job.status.size == 1, "one rank trains")
    assert "finished · 1 rank" in call("attach", "short", "--plain")
    assert job.status.state == "detached"
    assert "a job's name is missing; there are: none" in call("status", code=2)


def test_a_user_cannot_send_an_event_of_a_rank(crew, job):
    message = pack(JobWish("night", RankLeft(0)))
    with pytest.raises(ValueError, match="Invalid value 'RankLeft'"):
        crew.client.sync(crew.client.scheduler.nbelastic_wish, message=message)
    assert job.status.size == 2


def test_doctor_finds_nothing_bad_on_a_good_cluster(crew, call):
    text = call("doctor")
    assert "✓ versions" in text and "✓ ports" in text and "4 present" in text


def test_no_scheduler_is_a_line(monkeypatch):
    monkeypatch.setattr("nbelastic.cluster.kernel.reachability.CONNECT_WITHIN_S", 0.2)
    found = CliRunner().invoke(elastic, ["jobs", "--scheduler", "tcp://127.0.0.1:9"])
    assert found.exit_code == 1
    assert "Error: ClusterLost: " in found.output and "Connection refused" in found.output

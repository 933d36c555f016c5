"""What every job does: run a function on all ranks, and come back."""

import asyncio
import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import Event

import nbelastic
from nbelastic.errors import JobStopped, OptionError, RankFailed
from tests.support.clusters import kinds, until


def place():
    return nbelastic.rank(), nbelastic.size(), nbelastic.local_rank(), nbelastic.cross_size()


def test_results_come_by_rank(crew):
    job = crew.fit(place, np=4)
    assert job.results() == [(rank, 4, rank, 1) for rank in range(4)]
    assert job.result() == (0, 4, 0, 1)
    assert job.done()
    assert job.exception() is None
    assert job.status.state == "finished"
    assert kinds(job)[-1] == "finished"


def test_N11_an_error_arrives_as_what_it_is_with_the_users_line_rank_and_worker(crew):
    def fail():
        if nbelastic.rank() == 1:
            raise LookupError("no such digit")

    job = crew.fit(fail, np=2, block=False)
    with pytest.raises(LookupError, match="no such digit") as caught:
        job.result()
    assert isinstance(caught.value, RankFailed)
    assert isinstance(caught.value.__cause__, LookupError)
    message = str(caught.value)
    assert 'raise LookupError("no such digit")' in message
    assert "rank 1 on tcp://" in message
    assert "nbelastic/elastic" not in message
    assert job.status.state == "failed"
    with pytest.raises(ZeroDivisionError) as caught:  # one of several ranks is told of
        crew.fit(lambda: 1 / 0, np=4)
    assert str(caught.value).count("division by zero") == 1


def test_a_name_can_be_used_again_but_not_twice_at_once(crew):
    def nap(until):
        Event(until).wait(60)

    job = crew.fit(nap, args=("refused",), np=1, name="naps", block=False)
    with pytest.raises(OptionError, match="name='naps'"):
        crew.fit(nap, args=("refused",), np=1, name="naps")
    Event("refused", client=crew.client).set()
    job.result(30)
    crew.fit(nap, args=("refused",), np=1, name="naps")


def test_cancel_ends_ranks_whether_they_obey_or_swallow_everything_and_spares_workers(
    crew, tmp_path
):
    def spin():
        (tmp_path / f"begun-{nbelastic.rank()}").touch()
        try:
            while True:
                time.sleep(0.01)
        finally:
            (tmp_path / f"cleaned-{nbelastic.rank()}").touch()
            signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
            while nbelastic.rank() == 1:
                with contextlib.suppress(BaseException):
                    time.sleep(1)

    before = crew.workers()
    job = crew.fit(spin, np=2, block=False)
    until(lambda: len([*tmp_path.glob("begun-*")]) == 2, "the ranks run")
    assert job.cancel()
    with pytest.raises(JobStopped, match="cancelled"):
        job.result(60)
    assert len([*tmp_path.glob("cleaned-*")]) == 2
    assert job.status.state == "stopped" and job.cancelled()
    assert not job.cancel()
    assert job.status.ranks == ()  # none was ever a member
    assert "warning" not in kinds(job)
    crew.wait_until_whole(4)
    assert crew.workers() == before


def test_a_job_can_be_awaited_and_giving_up_leaves_it_alone(crew):
    async def main(job):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(job, 0.1)
        assert job.running() and not job.cancelled()
        return await job

    def slow():
        time.sleep(1.0)
        return 7

    job, ended = crew.fit(slow, np=1, block=False), []
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(0.01)
    assert not job.wait(0.01)
    job.add_done_callback(ended.append)
    assert asyncio.run(main(job)) == 7
    assert not job.running() and not job.cancelled()
    until(lambda: ended == [job], "the callback")

    async def failing():
        await crew.fit(lambda: 1 / 0, np=1, block=False)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing())


def test_N13_a_job_can_be_run_from_any_thread(crew):
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda n: crew.fit(place, np=n), [1, 3]))
    assert [len(job.results()) for job in jobs] == [1, 3]

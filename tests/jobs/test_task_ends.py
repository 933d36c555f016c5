"""Whatever ends a rank's task is an event of its job."""

from __future__ import annotations

import contextlib

import pytest

import nbelastic
from nbelastic.errors import JobStopped, RankFailed


@contextlib.contextmanager
def broken(crew, name):
    """Break something that ranks use on all workers."""

    def explode(name):
        from nbelastic.cluster.worker import rank_task as rank

        def boom(*args, **kwargs):
            raise SystemError(f"{name} is broken")

        rank.kept = getattr(rank, name)
        setattr(rank, name, boom)

    def mend(name):
        from nbelastic.cluster.worker import rank_task as rank

        setattr(rank, name, rank.kept)

    crew.client.run(explode, name)
    try:
        yield
    finally:
        crew.client.run(mend, name)


def fail():
    raise ValueError("the function's own")


OUTSIDE = ["Session", "prepared", "captured", "activate", "_Rank", "trainers_of"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_rank_that_raises_outside_its_function_fails_the_job(crew, name):
    with broken(crew, name), pytest.raises(RankFailed, match=f"{name} is broken"):
        crew.fit(nbelastic.size, np=2, elastic_timeout=30)


def test_an_error_that_cannot_be_packed_fails_the_job(crew):
    with broken(crew, "pack_error"), pytest.raises(RankFailed, match="pack_error is broken"):
        crew.fit(fail, np=1, elastic_timeout=30)


def swallow(place):
    import time
    from pathlib import Path

    Path(place).touch()
    while True:
        try:
            time.sleep(1)
        except BaseException:
            continue


def test_cancel_ends_a_rank_that_swallows_everything(crew, tmp_path):
    from tests.support.clusters import until

    begun = tmp_path / "begun"
    job = crew.fit(swallow, args=[str(begun)], np=1, block=False)
    until(begun.exists, "the rank runs")
    before = set(crew.workers())
    job.cancel()
    with pytest.raises(JobStopped):
        job.result(60)
    warnings = [event.detail for event in job.history if event.kind == "warning"]
    assert len(warnings) == 1
    assert "did not end within 10 s of the order to: its worker is restarted" in warnings[0]
    crew.wait_until_whole(4)
    assert len(before - set(crew.workers())) == 1

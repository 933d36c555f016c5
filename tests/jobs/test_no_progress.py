"""Jobs that a reset does not help: they end, soon, with what keeps them from getting on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from nbelastic.errors import NoProgress, RankFailed
from tests.support.clusters import kinds, until


def train(mishap, *, steps=6):
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps + mishap.extra(hvd.rank()):
            if state.step == 3:
                mishap.happen(hvd.rank())
            hvd.allreduce(torch.ones(3), name="loss")
            state.step += 1
            state.commit()

    loop(state)


class GivesUp:
    def extra(self, rank):
        return 0

    def happen(self, rank):
        from nbelastic.torch import HorovodInternalError

        if rank == 1:
            raise HorovodInternalError("loss is nan")


class Leaves(GivesUp):
    def happen(self, rank):
        from nbelastic.torch import HostsUpdatedInterrupt

        if rank == 1:
            raise HostsUpdatedInterrupt


class Raises(GivesUp):
    def happen(self, rank):
        raise ValueError("loss is nan")


@dataclass
class CrashesOnceKnown(GivesUp):
    """Crash when the scheduler has had a heartbeat from commit 3."""

    marks: Path

    def happen(self, rank):
        import os
        import signal
        import time

        from nbelastic.elastic.ranks.context import current

        known = self.marks / str(current().generation)
        while not known.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSEGV)

    def tell(self, plugin, job):
        """Let the ranks crash whose commit is known."""
        for host in list(plugin._workers.values()):
            for (name, _), beat in host.last_beats.items():
                if name == job.name and beat.version == 3:
                    (self.marks / str(beat.generation)).touch()


class HasMoreBatches:
    def extra(self, rank):
        return rank

    def happen(self, rank):
        pass


@pytest.mark.parametrize(
    ("mishap", "words"),
    [
        (GivesUp(), ["rank 1 on ", "loss is nan", "2 times in a row", "at commit 3"]),
        (Leaves(), ["rank 1 on ", "HostsUpdatedInterrupt, but no rank", "at commit 3"]),
        (HasMoreBatches(), ["rank 0 on ", "rank 1 on ", "waits for it", "ElasticSampler"]),
    ],
    ids=["gives-up", "leaves", "more-batches"],
)
def test_what_no_reset_helps_against_ends_the_job_and_is_named(crew, mishap, words):
    job = crew.fit(train, args=(mishap,), np=2, block=False)
    error = job.exception(60)
    assert type(error) is NoProgress
    assert [word for word in words if word not in str(error)] == []
    assert kinds(job).count("reset") <= 2


def test_what_all_ranks_raise_ends_a_job_that_has_no_other_workers(crew):
    job = crew.fit(train, args=(Raises(),), np=4, block=False)
    error = job.exception(60)  # bounded: elastic_timeout, which is not waited for, is 600 s
    assert isinstance(error, ValueError)
    assert isinstance(error, RankFailed)


def test_a_process_that_dies_at_the_same_commit_each_time_ends_the_job(crew, tmp_path):
    crash = CrashesOnceKnown(tmp_path)
    options = {"np": 1, "blacklist_cooldown": (0.1, 0.2), "block": False}
    job = crew.fit(train, args=(crash,), **options)
    plugin = crew.cluster.scheduler.plugins["nbelastic"]
    until(lambda: crash.tell(plugin, job) or job.done(), "it ends", 300)
    error = job.exception()
    assert type(error) is NoProgress
    assert "4 times in a row" in str(error)
    assert "was killed by signal 11 (SIGSEGV)" in str(error)
    assert "rank 0 on tcp://" in str(error)
    assert kinds(job).count("restarted") == 3


def test_what_the_scheduler_knows_of_a_lost_rank_its_driver_learns_before_the_loss(crew, tmp_path):
    crash = CrashesOnceKnown(tmp_path)
    job = crew.fit(train, args=(crash,), np=1, block=False)
    plugin = crew.cluster.scheduler.plugins["nbelastic"]
    relay = plugin._heartbeats._relay
    until(lambda: "formed" in kinds(job), "it runs")
    crew.cluster.sync(stopped, relay)
    try:
        until(lambda: crash.tell(plugin, job) or "restarted" in kinds(job), "it starts over")
    finally:
        crew.cluster.sync(started, relay)
    job.cancel()
    restarted = next(event for event in job.history if event.kind == "restarted")
    assert "holds commit 3" in restarted.detail


async def stopped(relay):
    relay.stop()


async def started(relay):
    relay.start()

"""Jobs that a reset does not help: they end, soon, with what keeps them from getting on."""

import pytest

from nbelastic.errors import NoProgress
from tests.support.clusters import kinds, until


def train(kind, marks):
    import os
    import signal
    import time

    import torch

    import nbelastic.torch as hvd
    from nbelastic.elastic.ranks.context import current

    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    steps = 6 + hvd.rank() * (kind == "more batches")

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            if state.step == 3 and kind == "gives up" and hvd.rank() == 1:
                raise hvd.HorovodInternalError("loss is nan")
            if state.step == 3 and kind == "leaves" and hvd.rank() == 1:
                raise hvd.HostsUpdatedInterrupt
            if state.step == 3 and kind == "crashes":
                while not (marks / str(current().generation)).exists():  # its commit is known
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGSEGV)
            hvd.allreduce(torch.ones(3), name="loss")
            state.step += 1
            state.commit()

    loop(state)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gives up", ["rank 1 on ", "loss is nan", "2 times in a row", "at commit 3"]),
        ("leaves", ["rank 1 on ", "HostsUpdatedInterrupt, but no rank", "at commit 3"]),
        ("more batches", ["rank 0 on ", "rank 1 on ", "waits for it", "ElasticSampler"]),
    ],
)
def test_what_no_reset_helps_against_ends_the_job_and_is_named(crew, tmp_path, kind, words):
    job = crew.fit(train, args=(kind, tmp_path), np=2, block=False)
    error = job.exception(60)
    assert type(error) is NoProgress
    assert [word for word in words if word not in str(error)] == []
    assert kinds(job).count("reset") <= 2


async def switch(relay, on):
    (relay.start if on else relay.stop)()


def test_what_the_scheduler_knows_of_a_lost_rank_its_driver_learns_before_the_loss(crew, tmp_path):
    job = crew.fit(train, args=("crashes", tmp_path), np=1, block=False)
    plugin = crew.cluster.scheduler.plugins["nbelastic"]

    def started_over():
        for host in list(plugin.workers.values()):
            for (name, _), beat in host.last_beats.items():
                if name == job.name and beat.version == 3:
                    (tmp_path / str(beat.generation)).touch()
        return "restarted" in kinds(job)

    until(lambda: "formed" in kinds(job), "it runs")
    crew.cluster.sync(switch, plugin._heartbeats._relay, False)
    try:
        until(started_over, "it starts over")
    finally:
        crew.cluster.sync(switch, plugin._heartbeats._relay, True)
    job.cancel()
    restarted = next(event for event in job.history if event.kind == "restarted")
    assert "holds commit 3" in restarted.detail

"""Jobs that a reset does not help: they end, soon, with what keeps them from getting on."""

import pytest

from nbelastic.errors import NoProgress
from tests.support.clusters import kinds


def train(kind):
    import torch

    import nbelastic.torch as hvd

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
def test_what_no_reset_helps_against_ends_the_job_and_is_named(crew, kind, words):
    job = crew.fit(train, args=(kind,), np=2, block=False)
    error = job.exception(60)
    assert type(error) is NoProgress
    assert [word for word in words if word not in str(error)] == []
    assert kinds(job).count("reset") <= 2

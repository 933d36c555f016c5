"""How tensors travel; ranks that differ, or that no reset helps, end their job at once by name."""

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import NoProgress, RankFailed, RanksDisagree
from tests.support.clusters import kinds


def works(kind):
    hvd.init()
    first, last = hvd.rank() == 0, hvd.rank() == 1
    state = hvd.elastic.ObjectState(step=0)
    sums = []

    def sum_up(state):
        sums.append(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())

    def differ(state):
        state.commit()
        if first:
            hvd.allreduce(torch.ones(2), name="loss")
        else:
            hvd.broadcast_object("settings", 0)

    def loop(state):
        while state.step < 6 + (last and kind == "more batches"):
            if state.step == 3 and kind == "gives up" and last:
                raise hvd.HorovodInternalError("loss is nan")
            if state.step == 3 and kind == "leaves" and last:
                raise hvd.HostsUpdatedInterrupt
            hvd.allreduce(torch.ones(3), name="loss")
            state.step += 1
            state.commit()

    if kind == "two loops":
        for _ in range(2):
            hvd.elastic.run(sum_up)(hvd.elastic.ObjectState())
    elif kind == "differ":
        hvd.elastic.run(differ)(state)
    elif kind == "differ without a loop":
        hvd.barrier()
        hvd.allreduce(torch.ones(2 + hvd.rank()))
    elif kind == "one alone":
        if first:
            hvd.allreduce(torch.ones(1))
    else:
        hvd.elastic.run(loop)(state)
    return sums


def test_without_gpus_the_job_goes_on_and_says_why(crew):
    job = crew.fit(works, args=("two loops",), np=2, backend="nccl")
    assert job.results() == [[[2.0] * 3] * 2] * 2
    assert job.status.backend == "shm"
    assert [event.detail for event in job.history if event.kind == "backend"] == [
        "tensors go over shared memory: tensors of GPUs are reduced in the memory of the host: "
        "rank 0 has used no GPU"
    ]


@pytest.mark.parametrize(
    ("kind", "backend", "error", "words"),
    [
        ("differ", "shm", RanksDisagree,
         ["rank 0: allreduce 'loss' (average) of float32[2]",
          "rank 1: broadcast_object from rank 0"]),
        ("differ without a loop", "gloo", RanksDisagree, ["float32[2]", "float32[3]"]),
        ("one alone", "auto", RankFailed, ["test_ranks_disagree.py, line ", ", in works. All"]),
        ("gives up", "auto", NoProgress,
         ["rank 1 on ", "loss is nan", "2 times in a row", "at commit 3"]),
        ("leaves", "auto", NoProgress,
         ["rank 1 on ", "HostsUpdatedInterrupt, but no rank", "at commit 3"]),
        ("more batches", "auto", NoProgress,
         ["rank 0 on ", "rank 1 on ", "waits for it", "ElasticSampler"]),
    ],
)  # fmt: skip
def test_what_no_reset_helps_against_ends_the_job_and_is_named(crew, kind, backend, error, words):
    job = crew.fit(works, args=(kind,), np=2, backend=backend, block=False)
    found = job.exception(60)  # elastic_timeout is 600 s
    assert isinstance(found, error)
    assert [word for word in words if word not in str(found)] == []
    assert kinds(job).count("reset") <= (2 if error is NoProgress else 0)

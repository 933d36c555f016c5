"""Ranks that call different operations, or build different data, end their job at once."""

import pytest

from nbelastic.errors import RankFailed, RanksDisagree
from tests.support.clusters import kinds


def differs(elastic):
    import torch

    import nbelastic.torch as hvd

    def loop(state):
        state.step = 1
        state.commit()
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(2), name="loss")
        else:
            hvd.broadcast_object("settings", 0)

    if elastic:
        hvd.elastic.run(loop)(hvd.elastic.ObjectState(step=0))
    else:
        hvd.barrier()
        hvd.allreduce(torch.ones(2 + hvd.rank()))


def meets_gradients():
    import torch

    import nbelastic.torch as hvd

    model = torch.nn.Linear(300, 300)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def loop(state):
        for step in range(20):
            if step == 3 and hvd.rank() == 0:
                hvd.allreduce(torch.ones(2), name="loss")
            optimizer.zero_grad()
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            state.commit()

    hvd.elastic.run(loop)(hvd.elastic.TorchState(model=model, optimizer=optimizer))


@pytest.mark.parametrize(("elastic", "backend"), [(True, "shm"), (False, "gloo")])
def test_ranks_that_differ_end_their_job_at_once(crew, elastic, backend):
    job = crew.fit(differs, args=(elastic,), np=2, backend=backend, block=False)
    error = job.exception(60)  # elastic_timeout is 600 s
    assert isinstance(error, RankFailed)
    assert isinstance(error, RanksDisagree)
    if elastic:
        assert "rank 0: allreduce 'loss' (average) of float32[2]" in str(error)
        assert "rank 1: broadcast_object from rank 0" in str(error)
    else:
        assert "float32[2]" in str(error)
        assert "float32[3]" in str(error)
    assert "reset" not in kinds(job), "going back to a commit would not help"


def test_an_operation_that_meets_gradients_ends_the_job_long_before_it_stalls(crew):
    job = crew.fit(meets_gradients, np=2, backend="gloo", block=False)
    reason = str(job.exception(50))  # stall_timeout is 60 s
    assert "allreduce 'loss' (average) of float32[2]" in reason
    assert "rank 1" in reason


def meet_on_rank_0():
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))


def test_an_operation_of_one_rank_without_a_loop_is_named_by_its_line(crew):
    line = meet_on_rank_0.__code__.co_firstlineno + 7
    place = rf"test_ranks_disagree.py, line {line}, in meet_on_rank_0\. All ranks must"
    with pytest.raises(RankFailed, match=place):
        crew.fit(meet_on_rank_0, np=2)

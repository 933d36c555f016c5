"""The process group of torch.distributed on tensors of a GPU, which the ranks share."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOptions
from torch.nn.parallel import DistributedDataParallel

from nbelastic.torch.process_group import ElasticProcessGroup
from tests.collectives.worlds import KINDS
from tests.torch.training import assert_close, batch, make_model, parameters_of, train_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SIZE = 2
STEPS = 3


@pytest.fixture(params=[*KINDS, "gpu"])
def over(request, ranks):
    """Run a function with the group of each of some ranks, which are processes."""

    def run(function):
        return ranks.run(
            SIZE, lambda context: function(ElasticProcessGroup(context)), request.param
        )

    return run


def on_gpu(rank, dtype=torch.float32):
    return (torch.arange(15, device="cuda").view(3, 5) + rank).to(dtype)


def test_reductions(over):
    def rank_main(group):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64):
            tensor = on_gpu(group.rank(), dtype)
            group.allreduce([tensor]).wait()
            assert torch.equal(tensor, on_gpu(0, dtype) + on_gpu(1, dtype))
        tensor, options = on_gpu(group.rank()), AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        group.allreduce([tensor], options).wait()
        assert torch.equal(tensor, on_gpu(0) + 0.5)
        tensor, options = on_gpu(group.rank()).t(), ReduceOptions()  # not contiguous
        options.rootRank = 1
        group.reduce([tensor], options).wait()
        assert torch.equal(tensor, (2 * on_gpu(0) + 1 if group.rank() else on_gpu(0)).t())
        part = torch.empty(3, 5, device="cuda")
        group.reduce_scatter([part], [[on_gpu(group.rank()), on_gpu(group.rank())]]).wait()
        assert torch.equal(part, 2 * on_gpu(0) + 1)
        sparse = torch.eye(3, device="cuda").to_sparse()
        group.allreduce([sparse]).wait()
        assert torch.equal(sparse.to_dense(), 2 * torch.eye(3, device="cuda"))

    over(rank_main)


def test_moves(over):
    def rank_main(group):
        rank, other = group.rank(), 1 - group.rank()
        tensor, options = on_gpu(rank), BroadcastOptions()
        options.rootRank = 1
        group.broadcast([tensor], options).wait()
        assert torch.equal(tensor, on_gpu(1))
        whole = torch.empty(6, 5, device="cuda")
        group.all_gather_single(whole, on_gpu(rank)).wait()
        assert torch.equal(whole, torch.cat([on_gpu(0), on_gpu(1)]))
        outputs = [torch.empty(3, 5, device="cuda") for _ in range(SIZE)]
        group.alltoall(outputs, [on_gpu(10 * rank), on_gpu(10 * rank + 1)]).wait()
        assert torch.equal(outputs[other], on_gpu(10 * other + rank))
        received = torch.empty(3, 5, device="cuda")
        sent = group.send([on_gpu(rank)], other)
        group.recv([received], other).wait()
        sent.wait()
        assert torch.equal(received, on_gpu(other))
        return whole.device.type, group.allreduce([tensor]).get_future().wait()[0].is_cuda

    assert over(rank_main) == [("cuda", True)] * SIZE


def test_what_the_stream_has_not_computed_yet_is_waited_for(over):
    def rank_main(group):
        tensor = torch.ones(1000, 1000, device="cuda")
        for _ in range(5):
            tensor = tensor @ tensor / 1000  # under way as the operation is called
        work = group.allreduce([tensor])
        work.wait()
        return (tensor * 2).mean().item()  # in the order of the stream

    assert over(rank_main) == [4.0] * SIZE


@pytest.mark.parametrize("bucket_mb", [25, 0.0001], ids=["one bucket", "several"])
def test_ddp_trains_as_one_process_does(over, bucket_mb):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def rank_main(group):
        model = DistributedDataParallel(
            make_model().cuda(), process_group=group, bucket_cap_mb=bucket_mb
        )
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            inputs, targets = batch(step, group.rank(), SIZE)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs.cuda()), targets.cuda()).backward()
            optimizer.step()
        return [each.cpu() for each in parameters_of(model)]

    first, second = over(rank_main)
    assert_close(first, train_alone(sgd, steps=STEPS))
    assert all(map(torch.equal, first, second))

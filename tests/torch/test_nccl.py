"""Gradients that are summed by NCCL, by ranks that share one GPU; where there is one.

NCCL wants a GPU for each rank of a host. So each rank is a host of its own
(``NBELASTIC_NCCL_SHARED_GPU``), and what travels between them goes over sockets.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from nbelastic.collectives.nccl.library import SHARED_GPU_VARIABLE
from nbelastic.collectives.reduction_tree import Blocks
from tests.collectives.test_operations import REDUCED, ops_of, reduced, same, values
from tests.support.bits import bits
from tests.support.clusters import sizes
from tests.support.processes import Ranks
from tests.torch.conftest import use_gpu
from tests.torch.test_cuda_jobs import work
from tests.torch.training import STEPS, batch, make_model, parameters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ROOT = Path(__file__).parents[2]


def prepare(_context):
    os.environ[SHARED_GPU_VARIABLE] = "1"
    use_gpu()


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        ranks.run(4, prepare)
        ranks.run = functools.partial(ranks.run, kind="gpu_nccl")
        yield ranks


def joined(context):
    """Return the communicator, after seeing that it is the one that is tested."""
    communicator = context.communicator()
    assert communicator.name == "nccl", communicator.fallback_reason
    return communicator


@pytest.mark.parametrize("size", [2, 4])
def test_all_types_and_reductions(ranks, size):
    def rank_main(context):
        communicator = joined(context)
        for dtype in REDUCED:
            for count in (1, 1000, 1_000_003):
                for op in ops_of(dtype):
                    tensor = values(context.rank, (count,), dtype).cuda()
                    communicator.allreduce(tensor, op)
                    wanted = reduced(op, [values(rank, (count,), dtype) for rank in range(size)])
                    same(tensor.cpu(), wanted)
        truths = torch.tensor([context.rank == 1, False, True], device="cuda")
        communicator.allreduce(truths)
        return truths.tolist()

    assert ranks.run(size, rank_main) == [[True, False, True]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_sums_have_the_same_bits_on_all_ranks(ranks, size):
    def rank_main(context):
        generator = torch.Generator().manual_seed(context.rank)
        tensors = [torch.randn(n, generator=generator).cuda() for n in (3_000_000, 5, 70_001)]
        torch.cuda._sleep(1_000_000 * context.rank)
        torch._foreach_add_(tensors, 0.0)  # what has been computed last is waited for
        handles = [joined(context).allreduce_async(tensor) for tensor in tensors]
        for handle in handles:
            handle.wait()
        return [bits(each.cpu()) for each in tensors]

    results = ranks.run(size, rank_main)
    assert all(result == results[0] for result in results)


def test_operations_that_move_tensors(ranks):
    def rank_main(context):
        communicator, rank, size = joined(context), context.rank, context.size
        root = torch.full((1001,), float(rank), device="cuda")
        communicator.broadcast(root, 2)
        gathered = [torch.zeros(7, device="cuda") for _ in range(size)]
        communicator.allgather(gathered, torch.full((7,), float(rank), device="cuda"))
        share = torch.zeros(9, device="cuda")
        inputs = [torch.full((9,), float(to), device="cuda") for to in range(size)]
        communicator.reduce_scatter(share, inputs)
        uneven = torch.zeros(rank + 1, device="cuda")
        parts = [torch.full((to + 1,), float(to), device="cuda") for to in range(size)]
        communicator.reduce_scatter(uneven, parts, Op.AVERAGE)
        received = [torch.zeros(rank + 1, device="cuda") for _ in range(size)]
        sent = [torch.full((to + 1,), 10.0 * rank + to, device="cuda") for to in range(size)]
        communicator.all_to_all(received, sent)
        found = (root, *gathered, share, uneven, *received)
        return [each.unique().tolist() for each in found]

    for rank, result in enumerate(ranks.run(4, rank_main)):
        gathered = [[float(each)] for each in range(4)]
        exchanged = [[10.0 * each + rank] for each in range(4)]
        assert result == [[2.0], *gathered, [4.0 * rank], [float(rank)], *exchanged]


def test_sums_along_a_tree_go_through_the_host(ranks):
    def rank_main(context):
        blocks = Blocks.even(7, context.size)
        nodes = [[torch.full((1000,), 1.0, device="cuda")] for _ in blocks.covers[context.rank]]
        output = torch.zeros(1000, device="cuda")
        joined(context).allreduce_tree(nodes, blocks, [output])
        return output.unique().tolist()

    nodes = sum(map(len, Blocks.even(7, 4).covers))
    assert ranks.run(4, rank_main) == [[float(nodes)]] * 4


def test_gradients_never_visit_the_host(ranks):
    def rank_main(context):
        communicator = joined(context)
        model = make_model().cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            inputs, targets = batch(step, context.rank, context.size)
            torch.nn.functional.mse_loss(model(inputs.cuda()), targets.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer._reducer._agreement.layout.groups:
            assert group._staging is None
        assert communicator.capabilities.devices == {"cuda"}
        return [each.cpu() for each in parameters_of(model)]

    results = ranks.run(2, rank_main)
    for tensors in zip(*results, strict=True):
        assert torch.equal(*tensors)


def test_a_handle_that_is_dropped_disturbs_nothing(ranks):
    def rank_main(context):
        for _ in range(20):
            joined(context).allreduce_async(torch.ones(1_000_000, device="cuda"))
            torch.full((1_000_000,), 7.0, device="cuda")
        tensor = torch.ones(1_000_000, device="cuda")
        joined(context).allreduce(tensor)
        return bool((tensor == 4.0).all())

    assert ranks.run(4, rank_main) == [True] * 4


def test_ranks_that_share_a_gpu_are_told_why_the_host_reduces():
    def rank_main(context):
        return context.communicator().name, context.communicator().fallback_reason

    with Ranks(2) as ranks:
        ranks.run(2, use_gpu)
        for name, reason in ranks.run(2, rank_main, kind="gpu_nccl"):
            assert name == "shm"
            assert "ranks 0 and 1 share a GPU; NCCL needs one for each" in reason


def benchmark(*arguments):
    """Run it in a process of its own: its ranks are forks of one that has not used CUDA."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments, "--over", "nccl", "--ranks", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_ranks_that_are_killed_leave_the_others_with_right_sums():
    """At random moments, in the middle of sums. How long it takes is in the output."""
    outcome = benchmark("kills", "--kills", "20")
    print(outcome.stdout)
    assert "all sums right: True" in outcome.stdout, outcome.stderr


def test_memory_does_not_grow_with_resets():
    outcome = benchmark("resets", "--resets", "10")
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def work_apart(*arguments):
    os.environ[SHARED_GPU_VARIABLE] = "1"
    return work(*arguments)


def test_a_job_over_nccl_outlives_its_workers(crew, tmp_path):
    job = crew.fit(work_apart, np=3, min_np=2, max_np=3, args=[tmp_path, 40, 12], backend="nccl")
    results = job.results()
    assert job.status.backend == "nccl"
    assert len(sizes(job)) > 1
    assert all(result == results[0] for result in results)
    assert results[0][0] == 40

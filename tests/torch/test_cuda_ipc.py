"""Gradients that are summed in the memory of a GPU, which all ranks share; where there is one."""

from __future__ import annotations

import functools
import hashlib
import os

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data import Batch, Loader
from tests.collectives.test_operations import REDUCED, ops_of, reduced, same, values
from tests.collectives.worlds import MAKERS, World
from tests.support.bits import bits
from tests.support.processes import Ranks
from tests.torch.conftest import use_gpu
from tests.torch.training import STEPS, batch, make_model, parameters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def ranks():
    """Ranks in processes: CUDA opens no memory in the process that it belongs to."""
    with Ranks(4) as ranks:
        ranks.run(4, use_gpu)
        ranks.run = functools.partial(ranks.run, kind="gpu")
        yield ranks


def noise(rank, count, dtype=torch.float32):
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10 ** (rank % 3)).to(dtype)


def joined(context):
    """Return the communicator, after seeing that it is the one that is tested."""
    communicator = context.communicator()
    assert communicator.name == "cuda_ipc", communicator.fallback_reason
    return communicator


def train_exactly(device):
    """Train with sums along a tree; return a digest of the parameters and the moments."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        generator = torch.Generator().manual_seed(1)
        rows = TensorDataset(
            torch.randn(44, 6, generator=generator), torch.randn(44, 3, generator=generator)
        )
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        for number, parameter in enumerate(model.parameters()):
            generator.manual_seed(number)
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        model.to(device)
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in Loader(rows, Batch(14, micro=2, exact=True), seed=2):
            optimizer.zero_grad()
            for x, y in step:
                torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    found = hashlib.sha256()
    moments = [each for state in optimizer.state.values() for each in state.values()]
    for tensor in [*model.parameters(), *moments]:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [*REDUCED, torch.bool], ids=str)
def test_all_types_and_reductions(ranks, size, dtype):
    def rank_main(context):
        for count in (1, 1000, 1_000_003):
            for op in ops_of(dtype):
                tensor = values(context.rank, (count,), dtype).cuda()
                joined(context).allreduce(tensor, op)
                wanted = reduced(op, [values(rank, (count,), dtype) for rank in range(size)])
                same(tensor.cpu(), wanted)

    def rank_main_of_bool(context):
        tensor = torch.tensor([context.rank == 1, False, True], device="cuda")
        joined(context).allreduce(tensor)
        return tensor.tolist()

    if dtype is torch.bool:
        assert ranks.run(size, rank_main_of_bool) == [[True, False, True]] * size
        return
    ranks.run(size, rank_main)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks_in_any_number_of_rounds(ranks, size):
    def rank_main(context):
        digests = []
        for _ in range(3):
            tensors = [noise(context.rank, count).cuda() for count in (30_000_000, 5, 70_001)]
            torch.cuda._sleep(1_000_000 * context.rank)
            torch._foreach_add_(tensors, 0.0)  # what has been computed last is waited for
            handles = [joined(context).allreduce_async(tensor) for tensor in tensors]
            for handle in handles:
                handle.wait()
            digests += [hashlib.sha256(each.cpu().numpy().tobytes()).digest() for each in tensors]
        wanted = noise(0, 70_001)
        for rank in range(1, size):
            wanted += noise(rank, 70_001)
        assert bits(tensors[2].cpu()) == bits(wanted)
        return digests

    results = ranks.run(size, rank_main)
    assert all(result == results[0] for result in results)
    assert results[0][:3] == results[0][3:6] == results[0][6:]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_along_a_tree_have_the_bits_of_the_host(ranks, size):
    def rank_main(context, on):
        communicator = context.communicator()
        found = []
        for blocks in (Blocks.even(7, size), Blocks((6, *[0] * (size - 2), 1))):
            nodes = [[noise(sum(n), 3_000_001).to(on)] for n in blocks.covers[context.rank]]
            output = torch.zeros(3_000_001, device=on)
            communicator.allreduce_tree(nodes, blocks, [output])
            found.append(hashlib.sha256(output.cpu().numpy().tobytes()).digest())
        return communicator.name, found

    there = ranks.run(size, functools.partial(rank_main, on="cuda"))
    here = ranks.run(size, functools.partial(rank_main, on="cpu"), kind="shm")
    assert there == [("cuda_ipc", here[0][1])] * size


def test_exact_steps_have_one_digest_on_one_two_and_four_ranks(ranks):
    (right,) = ranks.run(1, lambda context: train_exactly("cuda"))
    for size in (2, 4):
        for result in ranks.run(
            size, lambda context: (joined(context).name, train_exactly("cuda"))
        ):
            assert result == ("cuda_ipc", right)


def test_a_broadcast_stays_on_the_gpu(ranks):
    def rank_main(context):
        tensor = noise(context.rank, 20_000_001).cuda()
        joined(context).broadcast(tensor, root=2)
        return bool((tensor.cpu() == noise(2, 20_000_001)).all())

    assert ranks.run(4, rank_main) == [True] * 4


def test_states_move_from_gpu_to_gpu(ranks):
    def rank_main(context):
        joined(context)
        torch.manual_seed(context.rank)
        model = make_model().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        state = hvd.elastic.TorchState(model, optimizer, step=context.rank)
        if context.rank == 0:
            model(batch(0, 0, 1)[0].cuda()).sum().backward()
            optimizer.step()
        state.align(behind=[1, 2])
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        assert all(each.is_cuda for each in (*model.parameters(), *moments))
        return state.step, [each.detach().cpu() for each in (*model.parameters(), *moments)]

    (step, first), *others = ranks.run(3, rank_main)
    for other, tensors in others:
        assert other == step == 0
        assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True))


def test_gradients_are_launched_in_backward_and_never_visit_the_host(ranks):
    def rank_main(context):
        communicator = joined(context)
        model = make_model().cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            inputs, targets = batch(step, context.rank, context.size)
            torch.nn.functional.mse_loss(model(inputs.cuda()), targets.cuda()).backward()
            if step == STEPS - 1:
                assert optimizer._reducer._step._launched > 0
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer._reducer._agreement.layout.groups:
            assert group._staging is None
            assert group._wires[0].is_cuda
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


def test_ranks_of_one_process_are_told_why_the_host_reduces():
    use_gpu()
    with World(MAKERS["gpu"], 2) as world:
        for communicator in world.communicators:
            assert communicator.name == "shm"
            assert "shares its process with another rank" in communicator.fallback_reason
        tensors = [torch.ones(3, device="cuda") for _ in range(2)]
        world.run(lambda c: c.allreduce(tensors[c.rank], Op.SUM))
        assert all(tensor.tolist() == [2.0] * 3 for tensor in tensors)


def test_a_rank_without_a_gpu_keeps_the_others_on_the_host(ranks, monkeypatch):
    def rank_main(context):
        return context.communicator().name, context.communicator().fallback_reason

    with Ranks(1) as fresh:
        alone = fresh._lines
        ranks._lines, lines = [*ranks._lines[:1], *alone], ranks._lines
        try:
            found = ranks.run(2, rank_main)
        finally:
            ranks._lines = lines
    assert {name for name, _ in found} == {"shm"}
    assert all("rank 1 has used no GPU" in reason for _, reason in found)


def test_memory_is_that_of_one_generation_after_fifty(ranks):
    def rank_main(context):
        tensor = torch.ones(1000, device="cuda")
        joined(context).allreduce(tensor)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    first = max(ranks.run(4, rank_main))
    for _ in range(50):
        last = max(ranks.run(4, rank_main))
    assert last <= first + (1 << 20)

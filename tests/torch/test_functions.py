from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError, NotInitialized
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator

SIZES = [1, 2, 3]


def on_ranks(size, function):
    """Call `function(rank)` on so many ranks."""
    return run_ranks(size, lambda context: function(context.rank))


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_averages(size):
    def rank_main(rank):
        tensor = torch.full((2, 3), float(rank))
        result = hvd.allreduce(tensor, name="metric")
        assert torch.equal(tensor, torch.full((2, 3), float(rank)))
        assert torch.equal(result, torch.full((2, 3), (size - 1) / 2))

    on_ranks(size, rank_main)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"op": hvd.Sum}, 6.0),
        ({"op": hvd.Min}, 1.0),
        ({"op": hvd.Max}, 3.0),
        ({"op": hvd.Product}, 6.0),
        ({"op": hvd.Average}, 2.0),
        ({"average": True}, 2.0),
        ({"average": False}, 6.0),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, 9.0),
        ({"compression": hvd.Compression.fp16}, 2.0),
        ({"process_set": hvd.global_process_set}, 2.0),
    ],
    ids=str,
)
def test_allreduce_operations(options, expected):
    def rank_main(rank):
        result = hvd.allreduce(torch.tensor([rank + 1.0]), **options)
        assert result.dtype == torch.float32
        assert result.tolist() == [expected]

    on_ranks(3, rank_main)


def test_allreduce_of_integers_scalars_nothing_and_odd_layouts():
    def rank_main(rank):
        assert hvd.allreduce(torch.tensor([3, -4 * rank])).tolist() == [3, -2]
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item() == 1
        assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
        assert hvd.allreduce(torch.tensor([1j * rank, 1.0])).tolist() == [0.5j, 1.0]
        transposed = torch.arange(6.0).reshape(2, 3).T
        assert torch.equal(hvd.allreduce(transposed), transposed)
        assert hvd.allreduce(torch.tensor([-3 * rank])).tolist() == [-1], "cut off towards zero"
        halves = torch.tensor([3, -3])
        assert hvd.allreduce(halves, op=hvd.Sum, prescale_factor=0.5).tolist() == [2, -2]
        assert hvd.allreduce(halves, op=hvd.Sum, postscale_factor=0.25).tolist() == [1, -1]

    on_ranks(2, rank_main)


def test_in_place_operations_change_the_tensor_and_return_it():
    def rank_main(rank):
        tensor = torch.nn.Parameter(torch.tensor([float(rank), 1.0]))
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert tensor.tolist() == [1.0, 2.0]
        columns = torch.full((2, 2), float(rank))
        hvd.broadcast_(columns[:, 0], root_rank=1)
        assert columns.tolist() == [[1.0, float(rank)]] * 2
        tensors = [torch.tensor([rank]), torch.tensor([rank, 1.0])]
        assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[0] is tensors[0]
        assert [tensor.tolist() for tensor in tensors] == [[1], [1.0, 2.0]]

    on_ranks(2, rank_main)


def test_grouped_allreduce_takes_one_operation_per_type():
    communicator = TwinCommunicator(generation=1)
    with activate(ChangingContext(communicator)):
        tensors = [torch.ones(2), torch.ones(1, dtype=torch.int64), torch.ones(3)]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert hvd.allreduce(torch.empty(0, 2)).shape == (0, 2)
    assert [result.tolist() for result in results] == [[2.0, 2.0], [2], [2.0, 2.0, 2.0]]
    assert len(communicator.lent) == 2


def test_operations_can_overlap():
    def rank_main(rank):
        summed = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        tensor = torch.zeros(3)
        changed = hvd.allreduce_async_(tensor + rank, op=hvd.Max)
        copied = hvd.broadcast_async(tensor + rank, root_rank=1)
        filled = hvd.broadcast_async_(tensor, root_rank=0)
        gathered = hvd.allgather_async(torch.full((1 + rank,), rank))
        assert hvd.synchronize(summed).tolist() == [2.0] * 3
        assert hvd.synchronize(summed) is hvd.synchronize(summed)
        assert hvd.synchronize(changed).tolist() == [1.0] * 3
        assert hvd.synchronize(copied).tolist() == [1.0] * 3
        assert hvd.synchronize(filled) is tensor
        assert hvd.synchronize(gathered).tolist() == [0, 1, 1]
        assert hvd.poll(gathered)

    on_ranks(2, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_allgather_concatenates_different_lengths(size):
    def rank_main(rank):
        result = hvd.allgather(torch.full((rank, 2), rank))
        assert result.tolist() == [[r, r] for r in range(size) for _ in range(r)]
        assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
        assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)

    on_ranks(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_exchanges_rows(size):
    def rank_main(rank):
        even = hvd.alltoall(torch.arange(size) + 10 * rank)
        assert even.tolist() == [10 * r + rank for r in range(size)]
        splits = torch.arange(size)  # i rows to rank i
        rows = torch.full((int(splits.sum()), 2), float(rank))
        output, received = hvd.alltoall(rows, splits=splits)
        assert output.tolist() == [[float(r)] * 2 for r in range(size) for _ in range(rank)]
        assert received.tolist() == [rank] * size

    on_ranks(size, rank_main)


def test_alltoall_refuses_splits_that_do_not_add_up():
    def rank_main(rank):
        with pytest.raises(ValueError, match="add up to 4 rows"):
            hvd.alltoall(torch.ones(4), splits=[1, 2])
        with pytest.raises(ValueError, match="cannot be split evenly"):
            hvd.alltoall(torch.ones(3))

    on_ranks(2, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_deals_out_rows(size):
    def rank_main(rank):
        tensor = torch.arange(5.0).reshape(5, 1) + rank
        summed = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=2.0)
        parts = (2 * (size * torch.arange(5.0) + sum(range(size)))).tensor_split(size)
        assert torch.equal(summed.flatten(), parts[rank])
        averaged = hvd.reducescatter(tensor)
        torch.testing.assert_close(averaged.flatten(), parts[rank] / 2 / size)

    on_ranks(size, rank_main)


def test_barrier_and_wrong_arguments():
    def rank_main(rank):
        hvd.barrier()
        with pytest.raises(ValueError, match="not both"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="op must be"):
            hvd.allreduce(torch.ones(1), op="sum")
        with pytest.raises(ValueError, match="from 0 to 1, not 2"):
            hvd.broadcast(torch.ones(1), root_rank=2)
        with pytest.raises(ValueError, match="process_set must be a ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=[0, 1])
        with pytest.raises(ValueError, match="at least one dimension"):
            hvd.reducescatter(torch.tensor(1.0))

    on_ranks(2, rank_main)


def gradient(function, value):
    tensor = torch.tensor(value, requires_grad=True)
    output = function(tensor)
    weights = torch.arange(1.0, 1 + output.numel()).reshape(output.shape)
    (output * weights * (1 + hvd.rank())).sum().backward()
    return tensor.grad.tolist()


def test_gradients():
    def rank_main(rank):
        assert gradient(hvd.allreduce, [1.0, 1.0]) == [1.5, 3.0]
        assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), [1.0, 1.0]) == [3.0, 6.0]
        scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=2.0), [1.0])
        assert scaled == [6.0]
        own = [1.5, 3.0] if rank == 0 else [4.5, 6.0]
        assert gradient(hvd.allgather, [1.0, 1.0]) == own
        root = [1.5, 3.0] if rank == 1 else [0.0, 0.0]
        assert gradient(lambda x: hvd.broadcast(x, root_rank=1), [1.0, 1.0]) == root
        back = [1.0, 2.0] if rank == 0 else [2.0, 4.0]
        assert gradient(hvd.alltoall, [1.0, 1.0]) == back
        assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), [1.0, 1.0]) == [2.0, 4.0]
        assert gradient(hvd.reducescatter, [1.0, 1.0]) == [1.0, 2.0]
        first, second = hvd.grouped_allreduce([torch.ones(1, requires_grad=True), torch.ones(1)])
        assert first.requires_grad
        assert second.tolist() == [1.0]

    on_ranks(2, rank_main)


def test_gradients_of_gradients():
    def rank_main(rank):
        tensor = torch.tensor([2.0], requires_grad=True)
        (first,) = torch.autograd.grad(hvd.allreduce(tensor**3), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first, tensor)
        assert (first.item(), second.item()) == (12.0, 12.0)

    on_ranks(2, rank_main)


def test_operations_without_gradient_say_so():
    def rank_main(rank):
        tensor = torch.ones(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match="Average or Sum"):
            hvd.allreduce(tensor, op=hvd.Max).sum().backward()
        with pytest.raises(NotImplementedError, match="Average or Sum"):
            hvd.reducescatter(tensor, op=hvd.Max).sum().backward()

    on_ranks(1, rank_main)


def test_a_failed_operation_leaves_the_tensor_as_it_was():
    communicator = TwinCommunicator(generation=1)
    tensor = torch.arange(3.0)
    with activate(ChangingContext(communicator)):
        begun = [hvd.allreduce_async_(tensor, op=hvd.Sum), hvd.broadcast_async_(tensor, 0)]
        communicator.lent[0].fill_(-1.0)  # a transport writes what it likes
        communicator.abort("a peer is gone")
        for handle in begun:
            with pytest.raises(CollectiveError, match="a peer is gone"):
                hvd.synchronize(handle)
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_ranks_know_who_they_are():
    def rank_main(rank):
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size()) == (rank, 2)
        assert (hvd.local_rank(), hvd.local_size()) == (rank, 2)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        assert hvd.global_process_set.included()
        assert (hvd.global_process_set.rank(), hvd.global_process_set.size()) == (rank, 2)

    on_ranks(2, rank_main)


def test_outside_a_job_init_makes_a_world_of_one():
    assert not hvd.is_initialized()
    with pytest.raises(NotInitialized):
        hvd.rank()
    hvd.init()
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size()) == (0, 1)
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="comm must be None"):
            hvd.init(comm=[0, 1])
        with pytest.raises(ValueError, match="process_sets"):
            hvd.init(process_sets="none")
        hvd.init(process_sets="dynamic")
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()


def test_all_names_are_there():
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert callable(hvd.broadcast)
    assert callable(hvd.device)
    assert hvd.HorovodInternalError is CollectiveError
    assert hvd.elastic.run

"""Every operation and type, against numpy, on every kind of communicator."""

import numpy as np
import pytest
import torch

from nbelastic.collectives import Op, buffers
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import KINDS, MAKERS, World, noise

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
REDUCED = [*FLOATS, *INTEGERS]
MOVED = [*REDUCED, torch.bool, torch.int16, torch.complex64]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)]

NUMPY = {Op.SUM: np.sum, Op.AVERAGE: np.mean, Op.MIN: np.min, Op.MAX: np.max, Op.PRODUCT: np.prod}


def ops_of(dtype):
    return [op for op in Op if op is not Op.AVERAGE or dtype.is_floating_point]


def values(rank, shape, dtype, seed=0):
    """Ones and twos: any type holds their product, whatever the order. Truths are of all kinds."""
    generator = np.random.default_rng(1000 * seed + rank)
    least = int(dtype is not torch.bool)
    return torch.from_numpy(generator.integers(least, least + 2, shape)).to(dtype)


def as_numpy(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def reduced(op, tensors):
    """What numpy makes of the tensors of all ranks."""
    outcome = NUMPY[op](np.stack([as_numpy(tensor) for tensor in tensors]), axis=0)
    return torch.from_numpy(np.asarray(outcome)).to(tensors[0].dtype)


def same(actual, expected):
    if actual.dtype is torch.bool:  # a truth is one or zero in memory, too
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def part(source, target, dtype):
    """What `source` has for `target`: of another shape for each target, and empty from rank 0."""
    return values(source, (source, target + 1), dtype, seed=target)


def allreduce(c, op, dtype):
    tensors = [values(c.rank, shape, dtype) for shape in SHAPES]
    for tensor in tensors:
        c.allreduce(tensor, op)
    return tensors


def allreduce_in_many_places(c, op, dtype):
    """All tensors of a list as one, begun before the last has ended."""
    handles, found = [], []
    for some in ([(3, 5), (0,), (1,), (70_000,), (2, 3)], [(6,), (8, 1)], [(150_000,)]):
        tensors = [values(c.rank, shape, dtype) for shape in some]
        handles.append(c.allreduce_coalesced_async(tensors, op))
        found += tensors
    for handle in handles:
        handle.wait()
    return found


def reduce_scatter(c, op, dtype):
    """Parts of several lengths, and of one."""
    found = []
    for shapes in ([(target, 3) for target in range(c.size)], [(5,)] * c.size):
        inputs = [values(c.rank, shape, dtype, seed) for seed, shape in enumerate(shapes)]
        found.append(torch.zeros(shapes[c.rank], dtype=dtype))
        c.reduce_scatter(found[-1], inputs, op)
        for seed, (tensor, shape) in enumerate(zip(inputs, shapes, strict=True)):
            same(tensor, values(c.rank, shape, dtype, seed))
    return found


def check_reductions(world, dtypes):
    cases = [(allreduce_in_many_places, op, torch.bfloat16) for op in Op]
    cases += [
        (act, op, dtype)
        for act in (allreduce, reduce_scatter)
        for dtype in dtypes
        for op in ops_of(dtype)
    ]
    for rank, outcomes in enumerate(world.run(lambda c: [act(c, *how) for act, *how in cases])):
        for (act, op, dtype), found in zip(cases, outcomes, strict=True):
            for tensor in found:
                seed = rank if act is reduce_scatter else 0
                given = [values(each, tensor.shape, dtype, seed) for each in range(world.size)]
                same(tensor, reduced(op, given))


def test_values_of_all_ranks_are_reduced(world):
    check_reductions(world, [*REDUCED, torch.bool])


def test_a_large_allreduce_is_the_same_on_all_ranks(world):
    def rank_main(communicator):
        found = []
        for dtype in (torch.float32, torch.float16):
            tensor = noise(communicator.rank, 100_003, dtype)
            found.append((tensor.clone(), tensor))
            communicator.allreduce(tensor, Op.AVERAGE)
        return found

    for outcomes in zip(*world.run(rank_main), strict=True):
        exact = np.mean([as_numpy(mine) for mine, _ in outcomes], axis=0)
        first = outcomes[0][1]
        error = np.abs(as_numpy(first) - exact).max()
        assert error <= 1000 * torch.finfo(first.dtype).eps * world.size
        for _, actual in outcomes:
            same(actual, first)


def broadcast(c, dtype):
    found = [values(c.rank, shape, dtype) for _ in range(c.size) for shape in SHAPES]
    for number, tensor in enumerate(found):
        c.broadcast(tensor, number // len(SHAPES))
    return found


def allgather(c, dtype):
    found = []
    for shape in SHAPES:
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(c.size)]
        c.allgather(outputs, values(c.rank, shape, dtype))
        found.append(outputs)
    return [outputs[rank] for rank in range(c.size) for outputs in found]


def wanted_of_all(_rank, size, dtype):
    return [values(source, shape, dtype) for source in range(size) for shape in SHAPES]


def all_to_all(c, dtype):
    outputs = [torch.zeros(source, c.rank + 1, dtype=dtype) for source in range(c.size)]
    c.all_to_all(outputs, [part(c.rank, target, dtype) for target in range(c.size)])
    return outputs


def both_ways(c, message, place, other):
    """Begin a message to another rank, and one from there; the first sends first, for pygloo."""
    begin = [lambda: c.send_async(message, other), lambda: c.receive_async(place, other)]
    return [each() for each in (begin if c.rank < other else reversed(begin))]


def send_and_receive(c, dtype):
    """All messages under way at once."""
    outputs = [torch.zeros(source, c.rank + 1, dtype=dtype) for source in range(c.size)]
    outputs[c.rank] = part(c.rank, c.rank, dtype)
    handles = []
    for other in sorted({*range(c.size)} - {c.rank}):
        handles += both_ways(c, part(c.rank, other, dtype), outputs[other], other)
    for handle in reversed(handles):
        handle.wait()
    return outputs


def wanted_of_parts(rank, size, dtype):
    return [part(source, rank, dtype) for source in range(size)]


def check_moves(world, dtypes):
    acts = {broadcast: wanted_of_all, allgather: wanted_of_all}
    acts |= {all_to_all: wanted_of_parts, send_and_receive: wanted_of_parts}
    cases = [(act, dtype) for act in acts for dtype in dtypes]
    for rank, outcomes in enumerate(world.run(lambda c: [act(c, dtype) for act, dtype in cases])):
        for (act, dtype), found in zip(cases, outcomes, strict=True):
            for tensor, expected in zip(found, acts[act](rank, world.size, dtype), strict=True):
                same(tensor, expected)


def test_values_arrive_as_they_were_sent(world):
    check_moves(world, MOVED)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "hierarchical")]
)
def test_memory_that_is_not_the_hosts_is_staged(kind, monkeypatch):
    """As on an accelerator: everything passes through new memory, and back on success only."""
    monkeypatch.setattr(buffers, "is_on_host", lambda tensor: False)

    def along_tree(c):
        mine, total = torch.tensor([1.0 + c.rank]), [torch.zeros(1), torch.zeros(2)]
        c.allreduce_tree([[mine, mine.repeat(2)]], Blocks.even(2, 2), total)
        return [each.tolist() for each in total]

    with World(MAKERS[kind], 2) as world:
        check_reductions(world, [torch.float32])
        check_moves(world, [torch.float32])
        assert world.run(along_tree) == [[[3.0], [3.0, 3.0]]] * 2
        tensor = torch.full((1,), 5.0)
        handle = world.do(0, lambda c: c.allreduce_async(tensor))
        world.do(1, lambda c: c.allreduce_async(torch.ones(1)))
        world[0].abort("enough")
        with pytest.raises(CollectiveError):
            handle.wait()
        assert tensor.item() == 5.0


def test_no_rank_passes_a_barrier_before_all_have_come(world):
    come = []

    def rank_main(communicator):
        for number in range(20):
            come.append(number)
            communicator.barrier()
            assert come.count(number) == world.size
            communicator.barrier()

    world.run(rank_main)


def test_many_operations_in_flight(world):
    """Each kind of them in its own order, and messages of users in theirs."""
    blocks = Blocks.even(8, world.size)

    def rank_main(c):
        me, size = c.rank, c.size
        handles, found = [], []

        def expect(tensor, value):
            found.append((tensor, value))
            return tensor

        for number in range(20):
            value, leaves = float(number), sum(map(len, blocks.covers))
            nodes = [[torch.full((1000,), value)] for _ in blocks.covers[me]]
            expect(nodes[0][0], value * leaves)
            outputs = [expect(torch.zeros(2), float(rank)) for rank in range(size)]
            handles += [
                c.allreduce_tree_async(nodes, blocks),
                c.allreduce_async(expect(torch.full((1000,), value), value * size)),
                c.allgather_async(outputs, torch.full((2,), float(me))),
                c.barrier_async(),
            ]
            for other in sorted({*range(size)} - {me}):
                place = expect(torch.zeros(3), other + 0.5)
                handles += both_ways(c, torch.full((3,), me + 0.5), place, other)
        for handle in handles:
            handle.wait()
            assert handle.done()
        return found

    for found in world.run(rank_main):
        for tensor, value in found:
            assert tensor.unique().tolist() == [value]


def test_tensors_may_need_gradients_be_views_or_inputs_and_outputs(world):
    def rank_main(communicator):
        parameter = torch.nn.Parameter(torch.ones(4))
        communicator.allreduce(parameter)
        communicator.broadcast(parameter)
        flat = torch.zeros(10)
        communicator.allreduce(flat[3:6].fill_(1.0))
        outputs = [torch.full((3,), float(communicator.rank)) for _ in range(world.size)]
        communicator.allgather(outputs, outputs[communicator.rank])
        return parameter.detach(), flat, torch.stack(outputs)

    size = float(world.size)
    for parameter, flat, outputs in world.run(rank_main):
        same(parameter, torch.full((4,), size))
        same(flat, torch.tensor([0.0] * 3 + [size] * 3 + [0.0] * 4))
        same(outputs, torch.arange(size).view(-1, 1).expand(-1, 3))

"""Every operation and type, against numpy, from one rank to five."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbelastic.collectives import Op

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
REDUCED = [*FLOATS, *INTEGERS]
MOVED = [*REDUCED, torch.int16, torch.bool, torch.complex64]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)]

NUMPY = {Op.SUM: np.sum, Op.AVERAGE: np.mean, Op.MIN: np.min, Op.MAX: np.max, Op.PRODUCT: np.prod}


def ops_of(dtype):
    return [op for op in Op if op is not Op.AVERAGE or dtype.is_floating_point]


def values(rank, shape, dtype, seed=0):
    """Ones and twos: small enough for any type to hold their product, whatever the order."""
    generator = np.random.default_rng(1000 * seed + rank)
    return torch.from_numpy(generator.integers(1, 3, shape)).to(dtype)


def as_numpy(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def reduced(op, tensors):
    """What numpy makes of the tensors of all ranks."""
    outcome = NUMPY[op](np.stack([as_numpy(tensor) for tensor in tensors]), axis=0)
    return torch.from_numpy(np.asarray(outcome)).to(tensors[0].dtype)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_allreduce(world):
    cases = [(dtype, op, shape) for dtype in REDUCED for op in ops_of(dtype) for shape in SHAPES]

    def rank_main(communicator):
        outcomes = []
        for dtype, op, shape in cases:
            tensor = values(communicator.rank, shape, dtype)
            communicator.allreduce(tensor, op)
            outcomes.append(tensor)
        return outcomes

    expected = [
        reduced(op, [values(rank, shape, dtype) for rank in range(world.size)])
        for dtype, op, shape in cases
    ]
    for outcomes in world.run(rank_main):
        for actual, wanted in zip(outcomes, expected, strict=True):
            same(actual, wanted)


def test_allreduce_of_truths(world):
    def rank_main(communicator):
        outcomes = {}
        for op in (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT):
            tensor = torch.tensor([True, False, communicator.rank == 0])
            communicator.allreduce(tensor, op)
            assert tensor.view(torch.uint8).max() == 1  # a truth is one or zero in memory too
            outcomes[op] = tensor.tolist()
        return outcomes

    alone = world.size == 1
    for outcomes in world.run(rank_main):
        assert outcomes[Op.SUM] == outcomes[Op.MAX] == [True, False, True]
        assert outcomes[Op.PRODUCT] == outcomes[Op.MIN] == [True, False, alone]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_large_allreduce_is_the_same_on_all_ranks(world, dtype):
    def rank_main(communicator):
        generator = torch.Generator().manual_seed(communicator.rank)
        tensor = torch.randn(100_003, generator=generator).to(dtype)
        mine = tensor.clone()
        communicator.allreduce(tensor, Op.AVERAGE)
        return mine, tensor

    outcomes = world.run(rank_main)
    exact = np.mean([as_numpy(mine) for mine, _ in outcomes], axis=0)
    first = outcomes[0][1]
    error = np.abs(as_numpy(first) - exact).max()
    assert error <= 10 * torch.finfo(dtype).eps * world.size
    for _, actual in outcomes:
        same(actual, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_tensors_in_many_places_are_reduced_as_one(world, dtype):
    shapes = [(3, 5), (0,), (1,), (70_000,), (2, 3)], [(6,), (8, 1)], [(150_000,)]

    def rank_main(communicator):
        outcomes = []
        for op in ops_of(dtype):
            for some in shapes:
                tensors = [values(communicator.rank, shape, dtype) for shape in some]
                communicator.allreduce_coalesced(tensors, op)
                later = [values(communicator.rank, shape, dtype, seed=1) for shape in some]
                communicator.allreduce_coalesced_async(later, op).wait()
                outcomes += [*tensors, *later]
        return outcomes

    expected = [
        reduced(op, [values(rank, shape, dtype, seed) for rank in range(world.size)])
        for op in ops_of(dtype)
        for some in shapes
        for seed in (0, 1)
        for shape in some
    ]
    for outcomes in world.run(rank_main):
        for outcome, whole in zip(outcomes, expected, strict=True):
            same(outcome, whole)


def test_broadcast(world):
    cases = [
        (dtype, root, shape) for dtype in MOVED for root in range(world.size) for shape in SHAPES
    ]

    def rank_main(communicator):
        outcomes = []
        for dtype, root, shape in cases:
            tensor = values(communicator.rank, shape, dtype)
            communicator.broadcast(tensor, root)
            outcomes.append(tensor)
        return outcomes

    for outcomes in world.run(rank_main):
        for (dtype, root, shape), actual in zip(cases, outcomes, strict=True):
            same(actual, values(root, shape, dtype))


def test_allgather(world):
    cases = [(dtype, shape) for dtype in MOVED for shape in SHAPES]

    def rank_main(communicator):
        outcomes = []
        for dtype, shape in cases:
            outputs = [torch.zeros(shape, dtype=dtype) for _ in range(communicator.size)]
            tensor = values(communicator.rank, shape, dtype)
            communicator.allgather(outputs, tensor)
            same(tensor, values(communicator.rank, shape, dtype))
            outcomes.append(outputs)
        return outcomes

    for outcomes in world.run(rank_main):
        for (dtype, shape), outputs in zip(cases, outcomes, strict=True):
            for rank, actual in enumerate(outputs):
                same(actual, values(rank, shape, dtype))


def part(source, target, dtype):
    """What `source` has for `target`: of another shape for each target."""
    return values(source, (target, 3), dtype, seed=target)


def test_reduce_scatter(world):
    cases = [(dtype, op) for dtype in REDUCED for op in ops_of(dtype)]

    def rank_main(communicator):
        outcomes = []
        for dtype, op in cases:
            inputs = [part(communicator.rank, target, dtype) for target in range(world.size)]
            output = torch.zeros(communicator.rank, 3, dtype=dtype)
            communicator.reduce_scatter(output, inputs, op)
            outcomes.append(output)
            for target, tensor in enumerate(inputs):
                same(tensor, part(communicator.rank, target, dtype))
        return outcomes

    for rank, outcomes in enumerate(world.run(rank_main)):
        for (dtype, op), actual in zip(cases, outcomes, strict=True):
            same(actual, reduced(op, [part(each, rank, dtype) for each in range(world.size)]))


def test_all_to_all(world):
    def shape(source, target):
        return (source, target)  # uneven, and empty from and to rank 0

    def rank_main(communicator):
        me, others, outcomes = communicator.rank, range(world.size), []
        for dtype in MOVED:
            inputs = [values(me, shape(me, other), dtype, other) for other in others]
            outputs = [torch.zeros(shape(other, me), dtype=dtype) for other in others]
            communicator.all_to_all(outputs, inputs)
            outcomes.append(outputs)
        return outcomes

    for rank, outcomes in enumerate(world.run(rank_main)):
        for dtype, outputs in zip(MOVED, outcomes, strict=True):
            for source, actual in enumerate(outputs):
                same(actual, values(source, shape(source, rank), dtype, rank))


def test_send_and_receive(world):
    cases = [(dtype, shape) for dtype in MOVED for shape in SHAPES]

    def rank_main(communicator):
        me = communicator.rank
        others = [rank for rank in range(world.size) if rank != me]
        received = {other: [torch.zeros(s, dtype=t) for t, s in cases] for other in others}
        handles = []
        for number, (dtype, shape) in enumerate(cases):
            for other in others:
                tensor = values(me, shape, dtype, seed=other)
                handles.append(communicator.send_async(tensor, other))
                handles.append(communicator.receive_async(received[other][number], other))
        for handle in reversed(handles):
            handle.wait()
        return received

    for rank, received in enumerate(world.run(rank_main)):
        for source, tensors in received.items():
            for (dtype, shape), actual in zip(cases, tensors, strict=True):
                same(actual, values(source, shape, dtype, seed=rank))


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
    def rank_main(communicator):
        tensors = [torch.full((1000,), float(number)) for number in range(30)]
        outputs = [[torch.zeros(2) for _ in range(world.size)] for _ in range(30)]
        handles = []
        for tensor, output in zip(tensors, outputs, strict=True):
            handles.append(communicator.allreduce_async(tensor))
            handles.append(communicator.allgather_async(output, torch.ones(2)))
            handles.append(communicator.barrier_async())
        for handle in handles:
            handle.wait()
            assert handle.done()
        return tensors

    for tensors in world.run(rank_main):
        for number, tensor in enumerate(tensors):
            same(tensor, torch.full((1000,), float(number * world.size)))


def test_tensors_that_need_gradients_and_views(world):
    def rank_main(communicator):
        parameter = torch.nn.Parameter(torch.ones(4))
        communicator.allreduce(parameter)
        communicator.broadcast(parameter)
        flat = torch.zeros(10)
        communicator.allreduce(flat[3:6].fill_(1.0))
        return parameter.detach(), flat

    size = float(world.size)
    for parameter, flat in world.run(rank_main):
        same(parameter, torch.full((4,), size))
        same(flat, torch.tensor([0.0] * 3 + [size] * 3 + [0.0] * 4))


def test_an_allgather_may_name_its_input_as_an_output(world):
    def rank_main(communicator):
        outputs = [torch.zeros(3) for _ in range(world.size)]
        outputs[communicator.rank].fill_(communicator.rank)
        communicator.allgather(outputs, outputs[communicator.rank])
        return outputs

    for outputs in world.run(rank_main):
        for rank, tensor in enumerate(outputs):
            same(tensor, torch.full((3,), float(rank)))

"""Horovod's operations compute the same in each form, by name or by order, of all ranks or a set.

A form is in place or not, grouped or not, waited for at once or later.
"""

import inspect
import random

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import CollectiveError, NotInitialized
from nbelastic.torch.ops.operation.reduction import combine
from nbelastic.torch.ops.operation.tensor_operations import Allreduce
from tests.collectives.worlds import SOME_KINDS
from tests.torch.fakes import TwinCommunicator
from tests.torch.ranks import on_ranks


def own(rank):
    return torch.tensor([rank + 1.0, 1.0])


def whole(rank):
    return torch.tensor([3, -4 * rank, -3 * rank])


def columns(rank):
    return torch.arange(6.0).reshape(2, 3).T * rank


def five_rows(rank):
    return torch.arange(5.0).reshape(5, 1) + rank


def sparse(rank):
    return torch.tensor([[1.0, rank], [0.0, 0.0], [0.0, 2.0 * rank]]).to_sparse()


def total(values):
    return values.sum(0)


def mean(values):
    return values.mean(0)


def factors(before, after):
    return {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}


SUM, FP16 = {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}
# A function, the values of a rank, options, and what becomes of the values of all.
REDUCTIONS = [
    ("allreduce", own, SUM, total),
    ("allreduce", lambda rank: torch.nn.Parameter(own(rank)), {}, mean),
    ("allreduce", own, {"average": True}, mean),
    ("allreduce", own, {"average": False}, total),
    ("allreduce", own, {"op": hvd.Min}, lambda values: values.amin(0)),
    ("allreduce", own, {"op": hvd.Max}, lambda values: values.amax(0)),
    ("allreduce", own, {"op": hvd.Product}, lambda values: values.prod(0)),
    ("allreduce", own, {"op": hvd.Adasum}, lambda values: combine([*values]).float()),
    ("allreduce", own, factors(0.5, 3.0), lambda values: total(values) * 1.5),
    ("allreduce", own, {**SUM, **FP16}, total),
    ("allreduce", whole, {}, lambda values: values.double().mean(0).trunc().long()),
    (
        "allreduce",
        whole,
        factors(0.5, 0.75),
        lambda values: ((values / 2).trunc().sum(0) * 0.75).trunc().long(),
    ),
    ("allreduce", lambda rank: own(rank) * 1j, {}, mean),
    ("allreduce", lambda rank: own(rank)[0], SUM, total),
    ("allreduce", lambda _: torch.empty(0, 3), {}, mean),
    ("allreduce", columns, SUM, total),
    ("reducescatter", five_rows, factors(2.0, 0.25), lambda values: total(values) / 2),
    ("reducescatter", five_rows, {}, mean),
    ("sparse_allreduce", sparse, SUM, total),
    ("sparse_allreduce", sparse, {}, mean),
]


def of_reduction(function, of, options, how):
    def expected(ranks, rank):
        found = how(torch.stack([of(each).to_dense() for each in ranks]))
        dealt = function == "reducescatter"
        return found.tensor_split(len(ranks))[ranks.index(rank)] if dealt else found

    return function, lambda _, rank: [of(rank)], options, expected


# The same with arguments and what a rank gets, by the ranks that take part and by the rank.
CASES = [
    *(of_reduction(*each) for each in REDUCTIONS),
    (
        "allgather",
        lambda _, r: [torch.full((r, 2), r)],
        {},
        lambda ranks, _: torch.cat([torch.full((r, 2), r) for r in ranks]),
    ),
    ("allgather", lambda _, r: [torch.tensor(r)], {}, lambda ranks, _: torch.tensor(ranks)),
    ("broadcast", lambda s, r: [columns(r)[:, 0], s[-1]], {}, lambda s, _: columns(s[-1])[:, 0]),
    (
        "alltoall",
        lambda ranks, r: [torch.arange(len(ranks)) + 10 * r],
        {},
        lambda ranks, r: torch.tensor([10 * each + ranks.index(r) for each in ranks]),
    ),
    (
        "alltoall",  # one row more for each rank than for the rank before it
        lambda ranks, r: [torch.full((sum(range(len(ranks))), 2), r), torch.arange(len(ranks))],
        {},
        lambda ranks, r: (
            torch.cat([torch.full((ranks.index(r), 2), each) for each in ranks]),
            torch.full((len(ranks),), ranks.index(r), dtype=torch.int32),
        ),
    ),
]


def forms(case):
    """Return the names of the functions that compute a case."""
    function, _, options, _ = case
    names = [
        f"{group}{function}{end}"
        for group in ("", "grouped_")
        for end in ("", "_async", "_", "_async_")
    ]
    there = {name: inspect.signature(getattr(hvd, name)) for name in names if hasattr(hvd, name)}
    return [name for name, signature in there.items() if signature.parameters.keys() >= {*options}]


def begin(form, case, ranks, rank, **options):
    """Begin a form of an operation; return what ends it and looks at the result."""
    _, arguments, more, expected = case
    first, *rest = arguments(ranks, rank)
    before, wanted = first.clone(), expected(ranks, rank)
    several, later, in_place = form.startswith("grouped_"), "_async" in form, form.endswith("_")
    given = [first, first.clone()] if several else first
    handle = getattr(hvd, form)(given, *rest, **more, **options)

    def end():
        found = hvd.synchronize(handle) if later else handle
        if later:
            assert hvd.poll(handle)
            assert hvd.synchronize(handle) is found
        if form == "alltoall_async" and not rest:
            found = found[0]
        if form == "sparse_allreduce_async":  # Horovod's handle of it is a function
            assert found is handle() and found.is_sparse
        results = found if several else [found]
        assert (results[0] is first) == in_place
        for each in results:
            torch.testing.assert_close(each, wanted, rtol=1e-6, atol=1e-7, check_layout=False)
        if not in_place:
            torch.testing.assert_close(first, before)

    return end


def exchange_objects(ranks, rank, **options):
    mine = {"text": "x" * rank}
    received = hvd.broadcast_object(mine, ranks[-1], **options)
    assert received == {"text": "x" * ranks[-1]}
    assert (received is mine) == (rank == ranks[-1])
    assert hvd.allgather_object("x" * rank, **options) == ["x" * each for each in ranks]


@on_ranks(1, 3, kinds=SOME_KINDS)
def test_each_form_computes_the_same(context):
    assert len({form for case in CASES for form in forms(case)}) == 23
    ranks = [*range(context.size)]
    for case in CASES:
        ends = [begin(form, case, ranks, context.rank) for form in forms(case)]
        for end in reversed(ends):
            end()
    exchange_objects(ranks, context.rank)
    assert hvd.broadcast_object(None) is None
    table = torch.full((2, 2), context.rank)
    hvd.broadcast_(table[:, 0], root_rank=0)
    assert table.tolist() == [[0, context.rank]] * 2


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=["all", "sets"])
@on_ranks(4, kinds=SOME_KINDS)
def test_names_match_in_any_order_of_all_ranks_or_a_set(context, parts):
    rank, order = context.rank, random.Random(context.rank)
    ranks = next(part for part in parts if rank in part)
    options = {}
    if len(parts) > 1:
        sets = [hvd.add_process_set(part[::-1]) for part in parts]
        options["process_set"] = sets[parts.index(ranks)]
        for case in CASES:
            begin(forms(case)[0], case, ranks, rank, **options)()
        exchange_objects(ranks, rank, **options)
    for number, case in enumerate(CASES):
        names = [form for form in forms(case) if "_async" in form]
        ends = [
            begin(form, case, ranks, rank, name=f"{number} {form}", **options)
            for form in order.sample(names, len(names))
        ]
        for end in order.sample(ends, len(ends)):
            end()
    exchange_objects(ranks, rank, name="object", **options)


def gradient(function, value, **options):
    tensor = torch.tensor(value, requires_grad=True)
    output = function(tensor, **options)
    weights = torch.arange(1.0, 1 + output.numel()).reshape(output.shape)
    (output * weights * (1 + hvd.rank())).sum().backward()
    return tensor.grad.tolist()


@on_ranks(2)
def test_gradients_are_collectives_too(context):
    rank, ones = context.rank, [1.0, 1.0]
    assert gradient(hvd.allreduce, ones) == [1.5, 3.0]
    assert gradient(hvd.allreduce, ones, op=hvd.Sum, postscale_factor=2.0) == [6.0, 12.0]
    assert gradient(hvd.allgather, ones) == [[1.5, 3.0], [4.5, 6.0]][rank]
    assert gradient(hvd.broadcast, ones, root_rank=1) == [[0.0, 0.0], [1.5, 3.0]][rank]
    assert gradient(hvd.alltoall, ones) == [[1.0, 2.0], [2.0, 4.0]][rank]
    assert gradient(hvd.reducescatter, ones, op=hvd.Sum) == [2.0, 4.0]
    assert gradient(hvd.reducescatter, ones) == [1.0, 2.0]
    alone = [hvd.add_process_set([each]) for each in range(2)][rank]
    assert gradient(hvd.allreduce, ones, process_set=alone) == [1.0 + rank, 2.0 + 2 * rank]
    tensor = torch.tensor([2.0], requires_grad=True)
    first, second = hvd.grouped_allreduce([tensor**3, torch.ones(1)])
    assert not second.requires_grad or second.item() == 1.0
    (once,) = torch.autograd.grad(first, tensor, create_graph=True)
    (twice,) = torch.autograd.grad(once, tensor)
    assert (once.item(), twice.item()) == (12.0, 12.0)
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(NotImplementedError, match="Average or Sum"):
            gradient(call, ones, op=hvd.Max)


MISUSES = {
    "Adasum needs real floating point": lambda: hvd.allreduce(whole(0), op=hvd.Adasum),
    "not both": lambda: hvd.allreduce(own(0), average=True, op=hvd.Sum),
    "op must be": lambda: hvd.allreduce(own(0), op="sum"),
    "from 0 to 1, not 2": lambda: hvd.broadcast(own(0), root_rank=2),
    "at least one dimension": lambda: hvd.reducescatter(torch.tensor(1.0)),
    "or Product, not": lambda: hvd.reducescatter(own(0), op=hvd.Adasum),
    "add up to 4 rows": lambda: hvd.alltoall(torch.ones(4), splits=[1, 2]),
    r"not \[5, -1\]": lambda: hvd.alltoall(torch.ones(4), splits=[5, -1]),
    "must be integers": lambda: hvd.alltoall(torch.ones(2), splits=torch.ones(2)),
    "cannot be split evenly": lambda: hvd.alltoall(torch.ones(3)),
    "takes sparse_coo": lambda: hvd.sparse_allreduce_async(own(0)),
    "Average or Sum, not": lambda: hvd.sparse_allreduce_async(own(0).to_sparse(), op=hvd.Min),
    "not strided": lambda: hvd.allreduce(own(0).to_sparse()),
    "on tensors, not on int": lambda: hvd.allgather_async(3),
}


@on_ranks(2)
def test_misuse_is_refused_before_anything_is_sent(context):
    for words, call in MISUSES.items():
        with pytest.raises(ValueError, match=words):
            call()
    hvd.barrier()


@on_ranks(2)
def test_groups_may_be_of_any_types_and_of_nothing(context):
    tensors = [torch.ones(2, dtype=getattr(torch, name)) for name in ("float", "int16", "cfloat")]
    for call in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        for some in (tensors, tensors[::-1], []):
            results = call(some, op=hvd.Sum)
            assert [each.dtype for each in results] == [each.dtype for each in some]
            assert all(each.eq(2).all() for each in results)


def test_groups_take_one_operation_per_type_and_a_failed_one_leaves_tensors_as_they_were(twin):
    communicator = twin.communicator()
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.int64), torch.ones(3)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [result.tolist() for result in results] == [[2.0, 2.0], [2], [2.0, 2.0, 2.0]]
    assert len(communicator.lent) == 2
    tensor = torch.arange(3.0)
    begun = [hvd.allreduce_async_(tensor, op=hvd.Sum), hvd.broadcast_async_(tensor, 0)]
    communicator.lent[-1].fill_(-1.0)  # a transport writes what it likes
    communicator.abort("a peer is gone")
    for handle in begun:
        with pytest.raises(CollectiveError, match="a peer is gone"):
            hvd.synchronize(handle)
    assert tensor.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("lends", [False, True])
def test_memory_of_the_caller_is_lent_only_where_a_failure_may_spoil_it(lends):
    tensor, communicator = torch.zeros(2), TwinCommunicator(generation=1)
    operation = Allreduce([tensor], [tensor], hvd.Sum)
    operation.fuses, operation.lends = False, lends
    operation.load_on(0, 2)
    operation.launch(communicator, ())
    communicator.lent[-1].fill_(-1.0)
    assert tensor.eq(-1.0).all() == lends


def test_outside_a_job_init_makes_a_world_of_one():
    assert not hvd.is_initialized()
    with pytest.raises(NotInitialized):
        hvd.rank()
    hvd.init()
    hvd.init(process_sets="dynamic")
    try:
        assert (hvd.rank(), hvd.size()) == (0, 1)
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="comm must be None"):
            hvd.init(comm=[0, 1])
        with pytest.raises(ValueError, match="process_sets"):
            hvd.init(process_sets="none")
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()

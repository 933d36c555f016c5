"""The process group of torch.distributed, on ranks that are threads, over both transports.

What torch's own suite of back ends asks is in tests/trainers.
"""

import copy
import functools
import pickle
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
)
from torch.nn.parallel import DistributedDataParallel

from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.torch.process_group import ElasticProcessGroup, renew
from tests.support.world import in_time
from tests.torch.ranks import on_ranks
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    batch,
    filled,
    make_model,
    parameters_of,
    train_alone,
)

# Of a program of a rank's process group.
over = functools.partial(on_ranks, kinds=["gloo", "auto"], of=ElasticProcessGroup)


@pytest.fixture(autouse=True)
def _own_forward(monkeypatch):
    # torch keeps the DDP in forward for the whole process, and ranks that are threads leave theirs.
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


ANY, WHOLE = [torch.float32, torch.bfloat16, torch.int64, torch.int16], [torch.int32]
REDUCTIONS = {
    "SUM": (ANY, lambda rows: rows.sum(0)),
    "AVG": (ANY, lambda rows: rows.double().mean(0)),
    "BAND": (WHOLE, lambda rows: functools.reduce(torch.bitwise_and, rows)),
    "BOR": (WHOLE, lambda rows: functools.reduce(torch.bitwise_or, rows)),
    "BXOR": (WHOLE, lambda rows: functools.reduce(torch.bitwise_xor, rows)),
}


def values(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, (3, 5), generator=generator).to(dtype)


@over(1, 2, 4)
def test_what_torchs_own_suite_leaves_out(group):
    rank, size = group.rank(), group.size()
    for name, (types, expected) in REDUCTIONS.items():
        op = options(AllreduceOptions, reduceOp=getattr(dist.ReduceOp, name))
        for dtype in types:
            tensor = values(rank, dtype)
            group.allreduce([tensor], op).wait()
            wanted = expected(torch.stack([values(each, dtype) for each in range(size)]))
            wanted = wanted.trunc() if not dtype.is_floating_point else wanted
            torch.testing.assert_close(tensor, wanted.to(dtype))
    tensor = values(rank).t().clone().t()  # of another layout
    group.broadcast([tensor], options(BroadcastOptions, rootRank=size - 1)).wait()
    assert torch.equal(tensor, values(size - 1))
    whole, part, received = torch.empty(size * 3, 5), torch.empty(5), torch.empty(size, 2)
    group.all_gather_single(whole, values(rank)).wait()
    assert torch.equal(whole, torch.cat([values(each) for each in range(size)]))
    table = torch.arange(5.0 * size).view(size, 5)
    group.reduce_scatter_single(part, table * (rank + 1), options(ReduceScatterOptions)).wait()
    assert torch.equal(part, table[rank] * sum(range(1, size + 1)))
    group.all_to_all_single(received, torch.full((size, 2), float(rank)), [], []).wait()
    assert torch.equal(received, torch.arange(float(size)).view(-1, 1).expand(size, 2))
    group.monitored_barrier()  # which Lightning calls where it prepares data


@over(2)
def test_messages_are_matched_by_tag_and_come_from_any(group):
    rank, other = group.rank(), 1 - group.rank()
    data = torch.full((1 << 20,), float(rank))
    into = torch.empty_like(data)
    receiving, sending = group.recv([into], other), group.send([data], other)
    sending.wait()  # on both ranks, and only then for what comes
    receiving.wait()
    assert into[-1].item() == other
    if rank == 0:
        for work in [group.send([torch.full((4,), float(tag))], 1, tag) for tag in (7, 8, 9)]:
            work.wait()
        tensor = torch.empty(2)
        work = group.recv_anysource([tensor], 0)
        work.wait()
        assert (work.source_rank(), tensor.tolist()) == (1, [1.0, 1.0])
    else:
        received = {tag: torch.empty(4) for tag in (9, 7, 8)}
        for work in [group.recv([tensor], 0, tag) for tag, tensor in received.items()]:
            work.wait()
        assert all(tensor.eq(tag).all() for tag, tensor in received.items())
        group.send([torch.ones(2)], 0, 0).wait()


@over(2)
def test_a_difference_between_ranks_is_an_error_on_all_and_leaves_the_group_whole(group):
    with pytest.raises(RanksDisagree, match="broadcast"):
        group.broadcast([whole(count=2 + group.rank())], options(BroadcastOptions, asyncOp=False))
    again = whole()
    group.allreduce([again]).wait()
    assert again.tolist() == [2.0] * 4


def whole(dtype=torch.float32, count=4):
    return torch.ones(count, dtype=dtype)


FROM_0, AT_ONCE = options(BroadcastOptions, rootRank=0), options(BarrierOptions, asyncOp=False)


def gather(group, root):
    into = [[whole(), whole()]]
    return group.gather(into, [whole()], options(GatherOptions, rootRank=root))


def in_turn(group, counts):
    for count in counts:
        work = group.allreduce([whole(count=count)])
        work.wait()
    return work


MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM
# What ranks begin with a value, that of rank 0 and of the other, and what both must say of either.
DIFFER = {
    "another type of the same bytes": (
        lambda group, dtype: group.broadcast([whole(dtype)], FROM_0),
        (torch.float32, torch.int32),
        ("float32[4]", "int32[4]"),
    ),
    "reduction": (
        lambda group, op: group.allreduce([whole()], options(AllreduceOptions, reduceOp=op)),
        (MAX, SUM),
        ("all_reduce (max)", "all_reduce (sum)"),
    ),
    "root": (gather, (0, 1), ("gather to rank 0", "gather to rank 1")),
    "order": (
        in_turn,
        ((10, 4), (4, 10)),
        ("rank 0: all_reduce (sum) of float32[10]", "rank 1: all_reduce (sum) of float32[4]"),
    ),
    "a wait, and none": (
        lambda group, begin: begin(group),
        (lambda group: group.barrier(AT_ONCE), lambda group: group.allreduce([whole()])),
        ("barrier", "all_reduce"),
    ),
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("what", DIFFER)
@over(2)
def test_operations_that_differ_are_the_same_error_on_all_ranks(group, what, known):
    """Also if all ranks have done both before, so that nothing needs to be compared."""
    begin, values, sides = DIFFER[what]
    for _ in range(5 if known else 0):
        for value in (whole(), whole(torch.int32), whole(count=1000), whole(count=10)):
            group.allreduce([value]).wait()
    # The barrier is for a root, and for a rank that is ahead.
    with pytest.raises(RanksDisagree) as error:  # noqa: PT012
        begin(group, values[group.rank()]).wait()
        group.barrier().wait()
    assert all(side in str(error.value) for side in sides)
    return str(error.value)


@over(2)
def test_a_rank_may_begin_before_it_sends_what_another_needs_first(group):
    """The comparison of an operation is waited for where the operation is."""
    for step in range(3):
        message, total = torch.ones(2), torch.ones(2 + step)
        if group.rank() == 0:
            work = group.allreduce([total])
            group.send([message * 7], 1).wait()
        else:
            group.recv([message], 0).wait()
            assert message.tolist() == [7.0, 7.0]
            work = group.allreduce([total], options(AllreduceOptions, asyncOp=False))
        work.wait()
        assert total.tolist() == [2.0] * (2 + step)


@over(2)
def test_a_foreseen_operation_does_not_overtake_one_that_is_compared(group, met):
    for counts in ([1], [2], [3, 4], [1], [2], [5], [1], [2]):  # 4 follows 1, 2, 3, not 1, 2
        for count in counts:
            group.allreduce([whole(count=count)]).wait()
    tensors = [whole(count=3), whole(count=4)]
    if group.rank() == 1:
        assert met.wait(30)
        time.sleep(0.05)  # while rank 0 waits for the comparison
        for each in tensors:
            group.allreduce([each]).wait()
    else:
        works = [group.allreduce([each]) for each in tensors]
        met.set()
        for work in works:
            work.wait()
    assert all(each.eq(2).all() for each in tensors)


@over(2)
def test_parts_of_a_world_take_turns_without_waiting_for_each_other(group):
    """Rank 0 begins on one group and waits on the other; rank 1 the other way round."""
    groups = [group.new_group([0, 1], group_name=name) for name in "ab"]
    for step in range(3):
        tensors = [torch.ones(step + 1), torch.ones(step + 5)]
        order = [0, 1] if group.rank() else [1, 0]
        for work in [groups[each].allreduce([tensors[each]]) for each in order][::-1]:
            work.wait()
        group.barrier().wait()
        assert all(tensor.eq(2).all() for tensor in tensors)


@over(2)
def test_a_group_is_broken_by_a_wait_that_has_timed_out(group, met):
    group.barrier().wait()
    if group.rank() == 0:
        with pytest.raises(CollectiveError):
            group.allreduce([torch.ones(2)]).wait(timedelta(seconds=0.05))
        met.set()
    assert met.wait(30)
    with pytest.raises(CollectiveError):
        group.allreduce([torch.full((2,), 5.0)]).wait()


@over(2)
def test_any_thread_aborts(group, all_met):
    group.barrier().wait()
    work = None if group.rank() else group.allreduce([torch.ones(3)])  # the other takes no part
    all_met.wait()  # an abort would overtake its end of the barrier
    if work is not None:
        thread = threading.Thread(target=group.abort)
        thread.start()
        with pytest.raises(CollectiveError):
            work.wait()
        thread.join()
    all_met.wait()


@on_ranks(1)
def test_what_holds_a_group_can_be_copied_and_pickled(context):
    group = ElasticProcessGroup(context)
    assert not group.supports_reconfigure
    norm = torch.nn.SyncBatchNorm(3, process_group=group)
    assert copy.deepcopy(norm).process_group is group
    assert pickle.loads(pickle.dumps(norm)).process_group is None  # no group is initialised


# -- DistributedDataParallel -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0005},
    ],
    ids=str,
)
@over(2)
def test_ddp_trains_as_one_process_does(group, given):
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group, **given)
    optimizer = SGD(ddp.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step, group.rank(), group.size())
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        if step == 1:
            renew(ddp)
    assert_close(parameters_of(model), train_alone(SGD))


@over(2)
def test_an_error_in_backward_keeps_its_type_and_the_model_goes_on(group, all_met):
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group)
    inputs, targets = batch(0)
    loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
    all_met.wait()
    group.context._communicator.abort("a test of failures")
    with pytest.raises(CollectiveError):
        loss.backward()
    with group.alone():  # as in a generation of one
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@over(2)
def test_a_future_whose_callback_has_failed_does_not_wait_for_its_value(group):
    def begin(gradient):
        futures.append(group.allreduce([gradient.clone()]).get_future())
        futures.append(futures[0].then(lambda _: 1 / 0))
        futures.append(futures[1].then(lambda _: 1))

    futures, weight = [], torch.ones(2, requires_grad=True)
    product = weight * 2
    product.register_hook(begin)
    with pytest.raises(ZeroDivisionError):
        product.sum().backward()
    assert futures[0].wait()[0].tolist() == [2.0, 2.0]
    for future in futures[1:]:
        with pytest.raises(ZeroDivisionError):
            in_time(future.wait)


@over(2)
def test_ddp_made_before_a_generation_waits_for_no_other(group):
    generation, group.context.generation = group.context.generation, 0
    own, first = (filled(torch.nn.Linear(2, 2), rank) for rank in (group.rank(), 0))
    ddp = DistributedDataParallel(own, process_group=group)
    with torch.no_grad():
        ddp(torch.ones(1, 2))  # nor does an evaluation
    assert torch.equal(own.weight, filled(torch.nn.Linear(2, 2), group.rank()).weight)
    group.context.generation = generation
    ddp(torch.ones(1, 2)).sum().backward()  # the first step: parameters are rank 0's
    assert torch.equal(own.weight, first.weight)


@over(1)
def test_ddp_is_compiled_and_follows_its_group(group):
    """A graph breaks where a forward looks for a new generation."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    compiled = torch.compile(ddp, backend="eager")
    for _ in range(2):
        compiled(torch.full((1, 3), float(group.rank()))).sum().backward()
        group.queue.failures += 1  # as after a backward that has failed: a new reducer
    assert ddp.module.weight.grad[0].tolist() == [0.0, 0.0, 0.0]


@over(2)
def test_ddp_with_power_sgd_begins_again_in_a_new_generation(group):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    ddp = DistributedDataParallel(filled(torch.nn.Linear(40, 30), 0), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    generator = state.rng.get_state()
    for _ in range(4):
        ddp(torch.ones(1, 40)).sum().backward()
    assert state.iter > 0
    assert state.q_memory_dict
    renew(ddp)
    assert (state.iter, state.q_memory_dict) == (0, {})
    assert all((state.rng.get_state()[1] == generator[1]).tolist())

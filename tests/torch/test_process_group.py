"""The process group of torch.distributed, on ranks that are threads, over both transports.

What torch's own suite of back ends asks is in tests/trainers.
"""

import copy
import dataclasses
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
    ErrorType,
    GatherOptions,
    ReduceScatterOptions,
)
from torch.nn.parallel import DistributedDataParallel

from nbelastic.collectives import connect
from nbelastic.errors import CollectiveError, NbelasticError, RanksDisagree
from nbelastic.torch.process_group import ElasticProcessGroup, renew
from tests.support.world import in_time, run_ranks
from tests.torch.training import assert_close, batch, make_model, parameters_of, train_alone

BACKENDS = ["gloo", "auto"]


@pytest.fixture(params=BACKENDS)
def over(request, monkeypatch):
    """Run a function with the group of each of some ranks."""
    # torch keeps the DDP in forward for the whole process, and ranks that are threads leave theirs.
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)

    def run(size, function):
        def make(rendezvous):
            return connect(dataclasses.replace(rendezvous, backend=request.param))

        return run_ranks(size, lambda context: function(ElasticProcessGroup(context)), make=make)

    return run


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_torchs_own_suite_leaves_out(over, size):
    def rank_main(group):
        rank = group.rank()
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

    over(size, rank_main)


def test_messages_are_matched_by_tag_and_come_from_any(over):
    def rank_main(group):
        other, data = 1 - group.rank(), torch.full((1 << 20,), float(group.rank()))
        into = torch.empty_like(data)
        receiving, sending = group.recv([into], other), group.send([data], other)
        sending.wait()  # on both ranks, and only then for what comes
        receiving.wait()
        assert into[-1].item() == other
        if group.rank() == 0:
            sent = [group.send([torch.full((4,), float(tag))], 1, tag) for tag in (7, 8, 9)]
            for work in sent:
                work.wait()
            tensor = torch.empty(2)
            work = group.recv_anysource([tensor], 0)
            work.wait()
            return work.source_rank(), tensor.tolist()
        received = {tag: torch.empty(4) for tag in (9, 7, 8)}
        for work in [group.recv([tensor], 0, tag) for tag, tensor in received.items()]:
            work.wait()
        group.send([torch.ones(2)], 0, 0).wait()
        return {tag: tensor[0].item() for tag, tensor in received.items()}

    assert over(2, rank_main) == [(1, [1.0, 1.0]), {7: 7.0, 8: 8.0, 9: 9.0}]


def test_a_difference_between_ranks_is_an_error_on_all_and_leaves_the_group_whole(over):
    def rank_main(group):
        with pytest.raises(RanksDisagree, match="broadcast"):
            group.broadcast(
                [whole(count=2 + group.rank())], options(BroadcastOptions, asyncOp=False)
            )
        again = whole()
        group.allreduce([again]).wait()
        return again.tolist()

    assert over(2, rank_main) == [[2.0] * 4] * 2


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
def test_operations_that_differ_are_the_same_error_on_all_ranks(over, what, known):
    """Also if all ranks have done both before, so that nothing needs to be compared."""
    begin, values, sides = DIFFER[what]

    def rank_main(group):
        for _ in range(5 if known else 0):
            for value in (whole(), whole(torch.int32), whole(count=1000), whole(count=10)):
                group.allreduce([value]).wait()
        # The barrier is for a root, and for a rank that is ahead.
        with pytest.raises(RanksDisagree) as error:  # noqa: PT012
            begin(group, values[group.rank()]).wait()
            group.barrier().wait()
        return str(error.value)

    first, second = over(2, rank_main)
    assert first == second
    assert all(side in first for side in sides)


def test_a_rank_may_begin_before_it_sends_what_another_needs_first(over):
    """The comparison of an operation is waited for where the operation is."""

    def rank_main(group):
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

    over(2, rank_main)


def test_a_foreseen_operation_does_not_overtake_one_that_is_compared(over):
    begun = threading.Event()

    def rank_main(group):
        for counts in ([1], [2], [3, 4], [1], [2], [5], [1], [2]):  # 4 follows 1, 2, 3, not 1, 2
            for count in counts:
                group.allreduce([whole(count=count)]).wait()
        tensors = [whole(count=3), whole(count=4)]
        if group.rank() == 1:
            assert begun.wait(30)
            time.sleep(0.05)  # while rank 0 waits for the comparison
            for each in tensors:
                group.allreduce([each]).wait()
        else:
            works = [group.allreduce([each]) for each in tensors]
            begun.set()
            for work in works:
                work.wait()
        assert all(each.eq(2).all() for each in tensors)

    over(2, rank_main)


def test_parts_of_a_world_take_turns_without_waiting_for_each_other(over):
    """Rank 0 begins on one group and waits on the other; rank 1 the other way round."""

    def rank_main(group):
        groups = [group.new_group([0, 1], group_name=name) for name in "ab"]
        for step in range(3):
            tensors = [torch.ones(step + 1), torch.ones(step + 5)]
            order = [0, 1] if group.rank() else [1, 0]
            for work in [groups[each].allreduce([tensors[each]]) for each in order][::-1]:
                work.wait()
            group.barrier().wait()
            assert all(tensor.eq(2).all() for tensor in tensors)

    over(2, rank_main)


def test_a_group_is_broken_by_a_wait_that_has_timed_out(over):
    late = threading.Event()

    def rank_main(group):
        group.barrier().wait()
        if group.rank() == 0:
            with pytest.raises(CollectiveError):
                group.allreduce([torch.ones(2)]).wait(timedelta(seconds=0.05))
            late.set()
        assert late.wait(30)
        with pytest.raises(CollectiveError):
            group.allreduce([torch.full((2,), 5.0)]).wait()

    over(2, rank_main)


def test_any_thread_aborts_and_the_group_tells_of_it(over):
    met, aborted = threading.Event(), threading.Event()

    def rank_main(group):
        group.barrier().wait()
        assert group.get_error() == ErrorType.SUCCESS
        if group.rank() == 1:
            met.set()  # an abort would overtake its end of the barrier
            assert aborted.wait(30)
            return
        work = group.allreduce([torch.ones(3)])  # the other rank does not take part
        assert met.wait(30)
        thread = threading.Thread(target=group.abort)
        thread.start()
        with pytest.raises(CollectiveError):
            work.wait()
        thread.join()
        assert group.get_error() == ErrorType.COMM_ERROR
        aborted.set()

    over(2, rank_main)


def test_a_group_is_not_reconfigured_by_others_and_what_holds_it_can_be_copied_and_pickled():
    def rank_main(context):
        group = ElasticProcessGroup(context)
        assert not group.supports_reconfigure
        for call in (group.get_reconfigure_handle, group.reconfigure):
            with pytest.raises(NbelasticError, match="the job, which chooses them"):
                call()
        norm = torch.nn.SyncBatchNorm(3, process_group=group)
        assert copy.deepcopy(norm).process_group is group
        assert pickle.loads(pickle.dumps(norm)).process_group is None  # no group is initialised

    run_ranks(1, rank_main)


# -- DistributedDataParallel -----------------------------------------------------------------------


def trained(group, **given):
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group, **given)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(step, group.rank(), group.size())
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        if step == 1:
            renew(ddp)
    return parameters_of(model)


GIVEN = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0005},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_ddp_trains_as_one_process_does(over, given):
    expected = train_alone(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    for parameters in over(2, lambda group: trained(group, **given)):
        assert_close(parameters, expected)


def test_an_error_in_backward_keeps_its_type_and_the_model_goes_on(over):
    both_are_here = threading.Barrier(2, timeout=20)

    def rank_main(group):
        model = make_model()
        ddp = DistributedDataParallel(model, process_group=group)
        inputs, targets = batch(0)
        loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
        both_are_here.wait()
        group.context._communicator.abort("a test of failures")
        with pytest.raises(CollectiveError):
            loss.backward()
        with group.alone():  # as in a generation of one
            torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        return [parameter.grad is not None for parameter in model.parameters()]

    for found in over(2, rank_main):
        assert all(found)


def test_a_future_whose_callback_has_failed_does_not_wait_for_its_value(over):
    def rank_main(group):
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

    over(2, rank_main)


def test_ddp_made_before_a_generation_waits_for_no_other(over):
    def rank_main(group):
        generation, group.context.generation = group.context.generation, 0
        torch.manual_seed(group.rank())
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        before = ddp.module.weight.detach().clone()
        with torch.no_grad():
            ddp(torch.ones(1, 2))  # nor does an evaluation
        group.context.generation = generation
        ddp(torch.ones(1, 2)).sum().backward()  # the first step: parameters are rank 0's
        return before, ddp.module.weight.detach()

    (first, one), (_, other) = over(2, rank_main)
    assert torch.equal(first, one)
    assert torch.equal(one, other)


def test_ddp_is_compiled_and_follows_its_group(over):
    """A graph breaks where a forward looks for a new generation."""

    def rank_main(group):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        compiled = torch.compile(ddp, backend="eager")
        for _ in range(2):
            compiled(torch.full((1, 3), float(group.rank()))).sum().backward()
            group.queue.failures += 1  # as after a backward that has failed: a new reducer
        return ddp.module.weight.grad[0].tolist()

    assert over(1, rank_main) == [[0.0, 0.0, 0.0]]


def test_ddp_with_power_sgd_begins_again_in_a_new_generation(over):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def rank_main(group):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(40, 30), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        generator = state.rng.get_state()
        for _ in range(4):
            ddp(torch.ones(1, 40)).sum().backward()
        used = state.iter, bool(state.q_memory_dict)
        renew(ddp)
        fresh = all((state.rng.get_state()[1] == generator[1]).tolist())
        return used, (state.iter, bool(state.q_memory_dict), fresh)

    for used, renewed in over(2, rank_main):
        assert used[0] > 0
        assert used[1]
        assert renewed == (0, False, True)

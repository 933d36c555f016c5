"""Operations with names match in any order, and ranks without more data take part in all.

That each operation computes the same by its name is in test_operations.py.
"""

import threading
from unittest import mock

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current, one_of_all
from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.torch.ops.coordination import coordination
from tests.collectives.worlds import SOME_KINDS
from tests.torch.modes import set_overlaps
from tests.torch.ranks import on_ranks
from tests.torch.training import assert_close, loss_of, make_model, parameters_of


def summed(name=None, value=1.0):
    return hvd.allreduce_async(torch.tensor([value]), name=name, op=hvd.Sum)


@on_ranks(3, kinds=SOME_KINDS)
def test_operations_without_a_name_may_come_in_between(context):
    """And an operation goes on while its ranks do something else."""
    if context.rank == 0:
        early = summed("early")
        assert not hvd.poll(early), "the others have not begun it"
        for begin in (hvd.allreduce_async, hvd.allgather_async):
            with pytest.raises(ValueError, match=r"duplicate name: all.* of name 'early'"):
                begin(torch.ones(1), name="early")
        hvd.barrier()
    else:
        hvd.barrier()
        early = summed("early")
    hvd.barrier()
    assert hvd.poll(early), "a barrier leaves nothing behind that all had begun before"
    tensor, ended = torch.ones(1), threading.Event()
    late = hvd.allreduce_async(tensor, name="early")
    tensor.zero_()  # it was read when the operation began
    while not hvd.poll(late):
        ended.wait(0.001)
    assert (early.wait().item(), late.wait().item()) == (3.0, 1.0)


@mock.patch.object(coordination, "_TELL_AFTER_S", 0.05)  # ranks that all wait are told so soon
@on_ranks(2, kinds=SOME_KINDS)
def test_a_mismatch_fails_that_operation_only(context):
    """So does a wait of each rank for another name."""
    wrong = hvd.allreduce_async(torch.ones(context.rank + 1), name="wrong")
    assert summed("right").wait().item() == 2
    with pytest.raises(RanksDisagree, match=r"float32\[1\].*float32\[2\]") as shapes:
        wrong.wait()
    with pytest.raises(RanksDisagree, match=r"rank 0: .*'loss 0'.*rank 1: .*'loss 1'") as names:
        hvd.allreduce(torch.ones(1), name=f"loss {context.rank}")
    assert summed("wrong").wait().item() == 2
    return [str(shapes.value), str(names.value)]


@pytest.mark.parametrize(
    "wait",
    [hvd.join, lambda: summed("never").wait(), lambda: hvd.allreduce(torch.ones(2))],
    ids=["join", "name", "comparison"],
)
@on_ranks(2, kinds=SOME_KINDS)
def test_a_death_ends_every_wait(context, wait, met):
    summed("both").wait()
    hvd.barrier()
    if context.rank == 0:
        met.set()  # the abort would overtake the end of the barrier
        with pytest.raises(CollectiveError) as error:
            wait()
        assert not isinstance(error.value, RanksDisagree)
    else:
        summed("other")
        assert met.wait(30)
        context.communicator().abort("rank 1 is gone")


# -- join ------------------------------------------------------------------------------------------


@on_ranks(2, kinds=SOME_KINDS)
def test_a_joined_rank_does_not_wait_for_one_that_has_returned(context):
    hvd.barrier()
    if context.rank == 0:
        with pytest.raises(CollectiveError, match="rank 1 has left while this rank had joined"):
            hvd.join()


@on_ranks(3, 1, kinds=SOME_KINDS)
def test_joined_ranks_contribute_zeros_to_sums_and_averages(context):
    for first in range(context.size):
        for name in (None, "loss"):
            if context.rank != first:
                ones = torch.ones(2, 3)
                torch.testing.assert_close(hvd.allreduce(ones, name=name), ones * 2 / 3)
                assert hvd.allreduce(ones, op=hvd.Sum)[0, 0] == 2
                assert hvd.allreduce(torch.tensor([-5]), name=name).item() == -3
                hvd.barrier()
            last = hvd.join()
            assert (last != first) == (context.size > 1)
            assert hvd.allgather_object(last) == [last] * context.size
    assert summed().wait().item() == context.size


FORBIDDEN = {
    "Allgather": lambda: hvd.allgather(torch.ones(2)),
    "Broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "Alltoall": lambda: hvd.alltoall(torch.ones(6)),
    "Reducescatter": lambda: hvd.reducescatter(torch.ones(6)),
    "Allreduce": lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
    "Broadcast_parameters": lambda: hvd.broadcast_parameters({"a": torch.ones(2)}),
    "Allgather_object": lambda: hvd.allgather_object(1),
    "Broadcast_object": lambda: hvd.broadcast_object(1, name="named"),
    "Add_process_set": lambda: hvd.add_process_set([0]),
}


@on_ranks(3, kinds=SOME_KINDS)
def test_other_operations_raise_on_the_ranks_that_call_them(context):
    joined = {1: "rank 1 has joined", 2: "ranks 1, 2 have joined"}
    for last, words in joined.items():
        for verb, call in FORBIDDEN.items() if context.rank not in range(1, last + 1) else ():
            with pytest.raises(RanksDisagree, match=f"^{verb} .* with Join .*: {words}"):
                call()
        hvd.join()
    assert hvd.allgather(torch.tensor([context.rank])).tolist() == [0, 1, 2]


BATCHES = [0, 3, 2]  # of ranks


@pytest.mark.parametrize("overlaps", [True, False])
@on_ranks(3, kinds=SOME_KINDS)
def test_joined_ranks_take_part_in_steps_and_do_not_step(context, overlaps):
    """Also a rank that has had no batch at all."""
    set_overlaps(context, overlaps)
    model, other, reference = make_model(), make_model(), make_model()
    optimizers = [
        hvd.DistributedOptimizer(make(net.parameters(), lr=0.1))
        for make, net in ((torch.optim.SGD, model), (torch.optim.Adam, other))
    ]
    for number in range(BATCHES[context.rank]):
        for optimizer, net in zip(optimizers, (model, other), strict=True):
            optimizer.zero_grad()
            loss_of(net, number, context.rank, 3).backward()
            optimizer.step()
        hvd.allreduce(torch.ones(1))
    last = hvd.join()
    assert last == 1
    stepped = not all(map(torch.equal, parameters_of(model), parameters_of(reference)))
    assert stepped == (context.rank != 0)
    assert stepped or all(each.grad is None for each in model.parameters())
    assert True not in context.agreed, "who has joined says nothing about the membership"
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        for rank in [rank for rank, batches in enumerate(BATCHES) if number < batches]:
            (loss_of(reference, number, rank, 3) / 3).backward()
        optimizer.step()
    assert_close(parameters_of(model), parameters_of(reference))


@on_ranks(2)
def test_joined_ranks_answer_the_check_of_a_commit(context):
    context.check_membership = lambda: context.agree(one_of_all(context, context.flag))
    context.flag = context.rank == 0
    if context.rank == 1:
        assert one_of_all(current(), mine=False)
    hvd.join()
    assert context.agreed == [True] * (context.rank == 0)

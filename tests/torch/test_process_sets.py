"""Process sets: operations of some of the ranks. N19: none is lost in a reset without a word."""

import inspect

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from nbelastic.errors import RanksDisagree
from tests.collectives.worlds import SOME_KINDS
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    batch,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

TAKERS = sorted(
    name
    for name in hvd.__all__
    if callable(getattr(hvd, name))
    and not isinstance(getattr(hvd, name), type)
    and "process_set" in inspect.signature(getattr(hvd, name)).parameters
    and "process_set" not in name
    and name != "convert_sync_batchnorm"
)


FIRST = {
    "DistributedOptimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
    "broadcast_optimizer_state": lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0),
    "broadcast_parameters": dict,
    "sparse_allreduce_async": lambda: torch.ones(1).to_sparse(),
    **{name: lambda: [torch.ones(1)] for name in TAKERS if name.startswith("grouped")},
}


def test_the_operations_that_take_a_set_are_found():
    assert {*FIRST, "allgather_object", "allreduce", "barrier"} <= set(TAKERS)
    assert len(TAKERS) >= 28


def arguments_of(name):
    wanted = inspect.signature(getattr(hvd, name)).parameters
    first = () if name == "barrier" else (FIRST.get(name, lambda: torch.ones(1))(),)
    return first, {"root_rank": 0} if "root_rank" in wanted else {}


@on_ranks(2)
def test_what_is_no_set_is_refused_before_anything_is_sent_and_only_members_call_operations(
    context,
):
    gone, its = hvd.add_process_set([0]), hvd.add_process_set([1])
    assert hvd.remove_process_set(gone)
    for name in TAKERS:
        first, more = arguments_of(name)
        for some in ([0], 1, hvd.ProcessSet([0]), gone):
            with pytest.raises(ValueError, match=r"process_set|is not added"):
                getattr(hvd, name)(*first, **more, process_set=some)
        more = {key: 1 for key in more}
        if context.rank == 1:
            getattr(hvd, name)(*first, **more, process_set=its)
        elif name != "DistributedOptimizer":  # others step by themselves
            with pytest.raises(ValueError, match="rank 0 is not in process set 2"):
                getattr(hvd, name)(*first, **more, process_set=its)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2, name


@on_ranks(4)
def test_a_set_has_ranks_a_root_and_an_end_of_its_own(context, met):
    """What operations compute in one is in test_operations.py."""
    rank = context.rank
    even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set([1, 3])
    assert (even.ranks, odd.ranks) == ([0, 2], [1, 3])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert (mine.included(), other.included()) == (True, False)
    assert (mine.rank(), other.rank(), mine.size()) == (rank // 2, None, 2)
    if mine is odd:  # which waits for nobody else
        assert met.wait(20)
    tensors = {"a": torch.full((2,), float(rank))}
    hvd.broadcast_parameters(tensors, mine.ranks[1], process_set=mine)
    assert tensors["a"][0] == mine.ranks[1]
    with pytest.raises(ValueError, match="root_rank must be a rank of"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    with pytest.raises(RanksDisagree, match=r"float32\[1\].*float32\[2\]"):
        hvd.allreduce(torch.ones(rank // 2 + 1), process_set=mine)
    hvd.barrier(mine)
    met.set()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
    for each in (odd, even):
        assert hvd.remove_process_set(each)
        assert not hvd.remove_process_set(each)
    assert (mine.process_set_id, mine.included(), mine.size()) == (None, None, None)
    assert hvd.add_process_set([0, 2]).process_set_id == 3


@on_ranks(2)
def test_sets_that_cannot_be_made(context):
    hvd.add_process_set([0])
    for ranks, words in (
        ([0], "there is a process set of ranks"),
        ([0, 1], "there is a process set of ranks"),
        ([7], "among 2 ranks is impossible"),
        ([], "among 2 ranks is impossible"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.add_process_set(ranks)
    with pytest.raises(RanksDisagree, match=r"add_process_set of ranks \[0\]"):
        hvd.add_process_set([context.rank])
    for wrong in ("01", 3, [1.5], [True], [0, 0], [-1]):
        with pytest.raises(ValueError, match="ProcessSet"):
            hvd.ProcessSet(wrong)
    everyone = hvd.global_process_set
    assert not hvd.remove_process_set(everyone)
    assert (everyone.ranks, everyone.process_set_id) == ([0, 1], 0)
    assert (everyone.included(), everyone.rank(), everyone.size()) == (True, context.rank, 2)
    context.generation += 1
    assert hvd.add_process_set([0]).ranks == [0], "in another generation these are others"


@on_ranks(3)
def test_sets_given_to_init_and_removed_by_a_shutdown(context):
    front, back = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
    hvd.init(process_sets=[front, back, [1]])
    assert (front.process_set_id, back.process_set_id) == (1, 2)
    if context.rank < 2:
        assert hvd.allgather_object(context.rank, process_set=front) == [0, 1]
    added = hvd.add_process_set([0, 2]).process_set_id
    hvd.shutdown()
    assert (front.process_set_id, front.ranks) == (None, [0, 1])
    hvd.init()
    again = hvd.add_process_set(front)
    if context.rank < 2:
        assert hvd.allgather_object(context.rank, process_set=again) == [0, 1]
    assert (added, again.process_set_id) == (4, 5)


@on_ranks(3, kinds=SOME_KINDS)
def test_an_optimizer_of_a_set(context):
    pair = hvd.add_process_set([0, 2])
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), process_set=pair)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number, context.rank // 2, 2).backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1))
    if pair.included():
        assert_close(parameters_of(model), train_alone(SGD))
    first, alone, third = hvd.allgather_object(bits(model))
    assert first == third != alone
    assert context.agreed == [], "what a set agrees on is not known to all"
    with pytest.raises(ValueError, match="process_set= cannot be used with a Loader"):  # noqa: PT012
        for step in Loader(TensorDataset(*batch(0)), Batch(3, micro=1)):
            for x, _ in step:
                model(x).sum().backward()


@pytest.mark.parametrize("members", [[0], [0, 1]])
@on_ranks(3)
def test_a_set_that_is_removed_leaves_no_communicator_and_all_go_on(context, members):
    some = hvd.add_process_set(members)
    if context.rank in members:
        hvd.allreduce(torch.ones(1), process_set=some)
        hvd.allreduce(torch.ones(1), process_set=some, name="a")
        layer = hvd.SyncBatchNorm(3, process_set=some)
        layer(torch.randn(4, 3)).sum().backward()
    hvd.remove_process_set(some)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
    assert not context.communicator()._subgroups

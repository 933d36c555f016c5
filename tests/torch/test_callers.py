"""Operations of a rank belong to one of its threads."""

import _thread
import contextvars
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.errors import NotTheRank
from nbelastic.torch.ops.coordination.coordination import coordination_of
from nbelastic.torch.process_group import ElasticProcessGroup
from tests.torch.ranks import on_ranks

OPERATIONS = [
    lambda: hvd.allreduce(torch.ones(1)),
    lambda: hvd.allreduce_async(torch.ones(1)),
    lambda: hvd.broadcast_object("a"),
    lambda: hvd.broadcast_parameters({"a": torch.ones(1)}),
    hvd.barrier,
]


def in_thread(function, name="metrics"):
    """Call in another thread of the same rank; return what `function` returns or raises.

    Without a name the thread is one that Python has not started, as those of autograd are.
    """
    outcome, copied = Future(), contextvars.copy_context()

    def main():
        try:
            outcome.set_result(copied.run(function))
        except BaseException as error:
            outcome.set_result(error)

    if name is None:
        _thread.start_new_thread(main, ())
    else:
        thread = threading.Thread(target=main, name=name)
        thread.start()
        thread.join()
    return outcome.result()


def in_own(pool, function):
    """Call `function` in a thread of a pool, as one of this rank's."""
    return pool.submit(contextvars.copy_context().run, function)


def total():
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


@on_ranks(2)
def test_operations_belong_to_one_thread_until_it_ends(context):
    # Threads that have ended leave operations to the next; then they are the rank's own.
    assert [in_thread(total, "first"), in_thread(total, "second"), total()] == [2.0] * 3
    for operation in OPERATIONS:
        error = in_thread(operation)
        assert isinstance(error, NotTheRank)
        assert "thread 'metrics' called an operation" in str(error)
        assert f"belong to thread 'rank-{context.rank}'" in str(error)
    # Autograd's threads, which Python has not started, are welcome in backward only.
    assert isinstance(in_thread(total, None), NotTheRank)
    tensor = torch.ones(2, requires_grad=True)
    assert in_thread(hvd.allreduce(tensor, op=hvd.Sum).sum().backward, None) is None
    assert (tensor.grad.tolist(), total()) == ([2.0, 2.0], 2.0)


@mock.patch("nbelastic.elastic.ranks.context._of_process", [])
@on_ranks(1)
def test_threads_of_a_process_with_one_rank_are_that_ranks(context):
    hvd.barrier()
    with ThreadPoolExecutor(1) as pool:  # unlike in_thread(), without the rank's variables
        assert pool.submit(current_or_none).result() is context
    assert in_thread(total) == 1.0


@pytest.mark.parametrize("of_all", [False, True], ids=["own group", "all ranks"])
@on_ranks(2)
def test_a_group_serves_a_second_thread_beside_the_ranks_own(context, of_all):
    """On one rank the second thread comes first."""
    group = ElasticProcessGroup(context)
    its = group if of_all else group.new_group([0, 1], group_name="saver")

    def reduce(value, group):
        tensors = [torch.full((3,), float(value + step)) for step in range(10)]
        for work in [group.allreduce([each]) for each in tensors]:
            work.wait()
        assert [each[0].item() for each in tensors] == [2.0 * (value + n) for n in range(10)]

    with ThreadPoolExecutor(1) as pool:
        if context.rank:
            reduce(1, group)
        saved = in_own(pool, lambda: reduce(100, its))
        if not context.rank:
            reduce(1, group)
        saved.result()


@mock.patch("nbelastic.elastic.ranks.groups.ENDING_S", 0.05)
@on_ranks(2)
def test_two_threads_at_a_time_on_one_group_are_refused(context):
    its = ElasticProcessGroup(context).new_group([0, 1], group_name="saver")
    with ThreadPoolExecutor(1, "first") as pool:
        in_own(pool, lambda: its.barrier().wait()).result()
        for error in (in_thread(its.barrier), in_thread(its.barrier, None)):
            assert isinstance(error, NotTheRank)
            assert "on group 'saver', whose operations belong to thread 'first_0'" in str(error)
    its.barrier().wait()  # it has ended
    assert in_thread(lambda: its.barrier().wait())


CLIENTS = {}  # of ranks


@on_ranks(3)
def test_a_part_goes_on_when_the_rank_with_the_matching_has_returned(context):
    CLIENTS[context.rank] = coordination_of(context.communicator())._client
    its = ElasticProcessGroup(context).new_group([1, 2], group_name="others")
    hvd.barrier()
    if context.rank == 2:
        time.sleep(0.3)  # rank 1 compares, and waits for this one
        for rank in (1, 2):
            CLIENTS[rank].abort()  # as the server does that ends
        time.sleep(0.1)
    if context.rank:
        tensor = torch.ones(2)
        its.allreduce([tensor]).wait()
        assert tensor.tolist() == [2.0, 2.0]

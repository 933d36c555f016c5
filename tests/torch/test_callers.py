"""Operations of a rank belong to one of its threads."""

from __future__ import annotations

import _thread
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import nbelastic.torch as hvd
from nbelastic.errors import NotTheRank
from nbelastic.torch.ops.coordination.coordination import coordination_of
from nbelastic.torch.process_group import ElasticProcessGroup
from tests.support.world import run_ranks

OPERATIONS = [
    lambda: hvd.allreduce(torch.ones(1)),
    lambda: hvd.allreduce_async(torch.ones(1)),
    lambda: hvd.broadcast_object("a"),
    lambda: hvd.broadcast_parameters({"a": torch.ones(1)}),
    hvd.barrier,
]


def in_thread(function, name="metrics"):
    """Call `function` in another thread of the same rank; return what it returns or raises."""
    outcome = []

    def main():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(main,), name=name)
    thread.start()
    thread.join()
    return outcome[0]


def in_own(pool, function):
    """Call `function` in a thread of a pool, as one of this rank's."""
    return pool.submit(contextvars.copy_context().run, function)


def in_dummy(function):
    """Call in a thread that Python has not started, as those of autograd are."""
    done = threading.Event()
    outcome = []
    copied = contextvars.copy_context()

    def main():
        try:
            copied.run(function)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    _thread.start_new_thread(main, ())
    done.wait()
    return outcome[0]


def test_a_second_thread_is_refused_by_name():
    def rank_main(context):
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        for operation in OPERATIONS:
            error = in_thread(operation)
            assert isinstance(error, NotTheRank)
            assert "thread 'metrics' called an operation" in str(error)
            assert f"belong to thread 'rank-{context.rank}'" in str(error)
        return total, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(2, rank_main) == [(2.0, 2.0)] * 2


def test_an_optimizer_of_a_second_thread_is_refused():
    def rank_main(context):
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        hvd.barrier()

        def step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        assert isinstance(in_thread(step), NotTheRank)

    run_ranks(2, rank_main)


def test_a_thread_that_has_ended_leaves_operations_to_the_next():
    def rank_main(context):
        first = in_thread(lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), "first")
        second = in_thread(lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), "second")
        return first, second, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(2, rank_main) == [(2.0, 2.0, 2.0)] * 2


def test_threads_of_a_world_of_one_are_all_welcome():
    def rank_main(context):
        hvd.barrier()
        return in_thread(lambda: hvd.allreduce(torch.ones(1)).item())

    assert run_ranks(1, rank_main) == [1.0]


def test_backward_of_an_operation_may_have_a_thread_of_autograds_own():
    def rank_main(context):
        tensor = torch.ones(2, requires_grad=True)
        loss = hvd.allreduce(tensor, op=hvd.Sum).sum()
        return in_dummy(loss.backward), tensor.grad.tolist()

    assert run_ranks(2, rank_main) == [(None, [2.0, 2.0])] * 2


def test_a_thread_that_python_has_not_started_is_refused_outside_of_backward():
    def rank_main(context):
        hvd.barrier()
        error = in_dummy(lambda: hvd.allreduce(torch.ones(1)))
        return type(error), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(2, rank_main) == [(NotTheRank, 2.0)] * 2


def test_a_group_of_its_own_serves_a_second_thread():
    def rank_main(context):
        group = ElasticProcessGroup(context)
        its = group.new_group([0, 1], group_name="saver")
        hvd.barrier()
        begun, told = threading.Event(), threading.Event()

        def save():
            totals = []
            for step in range(20):
                tensor = torch.full((3,), float(step + context.rank))
                its.allreduce([tensor]).wait()
                totals.append(tensor[0].item())
                begun.set()
            told.wait()
            its.barrier().wait()
            return totals

        with ThreadPoolExecutor(1) as pool:
            saved = in_own(pool, save)
            begun.wait()
            ours = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(20)]
            told.set()
            return saved.result(), ours

    expected = [2.0 * step + 1 for step in range(20)], [2.0] * 20
    assert run_ranks(2, rank_main) == [expected] * 2


def test_the_group_of_all_ranks_serves_a_second_thread_apart():
    def rank_main(context):
        group = ElasticProcessGroup(context)

        def reduce(value):
            tensors = [torch.full((3,), float(value)) for _ in range(10)]
            works = [group.allreduce([each]) for each in tensors]
            for work in works:
                work.wait()
            return [each[0].item() for each in tensors]

        # On one rank the second thread comes first.
        with ThreadPoolExecutor(1) as pool:
            if context.rank:
                ours, saved = reduce(1), in_own(pool, lambda: reduce(100))
            else:
                saved, ours = in_own(pool, lambda: reduce(100)), reduce(1)
            return ours, saved.result()

    assert run_ranks(2, rank_main) == [([2.0] * 10, [200.0] * 10)] * 2


def test_two_threads_at_a_time_on_one_group_are_refused(monkeypatch):
    monkeypatch.setattr("nbelastic.elastic.ranks.groups.ENDING_S", 0.05)

    def rank_main(context):
        its = ElasticProcessGroup(context).new_group([0, 1], group_name="saver")
        with ThreadPoolExecutor(1, "first") as pool:
            in_own(pool, lambda: its.barrier().wait()).result()
            for error in (in_thread(its.barrier), in_dummy(its.barrier)):
                assert isinstance(error, NotTheRank)
                assert "on group 'saver', whose operations belong to thread 'first_0'" in str(error)
        its.barrier().wait()  # it has ended
        return in_thread(lambda: its.barrier().wait())

    assert run_ranks(2, rank_main) == [True] * 2


def test_a_part_goes_on_when_the_rank_with_the_matching_has_returned():
    clients = {}

    def rank_main(context):
        clients[context.rank] = coordination_of(context.communicator())._client
        its = ElasticProcessGroup(context).new_group([1, 2], group_name="others")
        hvd.barrier()
        if context.rank == 0:
            return None
        if context.rank == 2:
            time.sleep(0.3)  # rank 1 compares, and waits for this one
            for rank in (1, 2):
                clients[rank].abort()  # as the server does that ends
            time.sleep(0.1)
        total = torch.ones(2)
        its.allreduce([total]).wait()
        return total.tolist()

    assert run_ranks(3, rank_main) == [None, [2.0, 2.0], [2.0, 2.0]]

"""Handles and counts: what may be asked, when, and how often."""

import gc
import threading
import weakref

import pytest
import torch

from nbelastic.collectives import Op, buffers
from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.operations import OrderedExecutor, abortable
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.worlds import KINDS, MAKERS, PATIENCE_S, World, eventually, failure

HOSTS = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "hierarchical")]


def test_handles_are_waited_for_twice_once_or_never(world):
    def rank_main(communicator):
        before = communicator.completed
        for _ in range(10):  # nobody waits for these, and they disturb nothing
            communicator.allreduce_async(torch.ones(5), Op.AVERAGE)
        tensor = torch.full((3,), 6.0)
        handle = communicator.allreduce_async(tensor, Op.AVERAGE)
        eventually(handle.done, "done()")
        handle.wait()
        handle.wait()
        assert handle.done()
        return communicator.completed - before, tensor.tolist()

    assert world.run(rank_main) == [(1, [6.0] * 3)] * world.size


def test_done_is_false_and_waiting_true_while_a_peer_is_missing(pair):
    tensor = torch.zeros(5)
    handle = pair.do(0, lambda c: c.allreduce_async(torch.ones(5)))
    message = pair.do(0, lambda c: c.receive_async(tensor, 1))
    for number, (each, operation) in enumerate(
        [
            (handle, lambda c: c.allreduce(torch.ones(5))),
            (message, lambda c: c.send(torch.ones(5), 0)),
        ]
    ):
        assert not each.done()
        assert not pair[0].waiting
        waiter = pair.start(0, lambda _, each=each: each.wait())
        pair.wait_until_waiting([0])
        assert pair[0].completed == number
        assert not pair[1].waiting
        pair.do(1, operation)
        waiter.result(PATIENCE_S)
        assert each.done()
    assert tensor.tolist() == [1.0] * 5
    assert [communicator.completed for communicator in pair.communicators] == [2, 2]


def test_a_rank_that_waits_in_a_subgroup_waits_and_its_operations_count(pair):
    """Or its heartbeats would say that it computes, and makes no progress."""
    groups = pair.run(lambda c: [c.subgroup([0, 1], "both")])
    waiter = pair.start(0, lambda _: groups[0][0].barrier())
    pair.wait_until_waiting([0])
    before = pair[0].completed
    pair.do(1, lambda _: groups[1][0].barrier())
    waiter.result(PATIENCE_S)
    pair.do(0, lambda c: c.close_subgroup("both"))
    assert pair[0].completed == before + 1


def test_messages_may_be_waited_for_in_an_order_of_ones_own(pair):
    """An earlier receive that cannot complete yet holds up no later send."""

    def first(communicator):
        answer = torch.zeros(1)
        receiving = communicator.receive_async(answer, 1)
        for number in range(3):
            communicator.send(torch.full((1000,), float(number)), 1)
        receiving.wait()
        return answer.item()

    def second(communicator):
        total = torch.zeros(1)
        for _ in range(3):
            tensor = torch.zeros(1000)
            communicator.receive(tensor, 0)
            total += tensor[0]
        communicator.send(total, 0)

    answer = pair.start(0, first)
    pair.do(1, second)
    assert answer.result(PATIENCE_S) == 3.0


def test_nothing_keeps_a_communicator_or_its_threads(make):
    """No handle that is done, no cycle: of a world that succeeded, was aborted, or just dropped."""
    before = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        for outcome in ("succeeded", "aborted", "dropped"):
            with World(make, 2) as world:
                handles = world.run(lambda c: c.allreduce_async(torch.ones(3)))
                world.run(lambda c, handles=handles: handles[c.rank].wait())
                waiter = world.start(0, lambda c: c.allreduce(torch.ones(3)))
                world.wait_until_waiting([0])
                if outcome == "aborted":
                    world.abort("enough")
                    failure(waiter)
                else:
                    world.do(1, lambda c: c.allreduce(torch.ones(3)))
                    waiter.result(PATIENCE_S)
                references = [weakref.ref(communicator) for communicator in world.communicators]
                del waiter
                if outcome != "dropped":
                    world.close()
                world.forget()
                assert all(handle.done() for handle in handles)
                eventually(lambda its=references: all(each() is None for each in its), "freedom")
    finally:
        gc.enable()
    eventually(lambda: set(threading.enumerate()) <= before, "the end of all threads")


@pytest.mark.parametrize("kind", HOSTS)
def test_memory_that_is_not_the_hosts_is_staged(kind, monkeypatch):
    """As on an accelerator: everything passes through new memory, and back on success only."""
    monkeypatch.setattr(buffers, "is_on_host", lambda tensor: False)

    def rank_main(communicator):
        mine = 1.0 + communicator.rank
        average, root, scattered = torch.tensor([mine]), torch.tensor([mine]), torch.zeros(1)
        gathered, exchanged = [torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]
        communicator.allreduce_async(average, Op.AVERAGE).wait()
        communicator.broadcast(root)
        communicator.allgather(gathered, torch.tensor([mine]))
        communicator.reduce_scatter(scattered, [torch.tensor([mine])] * 2)
        communicator.all_to_all(exchanged, [torch.tensor([10 * mine + to]) for to in range(2)])
        nodes = [[torch.tensor([mine]), torch.tensor([mine, mine])]]
        total = [torch.zeros(1), torch.zeros(2)]
        communicator.allreduce_tree_async(nodes, Blocks.even(2, 2), total).wait()
        assert [each.tolist() for each in total] == [[3.0], [3.0, 3.0]]
        sending = communicator.send_async(torch.tensor([mine]), 1 - communicator.rank)
        message = torch.zeros(1)
        communicator.receive(message, 1 - communicator.rank)
        sending.wait()
        assert message.item() == 3.0 - mine
        assert [each.item() for each in exchanged] == [9.0 + mine, 19.0 + mine]
        return [each.item() for each in (average, root, *gathered, scattered)]

    with World(MAKERS[kind], 2) as world:
        assert world.run(rank_main) == [[1.5, 1.0, 1.0, 2.0, 3.0]] * 2
        tensor = torch.full((1,), 5.0)
        handle = world.do(0, lambda c: c.allreduce_async(tensor))
        world.do(1, lambda c: c.allreduce_async(torch.ones(1)))
        world[0].abort("enough")
        with pytest.raises(CollectiveError):
            handle.wait()
        assert tensor.item() == 5.0


def test_a_part_that_fails_breaks_the_whole_before_the_operation_has_ended():
    """Another thread may have broken the part, and be about to tell the whole."""

    def fail():
        raise RanksDisagree("between hosts")

    signal = AbortSignal()
    operation = OrderedExecutor("fails", PATIENCE_S).submit(abortable(signal, fail))
    eventually(operation.done)
    assert (signal.reason, signal.kind) == ("between hosts", RanksDisagree)


class Product:
    """A task that multiplies a subnormal number by one, once `begin` is set."""

    def __init__(self, begin):
        self.begin, self.found = begin, None

    def __call__(self, _limit):
        self.begin.wait(PATIENCE_S)
        self.found = float(torch.tensor(1e-40) * 1.0)


def test_a_task_treats_subnormal_numbers_as_the_thread_that_submits_it():
    begin = threading.Event()
    executor = OrderedExecutor("adds", PATIENCE_S)
    tasks = [Product(begin) for _ in range(3)]

    def submit_all():  # while the thread that performs them lives
        for task, flushes in zip(tasks, [True, False, True], strict=True):
            torch.set_flush_denormal(flushes)
            executor.submit(task)

    submitter = threading.Thread(target=submit_all)
    submitter.start()
    submitter.join()
    begin.set()
    executor.join()
    found = [task.found for task in tasks]
    assert found[0] == found[2] == 0.0
    assert found[1] > 0.0

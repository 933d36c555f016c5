"""Handles and counts: what may be asked, when, and how often."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from nbelastic.collectives import Op, buffers
from nbelastic.collectives.operations import OrderedExecutor
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import KINDS, MAKERS, PATIENCE_S, World, eventually

HOSTS = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "hierarchical")]


def test_waiting_twice_counts_and_divides_once(world):
    def rank_main(communicator):
        before = communicator.completed
        tensor = torch.full((3,), 6.0)
        handle = communicator.allreduce_async(tensor, Op.AVERAGE)
        handle.wait()
        handle.wait()
        assert handle.done()
        return communicator.completed - before, tensor.tolist()

    assert world.run(rank_main) == [(1, [6.0] * 3)] * world.size


def test_an_operation_that_nobody_waits_for_disturbs_nothing(world):
    def rank_main(communicator):
        for _ in range(10):
            communicator.allreduce_async(torch.ones(5), Op.AVERAGE)
        tensor = torch.ones(5)
        communicator.allreduce(tensor)
        return tensor.tolist()

    assert world.run(rank_main) == [[world.size] * 5] * world.size


def test_done_becomes_true_without_waiting(world):
    def rank_main(communicator):
        handles = [communicator.allreduce_async(torch.ones(5))]
        if world.size > 1:
            me = communicator.rank
            handles.append(communicator.send_async(torch.ones(5), (me + 1) % world.size))
            handles.append(communicator.receive_async(torch.ones(5), (me - 1) % world.size))
        for handle in handles:
            eventually(handle.done, "done()")
            handle.wait()

    world.run(rank_main)


def test_done_is_false_and_waiting_true_while_a_peer_is_missing(pair):
    handle = pair.do(0, lambda c: c.allreduce_async(torch.ones(5)))
    assert not handle.done()
    assert not pair[0].waiting
    waiter = pair.start(0, lambda c: handle.wait())
    pair.wait_until_waiting([0])
    assert pair[0].completed == 0
    assert not pair[1].waiting
    pair.do(1, lambda c: c.allreduce(torch.ones(5)))
    waiter.result(PATIENCE_S)
    assert handle.done()
    assert not pair[0].waiting
    assert [communicator.completed for communicator in pair.communicators] == [1, 1]


def test_a_message_is_not_done_before_it_is_sent(pair):
    tensor = torch.zeros(5)
    handle = pair.do(0, lambda c: c.receive_async(tensor, 1))
    assert not handle.done()
    waiter = pair.start(0, lambda c: handle.wait())
    pair.wait_until_waiting([0])
    pair.do(1, lambda c: c.send(torch.ones(5), 0))
    waiter.result(PATIENCE_S)
    assert tensor.tolist() == [1.0] * 5


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


def test_handles_keep_no_communicator_alive_once_they_are_done(make):
    with World(make, 2) as world:
        handles = world.run(lambda c: c.allreduce_async(torch.ones(3)))
        world.run(lambda c: handles[c.rank].wait())
        references = [weakref.ref(communicator) for communicator in world.communicators]
        world.forget()
        assert all(handle.done() for handle in handles)
        eventually(lambda: all(reference() is None for reference in references), "freedom")


@pytest.mark.parametrize("outcome", ["succeeded", "aborted"])
def test_no_cycles_are_left_for_the_collector(make, outcome):
    gc.collect()
    gc.disable()
    try:
        with World(make, 2) as world:
            waiter = world.start(0, lambda c: c.allreduce(torch.ones(3)))
            world.wait_until_waiting([0])
            if outcome == "succeeded":
                world.do(1, lambda c: c.allreduce(torch.ones(3)))
                waiter.result(PATIENCE_S)
            else:
                world.abort("enough")
                assert isinstance(waiter.exception(PATIENCE_S), CollectiveError)
            references = [weakref.ref(communicator) for communicator in world.communicators]
            del waiter
            world.close()
            world.forget()
            eventually(lambda: all(reference() is None for reference in references), "freedom")
    finally:
        gc.enable()


def test_a_communicator_that_is_just_dropped_ends_its_threads(make):
    before = set(threading.enumerate())
    with World(make, 2) as world:
        world.run(lambda c: c.barrier())
        world.forget()
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


class Product:
    """A task that multiplies a subnormal number by one, once `begin` is set."""

    def __init__(self, begin):
        self.begin, self.found = begin, None

    def wait(self, _timeout):
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

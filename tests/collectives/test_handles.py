"""Handles and counts: what may be asked, when, and how often."""

import gc
import os
import threading
import weakref

import torch

from nbelastic.collectives import Op
from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.operations import OrderedExecutor, abortable
from nbelastic.errors import RanksDisagree
from tests.collectives.worlds import PATIENCE_S, World, eventually, failure


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
    cases = [
        (lambda c: c.allreduce_async(torch.ones(5)), lambda c: c.allreduce(torch.ones(5))),
        (lambda c: c.receive_async(tensor, 1), lambda c: c.send(torch.ones(5), 0)),
    ]
    handles = [pair.do(0, begin) for begin, _ in cases]
    for number, (handle, (_, operation)) in enumerate(zip(handles, cases, strict=True)):
        assert not (handle.done() or pair[0].waiting)
        waiter = pair.start(0, lambda _, handle=handle: handle.wait())
        pair.wait_until_waiting([0])
        threading.Event().wait(0.1)  # longer than the moment in which no abort is listened to
        assert not handle.done()
        assert pair[0].completed == number
        assert not pair[1].waiting
        pair.do(1, operation)
        waiter.result(PATIENCE_S)
        assert handle.done()
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
    groups = pair.run(lambda c: [c.subgroup([0, 1], "again")])
    groups[0][0].abort("enough")  # a part that fails breaks the whole
    assert failure(pair.start(0, lambda c: c.barrier())) == "enough"


def test_a_receive_that_cannot_complete_yet_holds_up_no_send(pair):
    def rank_main(communicator):
        answer = torch.zeros(1000)
        receiving = communicator.receive_async(answer, 1 - communicator.rank)
        communicator.send(torch.full((1000,), float(communicator.rank)), 1 - communicator.rank)
        receiving.wait()
        return answer.unique().tolist()

    assert pair.run(rank_main) == [[1.0], [0.0]]


def test_nothing_keeps_a_communicator_or_its_threads(make):
    """No handle that is done, no cycle: of worlds that succeeded, were aborted, or just dropped."""
    before, opened = set(threading.enumerate()), []
    gc.collect()
    gc.disable()
    try:
        for outcome in ("succeeded", "aborted", "dropped") * 8:
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
            opened.append(len(os.listdir("/dev/fd")))
    finally:
        gc.enable()
    eventually(lambda: set(threading.enumerate()) <= before, "the end of all threads")
    # Clients of other tests open and close some, too; a leak would be forty.
    eventually(lambda: len(os.listdir("/dev/fd")) < opened[2] + 20, "the end of all connections")


def test_a_part_that_fails_breaks_the_whole_before_the_operation_has_ended():
    """Another thread may have broken the part, and be about to tell the whole."""

    def fail():
        raise RanksDisagree("between hosts")

    signal = AbortSignal()
    operation = OrderedExecutor("fails", PATIENCE_S).submit(abortable(signal, fail))
    eventually(operation.done)
    assert (signal.reason, signal.kind) == ("between hosts", RanksDisagree)

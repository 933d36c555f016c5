"""Abort and close: whoever waits is freed, whatever they wait for, and nothing works afterwards."""

import re
import threading

import pytest
import torch

from nbelastic.collectives import SoloCommunicator
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import PATIENCE_S, World, eventually, failure

OPERATIONS = {
    "allreduce": lambda c: c.allreduce_async(torch.ones(3)),
    "large allreduce": lambda c: c.allreduce_async(torch.ones(3_000_000)),
    "tree": lambda c: c.allreduce_tree_async([[torch.ones(3)]], Blocks.even(2, 2)),
    "large tree": lambda c: c.allreduce_tree_async(
        [[torch.ones(3_000_000)]] * (c.rank + 1), Blocks((1, 2))
    ),
    "broadcast": lambda c: c.broadcast_async(torch.ones(3), root=c.size - 1),
    "allgather": lambda c: c.allgather_async([torch.ones(3) for _ in range(c.size)], torch.ones(3)),
    "reduce_scatter": lambda c: c.reduce_scatter_async(
        torch.ones(3), [torch.ones(3) for _ in range(c.size)]
    ),
    "all_to_all": lambda c: c.all_to_all_async(
        [torch.ones(3) for _ in range(c.size)], [torch.ones(3) for _ in range(c.size)]
    ),
    "barrier": lambda c: c.barrier_async(),
    "receive": lambda c: c.receive_async(torch.ones(3), (c.rank + 1) % c.size),
    "empty": lambda c: c.broadcast_async(torch.ones(0)),  # ends at once
    # Which nobody receives.
    "send": lambda c: c.send_async(torch.ones(3_000_000), (c.rank + 1) % c.size),
}


def threads_of(world, rank=r"\d+"):
    """Return the threads of a world's communicators: those of the kinds, a generation and a rank.

    A world before this one may have left some.
    """
    its = re.compile(rf"nbelastic-\w+-{world.generation}-{rank}\b")
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if its.match(name)]


# Each kind has a way of its own for what all do, for sums along a tree, and for messages.
def test_abort_frees_who_waits_and_reaches_every_operation(make):
    for name in ("allreduce", "large tree", "receive", "send"):
        with World(make, 2) as pair:
            handles = [pair.do(0, begin) for begin in OPERATIONS.values()]
            waited_for = handles[[*OPERATIONS].index(name)]
            waiter = pair.start(0, lambda _, handle=waited_for: handle.wait())
            pair.wait_until_waiting([0])
            pair[0].abort("enough")
            assert failure(waiter) == "enough"
            for handle in (*handles, *handles):
                assert handle.done()
                assert failure(pair.start(0, lambda c, handle=handle: handle.wait())) == "enough"
            for begin in OPERATIONS.values():
                assert failure(pair.start(0, begin)) == "enough"
            assert not pair[0].waiting
            assert pair[0].completed == 0


def test_an_ended_operation_fails_unless_it_was_completed(pair):
    """Or ranks would disagree on what has happened, depending on who was waited for first."""
    completed, ended = (pair.run(lambda c: c.allreduce_async(torch.ones(3))) for _ in range(2))
    pair.run(lambda c: completed[c.rank].wait())
    eventually(lambda: all(handle.done() for handle in ended), "done()")
    pair.abort("enough")
    for rank, handle in enumerate(ended):
        assert failure(pair.start(rank, lambda c, handle=handle: handle.wait())) == "enough"
    pair.run(lambda c: completed[c.rank].wait())
    assert [communicator.completed for communicator in pair.communicators] == [1, 1]


def test_abort_frees_who_connects(make):
    with World(make, 3, connected=False) as world:
        connecting = [world.start(rank, lambda c: c.connect()) for rank in (0, 1)]
        assert not any(future.done() for future in connecting)
        world.abort("enough")
        assert failure(connecting[0]) == "enough"
        # Rank 1 may have seen rank 0 leave before it was aborted itself.
        assert re.fullmatch("enough|.*rank 0 left before all had joined", failure(connecting[1]))
        assert failure(world.start(2, lambda c: c.connect())) == "enough"
        eventually(lambda: not threads_of(world), "threads of communicators")


def test_closing_in_any_state(make):
    with World(make, 2, connected=False) as world:
        world.do(0, lambda c: c.close())
        assert "closed" in failure(world.start(0, lambda c: c.connect()))
        world[0].abort("enough")
        world.do(0, lambda c: c.close())
    with World(make, 2) as world:
        handle = world.do(0, lambda c: c.barrier_async())
        # Nobody has the handles of these.
        world.do(0, lambda c: (c.allreduce_async(torch.ones(3)), None)[1])
        world.do(0, lambda c: (c.receive_async(torch.ones(3), source=1), None)[1])
        for _ in range(2):
            world.do(0, lambda c: c.close())
        assert handle.done()
        eventually(lambda: not threads_of(world, rank=0), "the end of rank 0's threads")
        assert "closed" in failure(world.start(0, lambda c: handle.wait()))
        assert "closed" in failure(world.start(0, lambda c: c.barrier()))


def test_a_rank_that_leaves_fails_those_who_wait_for_it(make):
    """By themselves where the transport can tell, as a neighbour can; all of them once aborted."""
    with World(make, 2) as world:
        waiter = world.start(0, lambda c: c.allreduce(torch.ones(3)))
        world.wait_until_waiting([0])
        world.do(1, lambda c: c.close())
        failure(waiter)
    with World(make, 2) as world:  # noticed without waiting for the operation
        handle = world.do(0, lambda c: c.allreduce_async(torch.ones(3)))
        world.do(1, lambda c: c.close())
        eventually(handle.done, "done()")
        failure(world.start(0, lambda c: c.broadcast_async(torch.ones(3), root=0)))


def test_memory_of_an_aborted_operation_is_not_handed_to_another(make):
    """What the old generation may still write to is nobody's: new tensors keep their values."""
    size = 300_000

    def average_of_parts(communicator, output=None):
        output = torch.ones(size) if output is None else output
        communicator.reduce_scatter(output, [torch.full((size,), 7.0) for _ in range(2)])

    for _ in range(5):
        output = torch.full((size,), 5.0)
        with World(make, 2) as old:
            waiter = old.start(0, lambda c, output=output: average_of_parts(c, output))
            old.wait_until_waiting([0])
            old[0].abort("enough")
            assert isinstance(waiter.exception(PATIENCE_S), CollectiveError)
            assert (output == 5.0).all(), "a failed operation leaves a composed output alone"
            del waiter
            fresh = [torch.zeros(size) for _ in range(6)]
            late = old.start(1, average_of_parts)
            with World(make, 2) as new:
                new.run(lambda c, fresh=fresh: c.allreduce(fresh[c.rank]))
            # It comes to nothing, or is over before the connections are cut.
            assert isinstance(late.exception(PATIENCE_S), (CollectiveError, type(None)))
            assert not any(tensor.any() for tensor in fresh)


def test_an_operation_times_out_and_breaks_the_communicator(make):
    with (
        World(make, 2, timeout_s=1.0) as world,
        World(make, 2, timeout_s=1.0) as other,
        World(make, 2, connected=False, timeout_s=1.0) as apart,
    ):
        waiting = [
            world.start(0, lambda c: c.barrier()),
            other.start(0, lambda c: c.receive(torch.ones(1), 1)),
            apart.start(0, lambda c: c.connect()),
        ]
        for future in waiting:
            assert failure(future)
        assert failure(world.start(0, lambda c: c.barrier()))


def test_a_rank_alone_breaks_like_any_other():
    communicator = SoloCommunicator(generation=7).connect()
    handle = communicator.allreduce_async(torch.ones(3))
    communicator.abort("enough")
    communicator.close()
    for operation in (handle.wait, communicator.barrier, communicator.connect):
        with pytest.raises(CollectiveError, match="enough"):
            operation()
    assert handle.done()
    assert communicator.completed == 0

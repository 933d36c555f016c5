"""A fork of a rank: it takes part in nothing, and changes nothing of its parent's."""

import atexit
import gc
import multiprocessing
import os
import signal
import warnings

import pytest
import torch
from distributed import SpecCluster

from nbelastic.errors import NotTheRank
from tests.collectives.test_abort import OPERATIONS
from tests.collectives.worlds import KINDS, MAKERS, PATIENCE_S, World, needs_core

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

REFUSED = {
    **OPERATIONS,
    "agree": lambda c: c.agree("the same"),
    "coalesced": lambda c: c.allreduce_coalesced([torch.ones(3)] * 2),
    "check": lambda c: c.check(),
}


def in_fork(function):
    """Call `function` in a fork, and fail if it does not end well."""
    child = multiprocessing.get_context("fork").Process(target=function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads: that is the point
        child.start()
    child.join(PATIENCE_S)
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGABRT)  # pytest has faulthandler show where it is
        child.join()
    assert child.exitcode == 0


def all_refused(world, handle):
    with pytest.raises(NotTheRank):
        handle.wait()
    for communicator in world.communicators:
        for operation in REFUSED.values():
            with pytest.raises(NotTheRank, match="forked from a rank"):
                operation(communicator)
        communicator.cut_connections()
        communicator.abort("in the fork")
        communicator.close()
    world.communicators.clear()
    gc.collect()


def exit_normally(world):
    """Do what is done at exit, and destroy all that is left."""
    SpecCluster._instances.clear()  # they wait 10 s for a thread that is not in the fork
    atexit._run_exitfuncs()
    world.communicators.clear()
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_can_call_nothing_and_break_nothing(kind):
    with World(MAKERS[kind], 2) as world:
        tensor = torch.ones(70_000)
        handle = world.do(0, lambda c: c.broadcast_async(torch.ones(3), root=1))
        waiting = world.start(0, lambda c: c.allreduce(tensor))
        world.wait_until_waiting([0])
        in_fork(lambda: all_refused(world, handle))
        in_fork(lambda: exit_normally(world))
        world.do(1, lambda c: c.broadcast(torch.ones(3), root=1))
        world.do(1, lambda c: c.allreduce(torch.ones(70_000)))
        waiting.result(PATIENCE_S)
        world.do(0, lambda _: handle.wait())
        assert tensor[0].item() == 2
        sums = world.run(lambda c: [c.agree("again", c.rank), c.barrier()][0])
        assert sums == [[0, 1]] * 2


@pytest.mark.slow
@needs_core
def test_what_a_fork_writes_to_shared_memory_does_not_show():
    with World(MAKERS["shm"], 2) as world:
        buffers = world.run(lambda c: c.empty(1000, torch.float32).fill_(1.0))
        in_fork(lambda: [buffer.fill_(7.0) for buffer in buffers])
        assert [buffer.unique().tolist() for buffer in buffers] == [[1.0], [1.0]]

        def reduce(communicator):
            communicator.allreduce(buffers[communicator.rank])
            return buffers[communicator.rank].unique().tolist()

        assert world.run(reduce) == [[2.0], [2.0]]

"""Generations: a new one forms while the old dies, and neither touches the other."""

import contextlib
import dataclasses
import itertools
import os
import threading

import pytest
import torch

from nbelastic.collectives import RendezvousServer
from nbelastic.errors import CollectiveError
from tests.collectives import worlds
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, World, eventually


@pytest.fixture
def store():
    """The address of a rendezvous server for several generations."""
    with contextlib.closing(RendezvousServer(BIND)) as server:
        yield server.address


def descriptors():
    return len(os.listdir("/dev/fd"))


def test_many_generations_leave_nothing_behind(make, store):
    with World(make, 2) as world:  # what is made once and for all
        world.run(lambda c: c.allreduce(torch.ones(3)))
    its = f"-{world.generation}-"
    eventually(lambda: not any(its in each.name for each in threading.enumerate()), "quiet")
    threads, open_before = set(threading.enumerate()), descriptors()
    for number in range(30):
        with World(make, 2, store=store) as world:
            assert world.run(_step) == [2.0, 2.0]
            if number % 2:  # every other one ends with an operation that is stuck
                world.do(0, lambda c: c.allreduce_async(torch.ones(100)))
    eventually(lambda: set(threading.enumerate()) <= threads, "the end of all threads")
    # Clients of other tests open and close some, too; a leak would be sixty.
    eventually(lambda: descriptors() < open_before + 20, "the end of all connections")


def _step(communicator):
    tensor = torch.ones(1)
    communicator.allreduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("make", [MAKERS["gloo"], MAKERS["auto"]], ids=["gloo", "auto"])
def test_a_rank_that_comes_late_meets_nobody(make, store):
    with World(make, 2, store=store) as old:
        old.run(lambda c: c.barrier())

        its = old[0]._rendezvous
        for second_self_or_stranger in (its, dataclasses.replace(its, rank=2, size=3)):
            with pytest.raises(CollectiveError):
                make(second_self_or_stranger).connect()
        old.run(lambda c: c.barrier())
        with World(make, 2, store=store) as new:
            assert new.run(_step) == [2.0, 2.0]


def test_jobs_with_generations_of_one_number_share_a_store(store, monkeypatch):
    monkeypatch.setattr(worlds, "_generations", itertools.repeat(1 << 40))
    make = MAKERS["auto"]
    with (
        World(make, 2, store=store, job="one", connected=False) as one,
        World(make, 2, store=store, job="two", connected=False) as two,
    ):
        connecting = [world.start(0, lambda c: c.connect()) for world in (one, two)]
        connecting += [world.start(1, lambda c: c.connect()) for world in (two, one)]
        for future in connecting:
            future.result(PATIENCE_S)
        one.run(_step)
        two.run(_step)


def test_memory_of_an_aborted_operation_is_not_handed_to_another(make, store):
    """What the old generation may still write to is nobody's: new tensors keep their values."""
    size = 300_000

    def average_of_parts(communicator, output=None):
        output = torch.ones(size) if output is None else output
        communicator.reduce_scatter(output, [torch.full((size,), 7.0) for _ in range(2)])

    for _ in range(5):
        output = torch.full((size,), 5.0)
        with World(make, 2, store=store) as old:
            waiter = old.start(0, lambda c, output=output: average_of_parts(c, output))
            old.wait_until_waiting([0])
            old[0].abort("enough")
            assert isinstance(waiter.exception(PATIENCE_S), CollectiveError)
            assert (output == 5.0).all(), "a failed operation leaves a composed output alone"
            del waiter
            fresh = [torch.zeros(size) for _ in range(6)]
            late = old.start(1, average_of_parts)
            with World(make, 2, store=store) as new:
                new.run(lambda c, fresh=fresh: c.allreduce(fresh[c.rank]))
            # It comes to nothing, or is over before the connections are cut.
            assert isinstance(late.exception(PATIENCE_S), (CollectiveError, type(None)))
            assert not any(tensor.any() for tensor in fresh)

"""The communicator over pygloo, which is for Python 3.10 and older.

Its calls hold the interpreter, so its ranks are processes, which do what a test sends them. Only
those of the tests for all communicators are run that keep no operation under way while they do
something else.
"""

import dataclasses
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nbelastic.collectives import RendezvousServer, connect
from tests.collectives.test_arguments import (  # noqa: F401
    test_wrong_arguments_are_refused_and_do_no_harm,
)
from tests.collectives.test_handles import (  # noqa: F401
    test_handles_are_waited_for_twice_once_or_never,
)
from tests.collectives.test_operations import (  # noqa: F401
    test_a_large_allreduce_is_the_same_on_all_ranks,
    test_many_operations_in_flight,
    test_tensors_may_need_gradients_be_views_or_inputs_and_outputs,
    test_values_arrive_as_they_were_sent,
    test_values_of_all_ranks_are_reduced,
)
from tests.collectives.test_tree import test_any_sums_in_a_row_are_numpys  # noqa: F401
from tests.collectives.worlds import BIND, PATIENCE_S, failure, terms
from tests.support.processes import Ranks

pytest.importorskip("pygloo", reason="pygloo has wheels for Python 3.8 to 3.10 only")

from nbelastic.collectives.gloo.with_pygloo import LIMIT_S

START_S = 120.0  # importing torch in several processes on few and busy cores


def _open_store(here):
    here.store = RendezvousServer(BIND, b"secret")
    return here.store.address


def _make(rendezvous, here):
    here.communicator = connect(rendezvous)


class World:
    """A generation of the first `size` ranks. As in a job, rank 0 keeps its store."""

    def __init__(self, ranks, size):
        self.size = size
        self._processes = ranks.processes[:size]
        self._killed = set()
        store = self._processes[0].ask(_open_store).result(START_S)
        how = {"timeout_s": PATIENCE_S, "backend": "pygloo", "secret": b"secret"}
        its = terms(0, size, store, **how)
        for rank, process in enumerate(self._processes):
            process.ask(partial(_make, dataclasses.replace(its, rank=rank))).result(START_S)
        self.run(lambda c: c.connect() and None)

    def __reduce__(self):
        return SimpleNamespace, (), {"size": self.size}  # what a function on a rank sees of it

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in {*range(self.size)} - self._killed:
            self.do(rank, lambda c: c.close())
        self._processes[0].ask(lambda here: here.store.close()).result(PATIENCE_S)

    def start(self, rank, function):
        """Begin `function(communicator)` in the process of `rank`."""
        return self._processes[rank].ask(lambda here: function(here.communicator))

    def do(self, rank, function):
        """Do `function(communicator)` in the process of `rank` and return its result."""
        return self.start(rank, function).result(PATIENCE_S)

    def run(self, function):
        """Do `function(communicator)` on all ranks and return their results."""
        results = [self.start(rank, function) for rank in range(self.size)]
        return [result.result(PATIENCE_S) for result in results]

    def stop(self, rank):
        """Stop a process; it is killed in the end."""
        self._processes[rank].send_signal(signal.SIGSTOP)

    def kill(self, rank):
        """Kill a process, stopped or not. The ranks are one short from here on."""
        self._processes[rank].kill()
        self._killed.add(rank)


SIZES = (2, 3, 4)
ENDS_S = LIMIT_S - 10  # by then who waits is free because something broke, not because of the limit


@pytest.fixture(scope="module")
def ranks():
    with Ranks(max(SIZES)) as ranks:
        yield ranks


@pytest.fixture(params=SIZES, ids="size{}".format, scope="module")
def world(ranks, request):
    with World(ranks, request.param) as world:
        yield world


@pytest.fixture
def pair(ranks):
    with World(ranks, 2) as pair:
        yield pair


@pytest.mark.parametrize("end", ["abort", "close", "cut"])
def test_who_waits_is_freed_when_another_rank_leaves(pair, end):
    waiter = pair.start(0, lambda c: c.allreduce(torch.ones(3)))
    pair.do(1, {"abort": lambda c: c.abort("enough"), "close": lambda c: c.close()}.get(end, _cut))
    assert "rank 0 of generation" in failure(waiter, ENDS_S)
    for _ in range(2):
        failure(pair.start(0, lambda c: c.barrier()), ENDS_S)


def _cut(communicator):
    assert communicator.cut_connections() == 1


@pytest.mark.slow
def test_the_end_of_a_process_frees_all_who_wait():
    with Ranks(4) as ranks, World(ranks, 4) as world:
        waiters = [world.start(rank, lambda c: c.allreduce(torch.ones(99))) for rank in (0, 2, 3)]
        world.kill(1)
        for waiter in waiters:
            failure(waiter, ENDS_S)


@pytest.mark.slow
def test_a_stopped_process_costs_no_more_than_the_limit():
    with Ranks(2) as ranks, World(ranks, 2) as world:
        waiter = world.start(0, lambda c: c.barrier())
        world.stop(1)
        assert "imed out" in failure(waiter, 2 * LIMIT_S)
        world.kill(1)

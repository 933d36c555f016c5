"""The communicator over pygloo, which is for Python 3.10 and older.

Its calls hold the interpreter, so its ranks are processes, and only those of the tests for all
communicators are run that keep no operation under way while they do something else.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from nbelastic.errors import CollectiveError
from tests.collectives.apart import Crew, World
from tests.collectives.test_arguments import (  # noqa: F401
    test_inputs_of_several_types_are_refused,
    test_wrong_arguments_are_refused_and_do_no_harm,
)
from tests.collectives.test_handles import (  # noqa: F401
    test_an_operation_that_nobody_waits_for_disturbs_nothing,
    test_waiting_twice_counts_and_divides_once,
)
from tests.collectives.test_operations import (  # noqa: F401
    MOVED,
    SHAPES,
    same,
    test_a_large_allreduce_is_the_same_on_all_ranks,
    test_all_to_all,
    test_allgather,
    test_allreduce,
    test_allreduce_of_truths,
    test_an_allgather_may_name_its_input_as_an_output,
    test_broadcast,
    test_many_operations_in_flight,
    test_reduce_scatter,
    test_tensors_that_need_gradients_and_views,
    values,
)
from tests.collectives.test_tree import (  # noqa: F401
    test_an_absent_value_changes_no_bit_of_the_others,
    test_sums_have_the_bits_of_the_tree,
)

pytest.importorskip("pygloo", reason="pygloo has wheels for Python 3.8 to 3.10 only")

from nbelastic.collectives.gloo.with_pygloo import LIMIT_S

SIZES = (2, 3, 4)
ENDS_S = LIMIT_S - 10  # by then who waits is free because something broke, not because of the limit


@pytest.fixture(scope="module")
def crew():
    with Crew(max(SIZES)) as crew:
        yield crew


@pytest.fixture(params=SIZES, ids="size{}".format, scope="module")
def world(crew, request):
    with World(crew, request.param, backend="pygloo") as world:
        yield world


@pytest.fixture
def pair(crew):
    with World(crew, 2, backend="pygloo") as pair:
        yield pair


def failure(result, within=ENDS_S):
    """Return what a rank raised."""
    error = result.exception(within)
    assert isinstance(error, CollectiveError), error
    return str(error)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_send_and_receive(world, dtype):
    def rank_main(communicator):
        me = communicator.rank
        received = {}
        for other in range(world.size):
            for shape in SHAPES if other != me else ():
                tensor = torch.zeros(shape, dtype=dtype)
                if me < other:
                    communicator.send(values(me, shape, dtype, other), other)
                communicator.receive(tensor, other)
                if me > other:
                    communicator.send(values(me, shape, dtype, other), other)
                received[other, shape] = tensor
        return received

    for rank, received in enumerate(world.run(rank_main)):
        assert len(received) == len(SHAPES) * (world.size - 1)
        for (source, shape), tensor in received.items():
            same(tensor, values(source, shape, dtype, rank))


def test_no_rank_passes_a_barrier_before_all_have_come(pair):
    first = pair.start(0, lambda c: (c.barrier(), time.monotonic())[1])
    come = pair.do(1, lambda c: (time.monotonic(), c.barrier())[0])
    assert come <= first.result()


def test_what_it_is_called_and_what_it_counts(pair):
    def rank_main(communicator):
        communicator.barrier()
        communicator.allreduce(torch.ones(0))
        handle = communicator.allreduce_async(torch.ones(2))
        assert handle.done()
        assert not communicator.waiting
        return communicator.name, communicator.completed

    assert pair.run(rank_main) == [("pygloo", 2)] * 2


def test_connecting_comes_first_and_once(crew, pair):
    pair.run(_connect_again)
    with World(crew, 2, backend="pygloo", connected=False) as world:
        for operation in (lambda c: c.barrier(), lambda c: c.allreduce(torch.ones(0))):
            error = world.start(0, operation).exception(ENDS_S)
            assert isinstance(error, RuntimeError)
            assert "connect" in str(error)


def _connect_again(communicator):
    with pytest.raises(RuntimeError, match="once"):
        communicator.connect()
    communicator.barrier()


@pytest.mark.parametrize("end", ["abort", "close", "cut"])
def test_who_waits_is_freed_when_another_rank_leaves(pair, end):
    waiter = pair.start(0, lambda c: c.allreduce(torch.ones(3)))
    pair.do(1, {"abort": lambda c: c.abort("enough"), "close": lambda c: c.close()}.get(end, _cut))
    assert "rank 0 of generation" in failure(waiter)
    for _ in range(2):
        failure(pair.start(0, lambda c: c.barrier()))


def _cut(communicator):
    assert communicator.cut_connections() == 1


def test_nothing_is_done_after_an_abort(pair):
    def rank_main(communicator):
        waited, not_waited = (communicator.allreduce_async(torch.ones(3)) for _ in range(2))
        waited.wait()
        communicator.barrier()
        for reason in ("enough", "more"):
            communicator.abort(reason)
        waited.wait()
        for operation in (
            not_waited.wait,
            communicator.barrier,
            communicator.connect,
            lambda: communicator.allreduce(torch.ones(0)),
        ):
            with pytest.raises(CollectiveError, match=r"^enough$"):
                operation()

    # The other may have its barrier's end cut off.
    results = [pair.start(rank, rank_main) for rank in range(2)]
    assert sum(result.exception(ENDS_S) is None for result in results) >= 1


def test_abort_frees_who_connects(crew):
    def rank_main(communicator):
        errors = []

        def connect():
            try:
                communicator.connect()
            except CollectiveError as error:
                errors.append(str(error))

        thread = threading.Thread(target=connect)
        thread.start()
        communicator.abort("enough")
        thread.join(ENDS_S)
        return errors

    with World(crew, 2, backend="pygloo", connected=False) as world:
        assert world.do(0, rank_main) == ["enough"]
    with World(crew, 2, backend="pygloo", connected=False, timeout_s=0.5) as world:
        assert "within 0.5 s" in failure(world.start(0, lambda c: c.connect()))


def test_who_is_not_of_the_job_is_found_out(crew):
    with World(crew, 3, backend="pygloo", connected=False) as world:
        world.do(1, lambda c: setattr(c, "_token", lambda rank: bytes(32)))
        connecting = [world.start(rank, lambda c: c.connect() and None) for rank in range(3)]
        errors = [failure(result) for result in connecting]
    assert any("rank 1 is of another generation" in errors[rank] for rank in (0, 2))


def test_the_last_operation_of_one_who_leaves_reaches_the_others(crew):
    def rank_main(communicator):
        tensor = torch.full((500_000,), 1.0 + communicator.rank)
        communicator.broadcast(tensor, 0)
        communicator.close()
        return (tensor == 1).all().item()

    for _ in range(5):
        with World(crew, 4, backend="pygloo") as world:
            assert world.run(rank_main) == [True] * 4


def test_nothing_is_left_of_one_that_is_closed(pair):
    def left(communicator):
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = pair.run(left)
    pair.run(lambda c: c.close())
    after = pair.run(left)
    for (fds, threads), (fds_left, threads_left) in zip(before, after, strict=True):
        assert fds_left < fds
        assert threads_left == threads - 1


def test_the_end_of_a_process_frees_all_who_wait():
    with Crew(4) as crew, World(crew, 4, backend="pygloo") as world:
        waiters = [world.start(rank, lambda c: c.allreduce(torch.ones(99))) for rank in (0, 2, 3)]
        world.kill(1)
        for waiter in waiters:
            failure(waiter)


def test_a_stopped_process_costs_no_more_than_the_limit():
    with Crew(2) as crew, World(crew, 2, backend="pygloo") as world:
        waiter = world.start(0, lambda c: c.barrier())
        world.stop(1)
        assert "imed out" in failure(waiter, 2 * LIMIT_S)
        world.kill(1)

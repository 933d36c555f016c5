"""What is shared memory's own: memory that is reduced in place, and what becomes of it."""

import gc

import pytest
import torch

from nbelastic.collectives import Op
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.test_operations import same
from tests.collectives.worlds import (
    MAKERS,
    PATIENCE_S,
    World,
    eventually,
    failure,
    needs_core,
    noise,
)

pytestmark = needs_core


@pytest.fixture(params=["shm", "hierarchical"])
def kind(request):
    """Make communicators that have memory in a segment."""
    return MAKERS[request.param]


def mapped():
    """Return the inodes of the segments that this process has."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return {line.split()[4] for line in file if "memfd:nbelastic" in line}


def test_memory_of_its_own_is_reduced_like_any_other_and_outlives_the_communicator(kind):
    def rank_main(communicator):
        outcomes = []
        for op in (Op.SUM, Op.AVERAGE, Op.MAX):
            outside = noise(communicator.rank, 200_003)
            inside = communicator.empty(len(outside), torch.float32)
            inside.copy_(outside)
            communicator.allreduce(outside, op)
            communicator.allreduce_async(inside, op).wait()
            same(inside, outside)
            outcomes.append(inside)
        return outcomes

    with World(kind, 5) as world:
        first, again = world.run(rank_main), world.run(rank_main)
    for outcomes in (*first, *again):
        for actual, wanted in zip(outcomes, first[0], strict=True):
            same(actual, wanted)


def test_memory_goes_back_when_nobody_needs_it():
    others = mapped()  # of worlds that other tests keep, or have just left
    with World(MAKERS["shm"], 2) as world:

        def place(_):
            return world.run(lambda c: c.empty(1000, torch.float32).data_ptr())

        assert place(1) == place(2)
        vectors = world.run(lambda c: c.empty(1000, torch.float32)[10:].fill_(3.0))
        assert not {*place(3)} & {vector.data_ptr() - 40 for vector in vectors}
    ours = mapped() - others
    assert ours
    assert all((vector == 3.0).all() for vector in vectors), "it outlives the communicator"
    del vectors
    gc.collect()
    eventually(lambda: not ours & mapped(), "the end of all segments")


def test_where_the_segment_is_full_there_is_other_memory(monkeypatch):
    def full(*_):
        raise MemoryError("full")

    shared = "nbelastic.collectives.shm.communicator"  # there is none without the part in C++
    with World(MAKERS["shm"], 2) as world:
        monkeypatch.setattr(f"{shared}.allocate", full)
        vectors = world.run(lambda c: c.empty(1000, torch.float32).fill_(1.0))
        world.run(lambda c: c.allreduce(vectors[c.rank]))
        assert all((vector == 2.0).all() for vector in vectors)
        futures = [
            world.start(rank, lambda c: c.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2))
            for rank in range(2)
        ]
        assert "shared memory is full" in failure(futures[0])
        failure(futures[1])


DISAGREEING = {
    "count": lambda c: c.allreduce(torch.ones(3 + c.rank // 2)),
    "large count": lambda c: c.allreduce(torch.ones(100_000 + c.rank // 2)),
    "type": lambda c: c.allreduce(torch.ones(3, dtype=[torch.float32, torch.int32][c.rank // 2])),
    "reduction": lambda c: c.allreduce(torch.ones(3), [Op.SUM, Op.MAX][c.rank // 2]),
    "root": lambda c: c.broadcast(torch.ones(3), root=c.rank // 2),
    "operation": lambda c: c.barrier() if c.rank == 2 else c.allreduce(torch.ones(3)),
    "blocks": lambda c: c.allreduce_tree(
        [[torch.ones(3)]], Blocks((1, 1, 2 if c.rank == 2 else 1))
    ),
    "length": lambda c: c.all_to_all(
        [torch.ones(2 + (c.rank != to)) for to in range(3)],
        [torch.ones(2 + (c.rank != to) * (1 + c.rank // 2)) for to in range(3)],
    ),
}


@pytest.mark.parametrize("disagree", DISAGREEING.values(), ids=DISAGREEING.keys())
def test_ranks_that_disagree_all_raise_the_same_error(disagree):
    with World(MAKERS["shm"], 3) as world:
        futures = [world.start(rank, disagree) for rank in range(3)]
        errors = [future.exception(PATIENCE_S) for future in futures]
    assert {type(error) for error in errors} == {RanksDisagree}
    (said,) = {str(error) for error in errors}
    assert "disagree" in said


def test_a_message_of_another_length_is_an_error():
    with World(MAKERS["shm"], 2) as world:
        world.start(0, lambda c: c.send(torch.ones(3), 1))
        assert "disagree" in failure(world.start(1, lambda c: c.receive(torch.ones(4), 0)))


def test_an_operations_memory_is_kept_without_its_handle_until_it_has_ended(kind):
    with World(kind, 2) as world:
        world.do(0, lambda c: (c.allreduce_async(torch.ones(300_000)), None)[1])
        fresh = [torch.zeros(300_000) for _ in range(6)]
        world.do(1, lambda c: c.allreduce(torch.ones(300_000)))
        world.run(lambda c: c.barrier())
        assert not any(tensor.any() for tensor in fresh)
        assert not any(getattr(each, "_lent", ()) for each in world.communicators)


def test_an_error_in_one_part_breaks_the_others():
    with World(MAKERS["hierarchical"], 4) as world:
        world.run(lambda c: c.allreduce(torch.ones(3)))
        waiting = [world.start(rank, lambda c: c.allreduce(torch.ones(3))) for rank in (0, 1)]
        world.wait_until_waiting([0, 1])
        world[2]._group.abort("the segment of the other host")
        for rank in (2, 3):  # they do not wait for it
            begun = world.start(rank, lambda c: (c.allreduce_async(torch.ones(3)), None)[1])
            assert isinstance(begun.exception(PATIENCE_S), (CollectiveError, type(None)))
        again = [world.start(rank, lambda c: c.broadcast(torch.ones(3))) for rank in range(4)]
        for future in (*waiting, *again):
            failure(future)


def test_to_be_cut_off_breaks_it_for_all():
    with World(MAKERS["shm"], 3) as world:
        assert world[1].cut_connections() == 2
        assert world[1].cut_connections() == 0  # there is nothing left to cut
        for rank in range(3):
            with pytest.raises(CollectiveError, match="rank 1 was cut off"):
                world.do(rank, lambda communicator: communicator.barrier())

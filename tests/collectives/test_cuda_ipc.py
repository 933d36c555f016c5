"""Sums in the memory of devices that all ranks of a host can read, with devices that fail."""

import time
from functools import partial

import pytest
import torch

from nbelastic.collectives import Op
from nbelastic.collectives.cuda_ipc import communicator as cuda_ipc
from nbelastic.collectives.reduction_tree import Blocks
from tests.collectives import fake_device, worlds
from tests.collectives.crew import Crew, allreduce
from tests.collectives.fake_device import FakeDevice
from tests.collectives.worlds import (
    MAKERS,
    PATIENCE_S,
    World,
    failure,
    needs_compiler,
    needs_core,
    noise,
)
from tests.support.bits import bits

pytestmark = needs_core

SOON_S = 5.0  # shorter than what an operation may take


@pytest.fixture
def devices(monkeypatch):
    """Have each rank's device be of the test's choice: a function of its number."""
    return lambda make: monkeypatch.setitem(worlds.DEVICES, "cuda_ipc", make)


@pytest.fixture(params=[0, 1 << 30], ids=["in slices", "at once"])
def in_small_rounds(request, monkeypatch):
    """Have sums take many rounds."""
    monkeypatch.setattr(cuda_ipc, "BUFFER_BYTES", 16 << 10)
    monkeypatch.setattr(cuda_ipc, "AT_ONCE_BYTES", request.param)


def world(size):
    return World(MAKERS["cuda_ipc"], size)


def along_trees(communicator):
    """Return the bits of sums along a tree of even blocks, and of uneven ones."""
    found, size = [], communicator.size
    for blocks in (Blocks.even(7, size), Blocks((6, *[0] * (size - 2), 1))):
        nodes = [[noise(sum(node), 5000)] for node in blocks.covers[communicator.rank]]
        output = torch.zeros(5000)
        communicator.allreduce_tree(nodes, blocks, [output])
        found.append(bits(output))
    return found


def in_rank_order(communicator):
    """Return the bits of sums of each rank's noise, some of them of several tensors at once."""
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.float32):
        tensors = [noise(communicator.rank, n, dtype) for n in (1, 3, 2048, 2049, 10_000, 7)]
        handles = [communicator.allreduce_async(tensor) for tensor in tensors[:3]]
        handles.append(communicator.allreduce_coalesced_async(tensors[3:], Op.AVERAGE))
        for handle in handles:
            handle.wait()
        found += map(bits, tensors)
    return found


@pytest.mark.parametrize("kind", ["cuda_ipc", pytest.param("nccl", marks=needs_compiler)])
def test_ranks_that_disagree_are_told(kind):
    def disagree(communicator):
        communicator.allreduce(torch.ones(3 + communicator.rank // 2))

    with World(MAKERS[kind], 3) as ranks:
        for future in [ranks.start(rank, disagree) for rank in range(3)]:
            said = failure(future)
            assert "disagree" in said or kind == "nccl"  # which the ranks compare in words
            assert "rank 2: allreduce (sum) of 4 values of torch.float32" in said
    assert fake_device.living == []  # whatever ends a generation


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("in_small_rounds")
def test_in_many_rounds_sums_have_the_bits_of_shared_memory(size):
    def rank_main(communicator):
        assert communicator.name == "cuda_ipc"
        summed = torch.arange(10_000.0) + communicator.rank
        handle = communicator.allreduce_async(summed)
        averaged = torch.full((3000,), float(communicator.rank), dtype=torch.bfloat16)
        communicator.allreduce(averaged, Op.AVERAGE)
        handle.wait()
        sent = torch.arange(20_000.0) * communicator.rank
        communicator.broadcast(sent, root=size - 1)
        return [summed, averaged, sent], along_trees(communicator)

    with World(MAKERS["shm"], size) as ranks:
        on_one_host, in_order = ranks.run(along_trees), ranks.run(in_rank_order)
    with world(size) as ranks:
        outcomes = ranks.run(rank_main)
        assert ranks.run(in_rank_order) == in_order
        ranks.close()
        assert fake_device.living == []
    assert [exact for _, exact in outcomes] == on_one_host
    for (summed, averaged, sent), _ in outcomes:
        assert summed.equal(torch.arange(10_000.0) * size + sum(range(size)))
        assert averaged.eq((size - 1) / 2).all()
        assert sent.equal(torch.arange(20_000.0) * (size - 1))


# -- devices that fail ---------------------------------------------------------------------------


REFUSALS = [
    ({"refuses": "allocate"}, ": the device refuses to allocate"),
    ({"refuses": "open"}, ": it cannot open the memory of the GPU of rank 0: the device"),
    ({"refuses": "drain"}, ": the device refuses to drain"),
    (
        {"garbles": True},
        ": it cannot open the memory of the GPU of rank 0: it reads",
    ),
    (None, " has used no GPU"),
]


@pytest.mark.parametrize(("switches", "said"), REFUSALS, ids=str)
def test_without_memory_for_all_the_host_reduces(devices, switches, said):
    """On all ranks, with the reason, and with nothing left open."""

    def make(rank):
        if rank != 1:
            return FakeDevice()
        return None if switches is None else FakeDevice(**switches)

    devices(make)
    with world(3) as ranks:
        for communicator in ranks.communicators:
            assert communicator.name == "shm"
            assert f"rank 1{said}" in communicator.fallback_reason
            assert communicator.completed == 0
        assert fake_device.living == []
        assert ranks.run(lambda c: c.allreduce(torch.ones(3))) == [None] * 3


def test_a_device_that_fails_in_a_sum_fails_it_for_all(devices):
    made = {}
    devices(lambda rank: made.setdefault(rank, FakeDevice()))
    with world(2) as ranks:
        made[1].refuses = "drain"
        waiting = [ranks.start(rank, lambda c: c.allreduce(torch.ones(3))) for rank in range(2)]
        for future in waiting:
            assert "the device refuses to drain" in failure(future)


def test_a_stream_that_is_never_done_holds_up_nobody(devices, monkeypatch, caplog):
    """After an abort: its memory stays open, and the next generation says why it does without."""
    monkeypatch.setattr(cuda_ipc, "OPEN_LIMIT_S", 0.2)
    monkeypatch.setattr(cuda_ipc, "CLOSE_LIMIT_S", 0.2)
    made = {}
    devices(lambda rank: made.setdefault(rank, FakeDevice()))
    try:
        with world(2) as ranks:
            made[1].stream.stuck.set()
            waiting = [ranks.start(rank, lambda c: c.allreduce(torch.ones(3))) for rank in range(2)]
            ranks.wait_until_waiting([0, 1])
            began = time.monotonic()
            ranks.abort("rank 1 stands still")
            for future in waiting:
                assert str(future.exception(PATIENCE_S)) == "rank 1 stands still"
            ranks.close()
            assert time.monotonic() - began < SOON_S
        assert "rank 1 of generation" in caplog.text
        assert "its GPU has not ended its work within 0.2 s" in caplog.text
        with world(2) as ranks:
            assert {each.name for each in ranks.communicators} == {"shm"}
            reason = ranks[0].fallback_reason
            assert reason.endswith("rank 1: its GPU has not ended its work within 0.2 s")
            ranks.run(lambda c: c.allreduce(torch.ones(3)))
    finally:
        made[1].stream.stuck.clear()
        for memory in list(fake_device.living):
            memory.close()


# The host waits twice for a stream when memory is opened, then once before each meeting.
@pytest.mark.slow
@pytest.mark.parametrize("drain", [2, 4])
def test_a_rank_that_dies_at_any_point_fails_the_others_and_they_form_anew(drain):
    def die(_here):
        worlds.DEVICES["cuda_ipc"] = lambda _rank: FakeDevice(dies_at=drain)

    with Crew("cuda_ipc", 3) as crew:
        victim = crew.members[1]
        victim.ask(die, at_once=True).result(PATIENCE_S)
        _, answers = crew.connect()
        if drain > 2:
            for answer in answers:
                answer.result(PATIENCE_S)
            answers = crew.ask(partial(allreduce, length=400_000))
        answers.pop(1)
        for answer in answers:
            failure(answer)  # by themselves
        crew.dismiss(victim)
        crew.form()

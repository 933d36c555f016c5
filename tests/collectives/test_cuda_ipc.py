"""Sums in the memory of devices that all ranks of a host can read, with devices that fail."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch

from nbelastic.collectives import Op
from nbelastic.collectives.cuda_ipc import communicator as cuda_ipc
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError
from tests.collectives import fake_device, worlds
from tests.collectives.fake_device import FakeDevice
from tests.collectives.test_processes import Crew, error, fork_server, ok  # noqa: F401
from tests.collectives.worlds import (
    MAKERS,
    PATIENCE_S,
    World,
    eventually,
    needs_compiler,
    needs_core,
)
from tests.support.bits import bits

pytestmark = needs_core

SOON_S = 5.0
"""Shorter than what an operation may take."""


@pytest.fixture
def devices(monkeypatch):
    """Have each rank's device be of the test's choice: a function of its number."""
    return lambda make: monkeypatch.setattr(worlds, "fake_device", make)


@pytest.fixture(params=[0, 1 << 30], ids=["in slices", "at once"])
def in_small_rounds(request, monkeypatch):
    """Have sums take many rounds."""
    monkeypatch.setattr(cuda_ipc, "BUFFER_BYTES", 16 << 10)
    monkeypatch.setattr(cuda_ipc, "AT_ONCE_BYTES", request.param)


def noise(rank, count, dtype=torch.float32):
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10 ** (rank % 3)).to(dtype)


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


# -- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("in_small_rounds")
def test_sums_of_many_rounds_are_added_in_the_order_of_ranks(size, dtype):
    counts = [1, 3, 2048, 2049, 10_000, 7]

    def rank_main(communicator):
        assert communicator.name == "cuda_ipc"
        found = []
        for _ in range(3):
            tensors = [noise(communicator.rank, count, dtype) for count in counts]
            handles = [communicator.allreduce_async(tensor) for tensor in tensors[:3]]
            handles.append(communicator.allreduce_coalesced_async(tensors[3:], Op.AVERAGE))
            for handle in handles:
                handle.wait()
            found.append(tensors)
        return found

    with world(size) as ranks:
        outcomes = ranks.run(rank_main)
    for place, count in enumerate(counts):
        total = noise(0, count, dtype).to(torch.promote_types(dtype, torch.float32))
        for rank in range(1, size):
            total += noise(rank, count, dtype)
        if place >= 3:
            total /= size
        for tensors in itertools.chain(*outcomes):
            assert bits(tensors[place]) == bits(total.to(dtype))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("in_small_rounds")
def test_sums_along_a_tree_take_as_many_rounds_as_their_nodes_need(size):
    with world(size) as ranks:
        there = ranks.run(along_trees)
    with World(MAKERS["shm"], size) as ranks:
        assert ranks.run(along_trees) == there


def test_ranks_that_disagree_are_told():
    with world(3) as ranks:
        waiting = [
            ranks.start(rank, lambda c: c.allreduce(torch.ones(3 + c.rank // 2)))
            for rank in range(3)
        ]
        for future in waiting:
            said = str(future.exception(PATIENCE_S))
            assert "disagree" in said
            assert "rank 2: allreduce (sum) of 4 values of torch.float32" in said


# -- several hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["cuda_ipc+gloo", pytest.param("cuda_ipc+nccl", marks=needs_compiler)]
)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.usefixtures("in_small_rounds")
def test_on_several_hosts_each_host_adds_then_slices_cross(kind, size):
    """In many rounds; sums along a tree have the bits of one host."""

    def rank_main(communicator):
        assert communicator.name == kind
        summed = torch.arange(10_000.0) + communicator.rank
        handle = communicator.allreduce_async(summed)
        averaged = torch.full((3000,), float(communicator.rank), dtype=torch.bfloat16)
        communicator.allreduce(averaged, Op.AVERAGE)
        handle.wait()
        sent = torch.arange(20_000.0) * communicator.rank
        communicator.broadcast(sent, root=size - 1)
        return [summed, averaged, sent], along_trees(communicator)

    with World(MAKERS["shm"], size) as ranks:
        on_one_host = ranks.run(along_trees)
    with World(MAKERS[kind], size) as ranks:
        outcomes = ranks.run(rank_main)
    assert [exact for _, exact in outcomes] == on_one_host
    for (summed, averaged, sent), _ in outcomes:
        assert summed.equal(torch.arange(10_000.0) * size + sum(range(size)))
        assert averaged.eq((size - 1) / 2).all()
        assert sent.equal(torch.arange(20_000.0) * (size - 1))


@pytest.mark.parametrize("switches", [{"refuses": "open"}, None], ids=str)
def test_without_memory_on_one_host_all_hosts_reduce_on_the_host(devices, switches):
    def make(rank):
        if rank != 3:
            return FakeDevice()
        return None if switches is None else FakeDevice(**switches)

    devices(make)
    said = "rank 3 has used no GPU" if switches is None else "rank 3: it cannot open the memory"
    with World(MAKERS["cuda_ipc+gloo"], 4) as ranks:
        for communicator in ranks.communicators:
            assert communicator.name == "hierarchical"
            assert said in communicator.fallback_reason
        assert fake_device.living == []
        ranks.run(lambda c: c.allreduce(torch.ones(3)))


def test_a_death_between_hosts_frees_the_ranks_that_meet_inside_them():
    with World(MAKERS["cuda_ipc+gloo"], 4) as ranks:
        waiting = [ranks.start(rank, lambda c: c.allreduce(torch.ones(999))) for rank in range(3)]
        ranks.wait_until_waiting([0, 1, 2])
        ranks[3].abort("it has died")
        for future in waiting:
            assert isinstance(future.exception(PATIENCE_S), CollectiveError)


# -- devices that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"refuses": "allocate"}, "rank 1: the device refuses to allocate"),
        ({"refuses": "open"}, "rank 1: it cannot open the memory of the GPU of rank 0: the device"),
        ({"refuses": "drain"}, "rank 1: the device refuses to drain"),
        ({"garbles": True}, "rank 1: it reads something else in the memory of the GPU of rank 0"),
        (None, "rank 1 has used no GPU"),
    ],
    ids=str,
)
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
            assert said in communicator.fallback_reason
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
            assert "the device refuses to drain" in str(future.exception(PATIENCE_S))


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


def test_a_sum_ends_with_its_time_limit_if_a_stream_is_never_done(devices, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "CLOSE_LIMIT_S", 0.2)
    made = {}
    devices(lambda rank: made.setdefault(rank, FakeDevice()))
    try:
        with World(MAKERS["cuda_ipc"], 2, timeout_s=1.0) as ranks:
            made[1].stream.stuck.set()
            waiting = [ranks.start(rank, lambda c: c.allreduce(torch.ones(3))) for rank in range(2)]
            assert "not all ranks came within 1 s" in str(waiting[0].exception(PATIENCE_S))
            ranks.abort("rank 0 says so")
            assert isinstance(waiting[1].exception(PATIENCE_S), CollectiveError)
    finally:
        made[1].stream.stuck.clear()
        eventually(lambda: not made[1].stream.stuck.is_set())
        for memory in list(fake_device.living):
            memory.close()


def test_memory_is_bounded_whatever_ends_a_generation():
    def opened():
        return len(os.listdir("/proc/self/fd"))

    def generation(number):
        with world(3) as ranks:
            ranks.run(lambda c: c.allreduce(torch.ones(100)))
            if number % 2:
                ranks.start(0, lambda c: c.allreduce(torch.ones(100)))
                ranks.wait_until_waiting([0])
                ranks.abort("a rank is gone")
            ranks.close()
            assert fake_device.living == []

    generation(1)
    before = opened()
    for number in range(50):
        generation(number)
    eventually(lambda: opened() <= before + 3, "the end of all that was open")


# The host waits twice for a stream when memory is opened, then once before each meeting, and before
# a slice crosses to other hosts.
@pytest.mark.parametrize(
    ("kind", "drain"),
    [
        *(("cuda_ipc", drain) for drain in range(1, 5)),
        ("cuda_ipc+gloo", 5),
        pytest.param("cuda_ipc+nccl", 5, marks=needs_compiler),
    ],
)
def test_a_rank_that_dies_at_any_point_fails_the_others_and_they_form_anew(
    fork_server,  # noqa: F811
    kind,
    drain,
):
    crew = Crew(kind, 3, fork_server)
    try:
        victim = crew.members[1]
        ok(victim.ask("die_at", drain=drain))
        _, connecting = crew.connect()
        survivors = [member for member in crew.members if member is not victim]
        if drain > 2:
            for answer in connecting:
                ok(answer)
            answers = [member.ask("allreduce", length=400_000) for member in crew.members]
            answers.pop(1)
            if drain == 5:
                ok(answers.pop(0))  # alone on its host, it has all slices
        else:
            answers = [connecting[0], connecting[2]]
        for answer in answers:
            error(answer)  # by themselves
        crew.dismiss(victim)
        assert crew.members == survivors
        crew.form()
    finally:
        crew.close()

"""Which communicator is chosen, and that all choose the same."""

import dataclasses
import logging
import sys
import threading
import traceback

import pytest
import torch

from nbelastic.collectives import negotiation
from nbelastic.collectives.nccl import group as nccl_group
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.shm import handshake
from nbelastic.errors import CollectiveError
from tests.collectives.fake_nccl import LateNcclDevice, fake_library
from tests.collectives.worlds import (
    DEVICES,
    MAKERS,
    PATIENCE_S,
    World,
    descriptors,
    eventually,
    faked,
    needs_compiler,
    needs_core,
)
from tests.support.logs import own_records

pytestmark = needs_core

SOON_S = 5.0  # bounded: half as long as forming may take


def on(hosts, backend="auto"):
    """Make communicators of ranks that say they are on hosts, named by letters."""

    def make(rendezvous):
        its = dataclasses.replace(rendezvous, backend=backend)
        return NegotiatingCommunicator(its, host=hosts[rendezvous.rank])

    return make


def kinds(world):
    """Return the kinds that were chosen, after seeing them work."""
    world.run(lambda c: c.allreduce(torch.ones(3)))
    return {communicator.name for communicator in world.communicators}


def reasons(world):
    return {communicator.fallback_reason for communicator in world.communicators}


def failures(make, size):
    """Return what ranks that cannot connect say."""
    with World(make, size, connected=False) as world:
        connecting = [world.start(rank, lambda c: c.connect()) for rank in range(size)]
        errors = [future.exception(PATIENCE_S) for future in connecting]
    assert {type(error) for error in errors} == {CollectiveError}
    return {str(error).partition(" did not form: ")[2] for error in errors}


def only_on(rank, otherwise, then):
    """Return a function that does something else in the thread of one rank."""

    def function(*arguments):
        here = threading.current_thread().name.startswith(f"rank-{rank}_")
        return (then if here else otherwise)(*arguments)

    return function


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch):
    monkeypatch.setattr(negotiation, "_logged", set())


@pytest.mark.parametrize(
    ("backend", "hosts", "kind", "reason"),
    [
        ("auto", "aa", "shm", ""),
        ("auto", "aab", "hierarchical", ""),
        ("auto", "ab", "gloo", ""),
        ("auto", "abab", "hierarchical", ""),
        ("shm", "ab", "gloo", ""),
        ("cuda_ipc", "aa", "shm", "rank 0 has used no GPU"),
        ("cuda_ipc", "aab", "hierarchical", "rank 0 has used no GPU"),
        ("cuda_ipc", "ab", "gloo", "no two ranks share a host"),
        ("nccl", "ab", "gloo", "rank 0 has used no GPU"),
    ],
)
def test_what_is_chosen_follows_from_where_the_ranks_are(backend, hosts, kind, reason, caplog):
    with World(on(hosts, backend), len(hosts)) as world:
        assert kinds(world) == {kind}
        assert reasons(world) == {reason and f"{negotiation.ON_HOST}: {reason}"}
    assert own_records(caplog) == []


@needs_compiler
@pytest.mark.parametrize(
    ("cards", "fault", "kind", "reason"),
    [
        ("abc", "", "nccl", ""),
        ("abc", "refuses:1", "cuda_ipc", "GPUs do without NCCL: rank 1: ncclCommInitRankConfig"),
        ("abc", "progress:2", "cuda_ipc", "within 0.5 s, half of heartbeat_timeout"),
        ("abb", "", "cuda_ipc", "ranks 1 and 2 share a GPU; NCCL needs one for each"),
        ("abB", "", "shm", "share a GPU; NCCL needs one for each; rank 2: it cannot open"),
        ("a-c", "", "shm", f"{negotiation.ON_HOST}: rank 1 has used no GPU"),
        ("---", "", "shm", ""),
    ],
)
def test_the_fastest_transport_of_gpus_that_works_is_the_default(
    monkeypatch, cards, fault, kind, reason
):
    """A rank without one is "-"; one in capitals opens no other's memory."""

    def device_of(rank):
        if cards[rank] == "-":
            return None
        made = LateNcclDevice("open" if cards[rank].isupper() else "")
        made.identity = cards[rank].lower()
        return made

    monkeypatch.setitem(DEVICES, "each", device_of)
    monkeypatch.setattr(nccl_group, "_refusals", [])
    monkeypatch.setenv("FAKE_NCCL", fault)
    make = faked("auto", "each", fake_library)
    with World(lambda its: make(dataclasses.replace(its, forming_s=1.0)), 3) as world:
        monkeypatch.setenv("FAKE_NCCL", "")
        assert kinds(world) == {kind}
        for communicator in world.communicators:
            assert reason in communicator.fallback_reason
            assert bool(reason) == bool(communicator.fallback_reason)


def test_without_the_part_in_cpp_gloo_is_taken_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr("nbelastic.native.core", None)
    monkeypatch.setattr("nbelastic.native.missing", "no module named _core")
    said = "rank 0: nbelastic was installed without its C++ part (no module named _core)"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with World(MAKERS["auto"], 2) as world:
                assert kinds(world) == {"gloo"}
                assert reasons(world) == {said}
    assert len(own_records(caplog)) == 1
    assert said in caplog.text
    assert failures(MAKERS["shm"], 2) == {f"backend='shm', but memory cannot be shared: {said}"}


def test_one_that_cannot_is_enough_if_it_has_neighbours(monkeypatch):
    unable = only_on(1, negotiation.shared_memory_obstacle, lambda: "is too old")
    monkeypatch.setattr(negotiation, "shared_memory_obstacle", unable)
    with World(on("aab"), 3) as world:
        assert kinds(world) == {"gloo"}
        assert reasons(world) == {"rank 1: is too old"}
    with World(on("aba"), 3) as world:
        assert kinds(world) == {"hierarchical"}
    (reason,) = failures(on("aab", "shm"), 3)
    assert "rank 1: is too old" in reason


@pytest.mark.parametrize("where", ["create", "join"])
def test_if_forming_fails_on_one_host_all_take_gloo(monkeypatch, caplog, where):
    def fail(*_):
        raise handshake.SegmentError("the roof is leaking")

    rank = {"create": 2, "join": 3}[where]
    if where == "join":  # the other waits for it; it does not wait for the other
        monkeypatch.setattr(handshake, "FORMING_LIMIT_S", 0.5)
    monkeypatch.setattr(
        handshake.SegmentSocket, where, only_on(rank, getattr(handshake.SegmentSocket, where), fail)
    )
    before = descriptors()
    with World(on("aabb"), 4) as world:
        assert kinds(world) == {"gloo"}
        (remark,) = reasons(world)
    assert [record.levelname for record in own_records(caplog)] == ["WARNING"]
    assert remark in caplog.text
    (reason,) = failures(on("aabb", "shm"), 4)
    assert "memory cannot be shared" in reason
    eventually(lambda: descriptors() <= before, "the end of all segments and sockets")


@pytest.mark.parametrize("where", ["create", "join"])
def test_abort_frees_who_forms(monkeypatch, where):
    late = threading.Event()

    def dawdle(*_):
        late.wait(PATIENCE_S)
        raise handshake.SegmentError("too late")

    other = {"create": "join", "join": "create"}[where]
    monkeypatch.setattr(handshake.SegmentSocket, other, dawdle)
    rank = {"create": 0, "join": 1}[where]
    before = descriptors()
    with World(MAKERS["auto"], 2, connected=False) as world:
        connecting = [world.start(each, lambda c: c.connect()) for each in range(2)]
        eventually(lambda: any_in(handshake.SegmentSocket, where), f"{where} under way")
        world[rank].abort("enough")
        assert str(connecting[rank].exception(SOON_S)) == "enough"
        late.set()
        world[1 - rank].abort("so be it")
        assert str(connecting[1 - rank].exception(SOON_S)) == "so be it"
    connecting.clear()  # errors keep what their frames have
    eventually(lambda: descriptors() <= before, "the end of all sockets")


def any_in(owner, name):
    """Return whether any thread is in a method."""
    code = getattr(owner, name).__code__
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    return any(frame.f_code is code for stack in stacks for frame, _ in stack)


def test_abort_of_the_one_that_chose_reaches_the_chosen():
    for make in (MAKERS["shm"], MAKERS["hierarchical"], on("ab")):
        with World(make, 2, connected=False) as world:
            choosers = list(world.communicators)
            for future in [world.start(rank, lambda c: c.connect()) for rank in range(2)]:
                future.result(PATIENCE_S)
            assert world[0] is not choosers[0]
            waiter = world.start(0, lambda c: c.allreduce(torch.ones(3)))
            world.wait_until_waiting([0])
            choosers[0].abort("enough")
            assert str(waiter.exception(PATIENCE_S)) == "enough"

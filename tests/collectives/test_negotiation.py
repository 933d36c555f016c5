"""Which communicator is chosen, and that all choose the same."""

import dataclasses
import threading

import pytest
import torch

from nbelastic.collectives import negotiation
from nbelastic.collectives.nccl import group as nccl_group
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.shm import segment
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

pytestmark = needs_core


def on(hosts, backend="auto"):
    """Make communicators of ranks that say they are on hosts, named by letters."""

    def make(rendezvous):
        made = NegotiatingCommunicator(dataclasses.replace(rendezvous, backend=backend))
        made.host = lambda: hosts[rendezvous.rank]
        return made

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


@pytest.mark.parametrize(
    ("backend", "hosts", "kind", "reason"),
    [
        ("auto", "aa", "shm", ""),
        ("auto", "aab", "hierarchical", ""),
        ("auto", "ab", "gloo", ""),
        ("auto", "abab", "hierarchical", ""),
        ("shm", "ab", "gloo", ""),
        ("cuda_ipc", "aa", "shm", "rank 0 has used no GPU"),
        ("cuda_ipc", "aab", "hierarchical", "CUDA IPC takes ranks of one host"),
        ("nccl", "ab", "gloo", "rank 0 has used no GPU"),
    ],
)
def test_what_is_chosen_follows_from_where_the_ranks_are(backend, hosts, kind, reason):
    with World(on(hosts, backend), len(hosts)) as world:
        assert kinds(world) == {kind}
        assert reasons(world) == {reason and f"{negotiation.ON_HOST}: {reason}"}


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


def test_without_the_part_in_cpp_gloo_is_taken(monkeypatch):
    monkeypatch.setattr("nbelastic.native.missing", "no module named _core")
    said = "rank 0: nbelastic was installed without its C++ part (no module named _core)"
    with World(MAKERS["auto"], 2) as world:
        assert kinds(world) == {"gloo"}
        assert reasons(world) == {said}
    assert failures(MAKERS["shm"], 2) == {f"backend='shm', but memory cannot be shared: {said}"}


def test_one_that_cannot_is_enough_if_it_has_neighbours(monkeypatch):
    unable = only_on(1, NegotiatingCommunicator._own_segment, lambda *_: ("is too old", ""))
    monkeypatch.setattr(NegotiatingCommunicator, "_own_segment", unable)
    with World(on("aab"), 3) as world:
        assert kinds(world) == {"gloo"}
        assert reasons(world) == {"rank 1: is too old"}
    with World(on("aba"), 3) as world:
        assert kinds(world) == {"hierarchical"}
    (reason,) = failures(on("aab", "shm"), 3)
    assert "rank 1: is too old" in reason


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (segment.core, "create", "rank 3: the system refuses to share memory"),
        (segment, "join_segment", "rank 3: it cannot open the memory of rank 2"),
    ],
)
def test_if_a_rank_cannot_share_memory_all_take_gloo(monkeypatch, owner, name, said):
    def fail(*_):
        raise OSError("the roof is leaking")

    monkeypatch.setattr(owner, name, only_on(3, getattr(owner, name), fail))
    before = descriptors()
    with World(on("aabb"), 4) as world:
        assert kinds(world) == {"gloo"}
        assert reasons(world) == {f"{said}: the roof is leaking"}
    (reason,) = failures(on("aabb", "shm"), 4)
    assert f"memory cannot be shared: {said}" in reason
    eventually(lambda: descriptors() <= before, "the end of all segments")


def test_another_file_at_the_place_of_a_segment_is_not_taken():
    """Its process may have ended, and its number been given to another."""
    with segment.offered_segment(2) as offer:
        segment.join_segment(offer, 0, 2, 1.0).close()
        with pytest.raises(FileNotFoundError, match="something else"):
            segment.join_segment(f"{offer}1", 0, 2, 1.0)


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

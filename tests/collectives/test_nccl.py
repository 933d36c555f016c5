"""Sums over NCCL, with a library that fails as a test wants it to."""

import os
import threading
from functools import cache, partial

import pytest
import torch

from nbelastic.collectives.gpu.device import DeviceError
from nbelastic.collectives.nccl import group as nccl_group
from nbelastic.collectives.nccl import library as nccl
from tests.collectives import worlds
from tests.collectives.crew import Crew, allreduce, until
from tests.collectives.fake_nccl import NcclDevice, fake_library, library_path
from tests.collectives.worlds import (
    MAKERS,
    PATIENCE_S,
    World,
    eventually,
    failure,
    needs_compiler,
    needs_core,
)

pytestmark = [needs_core, needs_compiler]

ON_HOST = "tensors of GPUs are reduced in the memory of the host: "


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """Have limits be short, and no process refuse NCCL because of another test."""
    for name in ("FORMING_LIMIT_S", "FINALIZE_LIMIT_S", "IN_USE_LIMIT_S"):
        monkeypatch.setattr(nccl_group, name, 0.5)
    monkeypatch.setattr(nccl_group, "_refusals", [])


@pytest.fixture
def fault(monkeypatch):
    """Have the library fail on a rank, as long as the test runs or another fault is set."""
    yield lambda what: monkeypatch.setenv("FAKE_NCCL", what)
    monkeypatch.delenv("FAKE_NCCL", raising=False)
    eventually(lambda: not owners(), "the end of all communicators")


def owners():
    return [each.name for each in threading.enumerate() if "nccl-owner" in each.name]


def world(size, **options):
    return World(MAKERS["nccl"], size, **options)


def add(communicator, count=3):
    tensor = torch.full((count,), 1.0 + communicator.rank)
    communicator.allreduce(tensor)
    return tensor.tolist()[:1]


def kinds(ranks):
    return {each.name for each in ranks.communicators}


def reasons(ranks):
    return {each.fallback_reason for each in ranks.communicators}


# -- faults when a generation is formed ----------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("id:0", "rank 0: ncclGetUniqueId: NCCL reports: unhandled system error"),
        ("refuses:1", "rank 1: ncclCommInitRankConfig: NCCL reports: unhandled system error"),
        ("garbles:1", "rank 1: a sum of ones over NCCL is 4, not 3"),
        ("error:2", "rank 2: NCCL reports: remote process exited or there was a network error"),
    ],
)
def test_without_a_communicator_of_nccl_the_host_reduces_and_says_why(fault, what, said):
    fault(what)
    with world(3) as ranks:
        assert kinds(ranks) == {"shm"}
        assert reasons(ranks) == {ON_HOST + said}
        assert ranks.run(add) == [[6.0]] * 3
    fault("")
    with world(3) as ranks:
        assert kinds(ranks) == {"nccl"}


@pytest.mark.parametrize("what", ["init", "progress", "stuck"])
def test_a_communicator_that_never_forms_is_left_behind_for_good(fault, what):
    """Once: later generations of the process do not wait for it again."""
    fault(f"{what}:1")
    with world(2) as ranks:
        assert kinds(ranks) == {"shm"}
        assert "NCCL has not formed its communicator of generation" in ranks[0].fallback_reason
        assert "within 0.5 s" in ranks[0].fallback_reason
        assert ranks.run(add) == [[3.0]] * 2
    fault("")
    with world(2) as ranks:
        assert kinds(ranks) == {"shm"}
        assert "its process does not try it again" in ranks[1].fallback_reason


def test_an_abort_while_it_forms_frees_the_ranks_at_once(fault, monkeypatch):
    monkeypatch.setattr(nccl_group, "FORMING_LIMIT_S", 60.0)
    fault("init:1")
    with world(2, connected=False) as ranks:
        waiting = [ranks.start(rank, lambda c: c.connect()) for rank in range(2)]
        eventually(lambda: len(owners()) == 2, "the making of two communicators")
        ranks.abort("a rank is gone")
        for future in waiting:
            assert str(future.exception(PATIENCE_S)) == "a rank is gone"


# -- faults in an operation ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [("error:1", "network error"), ("stuck:1", "has not ended within 1 s")],
)
def test_an_operation_fails_with_what_nccl_says_or_by_its_limit(fault, what, said):
    with world(2, timeout_s=1.0) as ranks:
        fault(what)
        waiting = [ranks.start(rank, add) for rank in range(2)]
        assert said in failure(waiting[1])
        ranks.abort("rank 1 says so")
        failure(waiting[0])


def test_an_abort_frees_an_operation_that_never_ends_and_then_its_tensors(fault):
    with world(2) as ranks:
        fault("stuck:1")
        waiting = [ranks.start(rank, lambda c: add(c, 100)) for rank in range(2)]
        ranks.wait_until_waiting([0, 1])
        groups = [each._group for each in ranks.communicators]
        eventually(lambda: all(group._lent for group in groups), "the loan of tensors")
        fault("stuck:1 abort:1")
        ranks.abort("rank 1 stands still")
        assert {failure(future) for future in waiting} == {"rank 1 stands still"}
        assert groups[1]._lent
        fault("")
        eventually(lambda: not any(group._lent for group in groups), "the end of the loan")
        with world(2) as others:
            assert kinds(others) == {"nccl"}
            assert others.run(add) == [[3.0]] * 2


def test_an_abort_that_never_returns_holds_up_nobody(fault):
    with world(2) as ranks:
        fault("abort:1")
        ranks.abort("a rank is gone")
        ranks.close()
    with world(2) as ranks:
        assert ranks.run(add) == [[3.0]] * 2


def test_closing_ends_in_bounded_time_if_nccl_does_not_finalize(fault):
    with world(2) as ranks:
        fault("finalize:1")
        ranks.close()
        eventually(lambda: not owners(), "the end of all communicators")  # by an abort


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_fails_the_others_and_they_form_anew():
    with Crew("nccl", 3) as crew:
        crew.form()
        victim = crew.members[1]
        victim.ask(lambda _: os.environ.update(FAKE_NCCL="stuck:1")).result(PATIENCE_S)
        answers = crew.ask(partial(allreduce, length=1000))
        for member in crew.members:
            until(member, lambda here: bool(here.communicator._group._lent), "a sum under way")
        answers.pop(1)
        crew.dismiss(victim)
        for answer in answers:
            assert "rank 1 is gone, in the middle of a sum" in failure(answer)  # by themselves
        crew.form()


# -- who can use it ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gloo", "hierarchical"])
def test_ranks_on_several_hosts_reduce_over_nccl_too(kind):
    """Each host's part of the tests' ranks has its own communicator behind it."""

    def make(rendezvous):
        its = worlds.dataclasses.replace(rendezvous, backend="nccl")
        made = worlds.Faked(its, "nccl", fake_library)
        made.host = lambda: f"host {its.rank if kind == 'gloo' else its.rank // 2}"
        return made

    with World(make, 3) as ranks:
        assert kinds(ranks) == {"nccl"}
        assert {each._host.name for each in ranks.communicators} == {kind}
        assert ranks.run(add) == [[6.0]] * 3


# -- the library ---------------------------------------------------------------------------------


def test_the_library_is_the_one_that_torch_has_loaded(monkeypatch):
    monkeypatch.setattr(nccl, "present_library", cache(nccl.present_library.__wrapped__))
    monkeypatch.setattr(nccl, "_NAME", "nbelastic-fake-nccl")
    fake_library()
    assert nccl.present_library().version == (2, 28, 9)
    assert nccl.present_library() is nccl.present_library()


def test_a_library_that_is_missing_or_too_old_is_a_reason(monkeypatch):
    monkeypatch.setattr(nccl, "present_library", cache(nccl.present_library.__wrapped__))
    monkeypatch.setattr(nccl, "_NAME", "libnccl-of-another-make")
    with pytest.raises(DeviceError, match="torch has loaded no libnccl-of-another-make"):
        nccl.present_library()
    monkeypatch.setattr(nccl, "loaded_library", lambda _: "/nowhere/libnccl.so.2")
    with pytest.raises(DeviceError, match="NCCL cannot be loaded"):
        nccl.present_library()
    monkeypatch.setattr(nccl, "loaded_library", lambda _: library_path())
    monkeypatch.setattr(nccl, "OLDEST", (2, 29, 0))
    with pytest.raises(DeviceError, match=r"NCCL 2\.28\.9 is too old; 2\.29\.0"):
        nccl.present_library()


def test_a_card_is_told_apart_as_nccl_does(monkeypatch):
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE", nccl.SHARED_GPU_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    device, library = NcclDevice("a"), fake_library()

    def cards():
        return {nccl.card_of(device, library, rank) for rank in range(2)}

    assert len(cards()) == 1
    plain = cards()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert len(cards()) == 1  # which only later versions know
    library.version = (2, 30, 0)
    assert len(cards()) == 2
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    monkeypatch.setenv(nccl.SHARED_GPU_VARIABLE, "1")
    nccl._stand_apart()
    assert cards() != plain

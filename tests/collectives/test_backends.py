"""Backends by name, one that another package brings, and what ranks know to choose one."""

import contextlib
import sys

import pytest

from nbelastic import collectives
from nbelastic.collectives import SoloCommunicator, backend_names, connect
from nbelastic.collectives import topology as topology_module
from nbelastic.collectives.topology import (
    RankCapabilities,
    Topology,
    host_identity,
    nccl_obstacle,
    sharing_host,
)
from nbelastic.driver.options import Options
from nbelastic.errors import OptionError
from tests.collectives.worlds import terms


@pytest.fixture
def another_package(tmp_path, monkeypatch):
    """Install a package with an entry point."""
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "[nbelastic.backends]\nown = tests.support.own_transport:OwnTransport\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    collectives._brought.cache_clear()
    yield
    collectives._brought.cache_clear()


def test_a_backend_of_another_package_is_an_option_while_that_is_installed(another_package):
    assert backend_names()[-1] == "own"
    assert Options(backend="own").backend == "own"
    with contextlib.closing(connect(terms(backend="own"))) as communicator:
        assert communicator.name == "own"


def test_an_unknown_backend_is_refused():
    with pytest.raises(OptionError, match="backend='own': must be one of auto, gloo, shm"):
        Options(backend="own")
    with pytest.raises(ValueError, match=r"backend must be one of .*'auto', 'gloo'.* not 'own'"):
        connect(terms(backend="own"))


def test_it_says_which_package_is_missing_and_for_which_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    monkeypatch.delitem(sys.modules, "nbelastic.collectives.gloo.with_pygloo", raising=False)
    with pytest.raises(ImportError, match=r"pygloo.*Python 3.8 to 3.10.*pip install"):
        connect(terms(backend="pygloo"))


def test_a_rank_alone_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    assert isinstance(connect(terms(0, 1, backend="pygloo")), SoloCommunicator)


def topology_of(hosts):
    """Return what ranks on hosts named by letters conclude."""
    return Topology.of([RankCapabilities("", host) for host in hosts])


def test_ranks_are_grouped_by_host_and_share_a_slice_with_one_of_every_host():
    assert topology_of("bcabb").hosts == ((0, 3, 4), (1,), (2,))
    assert topology_of("bcabb").local_ranks(3) == (0, 3, 4)
    for hosts, peers in {
        "aabbb": [(0, 2), (1, 3), (0, 2), (1, 3), ()],
        "abab": [(0, 1), (0, 1), (2, 3), (2, 3)],
        "aabbcc": [(0, 2, 4), (1, 3, 5)] * 3,
    }.items():
        topology = topology_of(hosts)
        assert [topology.cross_ranks(rank) for rank in range(len(hosts))] == peers
        assert topology.slices == len({each for each in peers if each})


def test_a_host_has_one_name_until_it_is_split_for_a_test(monkeypatch):
    before = host_identity()
    host, user, process_names, user_names = sharing_host().split("/")
    assert (host, user) == (before, str(topology_module.os.getuid()))
    assert (process_names[:4], user_names[:5]) == ("pid:", "user:")
    monkeypatch.setenv(topology_module.HOST_VARIABLE, "a")
    assert host_identity() == "a" != before


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"nccl_obstacle": "it is broken"}, "rank 1: it is broken"),
        ({"nccl": "2.30.7"}, "rank 1 has NCCL 2.30.7, rank 0 2.28.9"),
    ],
)
def test_all_ranks_need_the_same_nccl(other, said):
    its = {"gpu": "cuda", "nccl": "2.28.9"}
    ranks = [RankCapabilities("", "host", **each) for each in (its, its | other)]
    assert nccl_obstacle(ranks) == said

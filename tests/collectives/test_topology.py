"""RankCapabilities of ranks, and the topology that follows."""

from types import SimpleNamespace

import pytest

from nbelastic.collectives import topology as topology_module
from nbelastic.collectives.topology import (
    RankCapabilities,
    Topology,
    host_identity,
    shared_memory_obstacle,
    sharing_host,
)
from nbelastic.errors import CollectiveError


def topology_of(hosts):
    """Return what ranks on hosts named by letters conclude."""
    return Topology.of([RankCapabilities("", host, "") for host in hosts])


def test_ranks_are_grouped_by_host_in_order():
    topology = topology_of("bcabb")
    assert topology.hosts == ((0, 3, 4), (1,), (2,))
    assert topology.local_ranks(3) == (0, 3, 4)


def test_a_slice_is_shared_by_one_local_rank_of_every_host():
    for hosts, peers in {
        "aabbb": [(0, 2), (1, 3), (0, 2), (1, 3), ()],
        "abab": [(0, 1), (0, 1), (2, 3), (2, 3)],
        "aabbcc": [(0, 2, 4), (1, 3, 5)] * 3,
    }.items():
        topology = topology_of(hosts)
        assert [topology.cross_ranks(rank) for rank in range(len(hosts))] == peers
        assert topology.slices == len({each for each in peers if each})


def test_another_version_is_an_error():
    for value in (b"", b"\xff", b"{}", b"7", b"[1]", b'[99, "", "", ""]', b'[2, "", "", 3]'):
        with pytest.raises(CollectiveError, match="rank 3 runs another version"):
            RankCapabilities.decode(value, 3)


def test_a_host_has_one_name_until_it_is_split_for_a_test(monkeypatch):
    before = host_identity()
    assert sharing_host() == f"{before}/{topology_module.os.getuid()}"
    monkeypatch.setenv(topology_module.HOST_VARIABLE, "a")
    assert host_identity() == "a" != before


def test_what_is_in_the_way_is_said(monkeypatch):
    def fail(_size):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("nbelastic.native.core", SimpleNamespace(create=fail))
    assert "Function not implemented" in shared_memory_obstacle()

"""Hosts for the tests in here, or the reason why they cannot be made on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.cluster import a_cluster
from tests.hosts.network import why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.cluster import HostsCluster


@pytest.fixture(scope="session")
def _three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no hosts can be made of namespaces here: {reason}")
    with a_cluster(tmp_path_factory.mktemp("hosts"), a=2, b=1, c=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(_three_hosts: HostsCluster) -> HostsCluster:
    """Two workers on host a, one on each of b and c, scheduler and kernel on a fourth."""
    _three_hosts.network.heal()
    return _three_hosts

"""Collectives of ranks on two hosts, some of which share memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.collectives.worlds import needs_core
from tests.hosts.network import a_network, environment, why_not

LIMIT_S = 150.0  # importing torch on few and busy cores

pytestmark = [pytest.mark.timeout(300), needs_core]


def crossing(host, ranks, size):
    return host.popen(
        [sys.executable, "-m", "tests.hosts.crossing", host.address, ranks, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment({}),
    )


def test_two_and_three_ranks_on_two_hosts_do_everything_hierarchically():
    reason = why_not()
    if reason:
        pytest.skip(f"no hosts can be made of namespaces here: {reason}")
    with a_network("a", "b") as network:
        first = crossing(network.hosts["a"], "0,1", 5)
        second = crossing(network.hosts["b"], "2,3,4", 5)
        first.stdin.write("\n")
        first.stdin.flush()
        store = first.stdout.readline()
        said = [second.communicate(store, timeout=LIMIT_S)[0], first.communicate()[0]]
        assert [first.returncode, second.returncode] == [0, 0]
    lines = "".join(said).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert sorted(each["rank"] for each in found) == [0, 1, 2, 3, 4]
    assert {each["kind"] for each in found} == {"hierarchical"}
    assert len({digest for each in found for digest in each["digests"]}) == 1, "the same bits"

"""Hosts that are cut off, slowly or badly connected, or gone, while they train."""

from __future__ import annotations

import re

import pytest

from tests.hosts.cluster import Traced
from tests.hosts.network import Link
from tests.support.clusters import until
from tests.support.training import Workload, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEARTBEAT = 5.0
QUICK = {"np": 4, "min_np": 2, "heartbeat_timeout": HEARTBEAT, "stall_timeout": 8.0}
LONG = 1000
"""Epochs that nobody waits for: such a job goes on until newcomers have come, or is left behind."""

FORMED = 30.0
"""Seconds after a cut in which those on the driver's side train again; bounded, not measured."""


def a_job(cluster, folder, *, size=4, seconds=0.05, options=None, **work):
    """Start a job of so many ranks, and wait until it trains."""
    marks = folder / "marks"
    marks.mkdir()
    function = Traced(Workload(marks, seconds=seconds, **work))
    job = cluster.fit(function, **{**QUICK, **(options or {})})
    job.until_formed(size)
    until((marks / "training").exists, "the first step")
    return function, job


def lost(job):
    """Return the hosts whose workers were lost, as the last part of their address."""
    workers = [event["worker"] for event in job.history if event["kind"] == "lost"]
    return {worker.rpartition(":")[0].rpartition(".")[2] for worker in workers}


def number(cluster, host):
    """Return the last part of a host's address."""
    return cluster.network.hosts[host].address.rpartition(".")[2]


def test_the_side_with_the_driver_goes_on_and_the_other_side_stops(cluster, tmp_path):
    function, job = a_job(cluster, tmp_path, epochs=20)
    cluster.network.cut("a")
    job.until_formed(2, timeout=FORMED)
    assert lost(job) == {number(cluster, "a")}
    until(lambda: not function.left_on("a"), "the end of the ranks that are cut off", 60)
    check(job.results(), function.work)
    assert job.sizes == [4, 2]


@pytest.mark.nightly
def test_ranks_that_are_cut_off_all_together_do_not_train_on(cluster, tmp_path):
    there = {"np": 2, "min_np": 2, "workers": cluster.network.hosts["a"].address}
    function, job = a_job(cluster, tmp_path, size=2, epochs=LONG, until_newcomers=2, options=there)
    cluster.network.cut("a")
    until(lambda: function.idle() > 2.0, "the last step of those who are cut off")
    assert function.left_on("a"), "they wait, and are not ended"
    assert not job.done()
    cluster.network.heal()
    until(lambda: cluster.tend() or job.done(), "the end of the job", 90)
    check(job.results(), function.work)
    assert job.sizes == [2, 2]
    assert [event["kind"] for event in job.history].count("restarted") == 1


@pytest.mark.nightly
def test_a_host_that_is_back_after_the_driver_went_on_gets_new_ranks(cluster, tmp_path):
    function, job = a_job(cluster, tmp_path, epochs=LONG, until_newcomers=2)
    cluster.network.cut("a")
    job.until_formed(2, timeout=FORMED)
    cluster.network.heal()
    results = job.results(timeout=90)
    check(results, function.work)
    assert job.sizes[:2] == [4, 2]
    assert sum(result["newcomer"] for result in results) == 2


@pytest.mark.nightly
def test_a_cut_shorter_than_all_timeouts_is_a_pause(cluster, tmp_path):
    patient = {"heartbeat_timeout": 10.0, "stall_timeout": 20.0}
    function, job = a_job(cluster, tmp_path, epochs=10, options=patient)
    before = cluster.network.lost
    cluster.network.cut("a")
    until(lambda: cluster.network.lost > before + 20, "packets that are lost")
    cluster.network.heal()
    check(job.results(), function.work)
    assert job.sizes == [4]


@pytest.mark.nightly
@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_host_cut_off_in_one_direction_is_left_behind(cluster, tmp_path, direction):
    function, job = a_job(cluster, tmp_path, epochs=LONG, until_newcomers=2)
    getattr(cluster.network, f"cut_{direction}")("a")
    job.until_formed(2, timeout=FORMED)
    assert lost(job) == {number(cluster, "a")}
    cluster.network.heal()
    check(job.results(timeout=90), function.work)


@pytest.mark.nightly
@pytest.mark.parametrize("silently", [False, True])
def test_a_host_is_killed_with_all_its_workers(cluster, tmp_path, silently):
    function, job = a_job(cluster, tmp_path, epochs=20)
    if silently:
        cluster.network.cut("a")
    cluster.network.hosts["a"].kill()
    check(job.results(), function.work)
    assert job.sizes == [4, 2]
    assert lost(job) == {number(cluster, "a")}


@pytest.mark.nightly
def test_a_slow_connection_that_loses_packets_costs_time_and_nothing_else(cluster, tmp_path):
    cluster.network.set_host("a", Link(delay=0.02, loss=0.01))
    function, job = a_job(cluster, tmp_path, epochs=2)
    check(job.results(timeout=90), function.work)
    assert job.sizes == [4]


@pytest.mark.nightly
def test_where_two_hosts_cannot_reach_each_other_the_job_goes_on_without_one(cluster, tmp_path):
    function, job = a_job(cluster, tmp_path, epochs=20)
    cluster.network.cut_between("b", "c")
    check(job.results(), function.work)
    assert job.sizes[:2] == [4, 3], job.reasons
    assert set(job.sizes[2:]) <= {3}, job.reasons  # one more attempt, among the same
    assert lost(job) < {number(cluster, "b"), number(cluster, "c")}
    assert any("cannot reach" in reason for reason in job.reasons)


def test_where_it_cannot_go_on_without_one_it_says_who_cannot_reach_whom(cluster, tmp_path):
    function, job = a_job(cluster, tmp_path, epochs=LONG, options={"min_np": 4})
    cluster.network.cut_between("b", "c")
    ending = job.ending()
    assert ending.error == "NoProgress"
    pair = "|".join(rf"{cluster.network.hosts[host].address}:\d+" for host in "bc")
    assert re.search(rf"on tcp://({pair}) cannot reach rank \d on tcp://({pair})", ending.message)
    until(lambda: not any(function.left_on(host) for host in "abc"), "the end of its ranks")

"""Whole commands: Elastic Horovod's integration scenarios, by its own command line.

Hosts are names of this machine. The discovery script prints others when an epoch has ended.
"""

from __future__ import annotations

import pytest

from .stage import Stage

pytestmark = pytest.mark.slow

A, B = "localhost", "127.0.0.1"


def test_A1_hosts_come_and_go_while_a_script_trains(stage: Stage):
    hosts = stage.hosts(f"{A}:1", f"{A}:1 {B}:1", f"{B}:1")
    ended = stage.run("-np", "1", "--min-np", "1", "--max-np", "4", *hosts, sizes="1,2,1")
    assert ended.code == 0
    assert stage.epochs() == [1, 2, 1]
    assert ended.sizes == [1, 2, 1]
    assert [each["kind"] for each in ended.events("left")] == ["left"]
    assert not ended.events("lost")
    assert f"host {B} has come" in ended.messages
    assert f"host {A} is gone (1 slot): its ranks leave" in ended.messages
    assert len(ended.events("alias")) == 1


def test_A2_A8_a_rank_dies_and_its_worker_comes_back_after_its_cooldown(stage: Stage):
    ended = stage.run(
        *("-H", f"{A}:2,{B}:1", "-np", "3", "--min-np", "2"),
        *("--blacklist-cooldown-range", "1", "2"),
        sizes="3,2,3",
        more=("--die", "raise:1"),
    )
    assert ended.code == 3
    assert ended.sizes[:3] == [3, 2, 3]
    assert len(ended.events("lost")) == 1
    assert "is excluded for" in ended.events("cooldown")[0]["detail"]


@pytest.mark.parametrize(
    ("options", "hosts", "more", "says"),
    [
        pytest.param("-np 2 -H localhost:2", (), ("--die", "all:0"),
                     ("ValueError: no rank can go on", "train.py", "in die_if_due"),
                     id="A4 all ranks fail"),
        pytest.param("-np 3 --elastic-timeout 1", (f"{A}:1",), (),
                     ("NotEnoughWorkers", "of at least 3 workers", "elastic_timeout=1"),
                     id="A6 the minimum is not reached"),
        pytest.param("-np 1 --max-np 2 --reset-limit 0", (f"{A}:1", f"{A}:1 {B}:1"),
                     ("--sizes", "1,2"), ("reset_limit=0 is reached",), id="A7"),
        pytest.param("-np 1", ("$(echo no such group >&2; kill $$)",), (),
                     ("failed at the first time: hosts.sh exited with code", "no such group"),
                     id="the discovery script fails at first"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_go_on_says_why(stage: Stage, options, hosts, more, says):
    ended = stage.run(*options.split(), *(stage.hosts(*hosts) if hosts else ()), more=more)
    assert ended.code == 1
    assert [words for words in says if words not in ended.errors] == []
    assert "runpy" not in ended.errors


def test_B1_a_run_without_updates_whose_discovery_fails_later(stage: Stage):
    hosts = stage.hosts(f"{A}:2", "'is this a host?'", f"{A}:2")
    ended = stage.run("-np", "2", *hosts, sizes="2,2,2", more=("--broadcast",))
    assert ended.code == 0
    assert ended.sizes == [2, 2]  # before the elastic loop, and in it
    assert not ended.events("reset")
    assert stage.epochs() == [2, 2, 2]
    assert ended.lines[-1]["state"] == "finished"

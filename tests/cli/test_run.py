"""Whole commands: Elastic Horovod's integration scenarios, by its own command line.

Hosts are names of this machine. The discovery script prints others when an epoch has ended.
"""

from __future__ import annotations

import pytest

from nbelastic.errors import OptionError

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


def test_A2_a_rank_is_killed_and_the_others_go_on(stage: Stage):
    options = ("-H", f"{A}:2", "-np", "2", "--min-np", "1")
    more = ("--die", "kill:1", "--workers", "1", "--context", "fork")
    ended = stage.run(*options, sizes="2,1", more=more)
    assert ended.code == 0
    assert ended.sizes[:2] == [2, 1]


def test_A4_all_ranks_fail(stage: Stage):
    ended = stage.run("-H", f"{A}:2", "-np", "2", more=("--die", "all:0"))
    assert ended.code == 1
    assert "ValueError: no rank can go on" in ended.errors
    assert "train.py" in ended.errors and "in die_if_due" in ended.errors
    assert "runpy" not in ended.errors


def test_A6_the_minimum_is_not_reached(stage: Stage):
    hosts = stage.hosts(f"{A}:1")
    ended = stage.run("-np", "3", *hosts, "--elastic-timeout", "1")
    assert ended.code == 1
    assert "NotEnoughWorkers" in ended.errors
    assert "of at least 3 workers" in ended.errors and "elastic_timeout=1" in ended.errors


def test_A7_the_reset_limit_is_reached(stage: Stage):
    hosts = stage.hosts(f"{A}:1", f"{A}:1 {B}:1")
    options = ("-np", "1", "--max-np", "2", "--reset-limit", "0")
    ended = stage.run(*options, *hosts, sizes="1,2")
    assert ended.code == 1
    assert "reset_limit=0 is reached" in ended.errors


def test_a_discovery_script_that_fails_at_first_ends_the_run(stage: Stage):
    hosts = stage.hosts(f"{A}:1")
    (stage.folder / "hosts.sh").write_text("#!/bin/sh\necho no such group >&2; exit 7\n")
    ended = stage.run("-np", "1", *hosts)
    assert ended.code == 1
    assert "failed at the first time: hosts.sh exited with code 7: no such group" in ended.errors


def test_B1_a_run_without_updates_whose_discovery_fails_later(stage: Stage):
    hosts = stage.hosts(f"{A}:2", "'is this a host?'", f"{A}:2")
    ended = stage.run("-np", "2", *hosts, sizes="2,2,2", more=("--broadcast",))
    assert ended.code == 0
    assert ended.sizes == [2, 2]  # before the elastic loop, and in it
    assert not ended.events("reset")
    assert stage.epochs() == [2, 2, 2]
    assert ended.lines[-1]["state"] == "finished"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-H", "a:1", "--scheduler", "tcp://b:1"), "give one of them"),
        (("--cluster", "nowhere.Cluster"), "must be MODULE.CLASS"),
        (("--hosts-from", "nowhere"), "there is no source 'nowhere'"),
        (("-x", "NO_SUCH_VARIABLE"), "give NO_SUCH_VARIABLE=VALUE"),
    ],
)
def test_wrong_options_start_nothing(stage: Stage, options, says):
    from click import UsageError

    with pytest.raises((UsageError, OptionError), match=says):
        stage.run(*options)

"""When a rank looks for those it cannot reach, and what it says of them."""

from __future__ import annotations

import pytest

from nbelastic.elastic.ranks.unreachable import UnreachablePeers
from nbelastic.messages import Member, Plan, Slot


def plan(*starts):
    members = (Member(s, Slot(f"w{s}", "", "", ""), (f"10.0.0.{s}", 1), 0) for s in starts)
    return Plan(generation=1, members=tuple(members), loop=1)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def peers(asked):
    def probe(addresses):
        asked.append([host for host, _ in addresses])
        return [len(addresses) - 1]

    return UnreachablePeers(probe)


def test_one_plan_that_does_not_form_is_bad_luck(peers, asked):
    peers.record_failure(plan(3, 5, 7), 5)
    assert asked == []
    assert peers.unreached == ()


def test_after_the_second_in_a_row_all_others_are_asked(peers, asked):
    peers.record_failure(plan(3, 5, 7), 5)
    peers.record_failure(plan(3, 5, 7), 5)
    assert asked == [["10.0.0.3", "10.0.0.7"]]
    assert peers.unreached == (7,)


def test_a_plan_that_forms_clears_all_failures(peers, asked):
    peers.record_failure(plan(3, 5), 5)
    peers.record_failure(plan(3, 5), 5)
    peers.clear()
    assert peers.unreached == ()
    peers.record_failure(plan(3, 5), 5)
    assert len(asked) == 1


def test_exited_peers_are_named_until_a_plan_has_formed(peers):
    peers.record_exits(plan(3, 5, 7), (2, 0))
    assert peers.gone == (7, 3)
    peers.clear()
    assert peers.gone == ()

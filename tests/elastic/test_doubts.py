"""When a rank looks for those it cannot reach, and what it says of them."""

from __future__ import annotations

import pytest

from nbelastic.elastic.doubts import Doubts
from nbelastic.membership import Member, Plan, Slot


def plan(*starts):
    members = (Member(s, Slot(f"w{s}", "", "", ""), (f"10.0.0.{s}", 1), 0) for s in starts)
    return Plan(generation=1, members=tuple(members), loop=1)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def doubts(asked):
    def probe(addresses):
        asked.append([host for host, _ in addresses])
        return [len(addresses) - 1]

    return Doubts(probe)


def test_one_plan_that_does_not_form_is_bad_luck(doubts, asked):
    doubts.raise_for(plan(3, 5, 7), 5)
    assert asked == []
    assert doubts.unreached == ()


def test_after_the_second_in_a_row_all_others_are_asked(doubts, asked):
    doubts.raise_for(plan(3, 5, 7), 5)
    doubts.raise_for(plan(3, 5, 7), 5)
    assert asked == [["10.0.0.3", "10.0.0.7"]]
    assert doubts.unreached == (7,)


def test_a_plan_that_forms_takes_all_doubts_away(doubts, asked):
    doubts.raise_for(plan(3, 5), 5)
    doubts.raise_for(plan(3, 5), 5)
    doubts.clear()
    assert doubts.unreached == ()
    doubts.raise_for(plan(3, 5), 5)
    assert len(asked) == 1


def test_who_is_gone_is_told_by_its_start_until_a_plan_has_formed(doubts):
    doubts.note_gone(plan(3, 5, 7), (2, 0))
    assert doubts.gone == (7, 3)
    doubts.clear()
    assert doubts.gone == ()

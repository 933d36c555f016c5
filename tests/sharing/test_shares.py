"""Shares: their promises, for whatever jobs and slots."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SlotGroup, Want, shares

from .worlds import NOW, PATIENCE, after, alike, fits, fitting, unlike, wants


@st.composite
def cases(draw, **kinds):
    jobs = draw(wants(**kinds))
    groups = draw(st.integers(0, 14).map(alike) | unlike(jobs))
    return fitting(jobs, groups), groups


def decide(jobs, groups):
    return shares(jobs, groups, NOW, PATIENCE)


@settings(deadline=None)
@given(cases(per_host=True))
def test_whatever_jobs_and_slots_a_division_keeps_its_promises(case):
    jobs, groups = case
    given_ = decide(jobs, groups)
    assert sum(given_.values()) <= sum(group.size for group in groups)
    assert fits(jobs, groups, given_)
    for want in jobs:
        share = given_[want.job]
        assert share >= want.kept, "what is kept is not taken"
        assert share == want.kept or want.least <= share <= max(want.most, want.kept), "gang"
        for low in jobs if want.least <= share < want.most else ():
            if low.priority < want.priority and given_[low.job] > max(low.least, low.kept):
                fewer = {**given_, low.job: given_[low.job] - 1, want.job: share + 1}
                assert not fits(jobs, groups, fewer), "priority"
    there = [after(want, given_[want.job]) for want in jobs]
    assert decide(there, groups) == given_, "asked again with its outcome it changes nothing"


@settings(deadline=None)
@given(cases(patient=True, per_host=True))
def test_work_conserving_no_slot_is_free_that_a_job_may_use(case):
    jobs, groups = case
    given_ = decide(jobs, groups)
    for want in jobs:
        more = max(given_[want.job] + 1, want.least)
        if more <= want.most:
            assert not fits(jobs, groups, {**given_, want.job: more})


@settings(deadline=None)
@given(st.integers(0, 20).flatmap(lambda size: st.tuples(wants(), st.just(alike(size)))))
def test_fair_no_job_envies_another_of_its_priority_more_than_one_rank(case):
    jobs, groups = fitting(*case), case[1]
    given_ = decide(jobs, groups)
    for one in jobs:
        for other in jobs:
            unmet = one.least <= given_[one.job] < one.most
            above = given_[other.job] > max(other.least, other.kept)
            if one.priority == other.priority and unmet and above:
                assert (given_[other.job] - 1) / other.weight <= given_[one.job] / one.weight + 1e-9


@settings(deadline=None)
@given(cases(preemptible=False), st.integers(1, 5), st.integers(-5, 5))
def test_a_newcomer_takes_no_floor_that_is_not_preemptible(case, least, priority):
    jobs, groups = case
    before = decide(jobs, groups)
    there = [after(want, before[want.job]) for want in jobs]
    newcomer = Want("newcomer", since=9.0, least=least, priority=priority, waiting_since=NOW)
    later = decide([*there, newcomer], groups)
    for want in there:
        if before[want.job] >= want.least:
            assert later[want.job] >= want.least


RUNNER = Want("runner", least=2, most=2, kept=2, has=2, running=True)
LOW = Want("low", least=3, kept=1, has=4, running=True, preemptible=True)
HIGH = Want("high", since=1.0, least=3, most=3, priority=1)
LATE = Want("late", since=1.0, least=4, waiting_since=NOW - PATIENCE)
SMALL = Want("small", since=2.0, least=1, most=1, priority=5, waiting_since=NOW)
OLD = Want("old", kept=1, has=2, running=True)
YOUNG = Want("young", since=1.0, kept=1, has=3, running=True)
WIDE = [Want("wide", least=3, per_host=1), Want("other", since=1.0)]
HOSTS = [SlotGroup(4, "a"), SlotGroup(4, "b")]
FOR_ONE = [SlotGroup(1, jobs=frozenset({"any", "gpu"})), SlotGroup(2, jobs=frozenset({"any"}))]
WEIGHTS = [Want("one", weight=2.0), Want("two", since=1.0), Want("low", since=2.0, priority=-1)]


@pytest.mark.parametrize(
    ("jobs", "groups", "found"),
    [
        ([Want("any", least=2), Want("gpu", most=1, since=1.0)], FOR_ONE, {"any": 2, "gpu": 1}),
        # A floor that fits in number but not on the hosts is not met.
        (WIDE, HOSTS, {"wide": 0, "other": 8}),
        (WIDE, [*HOSTS, SlotGroup(1, "c")], {"wide": 3, "other": 6}),
        # A preemptible job keeps one slot when a higher priority needs its floor.
        ([LOW, HIGH], alike(4), {"low": 1, "high": 3}),
        ([LOW, replace(HIGH, priority=0)], alike(4), {"low": 4, "high": 0}),
        # A job that has waited long closes the door; one whose floor never fits does not.
        ([RUNNER, LATE, SMALL], alike(4), {"runner": 2, "late": 0, "small": 0}),
        (
            [RUNNER, replace(LATE, waiting_since=NOW), SMALL],
            alike(4),
            {"runner": 2, "late": 0, "small": 1},
        ),
        ([replace(LATE, least=9), replace(SMALL, priority=0)], alike(4), {"late": 0, "small": 1}),
        (WEIGHTS, alike(10), {"one": 6, "two": 3, "low": 1}),
        # A tie goes to the job that has the slot, then to the older one.
        ([OLD, YOUNG], alike(5), {"old": 2, "young": 3}),
        ([OLD, Want("young", since=1.0)], alike(5), {"old": 3, "young": 2}),
        ([Want("one", most=math.inf)], alike(7), {"one": 7}),
        ([], alike(7), {}),
    ],
)
def test_jobs_and_their_shares(jobs, groups, found):
    assert decide(jobs, groups) == found

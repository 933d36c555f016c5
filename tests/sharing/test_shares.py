"""Shares: their promises, for whatever jobs and slots."""

from __future__ import annotations

import math

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
def test_gang_a_job_has_its_floor_or_what_it_keeps(case):
    jobs, groups = case
    for want in jobs:
        share = decide(jobs, groups)[want.job]
        assert share == want.kept or want.least <= share <= max(want.most, want.kept)


@settings(deadline=None)
@given(cases(per_host=True))
def test_bounds_the_slots_are_there(case):
    jobs, groups = case
    given_ = decide(jobs, groups)
    assert sum(given_.values()) <= sum(group.size for group in groups)
    assert fits(jobs, groups, given_)


@settings(deadline=None)
@given(cases(per_host=True))
def test_floors_what_is_kept_is_not_taken(case):
    jobs, groups = case
    assert all(decide(jobs, groups)[want.job] >= want.kept for want in jobs)


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
@given(cases(per_host=True))
def test_priority_lower_jobs_have_no_more_than_floors_while_a_higher_one_wants_more(case):
    jobs, groups = case
    given_ = decide(jobs, groups)
    for high in jobs:
        if high.least <= given_[high.job] < high.most:
            for low in jobs:
                if low.priority < high.priority and given_[low.job] > max(low.least, low.kept):
                    fewer = {**given_, low.job: given_[low.job] - 1}
                    assert not fits(jobs, groups, {**fewer, high.job: given_[high.job] + 1})


@settings(deadline=None)
@given(cases(per_host=True))
def test_fixed_point_asked_again_with_its_outcome_it_changes_nothing(case):
    jobs, groups = case
    first = decide(jobs, groups)
    assert decide([after(want, first[want.job]) for want in jobs], groups) == first


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


def test_a_slot_that_only_one_job_can_use_goes_to_it():
    jobs = [Want("any", least=2, since=0.0), Want("gpu", least=1, most=1, since=1.0)]
    groups = [SlotGroup(1, jobs=frozenset({"any", "gpu"})), SlotGroup(2, jobs=frozenset({"any"}))]
    assert decide(jobs, groups) == {"any": 2, "gpu": 1}


def test_a_floor_that_fits_in_number_but_not_on_the_hosts_is_not_met():
    jobs = [Want("wide", least=3, per_host=1), Want("other", since=1.0)]
    groups = [SlotGroup(4, "a"), SlotGroup(4, "b")]
    assert decide(jobs, groups) == {"wide": 0, "other": 8}
    assert decide(jobs, [*groups, SlotGroup(1, "c")]) == {"wide": 3, "other": 6}


def test_a_preemptible_job_keeps_one_slot_when_a_higher_priority_needs_its_floor():
    low = Want("low", least=3, kept=1, has=4, running=True, preemptible=True)
    high = Want("high", since=1.0, least=3, most=3, priority=1)
    assert decide([low, high], alike(4)) == {"low": 1, "high": 3}
    equal = Want("high", since=1.0, least=3, most=3)
    assert decide([low, equal], alike(4)) == {"low": 4, "high": 0}


def test_a_job_that_has_waited_long_closes_the_door():
    runner = Want("runner", least=2, most=2, kept=2, has=2, running=True)
    waiting = Want("waiting", since=1.0, least=4, waiting_since=NOW - PATIENCE)
    small = Want("small", since=2.0, least=1, most=1, priority=5, waiting_since=NOW)
    assert decide([runner, waiting, small], alike(4)) == {"runner": 2, "waiting": 0, "small": 0}
    patient = Want("waiting", since=1.0, least=4, waiting_since=NOW)
    assert decide([runner, patient, small], alike(4))["small"] == 1


def test_a_floor_that_never_fits_closes_no_door():
    giant = Want("giant", since=1.0, least=9, waiting_since=NOW - PATIENCE)
    small = Want("small", since=2.0, least=1, most=1)
    assert decide([giant, small], alike(4)) == {"giant": 0, "small": 1}


def test_weights_divide_what_a_priority_has():
    jobs = [Want("one", weight=2.0), Want("two", since=1.0), Want("low", since=2.0, priority=-1)]
    assert decide(jobs, alike(10)) == {"one": 6, "two": 3, "low": 1}


def test_a_tie_goes_to_the_job_that_has_the_slot_then_to_the_older_one():
    old = Want("old", kept=1, has=2, running=True)
    young = Want("young", since=1.0, kept=1, has=3, running=True)
    assert decide([old, young], alike(5)) == {"old": 2, "young": 3}
    assert decide([old, Want("young", since=1.0)], alike(5)) == {"old": 3, "young": 2}


def test_no_job_wants_more_than_all():
    assert decide([Want("one", most=math.inf)], alike(7)) == {"one": 7}
    assert decide([], alike(7)) == {}

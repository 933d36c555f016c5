"""When a share takes effect."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SharePolicy, SharingRules, SlotGroup, Want
from nbelastic.sharing.policy import jobs_to_yield

from .worlds import after, alike, fitting, wants

RULES = SharingRules(settle=2.0, protect=30.0, patience=60.0)
A = Want("a", least=1, kept=1, has=6, running=True)
B = Want("b", since=1.0, least=2, waiting_since=1.0)


def test_a_job_that_is_alone_has_no_bound():
    policy = SharePolicy(RULES)
    assert policy.decide([A], alike(6), 0.0) == {"a": None}


def test_a_newcomer_is_admitted_at_once_and_the_others_shrink_once():
    policy = SharePolicy(RULES)
    policy.decide([A], alike(6), 0.0)
    assert policy.decide([A, B], alike(6), 1.0) == {"a": 3, "b": 3}
    assert policy.decide([after(A, 3), after(B, 3)], alike(6), 2.0) == {"a": 3, "b": 3}


def test_growth_waits_so_that_several_departures_make_one_reset():
    policy = SharePolicy(RULES)
    jobs = [after(A, 2), after(B, 2), after(replace(B, job="c", since=2.0), 2)]
    policy.decide(jobs, alike(6), 0.0)
    assert policy.decide(jobs[:2], alike(6), 10.0) == {"a": 2, "b": 2}
    assert policy.decide(jobs[:2], alike(6), 12.0) == {"a": 3, "b": 3}
    jobs = [after(A, 3)]
    assert policy.decide(jobs, alike(6), 20.0) == {"a": 3}
    assert policy.decide(jobs, alike(6), 21.9) == {"a": 3}
    assert policy.decide(jobs, alike(6), 22.0) == {"a": None}


def test_a_job_gives_up_slots_to_be_fair_only_after_a_while():
    policy = SharePolicy(RULES)
    small = replace(after(B, 2), most=2)
    jobs = [after(A, 4), small]
    assert policy.decide(jobs, alike(6), 0.0) == {"a": 4, "b": 2}
    jobs[1] = replace(small, most=9)
    assert policy.decide(jobs, alike(6), 5.0) == {"a": 4, "b": 2}
    assert policy.decide(jobs, alike(6), 29.9) == {"a": 4, "b": 2}
    assert policy.decide(jobs, alike(6), 30.1) == {"a": 3, "b": 3}


def test_a_worker_that_is_soon_replaced_moves_no_other_job():
    policy = SharePolicy(RULES)
    jobs = [after(A, 3), after(B, 3)]
    policy.decide(jobs, alike(6), 0.0)
    lost = [after(A, 2), after(B, 3)]
    assert policy.decide(lost, alike(5), 100.0) == {"a": 3, "b": 3}
    assert policy.decide(lost, alike(6), 101.0) == {"a": 3, "b": 3}
    assert policy.decide(lost, alike(5), 200.0) == {"a": 3, "b": 3}
    assert policy.decide(lost, alike(5), 202.0) == {"a": 2, "b": 3}, "it has not come back"


def test_a_floor_is_restored_at_once():
    policy = SharePolicy(RULES)
    floor = replace(A, least=3)
    policy.decide([after(floor, 3), after(B, 3)], alike(6), 0.0)
    short = replace(floor, kept=2, has=2)
    assert policy.decide([short, after(B, 3)], alike(5), 1.0) == {"a": 3, "b": 2}


def test_first_come_first_served_bounds_no_job():
    policy = SharePolicy(replace(RULES, policy="first"))
    assert policy.decide([A, B], alike(6), 0.0) == {"a": None, "b": None}


@settings(deadline=None)
@given(wants().flatmap(lambda jobs: st.tuples(st.just(jobs), st.integers(0, 14))))
def test_what_is_decided_is_not_decided_otherwise_at_once(case):
    jobs, size = case
    jobs = fitting(jobs, alike(size))
    policy = SharePolicy(RULES)
    first = policy.decide(jobs, [SlotGroup(size)], 1000.0)
    if len(jobs) > 1:
        there, times = [after(want, first[want.job]) for want in jobs], (1000, 1001, 1010, 1200)
        # Suspended jobs that keep each other from their floors yield after a while.
        assume(not any(jobs_to_yield(there, alike(size), now, RULES.patience) for now in times))
        for later in times:
            assert policy.decide(there, [SlotGroup(size)], later) == first

"""Suspended jobs that keep each other from their floors: some yield, and the others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SharePolicy, SharingRules, SlotGroup, Want
from nbelastic.sharing.fair_share import shares
from nbelastic.sharing.policy import jobs_to_yield

from .worlds import NOW, alike, fitting, wants

OLD = Want("old", 0.0, least=3, kept=1, has=1, running=True, preemptible=True, waiting_since=5.0)
YOUNG = replace(OLD, job="young", since=1.0)
TRAINER = Want("trainer", since=2.0, least=1, most=1, kept=1, has=1, running=True)
RULES = SharingRules(settle=2.0, protect=30.0, patience=60.0)


def saved(want: Want) -> Want:
    return replace(want, resumable=True)


def yielding(jobs: list[Want], slots: int) -> set[str]:
    return set(jobs_to_yield(jobs, alike(slots), NOW))


@pytest.mark.parametrize(
    ("jobs", "yielded"),
    [
        ([OLD, YOUNG], "young"),
        ([saved(OLD), saved(YOUNG)], "young"),
        ([saved(OLD), YOUNG], "old"),
        ([OLD, replace(YOUNG, priority=1)], "old"),
        ([saved(replace(OLD, priority=1)), YOUNG], "old"),
    ],
    ids=["age", "age of the resumable", "resumable first", "priority", "no loss before priority"],
)
def test_one_of_two_suspended_jobs_yields_to_the_other(jobs, yielded):
    assert yielding(jobs, 3) == {yielded}


def test_no_job_yields_where_one_can_go_on():
    assert not yielding([OLD, YOUNG], 4)
    assert not yielding([OLD, replace(YOUNG, least=2)], 3)
    assert not yielding([saved(OLD), replace(TRAINER, has=0, kept=0, running=False)], 2)


def test_no_job_yields_where_nothing_is_gained():
    assert not yielding([saved(OLD), saved(YOUNG)], 2)
    assert not yielding([saved(OLD)], 3)
    assert not yielding([saved(OLD), saved(YOUNG), replace(TRAINER, least=2, kept=2, has=2)], 4)


def test_while_another_trains_only_a_resumable_job_yields_to_one_before_it():
    assert not yielding([OLD, YOUNG, TRAINER], 4), "the end of the other solves it"
    assert yielding([OLD, saved(YOUNG), TRAINER], 4) == {"young"}
    assert not yielding([saved(OLD), YOUNG, TRAINER], 4)


def test_a_job_that_cannot_start_takes_no_slot_of_a_suspended_one_while_others_train():
    waiting = Want("waiting", since=9.0, priority=5, least=1, waiting_since=9.0)
    assert not yielding([saved(OLD), waiting, TRAINER], 2)
    assert yielding([saved(OLD), waiting], 1) == {"old"}


def test_no_more_jobs_yield_than_it_takes():
    third = replace(OLD, job="third", since=2.0)
    assert yielding([OLD, YOUNG, third], 4) == {"third"}
    assert yielding([OLD, YOUNG, third], 3) == {"young", "third"}
    groups = [
        SlotGroup(1, jobs=frozenset({"third"})),
        SlotGroup(3, jobs=frozenset({"old", "young"})),
    ]
    assert jobs_to_yield([OLD, YOUNG, third], groups, NOW) == {"young"}


@settings(deadline=None)
@given(wants(preemptible=True), st.integers(0, 12), st.frozensets(st.integers(0, 5)))
def test_who_yields_could_not_go_on_and_another_can(jobs, slots, resumable):
    jobs = [
        replace(want, has=want.kept, resumable=number in resumable)
        for number, want in enumerate(fitting(jobs, alike(slots)))
    ]
    yielded = yielding(jobs, slots)
    before = shares(jobs, alike(slots), NOW)
    without = [replace(want, kept=0) if want.job in yielded else want for want in jobs]
    after = shares(without, alike(slots), NOW)
    for want in jobs:
        if want.job in yielded:
            assert want.running
            assert before[want.job] < want.least
            assert want.resumable or all(before[job.job] < job.least for job in jobs)
    if yielded:
        gains = [want.job for want in jobs if before[want.job] < want.least <= after[want.job]]
        assert set(gains) - yielded


def test_jobs_yield_only_after_the_patience():
    policy = SharePolicy(RULES)
    jobs = [OLD, YOUNG]
    assert policy.decide(jobs, alike(3), 1000.0) == {"old": 1, "young": 1}
    assert policy.decide(jobs, alike(3), 1059.0) == {"old": 1, "young": 1}
    assert policy.decide(jobs, alike(4), 1059.5) == {"old": 3, "young": 1}, "a worker is back"
    assert policy.decide(jobs, alike(3), 1060.0) == {"old": 3, "young": 1}, "lost again"
    assert policy.decide(jobs, alike(3), 1119.0)["young"] == 1
    assert policy.decide(jobs, alike(3), 1120.0) == {"old": 3, "young": 0}
    assert policy.decide(jobs, alike(3), 1121.0) == {"old": 3, "young": 0}
    gone = [replace(OLD, has=3, waiting_since=None), replace(YOUNG, kept=0, has=0)]
    assert policy.decide(gone, alike(3), 1130.0) == {"old": 3, "young": 0}
    other = replace(TRAINER, job="other")
    assert policy.decide([gone[1], other], alike(4), 1140.0) == {"young": 3, "other": 1}

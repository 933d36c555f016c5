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


THIRD = replace(OLD, job="third", since=2.0)
WAITING = Want("waiting", since=9.0, priority=5, least=1, waiting_since=9.0)
NEW, WIDE = replace(TRAINER, has=0, kept=0, running=False), replace(TRAINER, least=2, kept=2, has=2)


@pytest.mark.parametrize(
    ("jobs", "slots", "yielded"),
    [
        # Of two suspended jobs one yields: by age, by what a loss costs, by priority.
        ([OLD, YOUNG], 3, "young"),
        ([saved(OLD), saved(YOUNG)], 3, "young"),
        ([saved(OLD), YOUNG], 3, "old"),
        ([OLD, replace(YOUNG, priority=1)], 3, "old"),
        ([saved(replace(OLD, priority=1)), YOUNG], 3, "old"),
        # None does where one can go on, or where nothing is gained.
        ([OLD, YOUNG], 4, ""),
        ([OLD, replace(YOUNG, least=2)], 3, ""),
        ([saved(OLD), NEW], 2, ""),
        ([saved(OLD), saved(YOUNG)], 2, ""),
        ([saved(OLD)], 3, ""),
        ([saved(OLD), saved(YOUNG), WIDE], 4, ""),
        # While another trains, whose end solves it, only a resumable job yields to one before it.
        ([OLD, YOUNG, TRAINER], 4, ""),
        ([OLD, saved(YOUNG), TRAINER], 4, "young"),
        ([saved(OLD), YOUNG, TRAINER], 4, ""),
        # A job that cannot start takes no slot of a suspended one while others train.
        ([saved(OLD), WAITING, TRAINER], 2, ""),
        ([saved(OLD), WAITING], 1, "old"),
        # No more jobs yield than it takes.
        ([OLD, YOUNG, THIRD], 4, "third"),
        ([OLD, YOUNG, THIRD], 3, "young third"),
    ],
)
def test_who_of_suspended_jobs_yields(jobs, slots, yielded):
    assert yielding(jobs, slots) == {*yielded.split()}


def test_a_job_yields_whose_slots_the_others_can_use():
    groups = [
        SlotGroup(1, jobs=frozenset({"third"})),
        SlotGroup(3, jobs=frozenset({"old", "young"})),
    ]
    assert jobs_to_yield([OLD, YOUNG, THIRD], groups, NOW) == {"young"}


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

"""When a share takes effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SharePolicy, SharingRules, SlotGroup, Want

from .worlds import after, alike, fitting, wants

RULES = SharingRules(settle=2.0, protect=30.0, patience=60.0)
A = Want("a", least=1, kept=1, has=6, running=True)
B = Want("b", since=1.0, least=2, waiting_since=1.0)


A2, B2, C2 = after(A, 2), after(B, 2), after(replace(B, job="c", since=2.0), 2)
A3, B3, FLOOR = after(A, 3), after(B, 3), replace(A, least=3)

STORIES = {
    # so many seconds after the start, these jobs on so many slots have these shares
    "a job that is alone has no bound": [(0.0, [A], 6, {"a": None})],
    "a newcomer is admitted at once, and the others shrink once": [
        (0.0, [A], 6, {"a": None}),
        (1.0, [A, B], 6, {"a": 3, "b": 3}),
        (2.0, [A3, B3], 6, {"a": 3, "b": 3}),
    ],
    "growth waits, so that several departures make one reset": [
        (0.0, [A2, B2, C2], 6, {"a": 2, "b": 2, "c": 2}),
        (10.0, [A2, B2], 6, {"a": 2, "b": 2}),
        (12.0, [A2, B2], 6, {"a": 3, "b": 3}),
        (20.0, [A3], 6, {"a": 3}),
        (21.9, [A3], 6, {"a": 3}),
        (22.0, [A3], 6, {"a": None}),
    ],
    "a job gives up slots to be fair only after a while": [
        (0.0, [after(A, 4), replace(B2, most=2)], 6, {"a": 4, "b": 2}),
        (5.0, [after(A, 4), replace(B2, most=9)], 6, {"a": 4, "b": 2}),
        (29.9, [after(A, 4), replace(B2, most=9)], 6, {"a": 4, "b": 2}),
        (30.1, [after(A, 4), replace(B2, most=9)], 6, {"a": 3, "b": 3}),
    ],
    "a worker that is soon replaced moves no other job": [
        (0.0, [A3, B3], 6, {"a": 3, "b": 3}),
        (100.0, [A2, B3], 5, {"a": 3, "b": 3}),
        (101.0, [A2, B3], 6, {"a": 3, "b": 3}),
        (200.0, [A2, B3], 5, {"a": 3, "b": 3}),
        (202.0, [A2, B3], 5, {"a": 2, "b": 3}),  # it has not come back
    ],
    "a floor is restored at once": [
        (0.0, [after(FLOOR, 3), B3], 6, {"a": 3, "b": 3}),
        (1.0, [replace(FLOOR, kept=2, has=2), B3], 5, {"a": 3, "b": 2}),
    ],
}


@pytest.mark.parametrize("steps", STORIES.values(), ids=STORIES)
def test_when_a_share_takes_effect(steps):
    policy = SharePolicy(RULES)
    assert [policy.decide(jobs, alike(size), now) for now, jobs, size, _ in steps] == [
        shares for *_, shares in steps
    ]


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
        there = [after(want, first[want.job]) for want in jobs]
        for later in (1000, 1001, 1010, 1200):
            assert policy.decide(there, [SlotGroup(size)], later) == first

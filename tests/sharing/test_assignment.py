"""Which slots are whose."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SharedSlot, SlotGroup, Want, assign, shares

from .worlds import fitting, wants

A, B = Want("a"), Want("b")


def held(name, job, host="", **more):
    return SharedSlot(name, host, holder=job, free=False, **more)


FREE, FOUR = [SharedSlot(name) for name in "123"], {"a": 2, "b": 2}
CPU = frozenset("a")


@pytest.mark.parametrize(
    ("jobs", "shares_", "there", "reserved", "reclaimed"),
    [
        # Free slots are reserved for those below their share.
        ([A, B], FOUR, [held("0", "a"), *FREE], {"1": "a", "2": "b", "3": "b"}, {}),
        # Which ranks go is left to a job where slots are alike.
        ([A, B], FOUR, [held(name, "a") for name in "0123"], {}, {}),
        # A job leaves the slot that another one needs, and has another, or shrinks.
        (
            [A, B],
            {"a": 1, "b": 1},
            [held("gpu", "a"), SharedSlot("cpu", jobs=CPU)],
            {"cpu": "a"},
            {"a": ["gpu"]},
        ),
        (
            [A, B],
            {"a": 1, "b": 1},
            [held("gpu", "a"), held("cpu", "a", jobs=CPU)],
            {},
            {"a": ["gpu"]},
        ),
        # A cap on a host moves another job.
        (
            [A, replace(B, least=2, per_host=1)],
            FOUR,
            [held("0", "a", "x"), SharedSlot("1", "x"), SharedSlot("2", "x"), held("3", "a", "y")],
            {"1": "b", "2": "a"},
            {"a": ["3"]},
        ),
    ],
)
def test_slots_are_reserved_and_reclaimed(jobs, shares_, there, reserved, reclaimed):
    found = assign(jobs, shares_, there)
    assert (found.reserved, found.reclaimed) == (reserved, reclaimed)


@st.composite
def cases(draw):
    jobs = draw(wants(per_host=draw(st.booleans())))
    names = [want.job for want in jobs]
    there = []
    for number in range(draw(st.integers(0, 8))):
        allowed = draw(st.none() | st.frozensets(st.sampled_from(names)))
        able = names if allowed is None else sorted(allowed)
        holder = draw(st.none() | st.sampled_from(able)) if able else None
        there.append(SharedSlot(f"s{number}", draw(st.sampled_from("xy")), allowed, holder))
    groups = [SlotGroup(1, slot.host, slot.jobs) for slot in there]
    return fitting(jobs, groups), groups, there


@settings(deadline=None)
@given(cases())
def test_whatever_there_is_it_becomes_what_the_shares_say(case):
    jobs, groups, there = case
    given_ = shares(jobs, groups, 0.0)
    found = assign(jobs, given_, there)
    by_id = {slot.id: slot for slot in there}
    ends = dict.fromkeys(given_, 0)
    for slot in there:
        if slot.holder is not None and slot.id not in found.reclaimed.get(slot.holder, []):
            ends[slot.holder] += 1
    for slot_id, job in found.reserved.items():
        assert by_id[slot_id].free
        assert by_id[slot_id].holder is None
        assert by_id[slot_id].jobs is None or job in by_id[slot_id].jobs
        ends[job] += 1
    over = {job: number for job, number in ends.items() if number > given_[job]}
    alike = all(slot.jobs is None or slot.jobs == given_.keys() for slot in there)
    alike = alike and all(want.per_host is None for want in jobs)
    assert alike or not over, "where slots are not alike, a job knows which it has to leave"

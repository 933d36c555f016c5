"""Which slots are whose."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.sharing import SharedSlot, SlotGroup, Want, assign, shares

from .worlds import fitting, wants

A, B = Want("a"), Want("b")


def slots(text):
    """Slots ``name:holder``; without a holder they are free."""
    found = []
    for word in text.split():
        name, _, holder = word.partition(":")
        found.append(SharedSlot(name, holder=holder or None, free=not holder))
    return found


def test_free_slots_are_reserved_for_those_below_their_share():
    found = assign([A, B], {"a": 2, "b": 2}, slots("0:a 1 2 3"))
    assert found.reserved == {"1": "a", "2": "b", "3": "b"}
    assert found.reclaimed == {}


def test_which_ranks_go_is_left_to_a_job_where_slots_are_alike():
    found = assign([A, B], {"a": 2, "b": 2}, slots("0:a 1:a 2:a 3:a"))
    assert found.reserved == found.reclaimed == {}


def test_a_job_leaves_the_slot_that_another_needs_and_has_another():
    there = [
        SharedSlot("gpu", holder="a", free=False),
        SharedSlot("cpu", jobs=frozenset("a")),
    ]
    found = assign([A, B], {"a": 1, "b": 1}, there)
    assert found.reclaimed == {"a": ["gpu"]}
    assert found.reserved == {"cpu": "a"}


def test_a_job_that_shrinks_leaves_the_slots_that_another_can_use():
    there = [
        SharedSlot("gpu", holder="a", free=False),
        SharedSlot("cpu", holder="a", free=False, jobs=frozenset("a")),
    ]
    found = assign([A, B], {"a": 1, "b": 1}, there)
    assert found.reclaimed == {"a": ["gpu"]}


def test_a_cap_on_a_host_moves_another_job():
    there = [
        SharedSlot("0", "x", holder="a", free=False),
        SharedSlot("1", "x"),
        SharedSlot("2", "x"),
    ]
    wide = Want("b", least=2, per_host=1)
    there += [SharedSlot("3", "y", holder="a", free=False)]
    found = assign([A, wide], {"a": 2, "b": 2}, there)
    assert found.reclaimed == {"a": ["3"]}
    assert sorted(found.reserved.values()) == ["a", "b"]


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

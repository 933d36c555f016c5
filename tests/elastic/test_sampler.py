import copy
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.sampler import (
    ShardSampler,
    agree_on_progress,
    least_progress,
)
from nbelastic.errors import NbelasticError
from tests.support.world import run_ranks, world_of


def sampler_at(rank, size, length, **options):
    with activate(world_of(rank, size)):
        return ShardSampler(range(length), **options)


def settle_all(samplers, source, behind):
    """Do what the ranks of a new generation do together; sampler i is that of rank i."""
    [progress] = least_progress([[each.progress()] for each in samplers], source, behind)
    for rank, sampler in enumerate(samplers):
        sampler.install(progress, rank, len(samplers), resumed=True)


def test_shares_are_disjoint_equally_long_and_complete():
    for length, size in [(10, 3), (12, 4), (3, 5), (0, 2)]:
        shares = []
        for rank in range(size):
            with activate(world_of(rank, size)):
                sampler = ShardSampler(range(length))
                shares.append(list(sampler))
                assert len(sampler) == len(shares[-1]) == sampler.num_samples
                assert sampler.total_size == size * len(sampler)
        assert len({len(share) for share in shares}) == 1
        dealt = [share[i] for i in range(len(shares[0])) for share in shares]
        assert sorted(dealt[:length]) == list(range(length))
        if length:
            assert dealt[length:] == [dealt[i % length] for i in range(len(dealt) - length)]


def test_the_order_depends_on_seed_and_epoch_alone_and_is_fixed_for_good():
    sampler = sampler_at(0, 1, 8, seed=3)
    sampler.set_epoch(2)
    assert sampler.remaining_indices == [3, 7, 4, 0, 1, 6, 2, 5]
    assert sampler_at(0, 1, 8).remaining_indices == [3, 7, 4, 0, 2, 6, 5, 1]
    assert sampler_at(0, 1, 5, shuffle=False).remaining_indices == [0, 1, 2, 3, 4]


def test_last_batch_is_cut_and_batches_beyond_the_end_are_nothing():
    sampler = sampler_at(0, 1, 5, shuffle=False)
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    sampler.record_batch(2, 3)
    sampler.record_batch(-1, 3)
    assert (sampler.processed_indices, sampler.processed_num) == ({0, 1, 2, 3, 4}, 5)
    assert sampler.get_indices(1, 3) == [3, 4]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="0 … 4"):
            sampler.record_indices([wrong])


@pytest.mark.parametrize("by_index", [False, True])
def test_what_is_done_in_another_order_counts_once_nothing_before_is_missing(by_index):
    sampler = sampler_at(1, 2, 12)
    share = sampler.get_indices(0, 6)

    def record(number):
        if by_index:
            sampler.record_indices(share[2 * number : 2 * number + 2][::-1])
        else:
            sampler.record_batch(number, 2)

    record(1)
    assert (sampler.processed_indices, sampler.processed_num) == ({*share[2:4]}, 0)
    record(0)
    assert sampler.processed_num == 8
    record(2)
    assert sampler.processed_indices == set(range(12))


EVENTS = {
    "": lambda sampler: None,
    "iteration": list,
    "batch": lambda sampler: sampler.record_batch(0, 1),
    "indices": lambda sampler: sampler.record_indices([0]),
    "the same epoch": lambda sampler: sampler.set_epoch(0),
    "another epoch": lambda sampler: (sampler.set_epoch(3), sampler.record_batch(0, 4)),
}


@pytest.mark.parametrize("event", EVENTS)
def test_only_the_first_set_epoch_after_a_change_keeps_what_was_done(event):
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    settle_all([sampler], 0, set())
    EVENTS[event](sampler)
    sampler.set_epoch(sampler.epoch)
    assert sampler.processed_num == (0 if event else 4)
    sampler.record_indices([9])
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_indices, len(sampler)) == (1, set(), 10)


def test_iterating_and_len_use_the_present_rank_and_size_and_no_later_ones():
    sampler = sampler_at(0, 1, 12, shuffle=False)
    before = iter(sampler)
    with activate(world_of(1, 3)):
        assert len(sampler) == 4
        assert sampler.num_replicas == 1  # asking for the length deals nothing
        assert list(sampler) == [1, 4, 7, 10]
        assert (sampler.rank, sampler.num_replicas) == (1, 3)
    assert list(before) == list(range(12))


@pytest.mark.parametrize(("size", "in_state", "left"), [(1, False, 2), (2, False, 0), (2, True, 4)])
def test_reset_leaves_out_what_all_ranks_have_done(size, in_state, left):
    sampler = sampler_at(0, size, 8, shuffle=False)
    with activate(world_of(0, size)):
        if in_state:
            sampler.snapshot()
        sampler.record_batch(0, 2)
        sampler.reset()
    assert sampler.remaining_indices == list(range(left, 8))


def test_checkpoint_goes_on_where_it_was_with_any_number_of_ranks():
    sampler = sampler_at(0, 1, 10)
    sampler.set_epoch(2)
    sampler.record_batch(0, 4)
    checkpoint = copy.deepcopy(sampler.state_dict())
    shares = []
    for rank in range(2):
        with activate(world_of(rank, 2)):
            again = ShardSampler(range(10))
            again.load_state_dict(checkpoint)
            assert again.epoch == 2
            shares += list(again)
    assert sorted([*shares, *sampler.processed_indices]) == list(range(10))
    older = sampler_at(0, 1, 10)
    older.load_state_dict({"epoch": 2, "processed_indices": sampler.processed_indices})
    assert older.state_dict() == checkpoint


def test_N6_restore_goes_back_exactly_whatever_happened_since():
    sampler = sampler_at(0, 1, 20)
    seen = []

    def view():
        return (sampler.epoch, sampler.processed_indices, sampler.remaining_indices)

    for change in (
        lambda: sampler.record_batch(0, 3),
        lambda: sampler.record_batch(2, 3),
        lambda: sampler.record_indices([0, 19]),
        lambda: settle_all([sampler], 0, set()),
        lambda: sampler.record_batch(0, 5),
        lambda: sampler.set_epoch(2),
        lambda: sampler.record_batch(1, 3),
    ):
        change()
        seen.append((sampler.snapshot(), view()))
    for snapshot, before in [*reversed(seen), *seen]:
        sampler.go_back(snapshot)
        assert view() == before


def test_a_batch_or_commit_makes_no_order_of_all_samples():
    sampler = sampler_at(0, 4, 1_000_000)
    for batch in range(1000):
        sampler.record_batch(batch, 32)
        sampler.snapshot()
    assert sampler.progress().done == 128_000
    assert "indices" not in vars(sampler._deal.order)


def test_N4_ranks_behind_or_ahead_take_over_the_least_of_the_newest():
    def main(context):
        sampler, other = ShardSampler(range(100), seed=1), ShardSampler(range(10), shuffle=False)
        if context.rank == 0:
            sampler.set_epoch(3)
        else:
            sampler.set_epoch(4)
            sampler.record_batch(0, 5 if context.rank < 3 else 3)
        if context.rank == 2:
            sampler.set_epoch(5)
        other.record_indices(other.get_indices(0, 1))
        both = [sampler, other]
        with pytest.raises(NbelasticError, match="do not have the same samplers"):
            agree_on_progress([sampler.progress()] * (1 + context.rank), context)
        agreed = agree_on_progress([each.progress() for each in both], context, behind=[0])
        for each, progress in zip(both, agreed, strict=True):
            each.install(progress, context.rank, context.size)
        return sampler.epoch, sampler.processed_num, other.processed_indices, list(sampler)

    # Rank 0 is behind, 2 is ahead: 3 of rank 3 count for all.
    results = run_ranks(4, main, source=1)
    assert [each[:3] for each in results] == [(4, 12, {0, 1, 2, 3})] * 4
    assert len({sample for *_, share in results for sample in share}) == 88


@settings(deadline=None)
@given(
    lockstep=st.booleans(),
    length=st.integers(1, 60),
    size=st.integers(2, 5),
    rounds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=5, max_size=5),
            st.sampled_from(["leave", "die"]),
            st.integers(0, 4),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
)
def test_N4_nothing_is_lost_and_in_lockstep_nothing_is_used_twice(lockstep, length, size, rounds):
    samplers = [sampler_at(rank, size, length) for rank in range(size)]
    settle_all(samplers, 0, set())
    used = Counter()
    for paces, how, chosen, wanted in rounds:
        if lockstep:
            paces[:] = paces[:1] * 5
        for sampler, pace in zip(samplers, paces, strict=False):
            used.update(sampler.get_indices(0, pace))
            sampler.record_batch(0, pace)
        goner = chosen % len(samplers)
        slowest = min(range(len(samplers)), key=paces.__getitem__)
        if how == "leave":
            settle_all(samplers, 0, set())
        elif goner == slowest:
            goner = (goner + 1) % len(samplers)  # else what only others have done would count
        if len(samplers) > 1:
            del samplers[goner]
        stay = len(samplers)
        joining = min(wanted, 5 - stay)
        samplers += [sampler_at(stay + i, stay + joining, length) for i in range(joining)]
        settle_all(samplers, 0, set(range(stay, stay + joining)))
    for sampler in samplers:
        used.update(sampler.get_indices(0, length))
    assert set(used) == set(range(length))
    assert not lockstep or used.total() - length < 5, "more than what fills up the shares"

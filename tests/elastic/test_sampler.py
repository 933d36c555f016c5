from __future__ import annotations

import copy
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.elastic.context import activate
from nbelastic.elastic.progress_agreement import agree_on_progress
from nbelastic.elastic.sampler import SamplerSnapshot, ShardSampler
from tests.elastic.worlds import sampler_at, settle_all, world_of
from tests.support.world import StaticContext, run_ranks


def test_shares_are_disjoint_equally_long_and_complete() -> None:
    for length, size in [(10, 1), (10, 3), (12, 4), (3, 5), (1, 4), (0, 2)]:
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


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = sampler_at(0, 1, 100, seed=3)
    second = sampler_at(0, 1, 100, seed=3)
    assert first.remaining_indices == second.remaining_indices
    second.set_epoch(1)
    assert first.remaining_indices != second.remaining_indices
    assert first.remaining_indices != sampler_at(0, 1, 100, seed=4).remaining_indices
    assert sampler_at(0, 1, 5, shuffle=False).remaining_indices == [0, 1, 2, 3, 4]
    # Fixed for good: a rank with another NumPy must deal the same.
    assert sampler_at(0, 1, 8).remaining_indices == [3, 7, 4, 0, 2, 6, 5, 1]


def test_the_share_is_fixed_until_the_membership_changes() -> None:
    sampler = sampler_at(1, 2, 10, shuffle=False)
    with activate(world_of(1, 2)):
        sampler.record_batch(0, 2)
        assert list(sampler) == [1, 3, 5, 7, 9]
        assert sampler.processed_indices == {1, 3}
        assert sampler.processed_num == 2


def test_last_batch_is_cut_and_batches_beyond_the_end_are_nothing() -> None:
    sampler = sampler_at(0, 1, 5, shuffle=False)
    sampler.record_batch(1, 3)
    assert sampler.processed_indices == {3, 4}
    sampler.record_batch(2, 3)
    sampler.record_batch(-1, 3)
    assert sampler.processed_indices == {3, 4}
    assert sampler.get_indices(1, 3) == [3, 4]


def test_indices_that_do_not_exist_are_refused_when_recorded() -> None:
    sampler = sampler_at(0, 1, 5)
    sampler.record_indices([0, 4])
    with pytest.raises(ValueError, match="0 … 4"):
        sampler.record_indices([5])
    with pytest.raises(ValueError, match="0 … 4"):
        sampler.record_indices([-1])
    assert sampler.processed_indices == {0, 4}


def test_set_epoch_clears_what_was_done() -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    sampler.record_indices([9])
    sampler.set_epoch(0)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 4)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_indices, len(sampler)) == (1, set(), 10)


def test_set_epoch_in_a_function_called_again_keeps_progress() -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    settle_all([sampler], 0, set())
    sampler.set_epoch(0)
    assert sampler.processed_num == 4
    sampler.set_epoch(0)
    assert sampler.processed_num == 0


@pytest.mark.parametrize("use", ["iterate", "batch", "indices", "other epoch"])
def test_only_the_first_set_epoch_after_a_change_keeps_what_was_done(use: str) -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    settle_all([sampler], 0, set())
    if use == "iterate":
        list(sampler)
    elif use == "batch":
        sampler.record_batch(0, 1)
    elif use == "indices":
        sampler.record_indices([0])
    else:
        sampler.set_epoch(3)
        sampler.record_batch(0, 4)
    sampler.set_epoch(sampler.epoch)
    assert sampler.processed_num == 0


def test_an_iterator_is_not_disturbed_by_later_changes() -> None:
    sampler = sampler_at(0, 1, 10, shuffle=False)
    iterator = iter(sampler)
    assert next(iterator) == 0
    sampler.record_batch(0, 5)
    settle_all([sampler], 0, set())
    sampler.set_epoch(7)
    assert list(iterator) == list(range(1, 10))


def test_iterating_and_len_use_the_present_rank_and_size() -> None:
    sampler = sampler_at(0, 1, 12, shuffle=False)
    with activate(world_of(1, 3)):
        assert len(sampler) == 4
        assert sampler.num_replicas == 1  # asking for the length deals nothing
        assert list(sampler) == [1, 4, 7, 10]
        assert (sampler.rank, sampler.num_replicas) == (1, 3)


def test_reset_keeps_samples_that_only_this_rank_has_done() -> None:
    alone = sampler_at(0, 1, 6, shuffle=False)
    alone.record_batch(0, 2)
    alone.reset()
    assert alone.remaining_indices == [2, 3, 4, 5]
    one_of_two = sampler_at(1, 2, 6, shuffle=False)
    with activate(world_of(1, 2)):
        one_of_two.record_batch(0, 2)
        one_of_two.reset()
        assert one_of_two.remaining_indices == [0, 1, 2, 3, 4, 5]
        assert one_of_two.processed_indices == {1, 3}


def test_checkpoint_goes_on_where_it_was_with_any_number_of_ranks() -> None:
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
    assert sorted([*shares, *checkpoint["processed_indices"]]) == list(range(10))
    horovods = sampler_at(0, 1, 10)
    horovods.load_state_dict({"epoch": 2, "processed_num": 4})
    assert horovods.processed_indices == checkpoint["processed_indices"]


OPERATIONS = st.one_of(
    st.tuples(st.just("batch"), st.integers(0, 5)),
    st.tuples(st.just("indices"), st.lists(st.integers(0, 19), max_size=3)),
    st.tuples(st.just("epoch"), st.integers(0, 2)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("restore"), st.integers(0, 5)),
)


@settings(deadline=None)
@given(st.lists(OPERATIONS, max_size=20))
def test_N6_restore_goes_back_exactly_whatever_happened_since(operations: list) -> None:
    sampler = sampler_at(0, 1, 20)
    seen: list[tuple[SamplerSnapshot, object]] = []

    def view() -> object:
        return (sampler.epoch, sampler.processed_indices, sampler.remaining_indices)

    for what, value in operations:
        if what == "batch":
            sampler.record_batch(value, 3)
        elif what == "indices":
            sampler.record_indices(value)
        elif what == "epoch":
            sampler.set_epoch(value)
        elif what == "settle":
            settle_all([sampler], 0, set())
        elif what == "save":
            seen.append((sampler.snapshot(), view()))
        elif seen:
            snapshot, before = seen[value % len(seen)]
            sampler.go_back(snapshot)
            assert view() == before
    for snapshot, before in seen:
        sampler.go_back(snapshot)
        assert view() == before


def test_a_million_samples_cost_nothing_per_batch_or_commit() -> None:
    sampler = sampler_at(0, 4, 1_000_000)
    sampler.get_indices(0, 1)
    start = time.perf_counter()
    for batch in range(1000):
        sampler.record_batch(batch, 32)
        sampler.snapshot()
    assert time.perf_counter() - start < 2.0  # 2 ms each; walking over all takes 20
    assert sampler.claim().spans == ((0, 32_000),)


def test_N4_ranks_settle_on_the_same_rest() -> None:
    def main(context: StaticContext) -> object:
        sampler = ShardSampler(range(1000), seed=1)
        other = ShardSampler(range(10), shuffle=False)
        sampler.record_batch(0, 16)
        other.record_indices([context.rank])
        deals = agree_on_progress([sampler, other], context)
        for each, deal in zip((sampler, other), deals, strict=True):
            each.install(deal, context.rank)
        return sampler.processed_num, other.processed_indices, list(sampler)

    results = run_ranks(3, main)
    assert {result[0] for result in results} == {48}
    assert all(result[1] == {0, 1, 2} for result in results)
    shares = [sample for result in results for sample in result[2]]
    assert len(set(shares)) == 952


def test_N4_ranks_behind_or_apart_take_over_what_the_others_settle() -> None:
    def main(context: StaticContext) -> object:
        sampler = ShardSampler(range(100))
        if context.rank == 0:
            sampler.set_epoch(9)
        else:
            sampler.set_epoch(4)
            sampler.record_batch(0, 5 if context.rank < 3 else 3)
        if context.rank == 2:
            sampler.set_epoch(5)
        [deal] = agree_on_progress([sampler], context, behind=[0])
        sampler.install(deal, context.rank)
        return sampler.epoch, sampler.processed_num, sorted(deal.done.tolist())

    # Rank 0 is behind, 2 has gone its own way: 5 of rank 1, 3 of rank 3, three each for 0, 2.
    results = run_ranks(4, main, source=1)
    assert results == [(4, 14, results[0][2])] * 4

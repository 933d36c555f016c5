"""The deal: each row once, the same for every number of ranks, and no state but integers."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data.plan.dealing import Dealing, Permutation, mix


def test_orders_are_the_same_for_good() -> None:
    # Written down, because checkpoints depend on it.
    assert Permutation(10, 1).rows(range(10)).tolist() == [3, 0, 4, 6, 1, 2, 9, 7, 8, 5]
    assert mix(1, 2, 3) == 7702586659592502839
    assert Dealing(50, 3, 2, epoch=4, seed=5).rows(1, 1).tolist() == [46, 39, 15]


@given(
    length=st.integers(1, 400),
    micro=st.integers(1, 9),
    micro_batches=st.integers(1, 13),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_an_epoch_has_each_row_once(
    length: int, micro: int, micro_batches: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    deal = Dealing(length, micro, micro_batches, epoch, 3, shuffle, drop_last)
    rows: list[int] = []
    for step in range(deal.steps):
        weights = deal.weights(step)
        assert sum(weights) == deal.rows_in(step)
        full = deal.rows_in(step) == deal.global_batch
        assert full or step == deal.steps - 1
        used = [weight for weight in weights if weight]
        assert max(used) <= micro
        assert max(used) - min(used) <= 1
        assert len(used) == (micro_batches if full else -(-deal.rows_in(step) // micro))
        for number, weight in enumerate(weights):
            found = deal.rows(step, number).tolist()
            assert len(found) == weight
            rows += found
    assert len(rows) == len(set(rows))
    assert set(rows) <= set(range(length))
    assert len(rows) == (length - length % deal.global_batch if drop_last else length)
    assert shuffle or rows == sorted(rows)


def test_a_smaller_last_step_is_spread_over_the_ranks() -> None:
    deal = Dealing(length=100, micro=8, micro_batches=8)
    assert deal.weights(1) == [7, 7, 0, 7, 7, 0, 8, 0]
    for rank in range(2):
        assert any(deal.weights(1)[number] for number in Blocks.even(8, 2).block(rank))


def test_ten_million_rows_take_no_memory_that_grows_with_them() -> None:
    tracemalloc.start()
    deal = Dealing(10_000_000, 32, 8)
    assert len(set(deal.rows(39_061, 3).tolist())) == 32
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()

"""The plan of an epoch: each row once, by row or by unit, and no state but integers."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.data.plan.dealing import Dealing, Permutation, mix
from nbelastic.data.plan.streams import Lease, LeaseTable, UnitStreams

sizes_of_units = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(200, 400)), max_size=12
).filter(sum)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Dealing, UnitStreams, int]:
    sizes = draw(sizes_of_units)
    numbers = [draw(st.integers(low, high)) for low, high in ((1, 9), (1, 13), (0, 9), (0, 9))]
    dealing = Dealing(sum(sizes), *numbers, draw(st.booleans()), draw(st.booleans()))
    window_rows = draw(st.integers(1, 200))
    return dealing, UnitStreams(np.array(sizes), dealing, window_rows), window_rows


def rows_of(streams: UnitStreams, step: int, number: int) -> list[int]:
    """Return the rows of a micro-batch, numbered through all units in their own order."""
    found, firsts = list[int](), np.cumsum(streams._sizes) - streams._sizes
    for window, first, last in streams.pieces(step, number):
        rows = [row + firsts[unit] for unit, rows in window.ranges for row in rows]
        found += np.array(rows)[window.order()[first:last]].tolist()
    return found


@given(epochs())
@settings(max_examples=150, deadline=None)
def test_an_epoch_has_each_row_once_whether_rows_or_units_are_dealt(
    epoch: tuple[Dealing, UnitStreams, int],
) -> None:
    dealing, streams, window_rows = epoch
    full, rest = divmod(dealing.length, dealing.global_batch)
    assert dealing.steps == full + (rest > 0 and not dealing.drop_last)
    parts: list[list[int]] = [[] for _ in range(dealing.micro_batches)]
    found: list[int] = []
    for step in range(dealing.steps):
        weights = dealing.weights(step)
        used = [weight for weight in weights if weight]
        assert sum(used) == (dealing.global_batch if step < full else rest)
        assert len(used) == -(-sum(used) // dealing.micro)
        assert max(used) - min(used) <= (step == full)
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            by_rows, by_units = dealing.rows(step, number).tolist(), rows_of(streams, step, number)
            assert len(by_rows) == len(by_units) == weight
            found += by_rows
            part.extend(by_units)
    for rows in (found, [row for part in parts for row in part]):
        assert dealing.shuffle or rows == sorted(rows)
        assert len(rows) == len(set(rows)) == dealing.length - rest * dealing.drop_last
        assert set(rows) <= set(range(dealing.length))
    for part, windows in zip(parts, streams.windows, strict=True):
        start = 0
        for window in windows:
            assert window.start == start
            assert window.rows <= window_rows or len(window.ranges) == 1
            assert all(len(rows) for _, rows in window.ranges)
            start = window.stop
        assert start == len(part)


def test_orders_are_the_same_for_good() -> None:
    # Written down, because checkpoints depend on it.
    assert Permutation(10, 1).rows(range(10)).tolist() == [3, 0, 4, 6, 1, 2, 9, 7, 8, 5]
    assert mix(1, 2, 3) == 7702586659592502839
    assert Dealing(50, 3, 2, epoch=4, seed=5).rows(1, 1).tolist() == [46, 39, 15]
    # A smaller last step is spread over the ranks.
    assert Dealing(100, 8, 8).weights(1) == [7, 7, 0, 7, 7, 0, 8, 0]
    streams = UnitStreams(np.array([10, 3, 0, 11]), Dealing(24, 3, 2, epoch=1, seed=5), 8)
    found = np.array([[rows_of(streams, step, number) for step in range(4)] for number in (0, 1)])
    assert found.reshape(2, -1).tolist() == [
        [11, 12, 10, 15, 20, 21, 16, 19, 14, 13, 18, 17],
        [23, 22, 7, 2, 6, 5, 4, 9, 8, 0, 1, 3],
    ]
    in_order = UnitStreams(np.array([4, 4, 4]), Dealing(12, 2, 2, shuffle=False), 4)
    needed = [(window.stream, window.number) for window in in_order.needed(1, range(2))]
    assert needed == [(0, 0), (1, 1), (0, 1)]
    assert [window.number for window in in_order.needed(2, range(1))] == [1], "one is done"


def test_ten_million_rows_take_no_memory_that_grows_with_them() -> None:
    tracemalloc.start()
    deal = Dealing(10_000_000, 32, 8)
    assert len(set(deal.rows(39_061, 3).tolist())) == 32
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()


def test_units_go_to_the_streams_that_have_ended_in_their_order() -> None:
    table = LeaseTable.first(0, 7, 3)
    assert table.leases == (Lease(0, 0), Lease(1, 0), Lease(2, 0))
    table = table.after(4, {2: 1, 0: 3}, 3)
    assert table.leases == (Lease(3, 5), Lease(1, 0), Lease(4, 5))
    assert table.finished == 4 * 3 + 3 + 4 * 3 + 1
    table = table.after(9, {1: 3}, 3).after(10, {0: 3, 1: 3, 2: 3}, 3)
    assert table.leases == (Lease(6, 11), None, None)
    assert not table.is_over
    assert table.after(11, {0: 0}, 3).is_over

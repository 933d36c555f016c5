"""Units dealt, or leased, to streams and windows: each row once, whatever the sizes are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.data.plan.dealing import Dealing
from nbelastic.data.plan.streams import Lease, LeaseTable, UnitStreams

sizes_of_units = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(200, 400)), max_size=12
).filter(sum)


@st.composite
def streams_of_epochs(draw: st.DrawFn) -> tuple[Dealing, UnitStreams, int]:
    sizes = draw(sizes_of_units)
    numbers = [draw(st.integers(low, 9)) for low in (1, 1, 0, 0)]
    dealing = Dealing(sum(sizes), *numbers, draw(st.booleans()), draw(st.booleans()))
    window_rows = draw(st.integers(1, 200))
    return dealing, UnitStreams(np.array(sizes), dealing, window_rows), window_rows


@given(streams_of_epochs())
@settings(max_examples=80, deadline=None)
def test_each_row_is_once_in_streams_that_are_even_and_windows_that_are_small(
    epoch: tuple[Dealing, UnitStreams, int],
) -> None:
    dealing, streams, window_rows = epoch
    parts: list[list[int]] = [[] for _ in range(dealing.micro_batches)]
    for step in range(dealing.steps):
        for number, part in enumerate(parts):
            found = streams.rows(step, number).tolist()
            assert len(found) == len(dealing.places(step, number))
            part.extend(found)
    rows = [row for part in parts for row in part]
    assert dealing.shuffle or rows == sorted(rows)
    full, rest = divmod(dealing.length, dealing.global_batch)
    assert len(rows) == len(set(rows)) == dealing.length - (rest if dealing.drop_last else 0)
    assert set(rows) <= set(range(dealing.length))
    # Equal in all full steps; the rest goes to few streams, in parts that differ by a row.
    lengths = [streams.length(number) for number in range(dealing.micro_batches)]
    used = [length - full * dealing.micro for length in lengths if length > full * dealing.micro]
    assert not used or (max(used) - min(used) <= 1 and not dealing.drop_last)
    for length, windows in zip(lengths, streams.windows, strict=True):
        start = 0
        for window in windows:
            assert window.start == start
            assert window.rows <= window_rows or len(window.ranges) == 1
            assert all(len(each) for each in window.ranges)
            start = window.stop
        assert start == length


@given(streams_of_epochs(), st.integers(0, 10_000), st.data())
@settings(max_examples=150, deadline=None)
def test_windows_are_needed_in_the_order_of_the_micro_batches(
    epoch: tuple[Dealing, UnitStreams, int], first: int, data: st.DataObject
) -> None:
    dealing, streams, _ = epoch
    first %= max(dealing.steps, 1)
    bound = st.integers(0, dealing.micro_batches)
    block = range(*sorted((data.draw(bound), data.draw(bound))))
    wanted: list[tuple[int, int]] = []
    held: dict[int, int] = {}  # as WindowedRows holds them: one of each stream of the block
    for step in range(first, dealing.steps):
        for stream in block:
            places = streams.place(step, stream)
            for window in streams.windows[stream]:
                overlaps = window.start < places.stop and places.start < window.stop
                if overlaps and held.get(stream) != window.number:
                    held[stream] = window.number
                    wanted.append((stream, window.number))
    needed = [(window.stream, window.number) for window in streams.needed(first, block)]
    assert needed == wanted


def test_the_order_of_units_and_windows_is_the_same_for_good() -> None:
    dealing = Dealing(24, 3, 2, epoch=1, seed=5)
    streams = UnitStreams(np.array([10, 3, 0, 11]), dealing, 8)
    # Written down, because checkpoints depend on it.
    found = np.array([[streams.rows(step, number) for step in range(4)] for number in (0, 1)])
    assert found.reshape(2, -1).tolist() == [
        [11, 12, 10, 15, 20, 21, 16, 19, 14, 13, 18, 17],
        [23, 22, 7, 2, 6, 5, 4, 9, 8, 0, 1, 3],
    ]
    in_order = UnitStreams(np.array([4, 4, 4]), Dealing(12, 2, 2, shuffle=False), 4)
    assert [window.number for window in in_order.needed(2, range(1))] == [1], "one is done"


# -- units of unknown length ---------------------------------------------------------------------


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

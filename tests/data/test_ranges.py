"""Units dealt to streams and windows: each row once, whatever the sizes and the ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.data.plan.dealing import BlockSchedule, Dealing
from nbelastic.data.plan.ranges import RowRange, UnitStreams, cut

sizes_of_units = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(200, 400)), max_size=12
).filter(sum)


@st.composite
def streams_of_epochs(draw: st.DrawFn) -> tuple[Dealing, UnitStreams, int]:
    sizes = draw(sizes_of_units)
    dealing = Dealing(
        sum(sizes),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    window_rows = draw(st.integers(1, 200))
    return dealing, UnitStreams(np.array(sizes), dealing, window_rows), window_rows


@given(streams_of_epochs())
@settings(max_examples=80, deadline=None)
def test_an_epoch_of_units_has_each_row_once(epoch: tuple[Dealing, UnitStreams, int]) -> None:
    dealing, streams, _ = epoch
    rows: list[int] = []
    for step in range(dealing.steps):
        for number in range(dealing.micro_batches):
            found = streams.rows(step, number).tolist()
            assert len(found) == len(dealing.places(step, number))
            rows += found
    kept = dealing.length - dealing.length % dealing.global_batch
    assert len(rows) == len(set(rows)) == (kept if dealing.drop_last else dealing.length)
    assert set(rows) <= set(range(dealing.length))


@given(streams_of_epochs())
@settings(max_examples=60, deadline=None)
def test_streams_are_even_and_windows_small(epoch: tuple[Dealing, UnitStreams, int]) -> None:
    dealing, streams, window_rows = epoch
    lengths = [streams.length(number) for number in range(dealing.micro_batches)]
    full = dealing.length // dealing.global_batch
    # Equal in all full steps; the rest goes to few streams, in parts that differ by a row.
    rest = [length - full * dealing.micro for length in lengths]
    used = [rows for rows in rest if rows]
    assert not used or max(used) - min(used) <= 1
    assert not (dealing.drop_last and used)
    for number, length in enumerate(lengths):
        windows = streams.windows(number)
        assert [window.start for window in windows] == [
            0, *(window.stop for window in windows)
        ][: len(windows)]  # fmt: skip
        assert sum(window.rows for window in windows) == length
        for window in windows:
            assert window.rows <= window_rows or len(window.ranges) == 1
            assert all(len(each) for each in window.ranges)


@st.composite
def schedules(draw: st.DrawFn, micro_batches: int, steps: int) -> BlockSchedule:
    """One block, or another from some step on."""
    bound = st.integers(0, micro_batches)
    now, later = (range(*sorted((draw(bound), draw(bound)))) for _ in range(2))
    return BlockSchedule(now, draw(st.one_of(st.none(), st.integers(0, steps + 1))), later)


@given(streams_of_epochs(), st.integers(0, 10_000), st.data())
@settings(max_examples=150, deadline=None)
def test_windows_are_needed_in_the_order_of_the_micro_batches(
    epoch: tuple[Dealing, UnitStreams, int], first: int, data: st.DataObject
) -> None:
    dealing, streams, _ = epoch
    first %= max(dealing.steps, 1)
    blocks = data.draw(schedules(dealing.micro_batches, dealing.steps))
    wanted: list[tuple[int, int]] = []
    held: dict[int, int] = {}  # as WindowedRows holds them: one of each stream of the block
    for step in range(first, dealing.steps):
        block = blocks.at(step)
        held = {stream: number for stream, number in held.items() if stream in block}
        for stream in block:
            places = streams.place(step, stream)
            for window in streams.windows(stream):
                overlaps = window.start < places.stop and places.start < window.stop
                if overlaps and held.get(stream) != window.number:
                    held[stream] = window.number
                    wanted.append((stream, window.number))
    needed = [(window.stream, window.number) for window in streams.needed(first, blocks)]
    assert needed == wanted


def test_a_unit_at_a_cut_belongs_to_two_streams() -> None:
    sizes = np.array([5, 0, 4])
    assert cut([2, 1, 0], sizes, [3, 4, 2]) == [
        [RowRange(2, 0, 3)],
        [RowRange(2, 3, 4), RowRange(0, 0, 3)],
        [RowRange(0, 3, 5)],
    ]


def test_the_order_of_units_and_windows_is_the_same_for_good() -> None:
    dealing = Dealing(24, 3, 2, epoch=1, seed=5)
    streams = UnitStreams(np.array([10, 3, 0, 11]), dealing, 8)
    # Written down, because checkpoints depend on it.
    found = [streams.rows(step, number).tolist() for step in range(4) for number in range(2)]
    assert found == FIRST
    another = UnitStreams(np.array([10, 3, 0, 11]), Dealing(24, 3, 2, epoch=2, seed=5), 8)
    assert another.rows(0, 0).tolist() != FIRST[0]


def test_without_shuffling_each_stream_reads_its_part_in_order() -> None:
    streams = UnitStreams(np.array([4, 4, 4]), Dealing(12, 2, 2, shuffle=False), 5)
    assert [streams.rows(step, 0).tolist() for step in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [streams.rows(step, 1).tolist() for step in range(3)] == [[6, 7], [8, 9], [10, 11]]


FIRST = [
    [11, 12, 10],
    [23, 22, 7],
    [15, 20, 21],
    [2, 6, 5],
    [16, 19, 14],
    [4, 9, 8],
    [13, 18, 17],
    [0, 1, 3],
]

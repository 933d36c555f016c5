"""Leases: every row of every unit once, in order, whatever the lengths of units are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbelastic.data.plan.leases import Lease, LeaseTable


def rows_of_steps(
    lengths: list[int], streams: int, micro: int
) -> tuple[list[dict[int, list[tuple[int, int]]]], list[LeaseTable]]:
    """Return the rows of each step by stream, as units and rows, and the table before each."""
    table = LeaseTable.first(3, len(lengths), streams)
    steps, tables = [], [table]
    while not table.is_over:
        rows, ended = {}, {}
        for stream, lease in enumerate(table.leases):
            if lease is None:
                continue
            first = table.position(len(steps), stream, micro)
            last = min(first + micro, lengths[lease.unit])
            rows[stream] = [(lease.unit, row) for row in range(first, last)]
            if last == lengths[lease.unit]:
                ended[stream] = last - first
        table = table.after(len(steps), ended, micro)
        steps.append(rows)
        tables.append(table)
    return steps, tables


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    streams=st.integers(1, 9),
    micro=st.integers(1, 8),
)
def test_every_row_is_in_one_step_and_in_the_order_of_its_unit(
    lengths: list[int], streams: int, micro: int
) -> None:
    steps, tables = rows_of_steps(lengths, streams, micro)
    every = [row for rows in steps for stream in sorted(rows) for row in rows[stream]]
    assert sorted(every) == [(u, row) for u, length in enumerate(lengths) for row in range(length)]
    for unit in range(len(lengths)):
        mine = [row for each, row in every if each == unit]
        assert mine == sorted(mine)
    done = 0
    for number, (rows, table) in enumerate(zip([*steps, {}], tables, strict=True)):
        assert table.rows_before(number, micro) == done
        assert LeaseTable.from_text(table.to_text()) == table
        done += sum(map(len, rows.values()))


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

"""Output that waits in the scheduler for a kernel which does not read: a bounded amount."""

from __future__ import annotations

import pytest

from nbelastic.cluster.scheduler import output_valve
from nbelastic.cluster.scheduler.output_valve import OutputValve
from nbelastic.cluster.wire import RankOutput

TEN = RankOutput("job", 0, "0123456789")
GAP = RankOutput("job", 0, "", gap=True)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(output_valve, "MOST_WAITING", 25)


def test_a_kernel_that_does_not_read_gets_the_mark_of_a_gap_and_then_nothing():
    valve = OutputValve()
    assert [valve.take(TEN, 7) for _ in range(5)] == [TEN, TEN, GAP, None, None]


def test_a_kernel_that_reads_again_gets_output_again():
    valve = OutputValve()
    for _ in range(5):
        valve.take(TEN, 7)
    assert [valve.take(TEN, 8) for _ in range(4)] == [TEN, TEN, GAP, None]


def test_a_kernel_that_reads_gets_everything():
    valve = OutputValve()
    assert all(valve.take(TEN, batch) == TEN for batch in range(100))


def test_everything_passes_where_it_is_not_known_what_is_read():
    valve = OutputValve()
    assert all(valve.take(TEN, None) == TEN for _ in range(100))

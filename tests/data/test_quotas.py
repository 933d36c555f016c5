"""Quotas: the shortest step, the same on all ranks, and taken only where it is clearly shorter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.data import balancer
from nbelastic.data.balancer import GAIN, STEPS, Stopwatch, pace, plan, predict


def splits(count: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to share out micro-batches."""
    for bars in itertools.combinations(range(count + ranks - 1), ranks - 1):
        ends = (-1, *bars, count + ranks - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(ends))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.one_of(st.just(0.0), st.floats(1e-6, 1e3))),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=200)
def test_other_quotas_are_taken_only_if_no_others_are_shorter_and_they_clearly_are(
    ranks: list[tuple[int, float]],
) -> None:
    quotas, times = zip(*ranks, strict=True)
    found, count = plan(quotas, times), sum(quotas)
    assert sum(found) == count
    if not all(times) or count < len(quotas):
        assert found == quotas
        return
    best = None
    if count <= 8:  # of those that leave each rank one
        best = min(predict(split, times) for split in splits(count, len(quotas)) if all(split))
    limit = (1 - GAIN) * predict(quotas, times)
    if found == quotas:
        assert best is None or best >= limit * (1 - 1e-12)
    else:
        assert all(found)
        assert predict(found, times) < limit
        assert best is None or predict(found, times) == pytest.approx(best)


def test_a_rank_that_is_three_times_slower_gets_less() -> None:
    assert plan((4, 4, 4, 4), (1, 1, 1, 3)) == (5, 5, 5, 1)
    assert plan((5, 5, 5, 1), (1, 1, 1, 1)) == (4, 4, 4, 4)
    assert plan((1, 1, 1, 1), (1, 1, 1, 3)) == (1, 1, 1, 1)
    assert plan((2, 0, 0), (5, 1, 1)) == (2, 0, 0)  # fewer than ranks
    assert plan((20, 20), (1.0, 1.1)) == (20, 20)  # others would be 4.5 % shorter
    assert plan((2, 2), (0.0, 1.0)) == (2, 2)  # a time is not known


def test_a_time_is_known_after_some_steps_and_pauses_do_not_count() -> None:
    times = (50.0, 1.0, 1.0, 1.0, 80.0, 1.0, 90.0, 1.0)
    latest = [times[max(end - STEPS, 0) : end] for end in range(1, len(times) + 1)]
    assert [*map(pace, latest)] == [0.0, 0.0, *[1.0] * 6]
    assert pace((90.0, 1.0, 3.0, 3.0, 3.0)) == 3.0


def test_a_stopwatch_times_what_is_between_start_and_stop_and_waits_for_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments, watch = iter((10.0, 12.0, 50.0, 54.0)), Stopwatch()
    monkeypatch.setattr(balancer, "clock", lambda: next(moments))
    assert watch.take() is None
    for _ in range(2):
        watch.start()
        watch.stop()
    assert (watch.take(), watch.take()) == (3.0, None)
    event = Mock(**{"query.side_effect": [False, True], "elapsed_time.return_value": 1000.0})
    monkeypatch.setattr(balancer.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(balancer, "_event", lambda: event)
    monkeypatch.setattr(balancer, "clock", Mock())
    watch.start()
    watch.stop()
    assert (watch.take(), watch.take()) == (None, 1.0)

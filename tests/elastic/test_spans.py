"""Sets of numbers as spans, compared with sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.elastic.spans import Spans

bounds = st.integers(0, 30)
pairs = st.lists(st.tuples(bounds, bounds), max_size=6)


def members(spans: Spans) -> list[int]:
    """Return the numbers; assert that spans are sorted, not empty, and do not touch."""
    assert (spans.starts < spans.stops).all()
    assert (spans.stops[:-1] < spans.starts[1:]).all()
    found: list[int] = spans.numbers().tolist()
    assert len(found) == len(spans)
    return found


def numbers_of(some: list[tuple[int, int]]) -> set[int]:
    return {number for start, stop in some for number in range(start, stop)}


@given(pairs, pairs, st.integers(0, 35))
def test_they_are_sets(some: list[tuple[int, int]], more: list[tuple[int, int]], end: int) -> None:
    one, other = Spans.of(some), Spans.of(more)
    left, right = numbers_of(some), numbers_of(more)
    assert members(one) == sorted(left)
    assert members(Spans.of_numbers(np.array([*left], dtype=np.int64))) == sorted(left)
    assert members(one | other) == sorted(left | right)
    assert members(one & other) == sorted(left & right)
    assert members(one - other) == sorted(left - right)
    assert members(one.outside(end)) == sorted(set(range(end)) - left)


@given(pairs, pairs)
def test_numbers_have_places(some: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    spans, every = Spans.of(some), sorted(numbers_of(some))
    places = Spans.of([(min(a, len(every)), min(b, len(every))) for a, b in more])
    assert members(spans.within(places)) == [every[place] for place in members(places)]
    assert spans.at(np.arange(len(every))).tolist() == every
    asked = np.arange(31)
    assert spans.places_of(asked).tolist() == [every.index(n) for n in range(31) if n in every]

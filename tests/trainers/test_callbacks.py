"""Attributes of callbacks between ranks, without a trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbelastic.trainers.callbacks import Callbacks


class Watch:
    def __init__(self, rank: int) -> None:
        self.rank, self.path, self.device = rank, f"/tmp/{rank}", torch.tensor(float(rank))
        self.best, self.seen, self.weights = float("nan"), [], {"a": np.zeros(2)}
        self.begins, self.is_main, self.handle = 0, False, object()

    def begin(self, main: bool) -> None:
        self.begins += 1
        self.is_main = main


class Rank:
    """A rank's callback, and what it would commit."""

    def __init__(self, rank: int) -> None:
        self.watch = Watch(rank)
        self.callbacks = Callbacks(lambda: [self.watch])
        self.calls: list[tuple[bool, bool]] = []

    def begin(self, main: bool) -> None:
        def call(again: bool, goes_on: bool) -> None:
            self.calls.append((again, goes_on))
            self.watch.begin(main)

        self.callbacks.begin(main, call)


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    zero, one = Rank(0), Rank(1)
    one.callbacks.take(zero.callbacks.content(), own=False)
    zero.begin(True)
    one.begin(False)
    return zero, one


def test_what_was_not_changed_stays_the_ranks_own_if_it_was_so_at_first(ranks):
    zero, one = ranks
    one.watch.seen = [9]
    one.callbacks.take(zero.callbacks.content(), own=False)
    assert one.watch.seen == []
    zero.watch.seen.append(3)
    zero.watch.best = 0.5
    zero.watch.weights["a"][0] = 1.0
    one.callbacks.take(zero.callbacks.content(), own=False)
    assert (one.watch.rank, one.watch.path, float(one.watch.device)) == (1, "/tmp/1", 1.0)
    assert (one.watch.seen, one.watch.best, one.watch.weights["a"][0]) == ([3], 0.5, 1.0)
    assert not one.watch.is_main
    assert one.calls == [(False, False)]


def test_a_rank_that_becomes_the_main_one_begins_again_once(ranks):
    _, one = ranks
    one.watch.seen = [3]
    handle = one.watch.handle
    one.begin(True)
    one.begin(True)
    assert one.calls == [(False, False), (True, True)]
    assert (one.watch.is_main, one.watch.begins, one.watch.seen) == (True, 1, [3])
    assert one.watch.handle is handle


def test_a_rank_that_joins_begins_before_it_is_given_what_has_changed(ranks):
    zero, _ = ranks
    zero.watch.begins = 5
    late, later = Rank(2), Rank(3)
    late.callbacks.take(zero.callbacks.content(), own=False)
    later.callbacks.take(late.callbacks.content(), own=False)  # passed on before it has begun
    for each in (late, later):
        each.begin(False)
        assert each.calls == [(False, True)]
        assert each.watch.begins == 5
        assert each.watch.rank > 1


def test_a_failure_takes_back_what_was_changed_and_made_since(ranks):
    zero, _ = ranks
    zero.watch.seen = [3]
    committed = zero.callbacks.content()
    zero.watch.seen, zero.watch.new = [3, 4], 1
    zero.callbacks.take(committed, own=True)
    assert zero.watch.seen == [3]
    assert not hasattr(zero.watch, "new")


def test_a_commit_from_before_the_beginning_keeps_what_that_has_made():
    late = Rank(2)
    committed = late.callbacks.content()
    late.begin(True)
    late.watch.seen = [1]
    late.callbacks.take(committed, own=True)
    assert (late.watch.is_main, late.watch.begins, late.watch.seen) == (True, 1, [])

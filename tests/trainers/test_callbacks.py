"""Attributes of callbacks between ranks, without a trainer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from nbelastic.trainers.callbacks import Callbacks


class Rank:
    """A rank's callback, and what it would commit."""

    def __init__(self, rank: int) -> None:
        own = {"rank": rank, "path": f"/tmp/{rank}", "device": torch.tensor(float(rank))}
        changed = {"best": float("nan"), "seen": [], "weights": {"a": np.zeros(2)}}
        self.watch = SimpleNamespace(**own, **changed, begins=0, is_main=False, handle=object())
        self.callbacks = Callbacks(lambda: [self.watch])
        self.calls: list[tuple[bool, bool]] = []

    def begin(self, main: bool) -> None:
        def call(again: bool, goes_on: bool) -> None:
            self.calls.append((again, goes_on))
            self.watch.begins += 1
            self.watch.is_main = main

        self.callbacks.begin(main, call)

    def takes_from(self, other: Rank) -> None:
        self.callbacks.take(other.callbacks.content(), own=self is other)


def test_each_rank_keeps_its_own_and_has_what_training_has_changed() -> None:
    zero, one, late, later = map(Rank, range(4))
    one.takes_from(zero)
    zero.begin(True)
    one.begin(False)
    one.watch.seen = [9]  # the first commit has it as it was
    one.takes_from(zero)
    assert one.watch.seen == []
    zero.watch.seen.append(3)
    zero.watch.best = 0.5
    zero.watch.weights["a"][0] = 1.0
    one.takes_from(zero)
    assert (one.watch.rank, one.watch.path, float(one.watch.device)) == (1, "/tmp/1", 1.0)
    assert (one.watch.seen, one.watch.best, one.watch.weights["a"][0]) == ([3], 0.5, 1.0)
    handle = one.watch.handle
    for _ in range(2):  # it becomes the main one, once
        one.begin(True)
        assert one.calls == [(False, False), (True, True)]
        assert (one.watch.is_main, one.watch.begins, one.watch.seen) == (True, 1, [3])
        assert one.watch.handle is handle
    zero.watch.begins = 5
    late.takes_from(zero)
    later.takes_from(late)  # passed on before it has begun
    for each in (late, later):
        each.begin(False)
        assert each.calls == [(False, True)]
        assert (each.watch.begins, each.watch.seen) == (5, [3])
        assert each.watch.rank > 1


def test_a_failure_takes_back_what_was_changed_and_made_since_the_commit() -> None:
    zero, late = Rank(0), Rank(2)
    unbegun = late.callbacks.content()
    zero.begin(True)
    late.begin(True)
    zero.watch.seen.append(3)
    committed = zero.callbacks.content()
    zero.watch.seen, zero.watch.new = [3, 4], 1
    zero.callbacks.take(committed, own=True)
    assert zero.watch.seen == [3]
    assert not hasattr(zero.watch, "new")
    late.watch.seen = [1]
    late.callbacks.take(unbegun, own=True)  # from before the beginning, whose traces stay
    assert (late.watch.is_main, late.watch.begins, late.watch.seen) == (True, 1, [])

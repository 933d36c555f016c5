"""Epochs of fewer steps than the rows make, rows drawn by weights, and the ledger of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from nbelastic.data.loader import LEFT_EARLY
from nbelastic.data.plan.dealing import Draws
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import StateMismatch
from nbelastic.torch.state.torch_state import TorchState
from tests.data.worlds import training
from tests.support.world import StaticContext, run_ranks, world_of


def trained(state: TorchState, stop: int | None, epochs: int = 3) -> list[tuple[int, int]]:
    steps = []
    for state.epoch in range(state.epoch, epochs):
        for step in itertools.islice(state.loader, stop):
            state.optimizer.zero_grad()
            for (x,) in step:
                state.model(x.float().view(-1, 1)).mean().backward()
            if (state.epoch, step.number) == (1, 0) and state.fails:
                state.restore()
                state.fails = False
                return steps + trained(state, stop, epochs)
            state.optimizer.step()
            steps.append((state.epoch, step.number))
            state.commit()
    return steps


def loader_of(**options: Any) -> Loader:
    return Loader(TensorDataset(torch.arange(40)), Batch(8, micro=2), **options)


def state_of(fails: bool = False, **options: Any) -> TorchState:
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    return TorchState(model, optimizer, loader=loader_of(**options), epoch=0, fails=fails)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    with activate(context := world_of(0, 1)):
        monkeypatch.setattr(context, "warn", found.append)
        yield found


def test_a_failure_after_the_last_step_of_an_epoch_repeats_nothing(said: list[str]) -> None:
    found = trained(state_of(fails=True, steps=3), None)
    assert found == [(epoch, step) for epoch in range(3) for step in range(3)]
    assert said == []


def test_only_an_epoch_of_a_state_that_is_left_early_and_not_the_last_is_named(
    said: list[str],
) -> None:
    trained(state_of(), 3, epochs=1)
    loader = loader_of()
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(itertools.islice(loader, 2))
    assert said == []
    trained(state_of(steps=4), 3)
    assert said == [LEFT_EARLY.format(epoch=epoch, done=3, steps=4) for epoch in range(2)]


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    draws = Draws([0.0] * 10 + [1.0] * 20 + [5.0] * 10, 40)
    drawn = np.bincount(draws.rows(range(8000), key=7), minlength=40)
    assert not drawn[:10].any()
    assert drawn[10:].all()
    assert 0.9 < drawn[30:].mean() / drawn[10:30].mean() / 5 < 1.1


def test_a_state_with_other_weights_is_refused() -> None:
    one, same, other = (state_of(weights=[1.0] * 39 + [w]) for w in (1.0, 1.0, 2.0))
    one._unpack(same._pack())
    with pytest.raises(StateMismatch, match="weights"):
        other._unpack(one._pack())


# -- the ledger -----------------------------------------------------------------------------------

ROWS = 44


def test_rows_are_counted_once_whatever_is_rolled_back() -> None:
    loader = Loader(range(ROWS), Batch(8, micro=2))
    loader.participants.append(Mock())  # as a state adds one
    saved, seen, redone = loader.state_dict(), 0, 0
    for steps, commits in ((2, True), (3, False), (1, False), (1, True), (9, False), (9, True)):
        begun = 0
        for step in itertools.islice(loader, steps):
            list(step)
            begun += step.rows
        if commits:
            assert loader.rows_in_commit().seen == seen + begun
            saved = loader.state_dict()
            seen += begun
        else:
            loader.load_state_dict(saved)
            loader.rows_in_commit()  # as a state asks when it has been synchronised
            redone += begun
    step = next(iter(loader))
    list(step)
    seen += step.rows
    found = loader.rows_in_commit()
    assert (found.seen, found.redone, found.lost) == (seen, redone, 0)
    assert (found.source, found.done + found.left) == ("range", ROWS)


def train(context: StaticContext, passed_over: int) -> list[Any]:
    """Train, and return what each commit reports."""
    data = TensorDataset(torch.linspace(-1, 1, ROWS * 3).view(ROWS, 3))
    steps = training(Loader(data, Batch(8, micro=2)), 3, 2, passed_over)
    return [context.telemetry.data for _ in steps]


@pytest.mark.parametrize(("size", "passed_over"), [(1, -1), (3, -1), (2, 1)])
def test_what_ranks_have_taken_together_is_in_the_commit_and_the_rest_is_lost(
    size: int, passed_over: int
) -> None:
    steps, ends = [8, 8, 8, 8, 8, 4], []
    done = seen = 0
    for number, rows in enumerate(steps * 2):
        done = (0 if number % 6 == 0 else done) + rows
        if number % 6 != passed_over:
            seen += rows
            ends.append((number // 6, done, seen, sum((steps * 2)[: number + 1]) - seen))
    for found in run_ranks(size, lambda context: train(context, passed_over)):
        assert [(each.epoch, each.done, each.seen, each.lost) for (each,) in found] == ends

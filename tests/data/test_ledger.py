"""The ledger of rows: what steps should have had, what they have had, what was done again."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import TensorDataset

from nbelastic.data import Batch, Loader
from nbelastic.elastic.ranks.context import activate
from tests.data.worlds import training
from tests.support.world import StaticContext, run_ranks, world_of

ROWS = 44


def test_rows_are_counted_once_whatever_is_rolled_back() -> None:
    with activate(world_of(0, 1)):
        loader = Loader(range(ROWS), Batch(8, micro=2))
        loader.participants.append(Mock())  # as a state adds one
        saved, seen, redone = loader.state_dict(), 0, 0
        for steps, commits in ((2, True), (3, False), (1, False), (1, True), (9, False), (9, True)):
            begun = 0
            for number, step in enumerate(loader, 1):
                list(step)
                begun += step.rows
                if number == steps:
                    break
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
    assert (found.source, found.rows) == ("range", ROWS)


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

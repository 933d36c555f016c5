"""Epochs of fewer steps than the rows make, and rows that are drawn by weights."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives import SoloCommunicator
from nbelastic.data import Arrow, Batch, Loader
from nbelastic.data.loader import LEFT_EARLY
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext


def data(rows: int = 40) -> TensorDataset:
    return TensorDataset(torch.arange(rows))


def member(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def dealt(size: int, epochs: int = 1, **options: Any) -> dict[tuple[int, int, int], list[int]]:
    """Return the rows of each micro-batch, by epoch, step and number."""
    found = {}
    for rank in range(size):
        with activate(member(rank, size)):
            loader = Loader(data(), Batch(8, micro=2), seed=5, **options)
            for epoch in range(epochs):
                loader.set_epoch(epoch)
                for step in loader:
                    for number, (rows,) in zip(step.numbers, step, strict=True):
                        found[epoch, step.number, number] = rows.tolist()
    return found


# -- steps -----------------------------------------------------------------------------------------


def test_an_epoch_has_so_many_steps_and_its_order_is_the_same() -> None:
    whole, short = dealt(1, epochs=2), dealt(1, epochs=2, steps=3)
    assert short == {key: rows for key, rows in whole.items() if key[1] < 3}
    assert dealt(3, epochs=2, steps=3) == short
    assert dealt(1, epochs=2, steps=99) == whole


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


def state_of(fails: bool, **options: Any) -> TorchState:
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    loader = Loader(data(), Batch(8, micro=2), **options)
    return TorchState(model, optimizer, loader=loader, epoch=0, fails=fails)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("nbelastic.data.loader.warn", lambda _, text: found.append(text))
    return found


def test_a_failure_after_the_last_step_of_an_epoch_repeats_nothing(said: list[str]) -> None:
    with activate(member(0, 1)):
        undisturbed = trained(state_of(False, steps=3), None)
        assert undisturbed == [(epoch, step) for epoch in range(3) for step in range(3)]
        assert trained(state_of(True, steps=3), None) == undisturbed
    assert said == []


@pytest.mark.parametrize(("stop", "steps"), [(3, None), (1, None), (3, 4)])
def test_a_loop_that_stops_early_without_it_is_named(
    said: list[str], stop: int, steps: int | None
) -> None:
    with activate(member(0, 1)):
        trained(state_of(False, steps=steps), stop)
    whole = steps or 5
    assert said == [LEFT_EARLY.format(epoch=epoch, done=stop, steps=whole) for epoch in range(2)]


def test_a_last_epoch_that_stops_early_and_a_loader_in_no_state_are_not(said: list[str]) -> None:
    with activate(member(0, 1)):
        trained(state_of(False), 3, epochs=1)
        loader = Loader(data(), Batch(8, micro=2))
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(itertools.islice(loader, 2))
    assert said == []


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_other_numbers_of_steps_are_refused(steps: Any) -> None:
    with pytest.raises(OptionError, match=r"Loader\(steps="):
        Loader(data(), Batch(8, micro=2), steps=steps)


def test_streams_have_no_number_of_steps() -> None:
    shards = hvd.elastic.Shards([*"abcd"], lambda unit: iter([unit]))
    with pytest.raises(OptionError, match="its epoch lasts as long as its streams"):
        Loader(shards, Batch(8, micro=2), steps=3)


# -- weights ---------------------------------------------------------------------------------------

WEIGHTS = [0.0] * 10 + [1.0] * 20 + [5.0] * 10


@pytest.mark.slow
def test_draws_depend_on_seed_and_epoch_and_not_on_the_number_of_ranks() -> None:
    alone = dealt(1, epochs=2, weights=WEIGHTS)
    assert dealt(3, epochs=2, weights=WEIGHTS) == alone
    assert dealt(1, epochs=2, weights=np.array(WEIGHTS) * 1e-9, num_workers=1) == alone
    first = [alone[key] for key in alone if key[0] == 0]
    assert first != [alone[key] for key in alone if key[0] == 1]
    assert sum(map(len, first)) == 40


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    drawn = Counter(row for rows in dealt(1, 200, weights=WEIGHTS).values() for row in rows)
    assert not any(drawn[row] for row in range(10))
    light, heavy = (sum(drawn[row] for row in part) for part in (range(10, 30), range(30, 40)))
    assert 0.9 < (heavy / 10) / (light / 20) / 5 < 1.1
    assert min(drawn[row] for row in range(10, 40)) > 0


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0] * 39, "must be 40 numbers, one for each row; got shape"),
        ([[1.0]] * 40, "one for each row"),
        ("heavy", "one for each row; got str"),
        ([-1.0] + [1.0] * 39, "at least 0"),
        ([float("nan")] * 40, "finite"),
        ([0.0] * 40, "not all 0"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Loader(data(), Batch(8, micro=2), weights=weights)


def test_where_weights_have_no_meaning_they_are_refused() -> None:
    with pytest.raises(OptionError, match="draws have no order"):
        Loader(data(), Batch(8, micro=2), weights=[1.0] * 40, shuffle=False)
    table = pytest.importorskip("pyarrow").table({"x": list(range(40))})
    with pytest.raises(OptionError, match="only rows of a map-style dataset"):
        Loader(Arrow(table), Batch(8, micro=2), weights=[1.0] * 40)


def test_a_state_with_other_weights_is_refused() -> None:
    with activate(member(0, 1)):
        one, other = (state_of(False, weights=[1.0] * 39 + [w]) for w in (1.0, 2.0))
        one._unpack(state_of(False, weights=[1.0] * 40)._pack())
        with pytest.raises(StateMismatch, match="weights"):
            other._unpack(one._pack())


def test_a_kill_redraws_the_same_rows(said: list[str]) -> None:
    with activate(member(0, 1)):
        options = {"weights": WEIGHTS, "steps": 3}
        assert trained(state_of(True, **options), None) == trained(state_of(False, **options), None)

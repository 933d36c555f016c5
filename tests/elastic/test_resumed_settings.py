"""A resumed job says which of its settings are not those of the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.data import Batch, Loader
from nbelastic.elastic import ObjectState
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.gradients.optimizer import DistributedOptimizer
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import job, nothing, resumed


def told(url: object, build: Any, train: Any = nothing, run: str = "b") -> list[str]:
    """Resume, train and commit; return what is said of settings."""
    notes = resumed(url, build, train, run=run)[1]
    assert any("goes on from" in note for note in notes)
    return [note for note in notes if note.startswith("settings of the checkpoint")]


def torch_state(lr: float = 0.1, gamma: float = 0.5, seed: int = 0) -> TorchState:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
    sampler = ShardSampler(range(4), seed=seed)
    return TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0)


def loader_state(**options: Any) -> TorchState:
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    loader = Loader(torch.zeros(8, 1), Batch(4, micro=2), **options)
    return TorchState(model, optimizer, loader=loader, epoch=0)


def plain_state(shuffle: bool = True, **values: Any) -> ObjectState:
    return ObjectState(sampler=ShardSampler(range(4), shuffle=shuffle), **{"rate": 0.1, **values})


def decay(state: Any) -> None:
    """Change what training changes: that is no other setting."""
    state.optimizer.step()
    state.scheduler.step()
    state.epoch += 1


CASES: list[tuple[Any, dict[str, Any], str]] = [
    (torch_state, {"lr": 0.5}, "state.optimizer.param_groups[0]['lr'] 0.1 (not 0.5)"),
    (torch_state, {"gamma": 0.1}, "state.scheduler.gamma 0.5 (not 0.1)"),
    (torch_state, {"seed": 7}, "state.sampler.seed 0 (not 7)"),
    (loader_state, {"seed": 7}, "state.loader.seed 0 (not 7)"),
    (loader_state, {"shuffle": False}, "state.loader.shuffle True (not False)"),
    (plain_state, {"rate": 0.5}, "state.rate 0.1 (not 0.5)"),
    (plain_state, {"shuffle": False}, "state.sampler.shuffle True (not False)"),
]


@pytest.mark.parametrize(("build", "options", "message"), CASES)
def test_settings_of_a_function_that_do_not_hold_are_told(
    build: Any, options: Any, message: str, tmp_path: Any
) -> None:
    job(tmp_path, build, nothing)
    for run in ("b", "c"):  # told again: the next checkpoint still has the settings of the first
        (note,) = told(tmp_path, lambda: build(**options), run=run)
        assert f"that are not those of the function: {message}. The checkpoint's hold." in note


def test_what_training_has_changed_is_no_other_setting(tmp_path: Any) -> None:
    job(tmp_path, torch_state, decay)
    assert told(tmp_path, torch_state, decay) == []


def test_many_settings_are_counted(tmp_path: Any) -> None:
    def build(value: int) -> ObjectState:
        return ObjectState(**{f"value{number}": value for number in range(8)})

    job(tmp_path, lambda: build(0), nothing)
    (note,) = told(tmp_path, lambda: build(1))
    assert "state.value4 0 (not 1) and 3 more. " in note

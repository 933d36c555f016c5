"""A resumed job says which of its settings are not those of the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.data import Batch, Loader
from nbelastic.elastic import ObjectState
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.gradients.optimizer import DistributedOptimizer
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import Notes, begin, make_member, written
from tests.support.world import StaticContext, run_ranks


def run(url: object, build: Any, train: Any, *, resume: bool, run: str = "a") -> Notes:
    def rank(context: StaticContext) -> Any:
        plan = make_member(context, url, run=run, resume=resume)
        state = build()
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            train(state)
            state.commit()
            written(checkpoints)
            checkpoints.finish()
        return context.port

    return run_ranks(1, rank)[0]


def settings_in(notes: Notes) -> list[str]:
    return [note for note in notes if note.startswith("settings of the checkpoint")]


def nothing(state: Any) -> None:
    del state


def torch_state(
    lr: float = 0.1,
    gamma: float = 0.5,
    seed: int = 0,
    momentum: float = 0.0,
    **more: Any,
) -> TorchState:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
    sampler = ShardSampler(range(4), seed=seed)
    return TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, **more)


def loader_state(**options: Any) -> TorchState:
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    loader = Loader(torch.zeros(8, 1), Batch(4, micro=2), **options)
    return TorchState(model, optimizer, loader=loader, epoch=0)


def decay(state: Any) -> None:
    """Change what training changes: that is no other setting."""
    state.optimizer.step()
    state.scheduler.step()
    state.epoch += 1


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "learning rate": (
        torch_state,
        {"lr": 0.5},
        "state.optimizer.param_groups[0]['lr'] 0.1 (not 0.5)",
    ),
    "momentum": (
        torch_state,
        {"momentum": 0.9},
        "state.optimizer.param_groups[0]['momentum'] 0.0 (not 0.9)",
    ),
    "schedule": (torch_state, {"gamma": 0.1}, "state.scheduler.gamma 0.5 (not 0.1)"),
    "sampler": (torch_state, {"seed": 7}, "state.sampler.seed 0 (not 7)"),
    "seed": (loader_state, {"seed": 7}, "state.loader.seed 0 (not 7)"),
    "shuffle": (loader_state, {"shuffle": False}, "state.loader.shuffle True (not False)"),
    "drop_last": (loader_state, {"drop_last": True}, "state.loader.drop_last False (not True)"),
    "plain value": (
        lambda rate=0.1: ObjectState(rate=rate, epoch=0),
        {"rate": 0.5},
        "state.rate 0.1 (not 0.5)",
    ),
    "plain sampler": (
        lambda shuffle=True: ObjectState(sampler=ShardSampler(range(4), shuffle=shuffle)),
        {"shuffle": False},
        "state.sampler.shuffle True (not False)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_of_a_function_that_do_not_hold_are_told(name: str, tmp_path: Any) -> None:
    build, options, message = CASES[name]
    assert settings_in(run(tmp_path, build, nothing, resume=False)) == []
    notes = run(tmp_path, lambda: build(**options), nothing, resume=True, run="b")
    (note,) = settings_in(notes)
    assert f"that are not those of the function: {message}. The checkpoint's hold." in note
    # Told again: the next checkpoint still has the settings of the first.
    notes = run(tmp_path, lambda: build(**options), nothing, resume=True, run="c")
    assert message in settings_in(notes)[0]


def test_what_training_has_changed_is_no_other_setting(tmp_path: Any) -> None:
    run(tmp_path, torch_state, decay, resume=False)
    notes = run(tmp_path, torch_state, decay, resume=True, run="b")
    assert settings_in(notes) == []
    assert any("goes on from" in note for note in notes)


def test_many_settings_are_counted(tmp_path: Any) -> None:
    def build(value: int) -> ObjectState:
        return ObjectState(**{f"value{number}": value for number in range(8)})

    run(tmp_path, lambda: build(0), nothing, resume=False)
    (note,) = settings_in(run(tmp_path, lambda: build(1), nothing, resume=True, run="b"))
    assert "state.value4 0 (not 1) and 3 more. " in note

"""A resumed job says which of its settings are not those of the checkpoint."""

import pytest
import torch
from torch import nn

from nbelastic.data import Batch, Loader
from nbelastic.elastic import ObjectState
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.gradients.optimizer import DistributedOptimizer
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import job, nothing, resumed


def told(url, build, train=nothing, run="b"):
    """Resume, train and commit; return what is said of settings."""
    notes = resumed(url, build, train, run=run)[1]
    assert any("goes on from" in note for note in notes)
    return [note for note in notes if note.startswith("settings of the checkpoint")]


def torch_state(lr=0.1, gamma=0.5, seed=0):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
    sampler = ShardSampler(range(4), seed=seed)
    return TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0)


def loader_state(**options):
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    loader = Loader(torch.zeros(8, 1), Batch(4, micro=2), **options)
    return TorchState(model, optimizer, loader=loader, epoch=0)


def plain_state(shuffle=True, **values):
    return ObjectState(sampler=ShardSampler(range(4), shuffle=shuffle), **{"rate": 0.1, **values})


def many_values(value=0):
    return ObjectState(**{f"value{number}": value for number in range(8)})


def decay(state):
    """Change what training changes: that is no other setting."""
    state.optimizer.step()
    state.scheduler.step()
    state.epoch += 1


CASES = [
    (torch_state, {"lr": 0.5}, "state.optimizer.param_groups[0]['lr'] 0.1 (not 0.5)"),
    (torch_state, {"gamma": 0.1}, "state.scheduler.gamma 0.5 (not 0.1)"),
    (torch_state, {"seed": 7}, "state.sampler.seed 0 (not 7)"),
    (loader_state, {"seed": 7}, "state.loader.seed 0 (not 7)"),
    (loader_state, {"shuffle": False}, "state.loader.shuffle True (not False)"),
    (plain_state, {"rate": 0.5}, "state.rate 0.1 (not 0.5)"),
    (plain_state, {"shuffle": False}, "state.sampler.shuffle True (not False)"),
    (many_values, {"value": 1}, "state.value4 0 (not 1) and 3 more"),
]


@pytest.mark.parametrize(("build", "options", "message"), CASES)
def test_settings_of_a_function_that_do_not_hold_are_told(build, options, message, tmp_path):
    job(tmp_path, build, nothing)
    for run in ("b", "c"):  # told again: the next checkpoint still has the settings of the first
        (note,) = told(tmp_path, lambda: build(**options), run=run)
        assert "that are not those of the function: state." in note
        assert f"{message}. The checkpoint's hold." in note


def test_what_training_has_changed_is_no_other_setting(tmp_path):
    job(tmp_path, torch_state, decay)
    assert told(tmp_path, torch_state, decay) == []

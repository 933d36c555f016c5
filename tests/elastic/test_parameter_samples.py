"""Samples of parameters: from all over them, at the same places, and nothing is changed."""

import pytest
import torch

from nbelastic.elastic.training_checks import COUNT, sample
from tests.torch.training import make_model

MODELS = {
    "small": make_model,
    "many layers": lambda: torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(200)]),
    "one layer": lambda: torch.nn.Linear(1000, 1000, bias=False),
    "of many types": lambda: torch.nn.Sequential(
        *[torch.nn.Linear(2, 2, dtype=each) for each in (torch.double, torch.bfloat16, None)]
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_sample_is_small_and_changes_nothing(make):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    generator = torch.get_rng_state()
    values = sample([model])
    assert 6 <= len(values) <= 2 * COUNT
    assert values == sample([model, torch.optim.SGD(model.parameters(), 0.1)])
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    changed = [a != b for a, b in zip(values, sample([model]), strict=True)]
    assert all(changed)


def test_what_is_not_trained_is_not_sampled():
    frozen = make_model().requires_grad_(False)
    lazy = torch.nn.LazyLinear(3)
    empty = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0))])
    meta = torch.nn.Linear(2, 2, device="meta")
    complex_ = torch.nn.Linear(2, 2, dtype=torch.complex64)
    assert sample([frozen, lazy, empty, meta, complex_, object(), 5]) == ()

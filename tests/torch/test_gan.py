"""Two optimizers, one of whose losses leaves gradients in the parameters of the other."""

from __future__ import annotations

import functools

import pytest
import torch

import nbelastic.torch as hvd
from tests.support.world import run_ranks
from tests.torch.training import ROWS, STEPS, assert_close, assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("small_buckets")

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def of_model(model, optimizer):
    model.zero_grad()


def of_model_in_place(model, optimizer):
    model.zero_grad(set_to_none=False)


def of_optimizer(model, optimizer):
    optimizer.zero_grad()


def make_nets():
    generator = torch.Generator().manual_seed(0)
    nets = [
        torch.nn.Sequential(
            torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Linear(16, out)
        ).double()
        for width, out in ((6, 1), (4, 6))
    ]
    for parameter in torch.nn.ModuleList(nets).parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return nets


def loss_of(output, target):
    return torch.nn.functional.binary_cross_entropy_with_logits(
        output, torch.full_like(output, target)
    )


def train(rank, size, passes, zero_grad, *, freeze=False, steps=STEPS):
    """Train as PyTorch's DCGAN example does; ``passes`` of None is a plain optimizer."""
    critic, generator = make_nets()
    of_critic, of_generator = SGD(critic.parameters()), SGD(generator.parameters())
    if passes is not None:
        of_critic = hvd.DistributedOptimizer(of_critic, backward_passes_per_step=passes)
        of_generator = hvd.DistributedOptimizer(of_generator)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for step in range(steps):
        numbers = torch.Generator().manual_seed(step)
        real = torch.randn(ROWS, 6, dtype=torch.float64, generator=numbers)[rows]
        noise = torch.randn(ROWS, 4, dtype=torch.float64, generator=numbers)[rows]
        zero_grad(critic, of_critic)
        fake = generator(noise)
        if passes == 1:
            (loss_of(critic(real), 1.0) + loss_of(critic(fake.detach()), 0.0)).backward()
        else:
            loss_of(critic(real), 1.0).backward()
            loss_of(critic(fake.detach()), 0.0).backward()
        of_critic.step()
        zero_grad(generator, of_generator)
        critic.requires_grad_(not freeze)
        loss_of(critic(fake), 1.0).backward()
        critic.requires_grad_(True)
        of_generator.step()
    return parameters_of(torch.nn.ModuleList([critic, generator]))


def check(passes, zero_grad, **options):
    results = run_ranks(
        2, lambda context: train(context.rank, context.size, passes, zero_grad, **options)
    )
    assert_equal(*results)
    assert_close(results[0], train(0, 1, None, of_model))


@pytest.mark.parametrize("zero_grad", [of_model, of_model_in_place, of_optimizer])
def test_gradients_that_were_set_to_zero_between_passes_do_not_count(zero_grad):
    check(2, zero_grad)


@pytest.mark.parametrize("zero_grad", [of_model, of_model_in_place])
def test_frozen_while_another_loss_goes_through_one_pass_is_enough(zero_grad):
    check(1, zero_grad, freeze=True)


def test_one_pass_too_many_says_how_to_freeze():
    with pytest.raises(RuntimeError, match=r"another optimizer's step .*requires_grad_\(False\)"):
        check(1, of_model)

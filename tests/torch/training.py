"""A small task, and how a single process would train on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import nbelastic.torch as hvd

STEPS = 4
ROWS = 12  # per step; divides by 2, 3 and 4
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def filled(module: torch.nn.Module, seed: int) -> Any:
    """Return a module with other parameters, which depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)  # ranks are threads: they share torch's own
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return module


def make_model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 3),
    )
    return filled(model.double(), 0)


def distributed(**options: Any) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = make_model()
    optimizer = SGD(model.parameters())
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
    targets = torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return inputs[rows], targets[rows]


def loss_of(model: torch.nn.Module, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    inputs, targets = batch(step, rank, size)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def stepped(optimizer: Any, model: Any, step: int = 0, *place: int) -> list[torch.Tensor]:
    """Step with the batch of a rank of so many, or the whole one; return the parameters."""
    optimizer.zero_grad()
    loss_of(model, step, *place).backward()
    optimizer.step()
    return parameters_of(model)


def train_alone(
    make_optimizer: Callable[..., torch.optim.Optimizer], steps: int = STEPS
) -> list[torch.Tensor]:
    """Return the parameters after training on whole batches in one process."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return parameters_of(model)


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """All bits equal."""
    assert len(some) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def assert_close(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Equal but for the order of additions in float64."""
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)

"""A model with a bit of everything, and how to look at the bits of a training."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from nbelastic.torch.state.torch_state import TorchState


class Net(nn.Module):
    """Tied and frozen parameters, buffers of all kinds, a module that keeps extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("stretched", torch.zeros(1).expand(3))
        self.extra = Extra()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.extra.calls += 1
        return self.tied(self.drop(self.norm(self.first(x))))


class Extra(nn.Module):
    calls = 0

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


def bits(value: object) -> object:
    """Return a copy of `value` that compares equal only to what is equal bit for bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
        return ("tensor", tuple(value.shape), value.dtype, raw.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(each) for each in value)
    return copy.deepcopy(value)


def model_bits(model: nn.Module) -> object:
    return {
        name: (bits(tensor), tensor.requires_grad)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }


def optimizer_bits(optimizer: torch.optim.Optimizer) -> object:
    found = optimizer.state_dict()
    return bits({"state": found["state"], "groups": found["param_groups"]})


def generator_bits() -> list:
    # Python's state is a tuple of numbers, so it is taken as it is.
    return [random.getstate(), *bits([np.random.get_state(), torch.get_rng_state()])]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    """Train a little; ranks that are threads share PyTorch's generator, so with one of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def new_net(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.drop.p = 0.0
    return net


def adam(net: nn.Module, **options: object) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **options)


def everything(state: TorchState) -> object:
    optimizer = state.optimizer
    return (
        model_bits(state.model),
        None if optimizer is None else optimizer_bits(optimizer),
        bits({k: v for k, v in state._values().items() if k not in ("model", "optimizer")}),
    )

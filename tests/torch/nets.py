"""A model with a bit of everything, and how to look at the bits of a training."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch.training import filled


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


def bits(value: Any, seen: dict[int, Any] | None = None) -> object:
    """Return what compares equal only to what is equal bit for bit, and shares the same tensors.

    Of models, optimizers and the like it is all that a state keeps of them.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        number, _ = seen.setdefault(id(value), (len(seen), value))
        plain = value.detach().resolve_conj()
        raw = plain.to_dense() if plain.layout is not torch.strided else plain
        raw = raw.clone(memory_format=torch.contiguous_format).view(-1)
        data = raw.view(torch.uint8).numpy().tobytes()
        return number, tuple(value.shape), value.dtype, value.layout, value.requires_grad, data
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, nn.Module):
        return bits({name: _of_module(each) for name, each in value.named_modules()}, seen)
    if isinstance(value, torch.optim.Optimizer):
        parameters = [each for group in value.param_groups for each in group["params"]]
        states = [value.state.get(each) for each in parameters]
        return bits([value.param_groups, states, len(value.state)], seen)
    if isinstance(value, dict):
        # Wrappers of ``torch.compile`` change no name.
        named = [(str(key).split("."), each) for key, each in value.items()]
        pairs = [(".".join(k for k in key if k != "_orig_mod"), each) for key, each in named]
        return {key: bits(each, seen) for key, each in sorted(pairs, key=lambda pair: pair[0])}
    if isinstance(value, list | tuple):
        return type(value)(bits(each, seen) for each in value)
    if hasattr(value, "state_dict"):
        return bits({k: v for k, v in value.state_dict().items() if k[0] != "_"}, seen)
    return value.get_state().tolist() if isinstance(value, torch.Generator) else copy.copy(value)


def _of_module(module: nn.Module) -> object:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        plain: object = module.get_extra_state()
    else:
        kinds = (bool, int, float, str, tuple, type(None))
        own = vars(module).items()
        plain = {name: each for name, each in own if name[0] != "_" and isinstance(each, kinds)}
    return [module._parameters, module._buffers, plain]


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
    net: Net = filled(Net(), seed)
    net.drop.p = 0.0
    return net


def adam(net: nn.Module, **options: object) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **options)

"""Samples of a model's parameters, to compare ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

import torch
from torch.nn.parameter import is_lazy

COUNT = 64  # number of values of a sample, about

_OF_BATCHES = re.compile(r"running_(mean|var)$")


def sample(things: Iterable[object], *, models_only: bool = False) -> tuple[float, ...]:
    """Return values from all over the parameters that models and optimizers train.

    With `models_only`, those that were made to be a model's. It takes time that does not depend on
    how many there are, and changes nothing.
    """
    found: dict[int, torch.Tensor] = {}
    kind = torch.nn.Parameter if models_only else torch.Tensor
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            parameters = list(thing.parameters())
        elif isinstance(thing, torch.optim.Optimizer):
            parameters = [p for group in thing.param_groups for p in group["params"]]
        else:
            continue
        trained = (each for each in parameters if isinstance(each, kind) and each.requires_grad)
        found.update((id(each), each) for each in trained if _lies(each))
    return _values_of(list(found.values()))


def sampler_of(named: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], tuple[float, ...]]:
    """Return a function that samples tensors given to all ranks.

    Statistics of batches are left out, since each rank has its own.
    """
    tensors = [tensor for name, tensor in named if not _OF_BATCHES.search(name) and _lies(tensor)]
    return functools.partial(_values_of, tensors[:: max(1, len(tensors) // COUNT)])


@torch.no_grad()
def _values_of(tensors: list[torch.Tensor]) -> tuple[float, ...]:
    chosen = tensors[:: max(1, len(tensors) // COUNT)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in chosen:
        count = min(tensor.numel(), max(1, COUNT // len(chosen)))
        places = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64).long()
        values = tensor.detach().take(places.to(tensor.device)).float()
        by_device.setdefault(tensor.device, []).append(values)
    return tuple(value for each in by_device.values() for value in torch.cat(each).tolist())


def _lies(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has numbers that can be picked out of its memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_lazy(tensor)
    return (
        plain
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )

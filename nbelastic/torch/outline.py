"""Which tensors models and optimizers have, told quickly, so that a commit need not look again.

An *outline* is equal to an earlier one only if the same tensors are in the same places. It consists
of the ids of what there is, so it may be compared only with that of a moment whose tensors are all
alive still, as a commit keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.torch.handlers import options_of
from nbelastic.torch.snapshot import ATOMS

if TYPE_CHECKING:
    from nbelastic.torch.snapshot import Recorder

__all__ = ["outline", "renote"]

_USUAL = (torch.Tensor, torch.nn.Parameter)


def outline(thing: object) -> object:
    """Return a model's or optimizer's outline; None for all else, and where none can be told."""
    if isinstance(thing, torch.nn.Module):
        return _of_module(thing)
    return _of_optimizer(thing) if isinstance(thing, torch.optim.Optimizer) else None


def renote(recorder: Recorder, thing: object, content: Any) -> Any:
    """Return what a handler would note of `thing`, from what it has at the same outline.

    Of a model that is the same; of an optimizer, learning rates and the like may have changed.
    """
    if not isinstance(thing, torch.optim.Optimizer):
        return content
    groups, state = content
    pairs = zip(groups, thing.param_groups, strict=True)
    return [(slots, options_of(recorder, group)) for (slots, _), group in pairs], state


def _of_module(thing: torch.nn.Module) -> object:
    found: list[object] = []
    for module in _modules_of(thing):
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            return None
        found += module._modules
        found += map(id, module._modules.values())
        for kind in (module._parameters, module._buffers):
            found += kind
            for tensor in kind.values():
                if tensor is None:
                    found.append(None)
                elif type(tensor) not in _USUAL or tensor.layout is not torch.strided:
                    return None
                else:
                    found += (id(tensor), tensor.requires_grad)
    return found


def _modules_of(thing: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all in it, each once, faster than ``modules()`` does."""
    found = {id(thing): thing}
    queue = [thing]
    for module in queue:
        for child in module._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                queue.append(child)
    return queue


def _of_optimizer(thing: torch.optim.Optimizer) -> object:
    found: list[object] = [tuple(map(id, group["params"])) for group in thing.param_groups]
    for owner, values in thing.state.items():
        if type(owner) not in _USUAL:
            return None
        found.append(id(owner))
        for key, value in values.items():
            kind = type(value)
            if kind is torch.Tensor and value.layout is torch.strided:
                found += (key, id(value))
            elif kind in ATOMS:
                found += (key, kind, value)
            else:
                return None
    return found

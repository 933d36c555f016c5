"""Which tensors models and optimizers have, told quickly, so that a commit need not look again.

An *outline* is equal to an earlier one only if the same tensors are in the same places. It consists
of the ids of what there is, so it may be compared only with that of a moment whose tensors are all
alive still, as a commit keeps them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.torch.handlers import options_of
from nbelastic.torch.snapshot import ATOMS, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.snapshot import Recorder, Thing

__all__ = ["Outlined", "outline", "renote"]

_USUAL = (torch.Tensor, torch.nn.Parameter)


class Outlined:
    """What was noted of things with outlines. The same object stands for it as long as it holds.

    Parameters
    ----------
    things : list of object
        All objects with a handler.
    outlines : list
        For each its outline.
    noted : list of Thing
        The nodes of those that have one.
    tensors : list of torch.Tensor
        Theirs, for each slot one.

    Attributes
    ----------
    slots : dict of int to Slot
        For the id of each tensor its slot.
    whole : bool
        Whether no optimizer is without an outline.
    """

    def __init__(
        self,
        things: list[object],
        outlines: list[object],
        noted: list[Thing],
        tensors: list[torch.Tensor],
    ) -> None:
        self.things = things
        self.noted = noted
        self.tensors = tensors
        self.slots = {id(tensor): Slot(n) for n, tensor in enumerate(tensors)}
        self.whole = not any(
            found is None and isinstance(thing, torch.optim.Optimizer)
            for thing, found in zip(things, outlines, strict=True)
        )
        self._outlines = outlines

    def still(self, things: Sequence[object], outlines: Sequence[object]) -> bool:
        """Return whether things are the same, and have the same tensors in the same places."""
        return (
            self._outlines == outlines
            and len(self.things) == len(things)
            and all(map(operator.is_, self.things, things))
        )


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

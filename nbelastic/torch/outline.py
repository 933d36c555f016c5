"""Which tensors models and optimizers have, told quickly, so that a commit need not look again.

An *outline* is a row of what a thing consists of: modules, names, tensors. As long as another row
is made of the same objects, what was noted of the thing holds, tensors' values and an optimizer's
options apart. Whether it can be told so at all is asked once for each outline that is new.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from nbelastic.torch.handlers import options_of
from nbelastic.torch.snapshot import ATOMS, Slot, Thing, is_flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.snapshot import Recorder

__all__ = ["Outline", "Outlined", "outline", "renote"]

Outline = list[object]

_USUAL = (torch.Tensor, torch.nn.Parameter)


class Outlined:
    """What was noted of things with outlines. The same object stands for it as long as it holds.

    Parameters
    ----------
    things : list of object
        All objects with a handler.
    outlines : list of Outline
        For each its outline.

    Attributes
    ----------
    told : list of bool
        For each thing whether its outline tells all.
    whole : bool
        Whether that of every optimizer does.
    noted : list of Thing
        The nodes of those whose outline does.
    tensors : list of torch.Tensor
        Theirs, for each slot one.
    slots : dict of int to Slot
        For the id of each of them its slot.
    options : list of Outline
        For each of `noted`, if it is an optimizer with plain options, their values at the time.
    """

    def __init__(self, things: list[object], outlines: list[Outline]) -> None:
        self.things = things
        self.told = [_tells(thing) for thing in things]
        self.whole = all(
            tells or not isinstance(thing, torch.optim.Optimizer)
            for thing, tells in zip(things, self.told, strict=True)
        )
        self.noted: list[Thing] = []
        self.tensors: list[torch.Tensor] = []
        self.slots: dict[int, Slot] = {}
        self.options: list[Outline] = []
        self._outlines = outlines

    def fill(self, noted: Sequence[Thing], tensors: Sequence[torch.Tensor]) -> None:
        """Take in what was noted."""
        self.noted, self.tensors = list(noted), list(tensors)
        self.slots = {id(tensor): Slot(n) for n, tensor in enumerate(tensors)}
        self.options = [_plain_options_in(self.things[node.number]) for node in noted]

    def still(self, things: Sequence[object], outlines: Sequence[Outline]) -> bool:
        """Return whether things are the same, and have the same tensors in the same places."""
        return _same(self.things, things) and all(map(_same, self._outlines, outlines))


def outline(thing: object) -> Outline:
    """Return a model's or optimizer's outline; that of all else is empty."""
    if isinstance(thing, torch.nn.Module):
        return _of_module(thing)
    return _of_optimizer(thing) if isinstance(thing, torch.optim.Optimizer) else []


def renote(recorder: Recorder, thing: object, node: Thing, known: Outline) -> Thing:
    """Return the node of a thing from its node at the same outline and its options then.

    Of a model that is the same; of an optimizer, learning rates and the like may have changed.
    """
    if not isinstance(thing, torch.optim.Optimizer):
        return node
    if known and _same(known, _options_in(thing)):
        return node
    groups, state = node.content
    pairs = zip(groups, thing.param_groups, strict=True)
    options = [(slots, options_of(recorder, group)) for (slots, _), group in pairs]
    return Thing(node.number, (options, state))


def _options_in(thing: torch.optim.Optimizer) -> Outline:
    """Return all values that groups of parameters have, their parameters as one."""
    return [each for group in thing.param_groups for each in (*group, *group.values())]


def _plain_options_in(thing: object) -> Outline:
    """Return the same if they are all that there is to know; else nothing."""
    if not isinstance(thing, torch.optim.Optimizer):
        return []
    for group in thing.param_groups:
        for name, value in group.items():
            plain = type(value) in ATOMS or (type(value) is tuple and is_flat(value))
            if name != "params" and not plain:
                return []
    return _options_in(thing)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _of_module(thing: torch.nn.Module) -> Outline:
    found: Outline = []
    for module in _modules_of(thing):
        found.append(type(module))
        for kind in (module._modules, module._parameters, module._buffers):
            found += kind
            found += kind.values()
        found += [None if p is None else p.requires_grad for p in module._parameters.values()]
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


def _of_optimizer(thing: torch.optim.Optimizer) -> Outline:
    found: Outline = []
    for group in thing.param_groups:
        found.append(thing)  # where a group begins
        found += group["params"]
    for owner, values in thing.state.items():
        found.append(owner)
        found += values
        found += values.values()
    return found


def _tells(thing: object) -> bool:
    """Return whether an outline tells all there is to know of a thing, but values and options."""
    if isinstance(thing, torch.nn.Module):
        return all(map(_module_tells, _modules_of(thing)))
    if not isinstance(thing, torch.optim.Optimizer):
        return False
    values = [value for values in thing.state.values() for value in values.values()]
    return all(map(_is_usual, thing.state)) and all(
        type(value) in ATOMS or (type(value) is torch.Tensor and _is_usual(value))
        for value in values
    )


def _module_tells(module: torch.nn.Module) -> bool:
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        return False
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return all(tensor is None or _is_usual(tensor) for tensor in tensors)


def _is_usual(tensor: object) -> bool:
    return type(tensor) in _USUAL and tensor.layout is torch.strided  # type: ignore[attr-defined]

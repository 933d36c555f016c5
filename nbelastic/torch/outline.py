"""Which tensors models and optimizers have, told quickly, so that a commit need not look again.

An *outline* is a row of what a thing consists of: modules, names, tensors. As long as another row
is made of the same objects, what was noted of the thing holds, tensors' values and an optimizer's
options apart. Whether it can be told so at all is asked once for each outline that is new.

Rows are made by functions in C that are chained, since there is one in each commit.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

import torch

from nbelastic.torch.handlers import options_of
from nbelastic.torch.identity import same
from nbelastic.torch.snapshot import ATOMS, Slot, Thing, is_flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.snapshot import Recorder

__all__ = ["Outlined", "renote"]

Row = list[object]

_USUAL = (torch.Tensor, torch.nn.Parameter)
_all_of = itertools.chain.from_iterable
_dicts_in = operator.attrgetter("_modules", "_parameters", "_buffers")
_requires_grad = operator.attrgetter("requires_grad")
_holds = operator.methodcaller("holds")


class Outlined:
    """What was noted of things with outlines. The same object stands for it as long as it holds.

    Parameters
    ----------
    things : list of object
        All objects with a handler.
    labels : sequence of str, optional
        What they are called.

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
    options : list of list
        For each of `noted`, if it is an optimizer with plain options, their values at the time.
    """

    def __init__(self, things: list[object], labels: Sequence[str] = ()) -> None:
        self.things = things
        self.labels = labels
        self.told = [_tells(thing) for thing in things]
        self.whole = all(
            tells or not isinstance(thing, torch.optim.Optimizer)
            for thing, tells in zip(things, self.told, strict=True)
        )
        self.noted: list[Thing] = []
        self.tensors: list[torch.Tensor] = []
        self.slots: dict[int, Slot] = {}
        self.options: list[Row] = []
        self._outlines = [_outline(thing) for thing in things]

    def fill(self, noted: Sequence[Thing], tensors: Sequence[torch.Tensor]) -> None:
        """Take in what was noted."""
        self.noted, self.tensors = list(noted), list(tensors)
        self.slots = {id(tensor): Slot(n) for n, tensor in enumerate(tensors)}
        self.options = [_plain_options_in(self.things[node.number]) for node in noted]

    def still(self, things: Sequence[object]) -> bool:
        """Return whether things are the same, and have the same tensors in the same places."""
        return same(self.things, things) and all(map(_holds, self._outlines))


class _OfModule:
    """What a model consists of: were other modules in it, so would be values of the dicts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = _modules_of(model)
        self._types = [*map(type, self._modules)]
        self._dicts = [*_all_of(map(_dicts_in, self._modules))]
        self._empty = [each for each in self._dicts if not each]
        self._full = [each for each in self._dicts if each]
        self._names = [*_all_of(self._full)]
        self._values = [*_all_of(map(dict.values, self._full))]
        parameters = _all_of(module._parameters.values() for module in self._modules)
        self._parameters = [each for each in parameters if each is not None]
        self._flags = [*map(_requires_grad, self._parameters)]

    def holds(self) -> bool:
        return (
            all(map(operator.is_, _all_of(map(_dicts_in, self._modules)), self._dicts))
            and not any(self._empty)
            and [*map(type, self._modules)] == self._types
            and [*_all_of(self._full)] == self._names
            and same([*_all_of(map(dict.values, self._full))], self._values)
            and [*map(_requires_grad, self._parameters)] == self._flags
        )


class _OfOptimizer:
    """What an optimizer consists of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._row = self._look()
        self._names = self._look_at_names()

    def holds(self) -> bool:
        return self._look_at_names() == self._names and same(self._row, self._look())

    def _look_at_names(self) -> list[str]:
        return [*_all_of(self._optimizer.state.values())]

    def _look(self) -> Row:
        state, row = self._optimizer.state, Row()
        for group in self._optimizer.param_groups:
            row.append(self)  # where a group begins
            row += group["params"]
        row += state
        row += _all_of(map(dict.values, state.values()))
        return row


class _OfAnother:
    """What is looked at anew in each commit."""

    def holds(self) -> bool:
        return True


def _outline(thing: object) -> _OfModule | _OfOptimizer | _OfAnother:
    if isinstance(thing, torch.nn.Module) and _has_dicts(thing):
        return _OfModule(thing)
    if isinstance(thing, torch.optim.Optimizer):
        dicts = all(isinstance(values, dict) for values in thing.state.values())
        return _OfOptimizer(thing) if dicts else _OfAnother()
    return _OfAnother()


def renote(recorder: Recorder, thing: object, node: Thing, known: Row) -> Thing:
    """Return the node of a thing from its node at the same outline and its options then.

    Of a model that is the same; of an optimizer, learning rates and the like may have changed.
    """
    if not isinstance(thing, torch.optim.Optimizer):
        return node
    if known and same(known, _options_in(thing)):
        return node
    groups, state = node.content
    pairs = zip(groups, thing.param_groups, strict=True)
    options = [(slots, options_of(recorder, group)) for (slots, _), group in pairs]
    return Thing(node.number, (options, state))


def _options_in(thing: torch.optim.Optimizer) -> Row:
    """Return all values that groups of parameters have, their parameters as one."""
    return [each for group in thing.param_groups for each in (*group, *group.values())]


def _plain_options_in(thing: object) -> Row:
    """Return the same if they are all that there is to know; else nothing."""
    if not isinstance(thing, torch.optim.Optimizer):
        return []
    for group in thing.param_groups:
        for name, value in group.items():
            plain = type(value) in ATOMS or (type(value) is tuple and is_flat(value))
            if name != "params" and not plain:
                return []
    return _options_in(thing)


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


def _has_dicts(thing: torch.nn.Module) -> bool:
    """Return whether all is kept in dictionaries, which is not so of compiled modules."""
    return all(isinstance(each, dict) for each in _all_of(map(_dicts_in, _modules_of(thing))))


def _tells(thing: object) -> bool:
    """Return whether an outline tells all there is to know of a thing, but values and options."""
    if isinstance(thing, torch.nn.Module):
        return _has_dicts(thing) and all(map(_module_tells, _modules_of(thing)))
    if not isinstance(thing, torch.optim.Optimizer):
        return False
    if not all(isinstance(values, dict) for values in thing.state.values()):
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

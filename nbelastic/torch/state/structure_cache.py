"""Cache of the structure of models and optimizers from commit to commit.

The *structure* of an object is the row of objects that it consists of: modules, names, tensors. As
long as the row is made of the same objects, the captured content still holds, except for tensors'
values and an optimizer's options. Whether a structure is complete, is asked once for each new one.

Rows are made by chained functions in C, because each commit makes them.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

import torch

from nbelastic.torch.identity import same
from nbelastic.torch.state.adapters import keeps_more
from nbelastic.torch.state.flatten import ATOMS, ObjectNode, TensorRef, is_dense
from nbelastic.torch.state.optimizer_adapter import options_of, overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.state.flatten import Flattener

Row = list[object]

_USUAL = (torch.Tensor, torch.nn.Parameter)
_all_of = itertools.chain.from_iterable
_dicts_in = operator.attrgetter("_modules", "_parameters", "_buffers")
_requires_grad = operator.attrgetter("requires_grad")
_holds = operator.methodcaller("holds")


class StructureCache:
    """Captured content of objects, and the matching structures.

    As long as it holds, commits share one cache.
    """

    def __init__(self, objects: list[object], labels: Sequence[str] = ()) -> None:
        self.objects = objects
        self.labels = labels
        self.complete = [_is_complete(obj) for obj in objects]
        # The structure of every optimizer is complete.
        self.has_all_optimizers = all(
            is_complete or not isinstance(obj, torch.optim.Optimizer)
            for obj, is_complete in zip(objects, self.complete, strict=True)
        )
        self.captured: list[ObjectNode] = []  # of objects with a complete structure
        self.tensors: list[torch.Tensor] = []  # theirs, in the order of their references
        self.refs: dict[int, TensorRef] = {}  # by the tensors' ids
        self._structures = [each for obj in objects for each in _structures_of(obj)]

    def fill(self, captured: Sequence[ObjectNode], tensors: Sequence[torch.Tensor]) -> None:
        """Add the captured nodes and tensors."""
        self.captured, self.tensors = list(captured), list(tensors)
        self.refs = {id(tensor): TensorRef(n) for n, tensor in enumerate(tensors)}

    def holds(self, objects: Sequence[object]) -> bool:
        """Return whether objects are the same, and have the same tensors in the same places."""
        return same(self.objects, objects) and all(map(_holds, self._structures))


class _ModuleStructure:
    """Structure of a model; other modules would show as other values of the dicts."""

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


class _OptimizerStructure:
    """Structure of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._overrides = overrides(optimizer)
        self._row = self._look()
        self._names = self._look_at_names()

    def holds(self) -> bool:
        return (
            self._look_at_names() == self._names
            and same(self._row, self._look())
            and overrides(self._optimizer) == self._overrides
        )

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


def _structures_of(obj: object) -> list[_ModuleStructure | _OptimizerStructure]:
    """Return the structure of an object, unless each commit traverses it anew."""
    if isinstance(obj, torch.nn.Module) and _has_dicts(obj):
        return [_ModuleStructure(obj)]
    if isinstance(obj, torch.optim.Optimizer) and _has_state_dicts(obj):
        return [_OptimizerStructure(obj)]
    return []


def recapture(flattener: Flattener, obj: object, node: ObjectNode) -> ObjectNode:
    """Return the node of an object with the same structure as before.

    A model's settings may have changed, and an optimizer's learning rate and the like.
    """
    settings = getattr(node.content, "settings", None)
    renewed = None if settings is None else settings.renewed()
    if renewed is not settings:
        node = ObjectNode(node.number, node.content._replace(settings=renewed))
    if not isinstance(obj, torch.optim.Optimizer):
        return node
    pairs = zip(node.content.groups, obj.param_groups, strict=True)
    options = [(refs, options_of(flattener, group)) for (refs, _), group in pairs]
    return ObjectNode(node.number, node.content._replace(groups=options))


def _modules_of(obj: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all modules in it, each once, faster than ``modules()`` does."""
    found = {id(obj): obj}
    queue = [obj]
    for module in queue:
        for child in module._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                queue.append(child)
    return queue


def _has_dicts(obj: torch.nn.Module) -> bool:
    """Return whether modules keep everything in dictionaries, unlike scripted ones."""
    return all(isinstance(each, dict) for each in _all_of(map(_dicts_in, _modules_of(obj))))


def _has_state_dicts(obj: torch.optim.Optimizer) -> bool:
    return all(isinstance(values, dict) for values in obj.state.values())


def _is_complete(obj: object) -> bool:
    """Return whether a structure has all of an object but tensors' values and options."""
    if isinstance(obj, torch.nn.Module):
        return _has_dicts(obj) and all(map(_module_is_complete, _modules_of(obj)))
    if not isinstance(obj, torch.optim.Optimizer):
        return bool(getattr(obj, "nbelastic_complete", False))  # an integration's object says so
    if overrides(obj) or not _has_state_dicts(obj):
        return False
    values = [value for values in obj.state.values() for value in values.values()]
    return all(map(_is_usual, obj.state)) and all(
        type(value) in ATOMS or (type(value) is torch.Tensor and _is_usual(value))
        for value in values
    )


def _module_is_complete(module: torch.nn.Module) -> bool:
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state or keeps_more(module):
        return False
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return all(tensor is None or _is_usual(tensor) for tensor in tensors)


def _is_usual(tensor: object) -> bool:
    return type(tensor) in _USUAL and is_dense(tensor)  # type: ignore[arg-type]

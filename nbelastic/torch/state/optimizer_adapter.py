"""Adapter for optimizers, including wrappers of others and classes of users.

Of each optimizer the adapter captures groups of parameters, the state of each parameter, and plain
attributes, as modules have them. If a class overrides ``state_dict()`` or ``load_state_dict()``,
the state dict is captured as well, and holds whatever else the optimizer keeps. Without them, other
attributes are refused.

Optimizers in attributes are objects of the state themselves. Those around them are restored first,
because a ``load_state_dict()`` may replace groups and state of the optimizers within. Groups and
state come last, and in place: lists and dicts that optimizers share stay shared.
"""

from __future__ import annotations

import collections
import contextlib
import random
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nbelastic.elastic.state.in_place import attributes_in
from nbelastic.errors import NbelasticError, StateMismatch
from nbelastic.torch.gradients.reducer import Reducer
from nbelastic.torch.state.flatten import (
    ATOMS,
    Adapter,
    ContainerNode,
    TensorRef,
    ValueNode,
    mapping,
    nested,
)
from nbelastic.torch.state.settings import Settings, attributes_of_optimizers, is_plain
from nbelastic.torch.state.structure import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbelastic.torch.state.flatten import Flattener, Node, Unflattener
    from nbelastic.torch.state.settings import SentSettings
    from nbelastic.torch.state.structure import Structure, TensorNames

_Optimizer = torch.optim.Optimizer

_DATA = (
    *(torch.Tensor, np.generic, np.ndarray, set, frozenset, collections.deque),
    *(random.Random, np.random.Generator, np.random.RandomState),
)

_LISTS = ("param_groups", "state")

_SHARDED = "ZeroRedundancyOptimizer"

_ADVICE = (
    ", so they would be neither restored nor sent: give the class state_dict() and "
    "load_state_dict(), or register a handler (elastic.state.set_handler_registry)"
)

# Optimizers whose attributes were searched, and whose state dict was loaded once.
_checked: weakref.WeakSet[_Optimizer] = weakref.WeakSet()


class OptimizerContent(NamedTuple):
    """Captured content of an optimizer."""

    groups: Sequence[tuple[list[TensorRef], dict[str, Node]]]  # parameters, and options
    state: Sequence[tuple[TensorRef, dict[str, Node]]]  # of each parameter that has some
    settings: Settings | SentSettings | None = None  # plain attributes; of torch's own, none
    custom: Node | None = None  # its state dict, if that is not torch's


class OptimizerAdapter(Adapter):
    """Optimizers: torch's, users' own, and wrappers of optimizers."""

    def capture(self, flattener: Flattener, obj: _Optimizer) -> OptimizerContent:
        groups = [
            (
                [flattener.flatten(parameter) for parameter in group["params"]],
                options_of(flattener, group),
            )
            for group in obj.param_groups
        ]
        state: Any = [
            (
                flattener.flatten(owner),
                {key: flattener.flatten(each) for key, each in values.items()},
            )
            for owner, values in obj.state.items()
        ]
        if is_torchs(obj):
            return OptimizerContent(groups, state)  # type: ignore[arg-type]
        if obj not in _checked:
            _check(flattener, obj)
            _checked.add(obj)
        custom = flattener.flatten(obj.state_dict()) if overrides(obj) else None
        return OptimizerContent(groups, state, Settings(obj), custom)  # type: ignore[arg-type]

    def restore(self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent) -> None:
        self._put_back(unflattener, obj, content)
        if content.custom is not None:
            with same_lists(obj):
                load(obj, unflattener, content.custom)
            self._put_back(unflattener, obj, content)
        if content.settings is not None:
            content.settings.restore(obj)

    def _put_back(
        self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent
    ) -> None:
        groups, state = content.groups, content.state
        live = obj.param_groups
        if isinstance(getattr(obj, "_reducer", None), Reducer):
            obj.reset()  # type: ignore[attr-defined]
        del live[len(groups) :]
        models = set() if unflattener.local else unflattener.restored()
        for index, (refs, captured) in enumerate(groups):
            if index == len(live):
                live.append({"params": []})
            group = live[index]
            own = [each for each in group["params"] if id(each) not in models]
            parameters = _parameters(unflattener, refs, own)
            for parameter in parameters:
                parameter.grad = None
            options = {key: unflattener.unflatten(node) for key, node in captured.items()}
            group.clear()
            group.update(params=parameters, **options)
        built = {
            unflattener.unflatten(owner): {
                key: unflattener.unflatten(node) for key, node in values.items()
            }
            for owner, values in state
        }
        obj.state.clear()
        obj.state.update(built)

    def parts(self, label: str, content: OptimizerContent, names: TensorNames) -> Structure:
        return {
            ("parameter group", f"{label}.param_groups[{index}]"): tuple(
                sorted(names.known.get(ref, OWN + names.words[ref]) for ref in refs)
            )
            for index, (refs, _) in enumerate(content.groups)
        }

    def state_dict(self, content: OptimizerContent, *, whole: bool = False) -> Node:
        if content.custom is not None and not whole:
            return content.custom
        groups, state = _lists_of(content, whole)
        nodes = {"state": state, "param_groups": groups}
        if isinstance(content.custom, ContainerNode) and content.custom.keys is not None:
            pairs = zip(content.custom.keys, content.custom.nodes, strict=True)
            nodes = {**{str(key): node for key, node in pairs}, **nodes}
        return mapping(nodes)


def _lists_of(content: OptimizerContent, whole: bool = False) -> tuple[Node, Node]:
    """Return groups and state by numbers of parameters; groups with parameters if `whole`."""
    numbers: dict[TensorRef, int] = {}
    for ref in [
        *(s for refs, _ in content.groups for s in refs),
        *(s for s, _ in content.state),
    ]:
        numbers.setdefault(ref, len(numbers))
    groups = [
        mapping(
            {
                **options,
                "params": ContainerNode(list, None, list(refs))
                if whole
                else ValueNode([numbers[ref] for ref in refs]),
            }
        )
        for refs, options in content.groups
    ]
    state = mapping({numbers[ref]: mapping(values) for ref, values in content.state})
    return ContainerNode(list, None, groups), state


def options_of(flattener: Flattener, group: dict[str, Any]) -> dict[str, Node]:
    """Capture a parameter group without its parameters."""
    return {key: flattener.flatten(each) for key, each in group.items() if key != "params"}


def own_attributes(obj: _Optimizer) -> dict[str, Any]:
    """Return attributes that not every optimizer has; of torch's own classes, none."""
    own = {} if is_torchs(obj) else vars(obj)
    return {name: each for name, each in own.items() if name not in attributes_of_optimizers()}


def is_torchs(obj: _Optimizer) -> bool:
    """Return whether a class is torch's own; distributed ones have their base's module."""
    return type(obj).__module__.startswith("torch.optim.") and not overrides(obj)


def hooks_see_steps(obj: _Optimizer) -> bool:
    """Return whether hooks on an optimizer's ``step()`` see all its changes of tensors.

    They do not where its base is not initialised, or where it has methods of its own: an ``eval()``
    may swap averages in, often through ``tensor.data``.
    """
    if is_torchs(obj):
        return True
    own = [e for e in type(obj).__mro__ if not e.__module__.startswith(("torch.", "nbelastic."))]
    step: Any = next((vars(kind)["step"] for kind in own if "step" in vars(kind)), None)
    hooked = "_optimizer_step_post_hooks" in vars(obj) and getattr(step, "hooked", step is None)
    return bool(hooked) and not any(
        callable(value) and not name.startswith("_") and not hasattr(_Optimizer, name)
        for kind in own
        for name, value in vars(kind).items()
    )


def overrides(obj: _Optimizer) -> bool:
    """Return whether an optimizer overrides or hooks its state dict."""
    kind = type(obj)
    return (
        kind.state_dict is not _Optimizer.state_dict
        or kind.load_state_dict is not _Optimizer.load_state_dict
        or any(map(vars(obj).get, _OF_STATE_DICTS))
    )


# Attributes by which one optimizer changes what its state dict is.
_OF_STATE_DICTS = (
    "state_dict",
    "load_state_dict",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def within(obj: object) -> list[_Optimizer]:
    """Return the optimizers in the attributes of an object, first the object if an optimizer."""
    found: dict[int, _Optimizer] = {}
    queue = [obj]
    for each in queue:
        if isinstance(each, _Optimizer):
            found[id(each)] = each
        for name, value in getattr(each, "__dict__", {}).items():
            for item in nested(value) if name not in attributes_of_optimizers() else ():
                if isinstance(item, _Optimizer) and id(item) not in found:
                    found[id(item)] = item
                    queue.append(item)
    return list(found.values())


def _check(flattener: Flattener, obj: _Optimizer) -> None:
    """Raise an error if an optimizer keeps what neither attributes nor its state dict hold."""
    name = type(obj).__qualname__
    if any(kind.__name__ == _SHARDED for kind in type(obj).__mro__):
        raise NbelasticError(
            f"a {name} keeps of the optimizer's state only this rank's share, which is lost with "
            "the rank; use the optimizer that it is made of, in DistributedOptimizer"
        )
    if overrides(obj):
        with same_lists(obj):  # an error should come now, not after a failure
            _load(obj, obj.state_dict())
        return
    if any("__slots__" in vars(kind) for kind in type(obj).__mro__):
        raise NbelasticError(
            f"{name} keeps attributes in __slots__, which a state cannot see{_ADVICE}"
        )
    shared = [vars(each).get(name) for each in within(obj) for name in _LISTS]
    known = {id(each) for each in shared} | {id(p) for g in obj.param_groups for p in g["params"]}
    for attribute, value in own_attributes(obj).items():
        if id(value) in known or is_plain(value):
            continue
        for each in nested(value):
            if id(each) not in known and not flattener.is_object(each) and _is_data(each):
                kind = type(value).__qualname__
                raise NbelasticError(
                    f"{name}.{attribute} (a {kind}) holds values that a state cannot see{_ADVICE}"
                )


def _is_data(value: object) -> bool:
    """Return whether a value may change in training: a number, a tensor, an object with any."""
    return not callable(value) and (
        isinstance(value, _DATA) or type(value) in ATOMS or bool(attributes_in(value))
    )


def load(obj: Any, unflattener: Unflattener, node: Node) -> None:
    """Load a captured state dict into an object."""
    state_dict = unflattener.unflatten(node)
    unflattener.flush()
    _load(obj, state_dict)


def _load(obj: Any, state_dict: Any) -> None:
    try:
        obj.load_state_dict(state_dict)
    except Exception as error:  # whatever the user's classes raise
        name = type(obj).__qualname__
        raise NbelasticError(
            f"{name}.load_state_dict() does not take what {name}.state_dict() has given: "
            f"{error!r}; so a state can neither restore nor send it"
        ) from error


@contextlib.contextmanager
def same_lists(obj: object) -> Iterator[None]:
    """Put back lists and dicts that ``load_state_dict`` replaces, for other objects' references.

    These are the groups and states of an optimizer, and of those within an object.
    """
    optimizers = within(obj)
    before = [{k: vars(each)[k] for k in _LISTS if k in vars(each)} for each in optimizers]
    yield
    replaced = {
        id(vars(each)[name]): (vars(each)[name], value)
        for each, lists in zip(optimizers, before, strict=True)
        for name, value in lists.items()
        if name in vars(each)
    }
    for each in optimizers:
        for name, value in list(vars(each).items()):
            if id(value) in replaced:
                vars(each)[name] = replaced[id(value)][1]


def _parameters(
    unflattener: Unflattener, refs: Sequence[TensorRef], own: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return a group's parameters: a model's by reference, its own by position."""
    if unflattener.local:
        return [unflattener.tensor(ref) for ref in refs]
    if len(own) != sum(not unflattener.has(ref) for ref in refs):
        raise StateMismatch("the optimizer of this rank has other parameters that no model has")
    rest = iter(own)
    return [unflattener.tensor(ref, None if unflattener.has(ref) else next(rest)) for ref in refs]

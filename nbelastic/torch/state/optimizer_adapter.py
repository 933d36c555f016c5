"""Adapter for optimizers, including wrappers of others and classes of users.

An optimizer that is not torch's may keep state anywhere. The adapter captures:

- groups of parameters and the state of each parameter, also of optimizers in its attributes;
- attributes that hold numbers, strings, tensors, random generators, containers of them, or objects
  of plain classes with numbers and strings (a schedule that counts);
- its ``state_dict()``, if it overrides that method or ``load_state_dict()``.

A restore puts all of it back. A rank that receives it takes over the attributes that have changed
since the sender's optimizer was built, so that attributes that differ by rank stay. The state dict
is loaded before groups and state, and lists and dicts that optimizers share stay shared. Objects
are changed in place, because the user's loop may refer to them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import pickle
import random
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nbelastic.elastic.state.in_place import adopt, attributes_in
from nbelastic.errors import NbelasticError, StateMismatch
from nbelastic.torch.gradients.reducer import Reducer
from nbelastic.torch.state.flatten import (
    ATOMS,
    Adapter,
    ContainerNode,
    ObjectNode,
    TensorRef,
    ValueNode,
    children_of,
    is_container,
    mapping,
    nested,
)
from nbelastic.torch.state.structure import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbelastic.torch.state.flatten import Flattener, Node, Unflattener
    from nbelastic.torch.state.structure import Structure, TensorNames

_Optimizer = torch.optim.Optimizer


@functools.cache
def _common() -> frozenset[str]:
    """Return attributes of any optimizer: torch's, ours, those of schedulers and scalers."""
    torchs = vars(torch.optim.SGD([torch.zeros(1)]))  # the first one of a process imports Dynamo
    ours = {"_reducer", "_op", "_skips"}
    return frozenset(
        {*torchs, *ours, "step", "_opt_called", "_step_count", "grad_scale", "found_inf"}
    )


_ARRAYS = (np.generic, np.ndarray)
_COLLECTIONS = (set, frozenset, collections.deque)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_DEEPEST = 6  # levels of objects within objects that are searched for tensors

_LISTS = ("param_groups", "state")

_SHARDED = "ZeroRedundancyOptimizer"

_ADVICE = (
    ", so they would be neither restored nor sent: give the class state_dict() and "
    "load_state_dict(), or register a handler (elastic.state.set_handler_registry)"
)

# Pickled attributes without tensors of each optimizer, from its first capture.
_built: weakref.WeakKeyDictionary[Any, dict[str, bytes]] = weakref.WeakKeyDictionary()

# Names of each optimizer's attributes that were searched for tensors.
_searched: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


class OptimizerContent(NamedTuple):
    """Captured content of an optimizer."""

    groups: Sequence[tuple[list[TensorRef], dict[str, Node]]]  # parameters, and options
    state: Sequence[tuple[TensorRef, dict[str, Node]]]  # of each parameter that has some
    attributes: Mapping[str, Node] = MappingProxyType({})  # others
    changed: frozenset[str] = frozenset()  # of them, since it was built; or with tensors
    inner: Sequence[ObjectNode] = ()  # objects with an adapter among its attributes
    custom: Node | None = None  # its state dict, if that is not torch's


class OptimizerAdapter(Adapter):
    """Optimizers, those that wrap others, and those of users."""

    def capture(self, flattener: Flattener, obj: _Optimizer) -> OptimizerContent:
        groups = [
            (
                [flattener.flatten(parameter) for parameter in group["params"]],
                options_of(flattener, group),
            )
            for group in obj.param_groups
        ]
        state = [
            (
                flattener.flatten(owner),
                {key: flattener.flatten(each) for key, each in values.items()},
            )
            for owner, values in obj.state.items()
        ]
        content: Any = OptimizerContent(groups, state)  # type: ignore[arg-type]
        return content if is_torchs(obj) else self._capture_more(flattener, obj, content)

    def _capture_more(
        self, flattener: Flattener, obj: _Optimizer, content: OptimizerContent
    ) -> OptimizerContent:
        attributes = attributes_of(obj)
        if _searched.get(obj) != frozenset(attributes):
            _refuse(flattener, obj)
            _searched[obj] = frozenset(attributes)
        if _overrides(obj) and obj not in _built:
            with same_lists(within(obj)):  # an error should come now, not after a failure
                _load(obj, obj.state_dict())
        plain = {name: each for name, each in attributes.items() if _is_plain(each)}
        as_bytes = {name: _frozen(each) for name, each in plain.items()}
        built = _built.setdefault(obj, {k: v for k, v in as_bytes.items() if v is not None})
        inner = [
            flattener.flatten(each)
            for value in attributes.values()
            for each in nested(value)
            if flattener.is_object(each) and each is not obj
        ]
        custom = None
        if _overrides(obj):
            custom = flattener.flatten(obj.state_dict())
        return content._replace(
            attributes={name: flattener.flatten(each) for name, each in plain.items()},
            changed=frozenset(
                name for name, each in as_bytes.items() if each is None or built.get(name) != each
            ),
            inner=[node for node in inner if isinstance(node, ObjectNode)],
            custom=custom,
        )

    def restore(self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent) -> None:
        for node in content.inner:
            unflattener.unflatten(node)
        self.put_back(unflattener, obj, content, set())
        if content.custom is not None:
            with same_lists(within(obj)):
                load(obj, unflattener, content.custom)
            self.put_back(unflattener, obj, content, set())

    def put_back(
        self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent, done: set[int]
    ) -> None:
        """Put groups, state and attributes in place, also in the optimizers within."""
        if id(obj) in done:
            return
        done.add(id(obj))
        for node in content.inner:
            inner = unflattener.objects[node.number]
            if isinstance(inner, _Optimizer):
                self.put_back(unflattener, inner, node.content, done)
        self._put_back_groups(unflattener, obj, content)
        if not is_torchs(obj):
            _put_back_attributes(unflattener, obj, content)

    def _put_back_groups(
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
        nodes = {"state": state, "param_groups": groups, **(content.attributes if whole else {})}
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


def attributes_of(obj: _Optimizer) -> dict[str, Any]:
    """Return an optimizer's own attributes, except groups and state under any name."""
    if is_torchs(obj):
        return {}
    lists = [vars(each).get(name) for each in within(obj) for name in _LISTS]
    known = set(map(id, lists))
    return {
        name: value
        for name, value in vars(obj).items()
        if name not in _common() and id(value) not in known
    }


def is_simple(obj: _Optimizer) -> bool:
    """Return whether an optimizer consists of groups and state."""
    if is_torchs(obj):
        return True
    values = attributes_of(obj).values()
    return not (_overrides(obj) or any(map(_is_plain, values)) or len(within(obj)) > 1)


def is_torchs(obj: _Optimizer) -> bool:
    """Return whether a class is torch's own; distributed ones have their base's module."""
    return type(obj).__module__.startswith("torch.optim.") and not _overrides(obj)


def hooks_see_steps(obj: _Optimizer) -> bool:
    """Return whether hooks on an optimizer's ``step()`` see all changes that it makes to tensors.

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


def _overrides(obj: _Optimizer) -> bool:
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
    """Return the optimizers in the attributes of an object, itself first if it is one."""
    found: dict[int, _Optimizer] = {}
    queue = [obj]
    for each in queue:
        if isinstance(each, _Optimizer):
            found[id(each)] = each
        for name, value in getattr(each, "__dict__", {}).items():
            for item in nested(value) if name not in _common() else ():
                if isinstance(item, _Optimizer) and id(item) not in found:
                    found[id(item)] = item
                    queue.append(item)
    return list(found.values())


def _is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, strings, arrays, tensors and records."""
    return all(_is_data(each) or is_container(each) or _is_record(each) for each in nested(value))


def _is_data(value: object) -> bool:
    return (
        type(value) in ATOMS
        or isinstance(value, (torch.Tensor, *_ARRAYS, *_RANDOM))
        or (type(value) in _COLLECTIONS and ATOMS.issuperset(map(type, value)))  # type: ignore[call-overload]
    )


def _is_record(value: object, depth: int = 0) -> bool:
    """Return whether an object of a user's class holds numbers and strings, and no tensors."""
    attributes = attributes_in(value)
    return (
        bool(attributes)
        and depth <= _DEEPEST
        and all(
            is_container(each)
            or (_is_data(each) and not isinstance(each, torch.Tensor))
            or _is_record(each, depth + 1)
            for part in (attributes or {}).values()
            for each in nested(part)
        )
    )


def _frozen(value: object) -> bytes | None:
    """Return a plain value as bytes; None if it has tensors or cannot be pickled."""
    if any(isinstance(each, torch.Tensor) for each in nested(value)):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # such as a dict's factory that is a local function
        return None


def _refuse(flattener: Flattener, obj: _Optimizer) -> None:
    """Raise an error if an optimizer keeps tensors where they cannot be captured."""
    name = type(obj).__qualname__
    if any(kind.__name__ == _SHARDED for kind in type(obj).__mro__):
        raise NbelasticError(
            f"a {name} keeps of the optimizer's state only this rank's share, which is lost with "
            "the rank; use the optimizer that it is made of, in DistributedOptimizer"
        )
    if _overrides(obj):
        return
    if any("__slots__" in vars(kind) for kind in type(obj).__mro__):
        raise NbelasticError(
            f"{name} keeps attributes in __slots__, which a state cannot see{_ADVICE}"
        )
    seen = {id(p) for group in obj.param_groups for p in group["params"]}
    for attribute, value in attributes_of(obj).items():
        for each in nested(value):
            plain = flattener.is_object(each) or is_container(each) or _is_plain(each)
            if not plain and _holds_tensors(each, seen):
                kind = type(each).__qualname__
                raise NbelasticError(
                    f"{name}.{attribute} (a {kind}) holds tensors that a state cannot see{_ADVICE}"
                )


def _holds_tensors(value: object, seen: set[int], depth: int = 0) -> bool:
    """Return whether an object holds a tensor that is not in `seen`."""
    if id(value) in seen or depth > _DEEPEST:
        return False
    if callable(value):
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return True
    inside = [*children_of(value), *getattr(value, "__dict__", {}).values()]
    return any(_holds_tensors(each, seen, depth + 1) for each in inside)


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
def same_lists(optimizers: Sequence[_Optimizer]) -> Iterator[None]:
    """Put back lists and dicts that ``load_state_dict`` replaces: others may refer to them."""
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


def _put_back_attributes(
    unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent
) -> None:
    captured, changed = content.attributes, content.changed
    built = _built.get(obj, {})
    for name, node in captured.items():
        live = vars(obj).get(name)
        if isinstance(node, TensorRef) and isinstance(live, torch.Tensor):
            value: Any = unflattener.tensor(node, live)
        elif unflattener.local or name in changed or name not in built:
            value = unflattener.unflatten(node)
        else:
            value = pickle.loads(built[name])
        if not is_container(value) and not isinstance(value, torch.Tensor):
            value = adopt(live, value)  # the loop may refer to it
        vars(obj)[name] = value
    for name, value in attributes_of(obj).items():
        if name not in captured and _is_plain(value):
            del vars(obj)[name]


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

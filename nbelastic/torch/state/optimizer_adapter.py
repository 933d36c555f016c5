"""Adapter for optimizers, including wrappers of others and classes of users.

Of each optimizer the adapter captures groups of parameters, the state of each parameter, and plain
attributes, as modules have them. If a class overrides ``state_dict()`` or ``load_state_dict()``,
the state dict is captured as well, and holds whatever else the optimizer keeps. Without them, other
attributes are refused.

Optimizers in attributes are objects of the state themselves. Those around them are restored first,
because a ``load_state_dict()`` may replace groups and state of the optimizers within. Groups and
state come last, and in place.
"""

from __future__ import annotations

import collections
import itertools
import random
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nbelastic.elastic.state.in_place import attributes_in
from nbelastic.errors import NbelasticError, StateMismatch
from nbelastic.torch.gradients.reducer import Reducer
from nbelastic.torch.state.flatten import (
    ATOMS,
    Adapter,
    Flattener,
    ObjectRow,
    Unflattener,
    is_container,
    is_dense,
    is_flat,
    walk,
)
from nbelastic.torch.state.settings import (
    SentSettings,
    Settings,
    attributes_of_optimizers,
    is_plain,
)
from nbelastic.torch.state.structure import OWN, Structure, word_for

_Optimizer = torch.optim.Optimizer
_all_of = itertools.chain.from_iterable

_DATA = (
    *(torch.Tensor, np.generic, np.ndarray, set, frozenset, collections.deque),
    *(random.Random, np.random.Generator, np.random.RandomState),
)

# Optimizers whose attributes were searched.
_checked: weakref.WeakSet[_Optimizer] = weakref.WeakSet()


class OptimizerContent(NamedTuple):
    """Captured content of an optimizer."""

    groups: Sequence[dict[str, Any]]
    state: dict[Any, dict[str, Any]]
    settings: Settings | SentSettings | None = None  # plain attributes; of torch's own, none
    custom: Any = None  # its state dict, if that is not torch's


class OptimizerAdapter(Adapter):
    """Optimizers: torch's, users' own, and wrappers of optimizers."""

    def capture(self, flattener: Flattener, obj: _Optimizer) -> OptimizerContent:
        flatten = flattener.flatten
        groups = [
            {
                **{key: flatten(each) for key, each in group.items() if key != "params"},
                "params": [*map(flatten, group["params"])],  # the last one, as in a state dict
            }
            for group in obj.param_groups
        ]
        state = {
            flatten(owner): {key: flatten(each) for key, each in values.items()}
            for owner, values in obj.state.items()
        }
        if is_torchs(obj):
            return OptimizerContent(groups, state)
        if obj not in _checked:
            _check(flattener, obj)
            _checked.add(obj)
        custom = flatten(obj.state_dict()) if overrides(obj) else None
        return OptimizerContent(groups, state, Settings({"": obj}), custom)

    def row(self, obj: _Optimizer, content: OptimizerContent) -> ObjectRow | None:
        del content

        def look() -> Iterable[object]:
            state = obj.state
            groups = [(each, each.values(), each["params"]) for each in obj.param_groups]
            of_state = (state, map(len, state.values()), *state.values())
            own = map(bool, map(vars(obj).get, _OF_STATE_DICTS))  # hooks may come at any time
            return _all_of((*_all_of(groups), *of_state, *map(dict.values, state.values()), own))

        if not is_torchs(obj) or not all(isinstance(each, dict) for each in obj.state.values()):
            return None
        tensors = [each for each in look() if isinstance(each, torch.Tensor)]
        lists = [id(group["params"]) for group in obj.param_groups]
        others = [e for e in look() if not isinstance(e, torch.Tensor) and id(e) not in lists]
        fixed = all(type(e) in ATOMS or (type(e) is tuple and is_flat(e)) for e in others)
        return ObjectRow(look, tensors) if fixed and all(map(is_dense, tensors)) else None

    def restore(self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent) -> None:
        self._put_back(unflattener, obj, content)
        if content.custom is not None:
            load(obj, unflattener.unflatten(content.custom))
            self._put_back(unflattener, obj, content)  # load_state_dict() casts them
        if content.settings is not None:
            content.settings.restore(obj)

    def _put_back(
        self, unflattener: Unflattener, obj: _Optimizer, content: OptimizerContent
    ) -> None:
        groups, live = content.groups, obj.param_groups
        if isinstance(getattr(obj, "_reducer", None), Reducer):  # sums under way are void
            obj.reset()  # type: ignore[attr-defined]
        del live[len(groups) :]
        live.extend({"params": []} for _ in groups[len(live) :])
        models = set() if unflattener.local else {id(each) for each in unflattener.memo.values()}
        for captured, group in zip(groups, live, strict=True):
            own = [each for each in group["params"] if id(each) not in models]
            parameters = _parameters(unflattener, captured["params"], own)
            for parameter in parameters:
                parameter.grad = None
            options = {k: unflattener.unflatten(v) for k, v in captured.items() if k != "params"}
            group.clear()
            group.update(params=parameters, **options)
        built = {
            unflattener.unflatten(owner): {
                key: unflattener.unflatten(each) for key, each in values.items()
            }
            for owner, values in content.state.items()
        }
        obj.state.clear()
        obj.state.update(built)

    def parts(self, label: str, content: OptimizerContent, names: dict[int, str]) -> Structure:
        return {
            ("parameter group", f"{label}.param_groups[{index}]"): tuple(
                sorted(names.get(id(each), OWN + word_for(each)) for each in group["params"])
            )
            for index, group in enumerate(content.groups)
        }

    def state_dict(self, content: OptimizerContent, *, whole: bool = False) -> Any:
        """Return it with parameters by their numbers; groups with parameters if `whole`."""
        if content.custom is not None and not whole:
            return content.custom
        parameters = [each for group in content.groups for each in group["params"]]
        numbers: dict[int, Any] = {}
        for each in (*parameters, *content.state):
            number = len(numbers) if isinstance(each, torch.Tensor) else each
            numbers.setdefault(id(each), number)
        groups = [
            {**g, "params": g["params"] if whole else [numbers[id(each)] for each in g["params"]]}
            for g in content.groups
        ]
        state = {numbers[id(owner)]: values for owner, values in content.state.items()}
        custom = content.custom if isinstance(content.custom, dict) else {}
        return {**custom, "state": state, "param_groups": groups}


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
            for _, item in walk(value) if name not in attributes_of_optimizers() else ():
                if isinstance(item, _Optimizer) and id(item) not in found:
                    found[id(item)] = item
                    queue.append(item)
    return list(found.values())


def _check(flattener: Flattener, obj: _Optimizer) -> None:
    """Raise an error if an optimizer keeps what neither attributes nor its state dict hold."""
    name = type(obj).__qualname__
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(obj).__mro__):
        raise NbelasticError(
            f"a {name} keeps of the optimizer's state only this rank's share, which is lost with "
            "the rank; use the optimizer that it is made of, in DistributedOptimizer"
        )
    if overrides(obj):
        return
    lists = [vars(each).get(key) for each in within(obj) for key in ("param_groups", "state")]
    known = {*map(id, lists), *(id(p) for group in obj.param_groups for p in group["params"])}
    for attribute, value in own_attributes(obj).items():
        parts = () if id(value) in known or is_plain(value) else walk(value)
        others = [each for _, each in parts if id(each) not in known]
        if any(_is_data(each) and flattener.memo.get(id(each)) is not each for each in others):
            raise NbelasticError(
                f"{name}.{attribute} (a {type(value).__qualname__}) holds values that a state "
                "cannot see, so they would be neither restored nor sent: give the class "
                "state_dict() and load_state_dict(), or register a handler "
                "(elastic.state.set_handler_registry)"
            )


def _is_data(value: object) -> bool:
    """Return whether a value may change in training: a number, a tensor, an object with any."""
    if is_container(value):
        return bool(value) and is_flat(value)
    return not callable(value) and (isinstance(value, _DATA) or bool(attributes_in(value)))


def load(obj: Any, state_dict: Any) -> None:
    """Load a state dict into an object."""
    try:
        obj.load_state_dict(state_dict)
    except Exception as error:  # whatever the user's classes raise
        name = type(obj).__qualname__
        raise NbelasticError(
            f"{name}.load_state_dict() does not take what {name}.state_dict() has given: "
            f"{error!r}; so a state can neither restore nor send it"
        ) from error


def _parameters(
    unflattener: Unflattener, captured: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return a group's parameters: a model's by identity, its own by position."""
    missing = [each for each in captured if id(each) not in unflattener.memo]
    if not unflattener.local and len(own) != len(missing):
        raise StateMismatch("the optimizer of this rank has other parameters that no model has")
    for each, mine in zip(missing, own, strict=False):
        unflattener.tensor(each, mine)
    return [unflattener.tensor(each) for each in captured]

"""Adapters that capture and restore models, optimizers and other objects.

The contract is :class:`~nbelastic.torch.state.flatten.Adapter`. ``state_dict`` and
``load_state_dict`` are the last resort: a model's leaves out buffers that are not persistent, and
an optimizer's shares its tensors with the optimizer that loads it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data.distributed import DistributedSampler

from nbelastic.data import Loader
from nbelastic.elastic.followed import resumes_itself
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import NbelasticError, StateMismatch
from nbelastic.pickling import parts_of
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
from nbelastic.torch.state.optimizer_adapter import (
    OptimizerAdapter,
    load,
    own_attributes,
    within,
)
from nbelastic.torch.state.settings import SentSettings, Settings, uncompiled
from nbelastic.torch.state.structure import Structure, word_for

_all_of = itertools.chain.from_iterable
_dicts_in = operator.attrgetter("_modules", "_parameters", "_buffers")
_requires_grad = operator.attrgetter("requires_grad")

# Packages of modules with only tensors and extra state in their state dicts.
_TORCHS = ("torch.nn.", "torch.jit.", "torch._dynamo.")


class ModulePart(NamedTuple):
    """Tensors of a module, by name."""

    path: str
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    trained: frozenset[str]  # parameters that require gradients
    transient: frozenset[str]  # buffers that are not persistent


class ModuleContent(NamedTuple):
    """Captured content of a model."""

    parts: dict[str, ModulePart]  # by paths without the wrappers of ``torch.compile``
    extras: list[tuple[str, Any]]  # extra states by paths of modules
    custom: list[tuple[str, Any]]  # overridden state dicts by paths of modules
    settings: Settings | SentSettings


class ModuleAdapter(Adapter):
    """Parameters and buffers of a module, tied ones once, extra state, and plain attributes."""

    def capture(self, flattener: Flattener, obj: torch.nn.Module) -> ModuleContent:
        def captured(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {name: flattener.flatten(tensor) for name, tensor in tensors.items()}

        parts, extras = {}, []
        modules = dict(obj.named_modules())
        for path, module in modules.items():
            parameters = captured(module._parameters)
            trained = frozenset(n for n in parameters if getattr(parameters[n], "requires_grad", 0))
            transient = frozenset(getattr(module, "_non_persistent_buffers_set", ()))
            parts[uncompiled(path)] = ModulePart(
                path, parameters, captured(module._buffers), trained, transient
            )
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                extras.append((path, flattener.flatten(module.get_extra_state())))
        return ModuleContent(parts, extras, _custom(flattener, modules), Settings(modules))

    def row(self, obj: torch.nn.Module, content: ModuleContent) -> ObjectRow | None:
        assert isinstance(content.settings, Settings)
        modules, places = [*obj.modules()], content.settings.places()
        parts = content.parts.values()
        found = (each for p in parts for each in (*p.parameters.values(), *p.buffers.values()))
        tensors = [each for each in found if each is not None]

        def look() -> Iterable[object]:
            dicts = [*_all_of(map(_dicts_in, modules))]
            return _all_of(
                (
                    map(type, modules),
                    _all_of(dicts),
                    _all_of(map(dict.values, dicts)),
                    map(_requires_grad, tensors),
                    map(len, map(vars, modules)),
                    map(operator.getitem, *places),
                )
            )

        complete = (  # all but tensors' values; a scripted module has no dicts
            not content.extras
            and not content.custom
            and all(isinstance(each, dict) for each in _all_of(map(_dicts_in, modules)))
            and all(isinstance(each, torch.Tensor) and is_dense(each) for each in tensors)
        )
        return ObjectRow(look, tensors) if complete else None

    def restore(
        self, unflattener: Unflattener, obj: torch.nn.Module, content: ModuleContent
    ) -> None:
        modules = {uncompiled(path): each for path, each in obj.named_modules()}
        for path in content.parts.keys() - modules:
            raise StateMismatch(f"the model of this rank has no submodule {path!r}")
        for path, module in modules.items():
            part = content.parts.get(path, ModulePart(path, {}, {}, frozenset(), frozenset()))
            _fill(unflattener, module._parameters, part.parameters, torch.nn.Parameter)
            _fill(unflattener, module._buffers, part.buffers, torch.Tensor)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    parameter.requires_grad_(name in part.trained)
                    parameter.grad = None
        content.settings.restore(obj)
        for path, extra in content.extras:
            modules[uncompiled(path)].set_extra_state(unflattener.unflatten(extra))
        for path, state_dict in content.custom:
            load(modules[uncompiled(path)], unflattener.unflatten(state_dict))

    def parts(self, label: str, content: ModuleContent, names: dict[int, str]) -> Structure:
        paths = [_join(label, uncompiled(path)) for path, _ in content.extras]
        found: Structure = {("extra state of", path): "" for path in paths}
        for path, part in content.parts.items():
            for kind, tensors in (("parameter", part.parameters), ("buffer", part.buffers)):
                for name, tensor in tensors.items():
                    full = _join(label, path, name)
                    if tensor is None:
                        found[kind, full] = "None"
                        continue
                    names.setdefault(id(tensor), full)
                    frozen = kind == "parameter" and name not in part.trained
                    found[kind, full] = word_for(tensor) + " frozen" * frozen
        described = content.settings.described.items()
        found.update({(kind, _join(label, path)): text for (kind, path), text in described})
        return found

    def state_dict(self, content: ModuleContent, *, whole: bool = False) -> dict[str, Any]:
        own = [path for path, _ in content.custom]
        found = {
            _join(part.path, name): tensor
            for part in content.parts.values()
            for name, tensor in (*part.parameters.items(), *part.buffers.items())
            if tensor is not None
            and (whole or not (name in part.transient or _is_in(part.path, own)))
        }
        found.update((_join(path, "_extra_state"), extra) for path, extra in content.extras)
        for path, state_dict in content.custom:
            if isinstance(state_dict, dict):
                found.update((_join(path, str(key)), each) for key, each in state_dict.items())
        return found


def _is_in(path: str, outer: Iterable[str]) -> bool:
    return any(not each or path == each or path.startswith(f"{each}.") for each in outer)


def _keeps_more(kind: type[torch.nn.Module]) -> bool:
    """Return whether modules override their state dict, which may hold more than tensors."""
    return any(
        getattr(kind, name) is not getattr(torch.nn.Module, name)
        and not getattr(kind, name).__module__.startswith(_TORCHS)
        for name in ("state_dict", "load_state_dict", "_save_to_state_dict")
    )


def _custom(flattener: Flattener, modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, Any]]:
    """Capture the state dicts of a model's outermost modules with a custom ``state_dict``."""
    found: list[tuple[str, Any]] = []
    for path, module in modules.items():
        if _keeps_more(type(module)) and not _is_in(path, [outer for outer, _ in found]):
            try:  # with the tensors themselves, which are captured once
                state_dict = module.state_dict(keep_vars=True)
            except TypeError:
                state_dict = module.state_dict()
            found.append((path, flattener.flatten(state_dict)))
    return found


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _fill(
    unflattener: Unflattener, live: dict[str, Any], captured: dict[str, Any], kind: Any
) -> None:
    """Give a module its captured tensors under their names, and no others."""
    for name in [name for name in live if name not in captured]:
        del live[name]
    for name, tensor in captured.items():
        mine = live.get(name)
        if tensor is None or not is_dense(tensor):
            live[name] = unflattener.unflatten(tensor)
            continue
        found = unflattener.tensor(tensor, mine)
        if not isinstance(found, kind):
            found = kind(found)
            unflattener.memo[id(tensor)] = found  # with the same memory
        live[name] = found


class SamplerAdapter(Adapter):
    """Samplers, whose progress the ranks agree on; ``ObjectState`` keeps them."""


class StateDictAdapter(Adapter):
    """Other objects with ``state_dict`` and ``load_state_dict``: schedulers, scalers, metrics."""

    def capture(self, flattener: Flattener, obj: Any) -> Any:
        return flattener.flatten(obj.state_dict())

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        load(obj, unflattener.unflatten(content))

    def parts(self, label: str, content: Any, names: dict[int, str]) -> Structure:
        del names
        return {("tensor", name): word_for(each) for name, each in tensors_in(content, label)}


class LoaderAdapter(Adapter):
    """Loaders of micro-batches, which only loaders with the same batch and dataset take over."""

    def capture(self, flattener: Flattener, obj: Loader) -> tuple[dict[str, str], Any]:
        return obj.requirements(), flattener.flatten(obj.state_dict())

    def restore(self, unflattener: Unflattener, obj: Loader, content: Any) -> None:
        obj.load_state_dict(unflattener.unflatten(content[1]))

    def parts(self, label: str, content: Any, names: dict[int, str]) -> Structure:
        del names
        return {(f"{what} of", label): text for what, text in content[0].items()}

    def state_dict(self, content: Any, *, whole: bool = False) -> Any:
        del whole
        return content[1]


class ScalerAdapter(StateDictAdapter):
    """A ``GradScaler``, which also records optimizers in the middle of a step."""

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        if obj.is_enabled():
            super().restore(unflattener, obj, content)
            obj._per_optimizer_states.clear()  # of a step that the restoration has ended


def wrapped_in(obj: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an object wraps; schedulers and scalers only refer to theirs."""
    if isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return []
    return within(obj)


class GeneratorAdapter(Adapter):
    """Random generators that the user has named in the state."""

    def capture(self, flattener: Flattener, obj: torch.Generator) -> Any:
        return flattener.flatten(obj.get_state())

    def restore(self, unflattener: Unflattener, obj: torch.Generator, content: Any) -> None:
        obj.set_state(unflattener.unflatten(content))


class EpochAdapter(Adapter):
    """The epoch of torch's ``DistributedSampler``, whose dataset is neither copied nor sent."""

    def capture(self, flattener: Flattener, obj: DistributedSampler[Any]) -> Any:
        return flattener.flatten({"epoch": obj.epoch})

    def restore(self, unflattener: Unflattener, obj: DistributedSampler[Any], content: Any) -> None:
        obj.set_epoch(unflattener.unflatten(content)["epoch"])


_ADAPTERS: list[tuple[type, Adapter]] = [
    (ShardSampler, SamplerAdapter()),
    (Loader, LoaderAdapter()),
    (torch.nn.Module, ModuleAdapter()),
    (torch.optim.Optimizer, OptimizerAdapter()),
    (torch.amp.GradScaler, ScalerAdapter()),
    (torch.Generator, GeneratorAdapter()),
]
_STATE_DICT = StateDictAdapter()
_EPOCH = EpochAdapter()
_PLAIN = (torch.Tensor, type)
_HELD = (torch.nn.Module, torch.optim.Optimizer)


def adapter_of(value: object) -> Adapter | None:
    """Return the adapter for an object, or None for a plain value."""
    if isinstance(value, _PLAIN):
        return None
    own = getattr(type(value), "nbelastic_adapter", None)  # an integration's object brings its own
    if own is not None:
        return cast("Adapter", own())
    for kind, adapter in _ADAPTERS:
        if isinstance(value, kind):
            return adapter
    if isinstance(value, DistributedSampler) and not resumes_itself(value):
        return _EPOCH
    if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
        return _STATE_DICT
    return None


def adapter_for(obj: object) -> Adapter:
    """Return the adapter of an object that has one."""
    adapter = adapter_of(obj)
    assert adapter is not None
    return adapter


def objects_in(values: Mapping[str, object]) -> dict[str, object]:
    """Return the objects with an adapter in `values`, nested objects included.

    Each has a path from one of the names in `values`. An object without an adapter must not
    hold a model or an optimizer that is not in `values`.
    """
    objects: dict[str, object] = {}
    others: list[object] = []
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [*values.items()][::-1]
    while stack:
        label, value = stack.pop()
        if type(value) in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        adapter = adapter_of(value)
        if adapter is not None:
            objects[label] = value
        elif not is_container(value) and not isinstance(value, _PLAIN):
            others.append(value)
        stack.extend([(f"{label}.{k}", each) for k, each in _inside(value, adapter)][::-1])
    for other in others:
        for name, part in parts_of(other):
            for _, each in walk(part):
                if isinstance(each, _HELD) and id(each) not in seen:
                    _refuse(other, name, each)
    return objects


def _refuse(value: object, name: str, held: object) -> None:
    kind, inner = type(value).__qualname__, type(held).__qualname__
    raise NbelasticError(
        f"a {kind} in the state holds a {inner}, at {name}, that the state does not have: after a "
        f"failure the {kind} would hold a copy of it, and what is trained would not go back. Name "
        f"the {inner} in the state as well, keep it in a dict, list or tuple, or give {kind} "
        "state_dict() and load_state_dict()"
    )


def _inside(value: object, adapter: Adapter | None) -> Iterable[tuple[object, object]]:
    """Return keys and values in a container, an optimizer, or a wrapper of optimizers."""
    if is_container(value):
        if is_flat(value):
            return ()
        return value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    if isinstance(value, torch.optim.Optimizer):
        return own_attributes(value).items()
    if adapter is _STATE_DICT:
        return [(f"optimizer {n}", each) for n, each in enumerate(wrapped_in(value))]
    return ()


def tensors_in(value: Any, label: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors in containers, each with a name."""
    for name, part in walk(value, label):
        if isinstance(part, torch.Tensor) and is_dense(part):
            yield name, part

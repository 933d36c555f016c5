"""Adapters that capture and restore models, optimizers and other objects.

The contract is :class:`~nbelastic.torch.state.flatten.Adapter`. ``state_dict`` and
``load_state_dict`` are the last resort: a model's leaves out buffers that are not persistent, and
an optimizer's shares its tensors with the optimizer that loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data.distributed import DistributedSampler

from nbelastic.data import Loader
from nbelastic.elastic.followed import resumes_itself
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import NbelasticError, StateMismatch
from nbelastic.torch.state.flatten import (
    ATOMS,
    Adapter,
    ContainerNode,
    ObjectNode,
    TensorRef,
    ValueNode,
    is_container,
    is_flat,
    leaves_in,
    mapping,
    nested,
    refs_in,
)
from nbelastic.torch.state.optimizer_adapter import (
    OptimizerAdapter,
    load,
    own_attributes,
    same_lists,
    within,
)
from nbelastic.torch.state.settings import COMPILED, Settings, uncompiled
from nbelastic.torch.state.structure import LAZY, TensorNames, word_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbelastic.torch.state.flatten import Flattener, Node, Unflattener
    from nbelastic.torch.state.settings import SentSettings
    from nbelastic.torch.state.structure import Structure


_UNMADE = TensorRef(-1)  # reference of a tensor that does not exist yet


# Packages of modules with only tensors and extra state in their state dicts.
_TORCHS = ("torch.nn.", "torch.jit.", "torch._dynamo.")


class ModuleContent(NamedTuple):
    """Captured content of a model."""

    # For each parameter and buffer the path of its module, its dict, name and node, whether it
    # requires gradients, and whether it is persistent.
    tensors: list[tuple[str, str, str, Any, bool, bool]]
    extras: list[tuple[str, Node]]  # extra states by paths of modules
    custom: list[tuple[str, Node]]  # overridden state dicts by paths of modules
    settings: Settings | SentSettings


class ModuleAdapter(Adapter):
    """Parameters and buffers of a module, tied ones once, extra state, and plain attributes.

    Gradients are not part of a state: they belong to a batch that is done or is done again.
    """

    def capture(self, flattener: Flattener, obj: torch.nn.Module) -> ModuleContent:
        tensors: list[tuple[str, str, str, Node | None, bool, bool]] = []
        extras = []
        for path, module in obj.named_modules():
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, kind).items():
                    persistent = name not in getattr(module, "_non_persistent_buffers_set", ())
                    node: Node | None = None
                    trains = False
                    if is_lazy(tensor):
                        node = _UNMADE
                    elif tensor is not None:
                        node, trains = flattener.flatten(tensor), tensor.requires_grad
                    tensors.append((path, kind, name, node, trains, persistent))
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                extras.append((path, flattener.flatten(module.get_extra_state())))
        return ModuleContent(tensors, extras, _custom(flattener, obj), Settings(obj))

    def restore(
        self, unflattener: Unflattener, obj: torch.nn.Module, content: ModuleContent
    ) -> None:
        tensors, extras, custom, settings = content
        modules = {uncompiled(path): each for path, each in obj.named_modules()}
        captured = set()
        for raw, kind, name, node, requires_grad, _ in tensors:
            path = uncompiled(raw)
            if path not in modules:
                raise StateMismatch(f"the model of this rank has no submodule {path!r}")
            captured.add((path, kind, name))
            if node == _UNMADE:
                continue
            into = getattr(modules[path], kind)
            into[name] = _tensor(unflattener, node, into.get(name), kind, requires_grad)
        for path, module in modules.items():
            for kind in ("_parameters", "_buffers"):
                into = getattr(module, kind)
                for name in [n for n in into if (path, kind, n) not in captured]:
                    del into[name]
        settings.restore(obj)
        for path, node in extras:
            extra = unflattener.unflatten(node)
            unflattener.flush()
            modules[uncompiled(path)].set_extra_state(extra)
        for path, node in custom:
            load(modules[uncompiled(path)], unflattener, node)

    def parts(self, label: str, content: ModuleContent, names: TensorNames) -> Structure:
        tensors, extras, _, settings = content
        paths = [_join(label, uncompiled(path)) for path, _ in extras]
        found: Structure = {("extra state of", path): "" for path in paths}
        for path, kind, name, node, requires_grad, _ in tensors:
            full = _join(label, uncompiled(path), name)
            is_parameter = kind == "_parameters"
            if node is None:
                words = "None"
            elif node == _UNMADE:
                words = LAZY
            else:
                words = names.words[node] if isinstance(node, TensorRef) else word_for(node.value)
                words += " frozen" if is_parameter and not requires_grad else ""
                if isinstance(node, TensorRef):
                    names.known.setdefault(node, full)
            found["parameter" if is_parameter else "buffer", full] = words
        found.update({(k, _join(label, path)): t for (k, path), t in settings.described.items()})
        return found

    def state_dict(self, content: ModuleContent, *, whole: bool = False) -> Node:
        tensors, extras, custom, *_ = content
        own = [path for path, _ in custom]
        found = {
            _join(path, name): node
            for path, _, name, node, _, persistent in tensors
            if node not in (None, _UNMADE) and (whole or (persistent and not _is_in(path, own)))
        }
        found.update((_join(path, "_extra_state"), node) for path, node in extras)
        for path, node in custom:
            if isinstance(node, ContainerNode) and node.keys is not None:
                pairs = zip(node.keys, node.nodes, strict=True)
                found.update((_join(path, str(key)), each) for key, each in pairs)
            elif isinstance(node, ValueNode) and isinstance(node.value, dict):
                found.update((_join(path, str(k)), ValueNode(v)) for k, v in node.value.items())
        return mapping(found)


def _is_in(path: str, outer: Iterable[str]) -> bool:
    return any(not each or path == each or path.startswith(f"{each}.") for each in outer)


def keeps_more(module: torch.nn.Module) -> bool:
    """Return whether a module overrides its state dict, which may hold more than tensors."""
    return any(
        getattr(type(module), name) is not getattr(torch.nn.Module, name)
        and not getattr(type(module), name).__module__.startswith(_TORCHS)
        for name in ("state_dict", "load_state_dict", "_save_to_state_dict")
    )


def _custom(flattener: Flattener, obj: torch.nn.Module) -> list[tuple[str, Node]]:
    """Capture the state dicts of a model's outermost modules with a custom ``state_dict``."""
    found: list[tuple[str, Node]] = []
    for path, module in obj.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer, _ in found)
        if keeps_more(module) and not inside:
            try:  # with the tensors themselves, which are captured once
                state_dict = module.state_dict(keep_vars=True)
            except TypeError:
                state_dict = module.state_dict()
            found.append((path, flattener.flatten(state_dict)))
    return found


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _tensor(
    unflattener: Unflattener, node: Node | None, live: Any, kind: str, requires_grad: bool
) -> torch.Tensor | None:
    if node is None:
        return None
    if not isinstance(node, TensorRef):  # sparse
        tensor: torch.Tensor = unflattener.unflatten(node)
    else:
        if is_lazy(live):
            live.materialize(unflattener.value(node).shape)
        tensor = unflattener.tensor(node, live)
    if kind == "_parameters":
        if not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad)
            if isinstance(node, TensorRef):
                unflattener.replace(node, tensor)
        tensor.requires_grad_(requires_grad)
        tensor.grad = None
    return tensor


class SamplerAdapter(Adapter):
    """Samplers: the ranks agree on their progress, and nothing is sent with the rest.

    :class:`~nbelastic.elastic.state.ObjectState` keeps them.
    """

    def state_dict(self, content: Any, *, whole: bool = False) -> Node:
        del content, whole
        return mapping({})


class StateDictAdapter(Adapter):
    """Other objects with ``state_dict`` and ``load_state_dict``: schedulers, scalers, metrics.

    Optimizers that they wrap are objects of the state themselves.
    """

    def capture(self, flattener: Flattener, obj: Any) -> Node:
        return flattener.flatten(obj.state_dict())

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        with same_lists(obj):
            load(obj, unflattener, content)

    def parts(self, label: str, content: Any, names: TensorNames) -> Structure:
        return {("tensor", name): names.words[ref] for name, ref in refs_in(content, label)}


class LoaderAdapter(Adapter):
    """Loaders of micro-batches, which only loaders with the same batch and dataset take over."""

    def capture(self, flattener: Flattener, obj: Loader) -> tuple[dict[str, str], Node]:
        return obj.requirements(), flattener.flatten(obj.state_dict())

    def restore(self, unflattener: Unflattener, obj: Loader, content: Any) -> None:
        obj.load_state_dict(unflattener.unflatten(content[1]))

    def parts(self, label: str, content: Any, names: TensorNames) -> Structure:
        del names
        return {(f"{what} of", label): text for what, text in content[0].items()}

    def state_dict(self, content: Any, *, whole: bool = False) -> Node:
        del whole
        return cast("Node", content[1])


class ScalerAdapter(StateDictAdapter):
    """A ``GradScaler``, which also records optimizers in the middle of a step."""

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        if obj.is_enabled():
            super().restore(unflattener, obj, content)
            obj._per_optimizer_states.clear()


def wrapped_in(obj: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an object wraps; schedulers and scalers only refer to theirs."""
    if isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return []
    return within(obj)


class GeneratorAdapter(Adapter):
    """Random generators that the user has named in the state."""

    def capture(self, flattener: Flattener, obj: torch.Generator) -> Node:
        return flattener.flatten(obj.get_state())

    def restore(self, unflattener: Unflattener, obj: torch.Generator, content: Any) -> None:
        obj.set_state(unflattener.unflatten(content))


class EpochAdapter(Adapter):
    """torch's ``DistributedSampler``: its epoch. Rank and progress are kept apart, for all of them.

    The sampler stays the one that a ``DataLoader`` has, and its dataset is neither copied nor sent.
    """

    def capture(self, flattener: Flattener, obj: DistributedSampler[Any]) -> Node:
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


def capture_object(flattener: Flattener, obj: object) -> Any:
    """Return the content of an object that has an adapter."""
    adapter = adapter_of(obj)
    assert adapter is not None
    return adapter.capture(flattener, obj)


def restore_object(unflattener: Unflattener, obj: object, content: Any) -> None:
    """Give an object that has an adapter its captured content."""
    adapter = adapter_of(obj)
    assert adapter is not None
    adapter.restore(unflattener, obj, content)


def settings_of(obj: object) -> Iterator[tuple[str, Any]]:
    """Yield what a function chooses of an object: a learning rate, a seed, a schedule's length."""
    if isinstance(obj, torch.optim.Optimizer):
        for index, group in enumerate(obj.param_groups):
            options = {name: each for name, each in group.items() if name != "initial_lr"}
            yield from _plain_in(f".param_groups[{index}][{{!r}}]", options)
    elif isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        values = {name: each for name, each in vars(obj).items() if name not in _OF_SCHEDULERS}
        yield from _plain_in(".{}", values)
    elif isinstance(obj, Loader):
        state = obj.state_dict()
        yield from [(f".{name}", state[name]) for name in ("seed", "shuffle", "drop_last")]
    elif isinstance(obj, ShardSampler):
        yield from _plain_in(".{}", {"seed": obj.seed, "shuffle": obj.shuffle})


_OF_SCHEDULERS = ("base_lrs", "last_epoch")  # values of schedulers that follow from others


def _plain_in(form: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        parts = value if isinstance(value, (tuple, list)) else [value]
        if name[:1] != "_" and all(type(each) in (bool, int, float, str) for each in parts):
            yield form.format(name), value if parts is not value else tuple(parts)


def objects_in(values: Mapping[str, object]) -> dict[str, object]:
    """Return the objects with an adapter in `values`, nested objects included.

    Each has an expression in terms of the names in `values`. An object without an adapter must not
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
        form = "{}[{!r}]" if is_container(value) else "{}.{}"
        if adapter_of(value) is not None:
            objects[label] = value
        elif not is_container(value) and not isinstance(value, _PLAIN):
            others.append(value)
        stack.extend([(form.format(label, k), each) for k, each in _inside(value)][::-1])
    for other in others:
        for name, inner in _held_by(other):
            if id(inner) not in seen:
                _refuse(other, name, inner)
    return objects


def _held_by(value: object) -> Iterable[tuple[str, object]]:
    """Return models and optimizers in an object's attributes, and in a container of its class."""
    parts = [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
    if isinstance(value, dict):
        parts += [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts += [(f"[{number}]", each) for number, each in enumerate(value)]
    return [
        (name, each)
        for name, part in parts
        for each in nested(part)
        if isinstance(each, (torch.nn.Module, torch.optim.Optimizer))
    ]


def _refuse(value: object, name: str, held: object) -> None:
    kind, inner = type(value).__qualname__, type(held).__qualname__
    if isinstance(held, torch.optim.Optimizer):
        raise NbelasticError(
            f"a {kind} in the state wraps an optimizer ({inner}) that the state does not have: a "
            f"copy of it would train a copy of the model. Name the {inner} in the state as well, "
            f"or give {kind} state_dict() and load_state_dict()"
        )
    raise NbelasticError(
        f"a {kind} in the state holds a model ({inner}, at {name}) that the state does not have: "
        f"after a failure the {kind} would hold a copy of it, and the model that is trained would "
        f"not go back. Name the {inner} in the state as well, or keep it in a dict, list or tuple"
    )


def _inside(value: object) -> Iterable[tuple[object, object]]:
    """Return keys and values in a container, an optimizer, or a wrapper of optimizers."""
    if is_container(value):
        if is_flat(value):
            return ()
        return value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    if isinstance(value, torch.optim.Optimizer):
        return own_attributes(value).items()
    if adapter_of(value) is _STATE_DICT:
        return [(f"optimizer {n}", each) for n, each in enumerate(wrapped_in(value))]
    return ()


def _kind_of(obj: object) -> str:
    """Return the name of an object's class; of a compiled model that of the model itself."""
    if type(obj).__module__.startswith("torch._dynamo."):  # whose import takes a second
        obj = getattr(obj, COMPILED, obj)
    return type(obj).__qualname__


class CapturedState(NamedTuple):
    """Objects with their captured content."""

    objects: Sequence[object]
    labels: Sequence[str]  # expressions for them
    captured: Sequence[ObjectNode]
    tensors: Sequence[torch.Tensor]  # for each reference one of its type and shape

    def names(self, nodes: Mapping[str, Node]) -> list[str]:
        """Return a name for each tensor: its path in the values with these nodes."""
        parts = [part for label, node in nodes.items() for part in leaves_in(node, label, "{}.{}")]
        reached = {part.number for _, part in parts if isinstance(part, ObjectNode)}
        parts += [(self.labels[n.number], n) for n in self.captured if n.number not in reached]
        parts.sort(key=lambda part: not self._is_model(part[1]))  # they name what others share
        found: dict[int, str] = {}
        for label, part in parts:
            node: Node = part
            if isinstance(part, ObjectNode):
                adapter = adapter_of(self.objects[part.number])
                assert adapter is not None
                node = adapter.state_dict(part.content, whole=True)
            for name, ref in leaves_in(node, label, "{}.{}"):
                if isinstance(ref, TensorRef):
                    found.setdefault(ref, name)
        return [found.get(ref, f"tensor.{ref}") for ref in range(len(self.tensors))]

    def _is_model(self, node: Node) -> bool:
        return isinstance(node, ObjectNode) and isinstance(
            self.objects[node.number], torch.nn.Module
        )

    def kinds(self) -> list[str]:
        """Return names and types of the objects."""
        pairs = zip(self.labels, self.objects, strict=True)
        return [f"{label} ({_kind_of(obj)})" for label, obj in pairs]

    def structure(self) -> Structure:
        """Return the structure of the objects, to be compared with another one."""
        names = TensorNames([*map(word_for, self.tensors)], {})
        structure: Structure = {}
        for node in in_order(self.captured, self.objects):
            adapter = adapter_of(self.objects[node.number])
            assert adapter is not None
            structure.update(adapter.parts(self.labels[node.number], node.content, names))
        return structure


def in_order(captured: Iterable[ObjectNode], objects: Sequence[object]) -> list[ObjectNode]:
    """Return nodes in the order of restoration.

    Models own the tensors that others share. Whatever wraps an optimizer may change it.
    """

    def place(node: ObjectNode) -> tuple[bool, bool, int]:
        obj = objects[node.number]
        if isinstance(obj, torch.optim.Optimizer):
            return True, True, -len(within(obj))
        return not isinstance(obj, torch.nn.Module), False, 0

    return sorted(captured, key=place)

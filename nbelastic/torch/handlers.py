"""What a state knows of models, optimizers and other objects: how to note them, how to change them.

A handler notes an object with a :class:`~nbelastic.torch.snapshot.Recorder` and makes it as noted
with a :class:`~nbelastic.torch.snapshot.Builder`, both on the rank that noted it (a restore) and on
another (a synchronisation). ``state_dict`` and ``load_state_dict`` are the last resort: a model's
leaves out buffers that are not persistent, an optimizer's shares its tensors with whoever loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import StateMismatch
from nbelastic.torch.reducer import Reducer
from nbelastic.torch.snapshot import ATOMS, Slot, children_of, is_flat, slots_in
from nbelastic.torch.structure import LAZY, OWN, Names, word_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbelastic.torch.snapshot import Builder, Node, Recorder, Thing
    from nbelastic.torch.structure import Structure

__all__ = [
    "Structured",
    "change",
    "handler_of",
    "labels_of",
    "models_first",
    "note",
    "options_of",
    "things_in",
]


class Handler(Protocol):
    """How a kind of object is noted and changed."""

    def note(self, recorder: Recorder, thing: Any) -> Any:
        """Return what there is to know, with tensors and other values as nodes; picklable."""

    def change(self, builder: Builder, thing: Any, content: Any) -> None:
        """Make `thing` be as noted."""

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Return the structure of what was noted of the object that is called `label`."""


_UNMADE = Slot(-1)
"""Stands for a tensor that does not exist yet."""


class ModuleHandler:
    """Parameters and buffers of a module, tied ones once, and its extra state.

    Gradients are not part of a state: they belong to a batch that is done or is done again.
    """

    def note(self, recorder: Recorder, thing: torch.nn.Module) -> Any:
        """Note all tensors under the name of the submodule that has them."""
        tensors: list[tuple[str, str, str, Node | None, bool]] = []
        extras = []
        for path, module in thing.named_modules():
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, kind).items():
                    if tensor is None:
                        tensors.append((path, kind, name, None, False))
                    elif is_lazy(tensor):
                        tensors.append((path, kind, name, _UNMADE, False))
                    else:
                        node = recorder.record(tensor)
                        tensors.append((path, kind, name, node, tensor.requires_grad))
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                extras.append((path, recorder.record(module.get_extra_state())))
        return tensors, extras

    def change(self, builder: Builder, thing: torch.nn.Module, content: Any) -> None:
        """Fill all tensors in place; put back those replaced since, take out those added since."""
        tensors, extras = content
        modules = dict(thing.named_modules())
        noted = set()
        for path, kind, name, node, requires_grad in tensors:
            if path not in modules:
                raise StateMismatch(f"the model of this rank has no submodule {path!r}")
            noted.add((path, kind, name))
            if node == _UNMADE:
                continue
            into = getattr(modules[path], kind)
            into[name] = _tensor(builder, node, into.get(name), kind, requires_grad)
        for path, module in modules.items():
            for kind in ("_parameters", "_buffers"):
                into = getattr(module, kind)
                for name in [n for n in into if (path, kind, n) not in noted]:
                    del into[name]
        for path, node in extras:
            extra = builder.build(node)
            builder.flush()
            modules[path].set_extra_state(extra)

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Describe parameters and buffers by type and shape, and name those that are frozen."""
        tensors, extras = content
        found: Structure = {("extra state of", _join(label, path)): "" for path, _ in extras}
        for path, kind, name, node, requires_grad in tensors:
            full = _join(label, path, name)
            is_parameter = kind == "_parameters"
            if node is None:
                words = "None"
            elif node == _UNMADE:
                words = LAZY
            else:
                words = names.words[node] if isinstance(node, Slot) else word_for(node.value)
                words += " frozen" if is_parameter and not requires_grad else ""
                if isinstance(node, Slot):
                    names.known.setdefault(node, full)
            found["parameter" if is_parameter else "buffer", full] = words
        return found


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _tensor(
    builder: Builder, node: Node | None, live: Any, kind: str, requires_grad: bool
) -> torch.Tensor | None:
    if node is None:
        return None
    if not isinstance(node, Slot):  # sparse
        tensor: torch.Tensor = builder.build(node)
    else:
        if is_lazy(live):
            live.materialize(builder.value(node).shape)
        tensor = builder.tensor(node, live)
    if kind == "_parameters":
        if not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad)
            if isinstance(node, Slot):
                builder.replace(node, tensor)
        tensor.requires_grad_(requires_grad)
        tensor.grad = None
    return tensor


class OptimizerHandler:
    """Parameter groups and the state of each parameter, with none that was not there."""

    def note(self, recorder: Recorder, thing: torch.optim.Optimizer) -> Any:
        """Note groups and state under the slots of their parameters."""
        groups = [
            (
                [recorder.record(parameter) for parameter in group["params"]],
                options_of(recorder, group),
            )
            for group in thing.param_groups
        ]
        state = [
            (recorder.record(owner), {key: recorder.record(each) for key, each in values.items()})
            for owner, values in thing.state.items()
        ]
        return groups, state

    def change(self, builder: Builder, thing: torch.optim.Optimizer, content: Any) -> None:
        """Make groups and state as noted; the groups' dicts and the parameters stay the same."""
        groups, state = content
        live = thing.param_groups
        if isinstance(getattr(thing, "_reducer", None), Reducer):
            thing.reset()  # type: ignore[attr-defined]
        del live[len(groups) :]
        for index, (slots, noted) in enumerate(groups):
            if index == len(live):
                live.append({"params": []})
            group = live[index]
            parameters = _parameters(builder, slots, group["params"])
            for parameter in parameters:
                parameter.grad = None
            options = {key: builder.build(node) for key, node in noted.items()}
            group.clear()
            group.update(params=parameters, **options)
        built = {
            builder.build(owner): {key: builder.build(node) for key, node in values.items()}
            for owner, values in state
        }
        thing.state.clear()
        thing.state.update(built)

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Describe each group by the names of its parameters, in any order."""
        return {
            ("parameter group", f"{label}.param_groups[{index}]"): tuple(
                sorted(names.known.get(slot, OWN + names.words[slot]) for slot in slots)
            )
            for index, (slots, _) in enumerate(content[0])
        }


def _parameters(
    builder: Builder, slots: Sequence[Slot], present: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return a group's parameters: those of models; of the others, what is at their place."""
    if builder.local:
        return [builder.tensor(slot) for slot in slots]
    models = {id(builder.tensor(slot)) for slot in slots if builder.has(slot)}
    others = [each for each in present if id(each) not in models]
    if len(others) != sum(not builder.has(slot) for slot in slots):
        raise StateMismatch("the optimizer of this rank has other parameters, which no model has")
    rest = iter(others)
    return [builder.tensor(slot, None if builder.has(slot) else next(rest)) for slot in slots]


def options_of(recorder: Recorder, group: dict[str, Any]) -> dict[str, Node]:
    """Note all of an optimizer's parameter group but the parameters."""
    return {key: recorder.record(each) for key, each in group.items() if key != "params"}


class SamplerHandler:
    """A sampler: what of it concerns others is settled among all ranks, not sent with the rest."""

    def note(self, recorder: Recorder, thing: ShardSampler) -> Any:
        """Note nothing: :class:`~nbelastic.elastic.state.ObjectState` keeps samplers."""
        del recorder, thing

    def change(self, builder: Builder, thing: ShardSampler, content: Any) -> None:
        """Leave the sampler as it is."""
        del builder, thing, content

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Describe nothing."""
        del label, content, names
        return {}


class StateDictHandler:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, metrics."""

    def note(self, recorder: Recorder, thing: Any) -> Node:
        """Note the state dict."""
        return recorder.record(thing.state_dict())

    def change(self, builder: Builder, thing: Any, content: Any) -> None:
        """Load the state dict; what it contains is the object's alone."""
        state_dict = builder.build(content)
        builder.flush()
        thing.load_state_dict(state_dict)

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Describe the tensors in the state dict."""
        return {("tensor", name): names.words[slot] for name, slot in slots_in(content, label)}


class ScalerHandler(StateDictHandler):
    """A ``GradScaler``, which also notes for which optimizers a step has begun."""

    def change(self, builder: Builder, thing: Any, content: Any) -> None:
        """Load the state dict and forget the step that was under way."""
        if thing.is_enabled():
            super().change(builder, thing, content)
            thing._per_optimizer_states.clear()


class GeneratorHandler:
    """A random generator that the user has made part of the state."""

    def note(self, recorder: Recorder, thing: torch.Generator) -> Node:
        """Note its state."""
        return recorder.record(thing.get_state())

    def change(self, builder: Builder, thing: torch.Generator, content: Any) -> None:
        """Set its state."""
        thing.set_state(builder.build(content))

    def parts(self, label: str, content: Any, names: Names) -> Structure:
        """Describe nothing."""
        del label, content, names
        return {}


_HANDLERS: list[tuple[type, Handler]] = [
    (ShardSampler, SamplerHandler()),
    (torch.nn.Module, ModuleHandler()),
    (torch.optim.Optimizer, OptimizerHandler()),
    (torch.amp.GradScaler, ScalerHandler()),
    (torch.Generator, GeneratorHandler()),
]
_STATE_DICT = StateDictHandler()
_PLAIN = (torch.Tensor, type)


def handler_of(value: object) -> Handler | None:
    """Return the handler for an object, or None for a plain value."""
    if isinstance(value, _PLAIN):
        return None
    for kind, handler in _HANDLERS:
        if isinstance(value, kind):
            return handler
    if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
        return _STATE_DICT
    return None


def note(recorder: Recorder, thing: object) -> Any:
    """Return what the handler of `thing` notes of it."""
    handler = handler_of(thing)
    assert handler is not None
    return handler.note(recorder, thing)


def change(builder: Builder, thing: object, content: Any) -> None:
    """Have the handler of `thing` make it be as noted."""
    handler = handler_of(thing)
    assert handler is not None
    handler.change(builder, thing, content)


def things_in(values: Iterable[object]) -> list[object]:
    """Return the objects with a handler among `values` and in containers among them, each once."""
    things: list[object] = []
    seen: set[int] = set()
    stack = list(values)[::-1]
    while stack:
        value = stack.pop()
        if type(value) in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        if handler_of(value) is not None:
            things.append(value)
        elif not is_flat(value):
            stack.extend(reversed(list(children_of(value))))
    return things


def labels_of(things: Sequence[object], values: Mapping[str, object]) -> list[str]:
    """Return how code that has `values` would write each of the things in them."""
    found: dict[int, str] = {}
    stack = list(values.items())[::-1]
    seen: set[int] = set()
    while stack:
        label, value = stack.pop()
        if type(value) in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        found[id(value)] = label
        if handler_of(value) is None and not is_flat(value):
            children = list(children_of(value))
            keys = value if isinstance(value, dict) else range(len(children))
            pairs = zip(keys, children, strict=True)
            stack.extend([(f"{label}[{key!r}]", child) for key, child in pairs][::-1])
    return [found[id(thing)] for thing in things]


class Structured(NamedTuple):
    """What was noted of things.

    Attributes
    ----------
    things, labels : sequence
        The things, and what they are called.
    noted : sequence of Thing
        Their nodes.
    tensors : sequence of torch.Tensor
        For each slot a tensor of its type and shape.
    """

    things: Sequence[object]
    labels: Sequence[str]
    noted: Sequence[Thing]
    tensors: Sequence[torch.Tensor]

    def kinds(self) -> list[str]:
        """Return names and types of the things."""
        pairs = zip(self.labels, self.things, strict=True)
        return [f"{label} ({type(thing).__qualname__})" for label, thing in pairs]

    def structure(self) -> Structure:
        """Return what can be compared of them."""
        names = Names([*map(word_for, self.tensors)], {})
        structure: Structure = {}
        for node in models_first(self.noted, self.things):
            handler = handler_of(self.things[node.number])
            assert handler is not None
            structure.update(handler.parts(self.labels[node.number], node.content, names))
        return structure


def models_first(noted: Iterable[Thing], things: Sequence[object]) -> list[Thing]:
    """Return nodes in an order in which parameters are met in their models, if they have any."""
    return sorted(noted, key=lambda node: not isinstance(things[node.number], torch.nn.Module))

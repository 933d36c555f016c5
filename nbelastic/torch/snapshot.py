"""Values taken apart into tensors and the rest, and put together again.

A :class:`Recorder` walks through values and notes each as a *node*: tensors by their number in one
list, *things* (models, optimizers, whatever else :mod:`nbelastic.torch.handlers` knows) by theirs
and what their handler notes of them, containers by their items, all else as a copy. Nodes hold no
tensors, so they can be pickled, and the tensors can be copied or sent as they are.

A :class:`Builder` goes the other way, with the tensors' values from a commit or from another rank.
Things and the tensors that belong to them are changed in place: their identity is what optimizers,
hooks and users know them by.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "ATOMS",
    "Builder",
    "Items",
    "Plain",
    "Recorder",
    "Slot",
    "Thing",
    "children_of",
    "is_flat",
    "slots_in",
]

_CONTAINERS = (list, tuple, dict, OrderedDict)
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class Slot(int):
    """A tensor, by its number. A plain number to the garbage collector, too: there are many."""

    __slots__ = ()


@dataclass(eq=False)
class Items:
    """A list, tuple or dict, by its items."""

    kind: type
    keys: list[Any] | None
    nodes: list[Any]


@dataclass(eq=False)
class Thing:
    """An object with a handler, by its number, and what the handler has noted."""

    number: int
    content: Any = None


@dataclass(eq=False)
class Plain:
    """Any other value."""

    value: Any


Node = Slot | Items | Thing | Plain


def children_of(value: object) -> Iterable[Any]:
    """Return the items of a container whose items are looked at, and nothing for all else."""
    if type(value) in (list, tuple):
        return value  # type: ignore[return-value]
    return value.values() if type(value) in (dict, OrderedDict) else ()  # type: ignore[attr-defined]


def is_flat(value: object) -> bool:
    """Return whether a container holds nothing that could change or be a tensor."""
    return ATOMS.issuperset(map(type, children_of(value)))


def _copied(value: object, known: dict[int, Any], flat: bool) -> object:
    """Return a deep copy; `known` are the copies there are, by the ids of their originals."""
    if not flat:
        return copy.deepcopy(value, known)
    return known.setdefault(id(value), copy.copy(value))


def slots_in(node: Node, label: str) -> Iterator[tuple[str, Slot]]:
    """Yield the tensors in a container, with how code would write them."""
    stack: list[tuple[str, Node]] = [(label, node)]
    seen: set[int] = set()
    while stack:
        label, node = stack.pop()
        if isinstance(node, Slot):
            yield label, node
        elif isinstance(node, Items) and id(node) not in seen:
            seen.add(id(node))
            keys = range(len(node.nodes)) if node.keys is None else node.keys
            pairs = zip(keys, node.nodes, strict=True)
            stack.extend((f"{label}[{key!r}]", each) for key, each in pairs)


class Recorder:
    """Takes values apart.

    Parameters
    ----------
    things : sequence of object
        All objects with a handler that the values contain.
    note : callable
        ``note(recorder, thing)`` returns what there is to know about a thing.
    duplicate : bool, default True
        Whether to copy values that are neither tensors nor things. Not needed where the nodes are
        pickled at once.

    Attributes
    ----------
    tensors : list of torch.Tensor
        For each slot its tensor.
    noted : list of Thing
        The nodes of all things that were met.
    """

    def __init__(
        self,
        things: Sequence[object],
        note: Callable[[Recorder, object], Any],
        *,
        duplicate: bool = True,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.noted: list[Thing] = []
        self._note = note
        self._duplicate = duplicate
        self._numbers = {id(thing): number for number, thing in enumerate(things)}
        self._copies: dict[int, Any] = {id(thing): thing for thing in things}
        self._known: dict[int, Node] = {}
        self._alive: list[object] = []  # an id means something only while its value lives

    def record(self, value: object) -> Node:
        """Return the node of a value: the same for the same object."""
        known = self._known.get(id(value))
        if known is not None:
            return known
        if type(value) in ATOMS:
            return Plain(value)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            self.tensors.append(value)
            return self._know(value, Slot(len(self.tensors) - 1))
        if id(value) in self._numbers:
            thing = Thing(self._numbers[id(value)])
            self._know(value, thing)
            thing.content = self._note(self, value)
            self.noted.append(thing)
            return thing
        if type(value) in _CONTAINERS:
            if is_flat(value):
                return self._know(value, Plain(self._copy(value, flat=True)))
            items = Items(type(value), list(value) if isinstance(value, dict) else None, [])
            self._know(value, items)
            items.nodes.extend(self.record(each) for each in children_of(value))
            return items
        return self._know(value, Plain(self._copy(value, flat=False)))

    def resume(self, tensors: Sequence[torch.Tensor], slots: Mapping[int, Slot]) -> None:
        """Begin with tensors, and the slot of each by its id."""
        self.tensors.extend(tensors)
        self._known.update(slots)

    def adopt(self, thing: object, node: Thing) -> None:
        """Take the node of a thing as noted."""
        self._know(thing, node)
        self.noted.append(node)

    def _copy(self, value: object, *, flat: bool) -> object:
        return _copied(value, self._copies, flat) if self._duplicate else value

    def _know(self, value: object, node: Node) -> Node:
        self._known[id(value)] = node
        self._alive.append(value)
        return node


class Builder:
    """Puts values together again.

    Parameters
    ----------
    values : sequence of torch.Tensor
        For each slot the value; only read, unless they may be kept.
    things : sequence of object
        This rank's things, in the order in which they were numbered.
    change : callable
        ``change(builder, thing, content)`` makes a thing be as its handler has noted.
    owners : sequence of torch.Tensor, optional
        For each slot the tensor whose value it was, where that was on this rank.
    addresses : sequence of int, optional
        For each owner where its data was.
    devices : sequence of str, optional
        For each slot on which type of device it was, where that was on another rank.
    keep : bool, default False
        Whether values are to be used themselves where there is no tensor yet to take them in.

    Attributes
    ----------
    things : sequence of object
        This rank's things.
    kept : set of int
        Slots whose values are used themselves.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        things: Sequence[object],
        change: Callable[[Builder, Any, Any], None],
        *,
        owners: Sequence[torch.Tensor] | None = None,
        addresses: Sequence[int] = (),
        devices: Sequence[str] = (),
        keep: bool = False,
    ) -> None:
        self._keep = keep
        self._values = values
        self.things = things
        self._change = change
        self._owners = owners
        self._addresses = addresses
        self._devices = devices
        self._built: dict[int, Any] = {}
        self._filled: dict[int, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._copies: dict[int, Any] = {id(thing): thing for thing in things}
        self.kept: set[int] = set()

    @property
    def local(self) -> bool:
        """Whether the values were this rank's own."""
        return self._owners is not None

    def value(self, slot: Slot) -> torch.Tensor:
        """Return the value of a slot, only to be read."""
        return self._values[slot]

    def has(self, slot: Slot) -> bool:
        """Return whether the tensor of a slot has been met."""
        return slot in self._filled

    def replace(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Have another tensor with the same memory be that of a slot."""
        self._filled[slot] = tensor

    def build(self, node: Node) -> Any:
        """Return the value of a node: the same object for the same node."""
        if isinstance(node, Slot):
            return self.tensor(node)
        if id(node) in self._built:
            return self._built[id(node)]
        if isinstance(node, Thing):
            value = self._built[id(node)] = self.things[node.number]
            self._change(self, value, node.content)
            return value
        if isinstance(node, Items):
            return self._container(node)
        value = node.value
        if type(value) not in ATOMS:
            flat = type(value) in _CONTAINERS and is_flat(value)
            value = self._built[id(node)] = _copied(value, self._copies, flat)
        return value

    def tensor(self, slot: Slot, live: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor with the value of a slot: the same tensor for the same slot.

        Parameters
        ----------
        slot : Slot
            Which.
        live : torch.Tensor, optional
            A tensor that should have this value and keep its identity. Not needed where the values
            are this rank's own: then it is the tensor that had it.
        """
        if slot in self._filled:
            return self._filled[slot]
        value = self._values[slot]
        target = self._owners[slot] if self._owners is not None else live
        if target is value:
            pass  # it has it still
        elif target is None and self._keep and self._device(slot, None) == "cpu":
            self.kept.add(slot)
            target = value
        elif target is None or target.is_inference():
            target = value.to(self._device(slot, target), copy=True)
        elif self._fits(target, slot):
            self._targets.append(target)
            self._sources.append(value)
        else:
            target.data = value.to(target.device, copy=True)
        self._filled[slot] = target
        return target

    def flush(self) -> None:
        """Do the copying in place that :meth:`tensor` has only noted."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)
            self._targets.clear()
            self._sources.clear()

    def _container(self, node: Items) -> Any:
        if node.keys is None:
            if node.kind is tuple:
                return self._built.setdefault(id(node), tuple(self.build(n) for n in node.nodes))
            items = self._built[id(node)] = []
            items.extend(self.build(each) for each in node.nodes)
            return items
        mapping = self._built[id(node)] = node.kind()
        for key, each in zip(node.keys, node.nodes, strict=True):
            mapping[key] = self.build(each)
        return mapping

    def _device(self, slot: Slot, target: torch.Tensor | None) -> str | torch.device:
        if target is not None:
            return target.device
        return self._devices[slot] if self._devices else self._values[slot].device

    def _fits(self, target: torch.Tensor, slot: Slot) -> bool:
        """Return whether a value can be copied into `target` as it is now.

        Not if `target` looks into other memory than at the time: that may by now be another
        tensor's, too, which then would get two values. Nor if it looks at some of it twice.
        """
        value = self._values[slot]
        return (
            target.shape == value.shape
            and target.dtype == value.dtype
            and not any(
                n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)
            )
            and (not self._addresses or target.data_ptr() == self._addresses[slot])
        )

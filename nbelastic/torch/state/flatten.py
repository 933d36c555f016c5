"""Values flattened into tensors and nodes, and unflattened again.

A :class:`Flattener` makes a *node* of each value: a reference of a tensor, the content of an object
that has an adapter (:mod:`nbelastic.torch.state.adapters`), the items of a container, a copy of
anything else. Nodes hold no tensors, so nodes can be pickled, and tensors be copied or sent.

An :class:`Unflattener` makes values of nodes, with tensors from a commit or from another rank. It
changes objects and their tensors in place, because optimizers, hooks and users refer to them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.elastic.state.in_place import Originals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbelastic.torch.state.structure import Structure, TensorNames

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (list, tuple, *_MAPPINGS)
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class TensorRef(int):
    """Reference of a tensor by its number; an int, which the garbage collector ignores."""

    __slots__ = ()


@dataclass(eq=False)
class ContainerNode:
    """Node of a list, tuple or dict."""

    kind: type
    keys: list[Any] | None  # of a dict, with references for tensors
    nodes: list[Any]  # of the items
    factory: Any = None  # of a defaultdict


@dataclass(eq=False)
class ObjectNode:
    """Node of an object with an adapter: its number, and its captured content."""

    number: int
    content: Any = None


@dataclass(eq=False)
class ValueNode:
    """Node of any other value."""

    value: Any


Node = TensorRef | ContainerNode | ObjectNode | ValueNode


def children_of(value: object) -> Iterable[Any]:
    """Return the items of a container that is traversed; for other values nothing."""
    if type(value) in (list, tuple):
        return value  # type: ignore[return-value]
    return value.values() if type(value) in _MAPPINGS else ()  # type: ignore[attr-defined]


def is_container(value: object) -> bool:
    """Return whether a value is a container that is traversed."""
    return type(value) in _CONTAINERS


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is given by its type, its shape and its bytes."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def mapping(nodes: Mapping[Any, Node]) -> ContainerNode:
    """Return the node of a dict with these nodes."""
    return ContainerNode(dict, [*nodes], [*nodes.values()])


def nested(value: object) -> list[Any]:
    """Return a value and all values nested in its containers, each once."""
    if type(value) not in _CONTAINERS:
        return [value]
    found = {id(value): value}
    queue = [value]
    for each in queue:
        for child in children_of(each):
            if id(child) not in found:
                found[id(child)] = child
                queue.append(child)
    return queue


def is_flat(value: object) -> bool:
    """Return whether a container holds neither tensors nor values that can change."""
    keys = value if isinstance(value, dict) else ()
    return ATOMS.issuperset(map(type, children_of(value))) and ATOMS.issuperset(map(type, keys))


def _copied(value: object, known: dict[int, Any], *, flat: bool) -> object:
    """Return a deep copy; `known` has existing copies by the ids of their originals."""
    if not flat:
        return copy.deepcopy(value, known)
    return known.setdefault(id(value), copy.copy(value))


def refs_in(node: Node, label: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield the tensors in a container, with an expression for each."""
    for name, part in leaves_in(node, label, "{}[{!r}]"):
        if isinstance(part, TensorRef):
            yield name, part


def leaves_in(node: Node, label: str, form: str) -> Iterator[tuple[str, TensorRef | ObjectNode]]:
    """Yield the tensors and objects in a container; `form` makes a name of a name and a key."""
    stack: list[tuple[str, Node]] = [(label, node)]
    seen: set[int] = set()
    while stack:
        label, node = stack.pop()
        if isinstance(node, (TensorRef, ObjectNode)):
            yield label, node
        elif isinstance(node, ContainerNode) and id(node) not in seen:
            seen.add(id(node))
            keys = range(len(node.nodes)) if node.keys is None else node.keys
            pairs = zip(keys, node.nodes, strict=True)
            stack.extend([(form.format(label, key), each) for key, each in pairs][::-1])


class Flattener:
    """Makes nodes of values.

    For the `objects` with an adapter, ``capture(flattener, obj)`` returns their content, with nodes
    for its values. Values that are neither tensors nor objects are copied.
    """

    def __init__(
        self, objects: Sequence[object], capture: Callable[[Flattener, object], Any]
    ) -> None:
        self.tensors: list[torch.Tensor] = []  # in the order of their references
        self.captured: list[ObjectNode] = []  # of all objects that were found
        self._capture = capture
        self._numbers = {id(obj): number for number, obj in enumerate(objects)}
        self._copies: dict[int, Any] = {id(obj): obj for obj in objects}
        self._known: dict[int, Node] = {}
        self._alive: list[object] = []  # an id means something only while its value lives

    def flatten(self, value: object) -> Node:
        """Return the node of a value: the same for the same object."""
        known = self._known.get(id(value))
        if known is not None:
            return known
        if type(value) in ATOMS:
            return ValueNode(value)
        if isinstance(value, torch.Tensor) and is_dense(value):
            self.tensors.append(value)
            return self._know(value, TensorRef(len(self.tensors) - 1))
        if id(value) in self._numbers:
            obj = ObjectNode(self._numbers[id(value)])
            self._know(value, obj)
            obj.content = self._capture(self, value)
            self.captured.append(obj)
            return obj
        if type(value) in _CONTAINERS:
            if is_flat(value):
                return self._know(value, ValueNode(_copied(value, self._copies, flat=True)))
            factory = value.default_factory if type(value) is defaultdict else None
            items = ContainerNode(type(value), None, [], factory)
            self._know(value, items)
            if isinstance(value, dict):
                items.keys = [self._key(key) for key in value]
            items.nodes.extend(self.flatten(each) for each in children_of(value))
            return items
        return self._know(value, ValueNode(_copied(value, self._copies, flat=False)))

    def resume(self, tensors: Sequence[torch.Tensor], refs: Mapping[int, TensorRef]) -> None:
        """Begin with tensors, and their references by id."""
        self.tensors.extend(tensors)
        self._known.update(refs)

    def is_object(self, value: object) -> bool:
        """Return whether a value is one of the objects with an adapter."""
        return id(value) in self._numbers

    def adopt(self, obj: object, node: ObjectNode) -> None:
        """Take over the node of an object that was captured before."""
        self._know(obj, node)
        self.captured.append(node)

    def originals(self) -> tuple[Originals, dict[int, Any]]:
        """Return the values that were copied, and containers by the ids of their nodes."""
        nodes = [(self._known[id(each)], each) for each in self._alive]
        containers = {id(n): each for n, each in nodes if isinstance(n, ContainerNode)}
        return Originals(self._copies, self._alive), containers

    def _key(self, key: object) -> object:
        return self.flatten(key) if isinstance(key, torch.Tensor) and is_dense(key) else key

    def _know(self, value: object, node: Node) -> Node:
        self._known[id(value)] = node
        self._alive.append(value)
        return node


class Unflattener:
    """Makes values of nodes.

    It is given the tensors' `values`, in the order of their references, and this rank's `objects`,
    in the order of their numbers; ``restore(unflattener, obj, content)`` gives an object its
    captured content. Values are only read, unless `keep` is set: then one may be used itself where
    no tensor exists yet to copy it into.

    For values of this rank, `owners` are the tensors that had them, with the `addresses` of their
    data, and `flattener` made the nodes. For those of another rank, `devices` are the types of
    theirs.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        objects: Sequence[object],
        restore: Callable[[Unflattener, Any, Any], None],
        *,
        owners: Sequence[torch.Tensor] | None = None,
        addresses: Sequence[int] = (),
        devices: Sequence[str] = (),
        keep: bool = False,
        flattener: Flattener | None = None,
    ) -> None:
        self._keep = keep
        self._flattener = flattener
        self._originals: Originals | None = None
        self._containers: Mapping[int, Any] = {}
        self._values = values
        self.objects = objects
        self._restore = restore
        self._owners = owners
        self._addresses = addresses
        self._devices = devices
        self._built: dict[int, Any] = {}
        self._filled: dict[int, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._copies: dict[int, Any] = {id(obj): obj for obj in objects}
        self.kept: set[int] = set()  # references of values that are used themselves

    @property
    def local(self) -> bool:
        """Whether the values are from this rank."""
        return self._owners is not None

    def value(self, ref: TensorRef) -> torch.Tensor:
        """Return the value of a tensor, only to be read."""
        return self._values[ref]

    def has(self, ref: TensorRef) -> bool:
        """Return whether a tensor has been restored already."""
        return ref in self._filled

    def restored(self) -> set[int]:
        """Return the identities of all tensors that have been restored already."""
        return {id(tensor) for tensor in self._filled.values()}

    def begin_values(self) -> dict[int, Any]:
        """End with objects, and begin with values, which are restored in place on their rank.

        Returns what the objects have, by ids. (What an object has loaded is its own business: it
        may clear its containers before it fills them from those that it is given.)
        """
        if self._flattener is not None:
            self._originals, self._containers = self._flattener.originals()
        return {id(each): each for each in (*self._built.values(), *self._filled.values())}

    def replace(self, ref: TensorRef, tensor: torch.Tensor) -> None:
        """Replace a restored tensor by another one with the same memory."""
        self._filled[ref] = tensor

    def unflatten(self, node: Node) -> Any:
        """Return the value of a node: the same value for the same node."""
        if isinstance(node, TensorRef):
            return self.tensor(node)
        if id(node) in self._built:
            return self._built[id(node)]
        if isinstance(node, ObjectNode):
            value = self._built[id(node)] = self.objects[node.number]
            self._restore(self, value, node.content)
            return value
        if isinstance(node, ContainerNode):
            return self._container(node)
        value = node.value
        if type(value) not in ATOMS and self._originals is not None:
            value = self._built[id(node)] = self._originals.restored(value, self._copies)
        elif type(value) not in ATOMS:
            flat = type(value) in _CONTAINERS and is_flat(value)
            value = self._built[id(node)] = _copied(value, self._copies, flat=flat)
        return value

    def tensor(self, ref: TensorRef, live: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor with its value: the same tensor for the same reference.

        Without `owners`, the tensor `live` takes the value, if there is one.
        """
        if ref in self._filled:
            return self._filled[ref]
        value = self._values[ref]
        target = self._owners[ref] if self._owners is not None else live
        if target is value:
            pass  # not copied, so it still has the value
        elif target is None and self._keep and self._device(ref, None) == value.device.type:
            self.kept.add(ref)
            target = value
        elif target is None or target.is_inference():
            target = value.to(self._device(ref, target), copy=True)
        elif self._fits(target, ref):
            self._targets.append(target)
            self._sources.append(value)
        else:
            target.data = value.to(target.device, copy=True)
        self._filled[ref] = target
        return target

    def flush(self) -> None:
        """Do the copies that :meth:`tensor` has put off."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)
            self._targets.clear()
            self._sources.clear()

    def _container(self, node: ContainerNode) -> Any:
        if node.keys is None:
            if node.kind is tuple:
                return self._built.setdefault(
                    id(node), tuple(self.unflatten(n) for n in node.nodes)
                )
            items = self._built[id(node)] = self._containers.get(id(node), [])
            items[:] = [self.unflatten(each) for each in node.nodes]
            return items
        mapping = self._built[id(node)] = self._containers.get(id(node), node.kind())
        if node.kind is defaultdict:
            mapping.default_factory = node.factory
        pairs = [
            (self.tensor(key) if isinstance(key, TensorRef) else key, self.unflatten(each))
            for key, each in zip(node.keys, node.nodes, strict=True)
        ]
        mapping.clear()
        mapping.update(pairs)
        return mapping

    def _device(self, ref: TensorRef, target: torch.Tensor | None) -> str | torch.device:
        if target is not None:
            return target.device
        return self._devices[ref] if self._devices else self._values[ref].device

    def _fits(self, target: torch.Tensor, ref: TensorRef) -> bool:
        """Return whether a value can be copied into `target`.

        Not if `target` has other memory than before: another tensor may have the same memory by
        now, and would take two values. Nor if `target` is expanded.
        """
        value = self._values[ref]
        return (
            target.shape == value.shape
            and target.dtype == value.dtype
            and not any(
                n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)
            )
            and (not self._addresses or target.data_ptr() == self._addresses[ref])
        )


class Adapter:
    """Way to keep objects of a class in a state, in place, on the same rank and on another.

    The class names it, ``nbelastic_adapter = LedgerAdapter``, or it is one of those in
    :mod:`nbelastic.torch.state.adapters`. A checkpoint names the adapter's class, so that
    ``load_checkpoint`` can read it without the object.

    An object with ``nbelastic_complete = True`` keeps its tensors from commit to commit, so that it
    is captured once.
    """

    def capture(self, flattener: Flattener, obj: Any) -> Any:
        """Return the content of an object, with nodes for its values; picklable."""

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        """Give `obj` its captured content."""

    def parts(self, label: str, content: Any, names: TensorNames) -> Structure:
        """Return the structure of the object called `label`, which must be equal on all ranks."""
        del label, content, names
        return {}

    def state_dict(self, content: Any, *, whole: bool = False) -> Node:
        """Return the content as a state dict of the object; by default it is a node itself.

        With `whole`, add tensors that the object's own state dict does not have.
        """
        del whole
        node: Node = content
        return node

"""Values as a commit keeps them, and values given back.

A :class:`Flattener` copies values deeply, but for tensors and for objects that have an adapter
(:mod:`nbelastic.torch.state.adapters`): in a copy, these stand for themselves. So tensors can be
copied together, or sent in place of what the copies refer to.

An :class:`Unflattener` gives values back, with tensors of this rank in place of another rank's. It
changes objects and their tensors in place, because optimizers, hooks and users refer to them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nbelastic.elastic.state.in_place import Originals
from nbelastic.torch.gradients.arrived import same
from nbelastic.torch.state.structure import Structure

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (list, tuple, *_MAPPINGS)
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def is_container(value: object) -> bool:
    """Return whether a value is a container that is traversed."""
    return type(value) in _CONTAINERS


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is given by its type, its shape and its bytes."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def is_flat(value: Any) -> bool:
    """Return whether a container holds neither tensors nor values that can change."""
    keys, items = (value, value.values()) if isinstance(value, dict) else ((), value)
    return ATOMS.issuperset(map(type, items)) and ATOMS.issuperset(map(type, keys))


def walk(value: Any, label: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value and all values nested in its containers, each once; of flat ones nothing.

    Each has a path, if the first has one.
    """
    stack: list[tuple[str, Any]] = [(label, value)]
    seen: set[int] = set()
    while stack:
        label, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield label, value
        if type(value) in _CONTAINERS and not is_flat(value):
            mapping = isinstance(value, dict)
            pairs = (
                [*value.items(), *(("key", key) for key in value)]
                if mapping
                else [*enumerate(value)]
            )
            inner = [
                (label and f"{label}.{key}", each) for key, each in pairs if type(each) not in ATOMS
            ]
            stack.extend(inner[::-1])


class Flattener:
    """Copies of values in which tensors, and the `objects` with adapters, stand for themselves."""

    def __init__(self, objects: Iterable[object]) -> None:
        self.tensors: list[torch.Tensor] = []  # dense ones, each once
        self.memo: dict[int, Any] = {id(obj): obj for obj in objects}  # of the deep copies
        # As deep copies do: an id means something only while its value lives.
        self._alive: list[Any] = self.memo.setdefault(id(self.memo), [])

    def flatten(self, value: Any) -> Any:
        """Return the copy of a value: the same for the same value."""
        if type(value) in ATOMS:
            return value
        if (known := self.memo.get(id(value))) is not None:
            return known
        for _, each in walk(value):
            if id(each) in self.memo:
                continue
            if isinstance(each, torch.Tensor):
                self.add([each] if is_dense(each) else ())
            elif type(each) in _CONTAINERS and is_flat(each):
                self._alive.append(each)  # a long history of numbers: 30 times as fast
                self.memo[id(each)] = copy.copy(each)
        return copy.deepcopy(value, self.memo)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add dense tensors, which stand for themselves from here on."""
        new = {id(each): each for each in tensors if id(each) not in self.memo}
        self.memo.update(new)
        self.tensors.extend(new.values())


class ObjectRow:
    """What an object is made of, by identity; as long as it is the same, its content holds.

    `look` chains functions in C, because each step looks twice.
    """

    def __init__(
        self, look: Callable[[], Iterable[object]], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._look, self._seen = look, [*look()]
        self.tensors = tensors

    def holds(self) -> bool:
        """Return whether all is as it was."""
        try:
            return same([*self._look()], self._seen)
        except KeyError:  # an attribute is gone
            return False


class Unflattener:
    """Values given back: the tensors of a payload or a commit, and this rank's `objects`.

    On the rank that has made the commit, `own` are its tensors with their values. On another one,
    `devices` are the types of the sender's, by the ids of the payload's tensors. These are only
    read, unless `keep` is set: then one may be used itself where no tensor exists yet.
    """

    def __init__(
        self,
        objects: Iterable[object],
        *,
        own: Mapping[int, torch.Tensor] | None = None,
        devices: Mapping[int, str] | None = None,
        keep: bool = False,
    ) -> None:
        self.local = own is not None
        # Of the deep copies: what stands for captured things, by their ids.
        self.memo: dict[int, Any] = {id(obj): obj for obj in objects}
        self.memo.update(own or {})
        self.kept: set[int] = set()  # ids of tensors that are used themselves
        self._keep = keep
        self._devices = devices or {}
        self.originals: Originals | None = None  # to be filled again

    def unflatten(self, value: Any) -> Any:
        """Return the value of a copy: the same for the same copy."""
        if type(value) in ATOMS:
            return value
        if self.originals is not None:
            return self.originals.restored(value, self.memo)
        for _, each in () if self.local else walk(value):
            if isinstance(each, torch.Tensor) and is_dense(each):
                self.tensor(each)
        return copy.deepcopy(value, self.memo)

    def tensor(self, captured: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor of this rank for a captured one: the same for the same."""
        key = id(captured)
        if key in self.memo:
            return self.memo[key]  # type: ignore[no-any-return]
        device = self._devices.get(key, captured.device.type)
        if live is not None:
            live = filled(live, captured)
        elif self._keep and device == captured.device.type:
            self.kept.add(key)
            live = captured
        else:
            live = captured.to(device, copy=True)
        self.memo[key] = live
        return live


@torch.no_grad()
def filled(target: torch.Tensor, value: torch.Tensor, address: int = 0) -> torch.Tensor:
    """Return `target` with a value, or a new tensor if the value cannot be put there.

    Its data are replaced if they are not at `address` any more, unless that is 0: another tensor
    may have the same memory by now, and would take two values.
    """
    if target.is_inference():
        return value.to(target.device, copy=True)
    is_expanded = any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True))
    alike = target.shape == value.shape and target.dtype == value.dtype
    if alike and not is_expanded and address in (0, target.data_ptr()):
        target.copy_(value)
    else:
        target.data = value.to(target.device, copy=True)
    return target


class Adapter:
    """Way to keep objects of a class in a state, in place, on the same rank and on another.

    The class names it, ``nbelastic_adapter = LedgerAdapter``, or it is one of those in
    :mod:`nbelastic.torch.state.adapters`. A checkpoint names the adapter's class, so that
    ``load_checkpoint`` can read it without the object.
    """

    def capture(self, flattener: Flattener, obj: Any) -> Any:
        """Return the content of an object, made of flattened values; picklable."""

    def row(self, obj: Any, content: Any) -> ObjectRow | None:
        """Return what the captured content follows from; None if each commit captures anew."""
        del obj, content
        return None

    def restore(self, unflattener: Unflattener, obj: Any, content: Any) -> None:
        """Give `obj` its captured content."""

    def parts(self, label: str, content: Any, names: dict[int, str]) -> Structure:
        """Return the structure of the object called `label`, which must be equal on all ranks.

        A model adds to `names` its tensors, by their ids.
        """
        del label, content, names
        return {}

    def state_dict(self, content: Any, *, whole: bool = False) -> Any:
        """Return a state dict of the object; by default, the content.

        With `whole`, add tensors that the object's own state dict does not have.
        """
        del whole
        return content

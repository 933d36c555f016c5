"""Capture and restoration of a commit, copies of tensors, and random generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nbelastic.elastic.followed import generator_states
from nbelastic.elastic.sampler import SamplerSnapshot, ShardSampler
from nbelastic.elastic.state.in_place import Originals
from nbelastic.torch.gradients.arrived import same
from nbelastic.torch.state.adapters import adapter_for, objects_in, tensors_in
from nbelastic.torch.state.flatten import (
    ATOMS,
    Flattener,
    ObjectRow,
    Unflattener,
    filled,
)
from nbelastic.torch.state.optimizer_adapter import within
from nbelastic.torch.state.settings import COMPILED
from nbelastic.torch.state.structure import Structure

_address_of = torch.Tensor.data_ptr


class Part(NamedTuple):
    """Object of a state, and its captured content."""

    obj: Any
    label: str  # its path in the values
    content: Any
    row: ObjectRow | None  # what the content follows from


@dataclass(slots=True)
class Commit:
    """All of a state but its tensors' values: objects with their captured content, and values."""

    parts: Sequence[Part]
    values: dict[str, Any]
    tensors: list[torch.Tensor]
    samplers: list[tuple[ShardSampler, SamplerSnapshot]]
    memo: dict[int, Any]  # of the values' copies
    addresses: list[int] = field(init=False)
    generators: list[tuple[Callable[[Any], object], Any]] = field(default_factory=generator_states)

    def __post_init__(self) -> None:
        self.addresses = list(map(_address_of, self.tensors))

    @property
    def objects(self) -> list[Any]:
        """Models, optimizers and others with an adapter."""
        return [part.obj for part in self.parts]

    def in_order(self) -> list[Part]:
        """Return objects in the order of restoration: models first, optimizers after wrappers."""

        def place(part: Part) -> tuple[bool, bool, int]:
            if isinstance(part.obj, torch.optim.Optimizer):
                return True, True, -len(within(part.obj))
            return not isinstance(part.obj, torch.nn.Module), False, 0

        return sorted(self.parts, key=place)

    def kinds(self) -> list[str]:
        """Return names and types of the objects; of a compiled model that of the model itself."""
        plain = [(each.label, getattr(each.obj, COMPILED, each.obj)) for each in self.parts]
        return [f"{label} ({type(obj).__qualname__})" for label, obj in plain]

    def structure(self) -> Structure:
        """Return the structure of the objects, to be compared with another one."""
        names: dict[int, str] = {}
        structure: Structure = {}
        for obj, label, content, _ in self.in_order():
            structure.update(adapter_for(obj).parts(label, content, names))
        return structure

    def names(self) -> dict[int, str]:
        """Return a name for each tensor, by its id: its path in an object, or in the values."""
        trees = [
            (label, adapter_for(obj).state_dict(content, whole=True))
            for obj, label, content, _ in self.in_order()
        ]
        found: dict[int, str] = {}  # models come first, because they name what others share
        for label, tree in (*trees, *self.values.items()):
            for name, tensor in tensors_in(tree, label):
                found.setdefault(id(tensor), name)
        return found

    def restore(self, copies: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Restore all objects in place; return the values by name."""
        # For each tensor, `copies` has its value: a copy, or the tensor itself if uncopied.
        own = {
            id(tensor): tensor if tensor is value else filled(tensor, value, address)
            for tensor, value, address in zip(self.tensors, copies, self.addresses, strict=True)
        }
        values, _ = self.rebuild(Unflattener(self.objects, own=own), Originals(self.memo))
        for sampler, snapshot in self.samplers:
            sampler.go_back(snapshot)
        for put, generator in self.generators:  # last, as what objects load may draw numbers
            put(generator)
        return values

    def rebuild(
        self, unflattener: Unflattener, originals: Originals | None = None
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return values by name, and what objects have by id; restore objects in place."""
        for obj, _, content, _ in self.in_order():
            adapter_for(obj).restore(unflattener, obj, content)
        # What an object has loaded is its own business: it may clear its containers before it fills
        # them from those that it is given. Values are restored in place on their rank.
        owned = {id(each): each for each in unflattener.memo.values()}
        unflattener.originals = originals
        return {name: unflattener.unflatten(value) for name, value in self.values.items()}, owned


def make_commit(values: Mapping[str, Any], before: Commit | None = None) -> Commit:
    """Return a commit of `values`, with what has not changed since the commit `before`."""
    known = {} if before is None else {id(part.obj): part for part in before.parts}
    objects = [each for each in values.values() if type(each) not in ATOMS]
    if before is not None and same(objects, before.objects):
        found = {part.label: part.obj for part in before.parts}
    else:
        found = objects_in(values)
    flattener = Flattener(found.values())
    parts = []
    for label, obj in found.items():
        part = known.get(id(obj))
        if part is not None and part.row is not None and part.label == label and part.row.holds():
            flattener.add(part.row.tensors)
        else:
            adapter = adapter_for(obj)
            content = adapter.capture(flattener, obj)
            part = Part(obj, label, content, adapter.row(obj, content))
        parts.append(part)
    return Commit(
        parts,
        {name: flattener.flatten(value) for name, value in values.items()},
        flattener.tensors,
        [(each, each.snapshot()) for each in found.values() if isinstance(each, ShardSampler)],
        flattener.memo,
    )


class Copies:
    """Copies of a state's tensors, renewed at each commit."""

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        # By places of the tensors, on their devices; in the host's memory once a device was full.
        self._copied: dict[int, torch.Tensor] = {}
        self._spilled = False

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(each.nbytes for each in self._copied.values())

    @property
    def values(self) -> list[torch.Tensor]:
        """Copies in the order of the tensors; uncopied tensors themselves."""
        return [self._copied.get(place, each) for place, each in enumerate(self._tensors)]

    def take(self, tensors: Sequence[torch.Tensor], uncopied: AbstractSet[int]) -> None:
        """Copy `tensors`, except those with ids in `uncopied`, in place of the copies before."""
        old, self._copied, self._tensors = self._copied, {}, tensors
        targets, sources = [], []
        for place in [n for n, each in enumerate(tensors) if id(each) not in uncopied]:
            tensor, copied = tensors[place], old.get(place)
            if (
                copied is not None
                and (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
                and (copied.device == tensor.device or self._spilled)
            ):
                targets.append(copied)
                sources.append(tensor)
            else:
                copied = self._clone(tensor)
            self._copied[place] = copied
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)  # one launch for hundreds of tensors

    def complete(self) -> None:
        """Copy the uncopied tensors, as they are now."""
        for place, tensor in enumerate(self._tensors):
            if place not in self._copied:
                self._copied[place] = self._clone(tensor)

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Clone a tensor on its device, or to the host if the device is full."""
        if not self._spilled:
            try:
                return tensor.detach().clone()
            except torch.OutOfMemoryError:
                self._spilled = True
        return tensor.detach().to("cpu", copy=True)

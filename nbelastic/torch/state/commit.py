"""Capture and restoration of a commit, and copies of its tensors' values.

The states of this process's random generators are part of it.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.identity import same
from nbelastic.torch.state.adapters import capture_object, in_order, objects_in, restore_object
from nbelastic.torch.state.flatten import ATOMS, Flattener, ObjectNode, Unflattener
from nbelastic.torch.state.structure_cache import StructureCache, recapture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from nbelastic.elastic.sampler import SamplerSnapshot
    from nbelastic.torch.state.flatten import Node

_address_of = torch.Tensor.data_ptr

_STATE_BYTES = 625 * 4  # of NumPy's Mersenne Twister: 624 words and a position


class GeneratorStates:
    """Present states of this process's global generators; they are never sent to another rank.

    NumPy's is included if it has been imported, that of the present CUDA device if CUDA has been
    initialised. NumPy's state of `before` is used again if it has not changed.
    """

    def __init__(self, before: GeneratorStates | None = None) -> None:
        self._python = random.getstate()
        self._numpy: Any = None
        self._words: bytes | None = None
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._take_numpy(numpy.random, before)
        self._cpu = torch.get_rng_state()
        self._cuda: tuple[int, torch.Tensor] | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
            self._cuda = (device, torch.cuda.get_rng_state(device))

    def _take_numpy(self, numpy_random: Any, before: GeneratorStates | None) -> None:
        # get_state() copies number by number: 0.09 ms after a step, as long as a whole commit
        # else. So the words are compared first, at the address that NumPy documents for such use.
        generator = numpy_random.get_bit_generator()
        if type(generator) is numpy_random.MT19937:
            address = generator.ctypes.state_address
            self._words = (ctypes.c_char * _STATE_BYTES).from_address(address).raw
        same = before is not None and self._words is not None and self._words == before._words
        # The second number of a pair of normal ones, if one is left over, is not among the words.
        if same and before is not None and not before._numpy["has_gauss"]:
            self._numpy = before._numpy
        else:
            self._numpy = numpy_random.get_state(legacy=False)

    def restore(self) -> None:
        """Set the generators back to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)


@dataclass(slots=True)
class Commit:
    """All of a state but its tensors' values.

    The tensors in `cache` come first, because the next commit takes them over from there.
    """

    nodes: dict[str, Node]
    captured: list[ObjectNode]
    cache: StructureCache
    owners: list[torch.Tensor]
    addresses: list[int]
    samplers: list[tuple[ShardSampler, SamplerSnapshot]]
    generators: GeneratorStates
    flattener: Flattener

    @property
    def objects(self) -> list[object]:
        """Models, optimizers and other objects with an adapter."""
        return self.cache.objects

    def restore(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Restore all objects in place; return the values by name.

        For each of `owners`, `tensors` has its value: a copy, or the owner itself if it is
        uncopied.
        """
        unflattener = Unflattener(
            tensors,
            self.objects,
            restore_object,
            owners=self.owners,
            addresses=self.addresses,
            flattener=self.flattener,
        )
        values, _ = rebuild(unflattener, self.captured, self.nodes)
        for sampler, snapshot in self.samplers:
            sampler.go_back(snapshot)
        self.generators.restore()
        return values


def make_commit(values: Mapping[str, Any], before: Commit | None = None) -> Commit:
    """Return a commit of `values`, with the cache of the earlier commit `before`."""
    known = None if before is None else before.cache
    objects: list[object] = [each for each in values.values() if type(each) not in ATOMS]
    if known is None or not same(objects, known.objects):
        objects = [*objects_in(values).values()]
    flattener = Flattener(objects, capture_object)
    if known is not None and known.holds(objects):
        flattener.resume(known.tensors, known.refs)
        for node in known.captured:
            obj = objects[node.number]
            flattener.adopt(obj, recapture(flattener, obj, node))
    else:
        known = StructureCache(objects, [*objects_in(values)])
        for obj, is_complete in zip(objects, known.complete, strict=True):
            if is_complete:
                flattener.flatten(obj)
        known.fill(flattener.captured, flattener.tensors)
    nodes = {name: flattener.flatten(value) for name, value in values.items()}
    for obj in objects:  # those within others
        flattener.flatten(obj)
    return Commit(
        nodes,
        flattener.captured,
        known,
        flattener.tensors,
        list(map(_address_of, flattener.tensors)),
        [(each, each.snapshot()) for each in objects if isinstance(each, ShardSampler)],
        GeneratorStates(None if before is None else before.generators),
        flattener,
    )


def rebuild(
    unflattener: Unflattener, captured: list[ObjectNode], nodes: dict[str, Node]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return values by name, and what objects have by id; restore objects in place."""
    for obj in in_order(captured, unflattener.objects):
        unflattener.unflatten(obj)
    owned = unflattener.begin_values()
    built = {name: unflattener.unflatten(node) for name, node in nodes.items()}
    unflattener.flush()
    return built, owned


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor's elements take."""
    return tensor.numel() * tensor.element_size()


class Copies:
    """Copies of a state's tensors, renewed at each commit."""

    def __init__(self) -> None:
        # In the order of the tensors, on their devices, or in the host's memory once a device was
        # full. Uncopied tensors are in it themselves.
        self.values: list[torch.Tensor] = []
        self._uncopied: set[int] = set()
        self._copied: list[int] = []
        self._uncopied_ids: AbstractSet[int] = frozenset()
        self._tensors: Sequence[torch.Tensor] = ()
        self._spare: list[torch.Tensor] = []
        self._spilled = False

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(nbytes_of(self.values[index]) for index in self._copied)

    def take(
        self, tensors: Sequence[torch.Tensor], uncopied: AbstractSet[int] = frozenset()
    ) -> None:
        """Copy `tensors`, except those with ids in `uncopied`, in place of the copies before.

        Memory that is no longer needed is freed at the next call: freeing takes as long as filling,
        and the first call is at a join, when other ranks wait.
        """
        self._spare.clear()
        if not self._take_again(tensors, uncopied):
            self._take_anew(tensors, uncopied)
        self._tensors, self._uncopied_ids = (tensors if uncopied else ()), uncopied

    def _take_again(self, tensors: Sequence[torch.Tensor], uncopied: AbstractSet[int]) -> bool:
        """Copy the same tensors as before, if they are the same; else return False."""
        if not uncopied or uncopied is not self._uncopied_ids or not same(tensors, self._tensors):
            return False
        pairs = [(self.values[n], tensors[n]) for n in self._copied]
        if not all(self._suits(copy, tensor) for copy, tensor in pairs):
            return False
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [each for _, each in pairs])
        return True

    def _take_anew(self, tensors: Sequence[torch.Tensor], uncopied: AbstractSet[int]) -> None:
        old = [
            None if index in self._uncopied else copied for index, copied in enumerate(self.values)
        ]
        self.values, self._uncopied = [], set()
        targets, sources = [], []
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                if id(tensor) in uncopied:
                    self._uncopied.add(index)
                    self.values.append(tensor)
                    continue
                copied = old[index] if index < len(old) else None
                if copied is not None and self._suits(copied, tensor):
                    targets.append(copied)
                    sources.append(tensor)
                else:
                    copied = self._clone(tensor)
                self.values.append(copied)
            if targets:
                torch._foreach_copy_(targets, sources)
        kept = set(map(id, self.values))
        self._spare = [each for each in old if each is not None and id(each) not in kept]
        self._copied = [index for index in range(len(tensors)) if index not in self._uncopied]

    def complete(self) -> None:
        """Copy the uncopied tensors, as they are now."""
        with torch.no_grad():
            for index in self._uncopied:
                self.values[index] = self._clone(self.values[index])
        self._uncopied, self._tensors, self._copied = set(), (), list(range(len(self.values)))

    def _suits(self, copied: torch.Tensor, tensor: torch.Tensor) -> bool:
        return (
            copied.shape == tensor.shape
            and copied.dtype == tensor.dtype
            and (copied.device == tensor.device or self._spilled)
        )

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Clone a tensor on its device, or to the host if the device is full."""
        if not self._spilled:
            try:
                return tensor.detach().clone()
            except torch.OutOfMemoryError:
                self._spilled = True
        return tensor.detach().to("cpu", copy=True)

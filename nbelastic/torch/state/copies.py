"""Copies of tensors, in memory that is used again for the next copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.torch.identity import same

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet


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

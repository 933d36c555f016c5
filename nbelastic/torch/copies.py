"""Copies of tensors, in memory that is used again each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Copies"]


class Copies:
    """Copies of the same tensors, again and again.

    Attributes
    ----------
    values : list of torch.Tensor
        The copies, in the order of the tensors; on the tensors' devices, or in the host's memory
        once a device has had no more room.
    """

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self._spilled = False

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors`; what was copied before is gone."""
        old, self.values = self.values, []
        targets, sources = [], []
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                copied = old[index] if index < len(old) else None
                if copied is not None and self._suits(copied, tensor):
                    targets.append(copied)
                    sources.append(tensor)
                else:
                    copied = self._clone(tensor)
                self.values.append(copied)
            if targets:
                torch._foreach_copy_(targets, sources)

    def _suits(self, copied: torch.Tensor, tensor: torch.Tensor) -> bool:
        return (
            copied.shape == tensor.shape
            and copied.dtype == tensor.dtype
            and (copied.device == tensor.device or self._spilled)
        )

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Clone a tensor where it is, if there is room."""
        if not self._spilled:
            try:
                return tensor.detach().clone()
            except torch.OutOfMemoryError:
                self._spilled = True
        return tensor.detach().to("cpu", copy=True)

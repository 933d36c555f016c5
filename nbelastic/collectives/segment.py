"""A segment in terms of tensors, flights and alarms."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from nbelastic.collectives.communicator import Op
from nbelastic.collectives.flights import OperationFailed
from nbelastic.native import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.alarm import Alarm
    from nbelastic.native._core import Group

__all__ = [
    "OPS",
    "TYPES",
    "Message",
    "Ticket",
    "break_with",
    "codes_of",
    "joined_in",
    "piece_of",
    "processors",
    "room_in",
    "together",
]

TYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in core.TYPES.items()}
OPS = core.OPS
# A sum of truths is whether any is true, and a product whether all are; bytes would overflow.
_OPS_ON_TRUTHS = {Op.SUM: "max", Op.MIN: "min", Op.MAX: "max", Op.PRODUCT: "min"}


def codes_of(dtype: torch.dtype, op: Op) -> tuple[int, int]:
    """Return the codes by which the segment knows a type and a reduction of it."""
    if dtype is torch.bool:
        return core.TYPES["uint8"], OPS[_OPS_ON_TRUTHS[op]]
    return TYPES[dtype], OPS[op.value]


def room_in(group: Group, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new vector in a rank's part of a segment."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    block: torch.Tensor = from_dlpack(group.empty(count * dtype.itemsize))
    return block.view(dtype)


def joined_in(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of all `tensors`, one after the other, in a rank's part of a segment."""
    counts = [tensor.numel() for tensor in tensors]
    joined = room_in(group, sum(counts), tensors[0].dtype)
    for piece, tensor in zip(torch.split(joined, counts), tensors, strict=True):
        piece.copy_(tensor.detach().view(-1))
    return joined


def break_with(group: Group, alarm: Alarm, rank: int) -> None:
    """Have a segment break when the alarm is raised, but for a closing in good order."""
    process = os.getpid()

    def act(reason: str, gentle: bool) -> None:
        if not gentle and os.getpid() == process:  # a fork's copy is not the rank's
            group.abort(f"rank {rank} has gone: {reason}")

    alarm.then(act)


class Ticket:
    """A collective under way."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._group.done(self._number)

    def failure(self) -> str | None:
        """Return what went wrong, if something has."""
        return self._group.failure

    def wait(self, alarm: Alarm) -> bool:
        """Wait for its end, or for `alarm`, which breaks the segment; return whether it is well."""
        try:
            self._group.wait(self._number)
        except core.Broken as error:
            if alarm.reason is None:
                raise OperationFailed(str(error)) from None
            return False
        return True

    def strip(self) -> None:
        """Do nothing: what it refers to may be let go of anywhere."""


class Message:
    """A message to be moved by a lane.

    Parameters
    ----------
    move : callable
        What moves it.
    arguments : tuple
        What that is called with.
    lent : object
        The memory that it moves, kept until then.
    """

    def __init__(
        self, move: Callable[..., None], arguments: tuple[object, ...], lent: object
    ) -> None:
        self._move = move
        self._arguments = arguments
        self._lent = lent

    def wait(self, _timeout: object) -> None:
        """Move it. The segment has a limit of its own."""
        try:
            self._move(*self._arguments)
        except core.Broken as error:
            raise RuntimeError(str(error)) from None


def piece_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor is, and how many bytes it has."""
    return tensor.data_ptr(), tensor.nbytes


def together(tensors: Sequence[torch.Tensor], op: Op) -> tuple[list[tuple[int, int]], int, int]:
    """Return where the values of `tensors`, of one type, are; and the codes to reduce them by."""
    return [(each.data_ptr(), each.numel()) for each in tensors], *codes_of(tensors[0].dtype, op)


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

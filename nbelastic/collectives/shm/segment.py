"""A segment of shared memory: how ranks get it, its tensors and operations.

Each rank creates a segment, and tells the others where it is: at a descriptor of its process. Those
of its host open that of the lowest under ``/proc``, where the system lets only processes of the
same user in. The segment has no other name, so a rank that has it is on that host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from nbelastic.collectives.buffers import as_number
from nbelastic.collectives.operations import Operation
from nbelastic.collectives.reduction_tree import additions
from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.native import core

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Op
    from nbelastic.native._core import Group, Tree

# Without the part in C++ there are neither.
TYPES = {getattr(torch, name): code for name, code in core.TYPES.items()} if core else {}
OPS = core.OPS if core else {}


_MOST_RANKS = 256  # of a segment


@contextlib.contextmanager
def offered_segment(size: int) -> Iterator[str]:
    """Create a segment and offer it to other ranks of this host, for the length of a block."""
    descriptor = core.create(min(size, _MOST_RANKS))
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor} {os.fstat(descriptor).st_ino}"
    finally:
        os.close(descriptor)


def join_segment(offer: str, rank: int, size: int, timeout_s: float) -> Group:
    """Return a rank's part in a segment that a rank of this host has offered."""
    path, _, inode = offer.partition(" ")
    descriptor = os.open(path, os.O_RDWR)
    try:
        if str(os.fstat(descriptor).st_ino) != inode:  # its process is gone, and the number reused
            raise FileNotFoundError(f"something else is at {path}")
        return core.Group(descriptor, rank, size, timeout_s)
    finally:
        os.close(descriptor)  # the group has a duplicate


def reduction_codes(dtype: torch.dtype, op: Op) -> tuple[int, int]:
    """Return the native core's codes for a type and a reduction."""
    dtype, op = as_number(dtype, op)
    return TYPES[dtype], OPS[op.value]


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the number of elements of a tensor."""
    return tensor.data_ptr(), tensor.numel()


@functools.lru_cache(maxsize=64)  # the steps of a job sum along few trees
def tree_of(blocks: Blocks, ranks: tuple[int, ...] | None = None) -> Tree:
    """Return the native core's tree for the `ranks` of a segment, by default all.

    Where they are not all, several sums may remain.
    """
    its = [*range(blocks.ranks)] if ranks is None else ranks
    covers = [blocks.covers[rank] for rank in its]
    order = additions([node for cover in covers for node in cover], blocks.leaves)
    return core.Tree([blocks.quotas[rank] for rank in its], [*map(len, covers)], [*order])


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the number of bytes of a tensor."""
    return tensor.data_ptr(), tensor.nbytes


def allocate(group: Group, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new vector in this rank's part of a segment."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    # The tensor keeps the arena and its mapping, so it may outlive the group.
    block: torch.Tensor = from_dlpack(group.empty(count * dtype.itemsize))
    return block.view(dtype)


def abort_with(group: Group, abort_signal: AbortSignal, rank: int) -> None:
    """Break a segment on an abort, unless it is an orderly close."""
    signal = weakref.ref(abort_signal)  # a cycle would keep the segment until it is collected

    def break_segment(reason: str, orderly: bool) -> None:
        given = signal()
        if given is not None and given.kind is RanksDisagree:
            group.abort(reason, differ=True)  # the same error on all ranks
        elif not orderly:  # after a close, peers may finish what this rank has ended
            group.abort(f"rank {rank} has left: {reason}")

    abort_signal.on_abort(break_segment)


class SegmentOperation(Operation):
    """A collective operation under way in a segment, with its number there."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number

    def done(self) -> bool:
        return self._group.done(self._number)

    def wait(self, abort_signal: AbortSignal) -> bool:
        try:
            self._group.wait(self._number)
        except CollectiveError:
            if abort_signal.reason is None:  # else the abort broke it, and gives the reason
                raise
            return False
        return True

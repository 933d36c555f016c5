"""A segment of shared memory: how ranks get it, its tensors and operations.

The lowest rank of a host creates the segment, and tells the others where it is: at a descriptor of
its process. They open that under ``/proc``, where the system lets only processes of the same user
in. The segment has no other name, so a rank that has it is on that host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from nbelastic.collectives.buffers import as_number
from nbelastic.collectives.operations import Operation, OperationFailed
from nbelastic.collectives.reduction_tree import additions
from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.native import core

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.rendezvous.client import Rendezvous
    from nbelastic.collectives.transport import Op
    from nbelastic.native._core import Group, Tree

# Without the part in C++ there are neither.
TYPES = {getattr(torch, name): code for name, code in core.TYPES.items()} if core else {}
OPS = core.OPS if core else {}


def share_segment(
    its: Rendezvous, ranks: Sequence[int], exchange: Callable[[str, bytes], list[bytes]]
) -> tuple[Group | None, str]:
    """Share a segment between the `ranks` of a host; all ranks of all hosts call this.

    Return it, None for a rank alone on its host, and why a rank of any host has failed, if one has.
    Then no rank uses one. `exchange` returns what every rank of all hosts says on a subject.
    """
    with contextlib.ExitStack() as stack:
        offer = ""
        if len(ranks) > 1 and its.rank == ranks[0]:
            try:
                descriptor = core.create(len(ranks))
                stack.callback(os.close, descriptor)  # once all have opened it
                inode = os.fstat(descriptor).st_ino
                offer = f"/proc/{os.getpid()}/fd/{descriptor} {inode}"
            except OSError as error:
                offer = str(error)
        offers = exchange("segments", offer.encode())
        group, failure = None, ""
        failed = stack.enter_context(contextlib.ExitStack())
        if len(ranks) > 1:
            try:
                descriptor = open_offered(offers[ranks[0]].decode())
                stack.callback(os.close, descriptor)  # the group has a duplicate
                group = core.Group(descriptor, ranks.index(its.rank), len(ranks), its.timeout_s)
                failed.callback(group.close)
            except (OSError, ValueError) as error:
                failure = f"it cannot open the memory of rank {ranks[0]}: {error}"
        # A rank that dies before it has a group is missing here; later, its group breaks.
        results = exchange("results", failure.encode())
        for rank, result in enumerate(results):
            if result:
                return None, f"rank {rank}: {result.decode()}"
        failed.pop_all()
        return group, ""


def open_offered(offer: str) -> int:
    """Return a descriptor of the segment that a rank of this host has offered."""
    path, _, inode = offer.partition(" ")
    if not path.startswith("/proc/"):
        raise OSError(offer)  # why there is none
    descriptor = os.open(path, os.O_RDWR)
    if str(os.fstat(descriptor).st_ino) != inode:  # its process is gone, and the number reused
        os.close(descriptor)
        raise FileNotFoundError(f"something else is at {path}")
    return descriptor


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


def error_type(error: Exception) -> type[CollectiveError]:
    """Return the error to raise for the native core's."""
    return RanksDisagree if isinstance(error, core.Disagreement) else CollectiveError


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
        except core.Broken as error:
            if abort_signal.reason is None:  # else the abort broke it, and gives the reason
                failure = OperationFailed(str(error))
                failure.kind = error_type(error)
                raise failure from None
            return False
        return True

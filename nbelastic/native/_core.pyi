"""Collective operations in memory that processes of one host share.

Pointers are addresses (``tensor.data_ptr()``), pairs an address and a length. Lengths are elements
where a type (see `TYPES`) is given, else bytes. Calls that wait or move data release the GIL. What
the system refuses is an ``OSError``; arguments that do not fit together, a ``ValueError``. Once the
segment is broken, by an abort or a dead peer, all raise ``CollectiveError``; if ranks were in
different operations, ``RanksDisagree``.
"""

from typing import Any

TYPES: dict[str, int]  # codes of types that can be reduced, by torch's names
OPS: dict[str, int]  # of reductions: ``sum``, ``average``, ``min``, ``max``, ``product``

def create(size: int) -> int:
    """Create a segment for `size` ranks, or fewer; return its descriptor, an unnamed memfd."""

def copy(target: int, source: int, nbytes: int, far: bool = False) -> None:
    """Copy as messages are copied into a ring; `far` if a distant processor has read the target."""

class Tree:
    """The shape of a sum: the nodes of each rank of a segment, and the order of additions."""

    def __init__(self, leaves: list[int], nodes: list[int], order: list[int]) -> None:
        """Make it of numbers of leaves and nodes by rank, and additions after each node."""

class Block:
    """A piece of this rank's memory in a segment, mapped by all ranks.

    Has the buffer protocol (and DLPack) as bytes. Returns to the segment when it is no longer
    referenced.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Group:
    """One rank's part in a segment.

    The thread that made it calls everything but `abort`, `failure`, `dead` and `waiting`. Beginning
    an operation (``…_async``) returns a ticket. Operations run in order, in the group's own thread
    or in a waiting one. The caller keeps their memory until they have ended.
    """

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        """Map the segment behind `fd`, which the caller closes. A rank's death breaks it."""

    def empty(self, nbytes: int) -> Any:
        """Return an uninitialised `Block` of `nbytes`. Raises ``MemoryError`` if full."""

    def holds(self, ptr: int, nbytes: int) -> bool:
        """Return whether that memory is in this rank's part of the segment."""

    def allreduce(self, ptr: int, count: int, type: int, op: int) -> None:
        """Reduce in place; without copies if all ranks' memory is in the segment."""

    def allreduce_async(self, parts: list[tuple[int, int]], type: int, op: int) -> int:
        """Reduce memory in several places in place; ranks may split the elements differently."""

    def reduce_scatter_async(
        self,
        ptr: int,
        counts: list[int],
        outputs: list[int],
        type: int,
        op: int,
        tree: Tree | None = None,
    ) -> int:
        """Reduce part ``i`` of all ranks' memory (in the segment), on rank ``i`` only.

        The output may be that part itself. Along a tree, which sums, a rank's nodes lie one after
        the other, and each result goes to an output.
        """

    def gather_parts_async(self, ptr: int, counts: list[int], type: int) -> int:
        """Copy part ``i`` of rank ``i``'s memory (in the segment) into that of all others."""

    def allreduce_tree_async(
        self,
        nodes: list[list[tuple[int, int]]],
        outputs: list[tuple[int, int]],
        tree: Tree,
        type: int,
    ) -> int:
        """Sum this rank's nodes and those of all others along a tree, into `outputs`.

        Each node has as many elements as the outputs, which may be those of the first node.
        """

    def broadcast_async(self, ptr: int, nbytes: int, root: int) -> int: ...
    def allgather_async(self, outputs: list[int], ptr: int, nbytes: int) -> int: ...
    def all_to_all_async(
        self, outputs: list[tuple[int, int]], inputs: list[tuple[int, int]]
    ) -> int: ...
    def share(self, record: bytes) -> list[bytes]:
        """Return the `record` of every rank, of at most 16 KiB each; waits for all of them.

        To ranks in another operation, a rank is described by its record up to a zero byte.
        """

    def barrier_async(self) -> int: ...
    def send(self, parts: list[tuple[int, int]], to: int) -> None:
        """Send parts as one message; return when it is in the ring. One thread for each `to`."""

    def receive(self, ptr: int, nbytes: int, source: int) -> None:
        """Wait for a message. One thread for each `source`."""

    def done(self, ticket: int) -> bool:
        """Return whether an operation has ended, or never will."""

    def wait(self, ticket: int) -> None:
        """Wait for an operation. Raises if the segment is broken."""

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread is in `wait`, or a call that waits."""

    @property
    def failure(self) -> str | None:
        """Why the segment is broken, or None."""

    @property
    def dead(self) -> list[int]:
        """Ranks whose processes are known to have ended without leaving."""

    def abort(self, reason: str, differ: bool = False) -> None:
        """Break the segment for all ranks, and wake the waiting ones. The first reason stays.

        It is ``RanksDisagree`` for them if ranks `differ`.
        """

    def close(self) -> None:
        """Leave; in an orderly way if no operation is under way, else break the segment.

        Ends the group's threads. Memory stays mapped as long as it is in use.
        """

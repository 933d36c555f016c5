"""Collectives in memory that processes of one host share.

All pointers are addresses (``tensor.data_ptr()``), all lengths of types 0 to 7 (see `TYPES`) are
elements, all others bytes. Calls that wait or move data release the GIL.
"""

from typing import Any

TYPES: dict[str, int]
"""Codes of what can be reduced, by torch's names: ``float32``, ``float64``, ``float16``,
``bfloat16``, ``int8``, ``int32``, ``int64``, ``uint8``."""

OPS: dict[str, int]
"""Codes of reductions: ``sum``, ``average``, ``min``, ``max``, ``product``."""

ISA: str
"""What the loops in use were compiled for: ``baseline``, ``avx2``, ``avx512`` or ``neon``."""

class Broken(Exception):
    """The segment is broken, by an abort, a peer that is gone, or ranks that disagree."""

def create(size: int) -> int:
    """Make a segment for so many ranks; return its file descriptor (a memfd, nowhere named).

    Raises ``OSError`` where that cannot be.
    """

def copy(target: int, source: int, nbytes: int, far: bool = False) -> None:
    """Copy as messages are copied into a ring: `far`, to where a processor far away has read."""

class Block:
    """A piece of this rank's memory in a segment, all ranks having it mapped.

    Has the buffer protocol (and DLPack) as bytes; goes back to the segment when nothing refers to
    it.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Group:
    """One rank's part in a segment.

    The thread that made it calls everything but `abort`, `failure`, `dead`, `waiting` and
    `completed`. Operations begun (``…_async``) return a ticket and happen in their order, in a
    thread of the group's own, or in that of whoever waits for them. Memory handed in stays the
    caller's to keep until the operation has ended.
    """

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        """Map the segment behind `fd`, which stays the caller's to close.

        Raises ``OSError`` where it cannot be mapped, ``ValueError`` where it is none.
        """

    def watch(self, peers: list[tuple[int, int]]) -> None:
        """Break the segment when a peer dies: (rank, connected socket) pairs.

        The sockets are the group's from here on. A peer whose socket closes after it has left
        in good order breaks nothing.
        """

    def empty(self, nbytes: int) -> Any:
        """Return a `Block` of so many bytes; what is in it is undefined. MemoryError if full."""

    def holds(self, ptr: int, nbytes: int) -> bool:
        """Return whether that memory is in this rank's part of the segment."""

    def allreduce(self, ptr: int, count: int, type: int, op: int) -> None: ...
    def allreduce_async(self, ptr: int, count: int, type: int, op: int) -> int:
        """In place. Without copies, where all ranks' memory is in the segment."""

    def allreduce_coalesced(self, parts: list[tuple[int, int]], type: int, op: int) -> None: ...
    def allreduce_coalesced_async(self, parts: list[tuple[int, int]], type: int, op: int) -> int:
        """In place, of memory in several places, as if it were in one.

        Pairs are an address and a number of elements; how they are cut may differ between ranks.
        """

    def reduce_scatter_async(
        self, output: int, input: int, counts: list[int], type: int, op: int
    ) -> int:
        """Reduce part ``i`` of all ranks' `input` (in the segment) into `output` of rank ``i``."""

    def reduce_parts_async(self, ptr: int, counts: list[int], type: int, op: int) -> int:
        """Reduce part ``i`` of all ranks' memory (in the segment) in place, on rank ``i`` only."""

    def gather_parts_async(self, ptr: int, counts: list[int], type: int) -> int:
        """Copy part ``i`` of rank ``i``'s memory (in the segment) into that of all others."""

    def broadcast_async(self, ptr: int, nbytes: int, root: int) -> int: ...
    def allgather_async(self, outputs: list[int], ptr: int, nbytes: int) -> int: ...
    def all_to_all_async(
        self, outputs: list[tuple[int, int]], inputs: list[tuple[int, int]]
    ) -> int:
        """Pairs are an address and a number of bytes, one pair per rank."""

    def barrier_async(self) -> int: ...
    def send(self, parts: list[tuple[int, int]], to: int) -> None:
        """Send parts as one message, and wait until it is taken.

        Pairs are an address and a number of bytes. One thread at a time for each `to`.
        """

    def receive(self, ptr: int, nbytes: int, source: int) -> None:
        """Wait for a message. One thread at a time for each `source`."""

    def done(self, ticket: int) -> bool:
        """Return whether an operation has ended, or never will."""

    def wait(self, ticket: int) -> None:
        """Wait for an operation. Raises `Broken` if the segment is broken."""

    def settle(self) -> None:
        """Count an operation that was waited for elsewhere (a message)."""

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread is in `wait`, or a call that waits."""

    @property
    def completed(self) -> int:
        """How many operations have been waited for with success."""

    @property
    def failure(self) -> str | None:
        """Why the segment is broken, or None."""

    @property
    def dead(self) -> list[int]:
        """The ranks whose processes are known to have ended without leaving."""

    def abort(self, reason: str) -> None:
        """Break the segment for all ranks, and wake all who wait. The first reason stays."""

    def close(self) -> None:
        """Leave: in good order if nothing is under way, else break the segment.

        Ends the group's threads; takes a moment. Memory in use stays mapped until it is not.
        """

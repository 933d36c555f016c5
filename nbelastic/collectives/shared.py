"""The communicator of ranks that are all on one host: memory that they share.

What is done in that memory, and how, is told in :mod:`nbelastic.native`. Here its operations get
the shape of a communicator's, and tensors get addresses.

Memory that is lent to an operation is kept until the operation has ended, whether or not somebody
still has its handle; once something has failed, until the group is closed: its thread may be in the
middle of a copy. Messages wait in lanes, as Gloo's do.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_peer,
    check_rank,
    check_scatter,
    check_together,
)
from nbelastic.collectives.buffers import on_host, return_to, returning
from nbelastic.collectives.communicator import Handle, Op, Rendezvous
from nbelastic.collectives.landing import FlightHandle, LandingCommunicator
from nbelastic.collectives.lanes import Lane
from nbelastic.collectives.segment import (
    OPS,
    TYPES,
    Message,
    Ticket,
    break_with,
    codes_of,
    joined_in,
    piece_of,
    processors,
    room_in,
    together,
)
from nbelastic.native import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.alarm import Alarm
    from nbelastic.collectives.lanes import MessageFlight
    from nbelastic.native._core import Group

__all__ = ["SharedMemoryCommunicator"]

EXIT_LIMIT_S = 2.0
_AVERAGE = Op.AVERAGE


class SharedMemoryCommunicator(LandingCommunicator):
    """A communicator of ranks that share a segment.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks.
    group : Group
        The segment, open on all ranks. It is the communicator's from here on.
    alarm : Alarm
        What ends it.
    """

    name = "shm"
    coalesces = True
    lets_go = True

    def __init__(self, rendezvous: Rendezvous, group: Group, alarm: Alarm) -> None:
        super().__init__(rendezvous, alarm)
        # Sums are this processor's work: beside other work only if there is another one for them.
        self.overlaps = processors() >= 2 * self.size
        self._timeout_s = rendezvous.timeout_s
        self._group = group
        self._reduce = group.allreduce
        self._lent: deque[tuple[Ticket, object]] = deque()
        self._lanes: dict[str, Lane] = {}
        self._closed = False
        self._process = os.getpid()
        break_with(group, alarm, self.rank)
        _living.add(self)

    def connect(self) -> SharedMemoryCommunicator:
        """Refuse: it has been connected by whoever made it."""
        self._alarm.check()
        raise RuntimeError("connect() is called once")

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector in the segment."""
        self._alarm.check()
        try:
            return room_in(self._group, count, dtype)
        except MemoryError:
            return super().empty(count, dtype)

    # -- operations ------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        """Reduce `tensor` over all ranks and wait for it: the short way, where there is one."""
        count = tensor.numel()
        if (
            self._lent
            or self._closed
            or not (count and tensor.is_cpu and tensor.is_contiguous())
            or (op is _AVERAGE and not tensor.is_floating_point())
        ):
            self.allreduce_async(tensor, op).wait()
            return
        try:
            self._reduce(tensor.data_ptr(), count, TYPES[tensor.dtype], OPS[op._value_])
        except KeyError:  # a type that is summed as another
            self.allreduce_async(tensor, op).wait()
            return
        except core.Broken as error:
            self._fail(str(error))
        self._completed += 1

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        if tensor.numel() == 0:
            return self._nothing()
        buffer = on_host(tensor)
        return self._begin(
            self._group.allreduce_async,
            (buffer.data_ptr(), buffer.numel(), *codes_of(buffer.dtype, op)),
            buffer,
            lambda: return_to(tensor, buffer),
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> None:
        """Reduce `tensors` over all ranks and wait for it: the short way, where there is one."""
        check_together(tensors, op)
        if self._lent or self._closed or not tensors[0].is_cpu:
            self.allreduce_coalesced_async(tensors, op).wait()
            return
        try:
            self._group.allreduce_coalesced(*together(tensors, op))
        except core.Broken as error:
            self._fail(str(error))
        self._completed += 1

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors` over all ranks, in place, as one operation."""
        check_together(tensors, op)
        buffers = [on_host(tensor) for tensor in tensors]
        return self._begin(
            self._group.allreduce_coalesced_async,
            together(buffers, op),
            buffers,
            returning(tensors, buffers),
        )

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        if tensor.numel() == 0:
            return self._nothing()
        buffer = on_host(tensor, load=self.rank == root)

        def land() -> None:
            if self.rank != root:
                return_to(tensor, buffer)

        return self._begin(self._group.broadcast_async, (*piece_of(buffer), root), buffer, land)

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        if tensor.numel() == 0:
            return self._nothing()
        source = on_host(tensor)
        buffers = [on_host(output, load=False) for output in outputs]
        return self._begin(
            self._group.allgather_async,
            ([buffer.data_ptr() for buffer in buffers], *piece_of(source)),
            (source, buffers),
            returning(outputs, buffers),
        )

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        counts = [tensor.numel() for tensor in inputs]
        if not any(counts):
            return self._nothing()
        self._alarm.check()
        try:
            source = joined_in(self._group, inputs)
        except MemoryError as error:
            self._fail(f"no room in shared memory: {error}")
        buffer = on_host(output, load=False)
        return self._begin(
            self._group.reduce_scatter_async,
            (buffer.data_ptr(), source.data_ptr(), counts, *codes_of(output.dtype, op)),
            (source, buffer),
            lambda: return_to(output, buffer),
        )

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        check_exchange(outputs, inputs, self.rank, self.size)
        sources = [on_host(tensor) for tensor in inputs]
        buffers = [on_host(output, load=False) for output in outputs]
        return self._begin(
            self._group.all_to_all_async,
            ([piece_of(buffer) for buffer in buffers], [piece_of(source) for source in sources]),
            (sources, buffers),
            returning(outputs, buffers),
        )

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        return self._begin(self._group.barrier_async, (), None, None)

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`."""
        check_contiguous(tensor)
        check_peer(to, self.rank, self.size, "to")
        if tensor.numel() == 0:
            return self._nothing()
        return self._send([tensor], to)

    def send_parts_async(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        """Send `parts` as one message, without copying them together."""
        check_peer(to, self.rank, self.size, "to")
        return self._send(parts, to)

    def _send(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        buffers = [on_host(part) for part in parts]
        arguments = ([piece_of(buffer) for buffer in buffers], to)
        flight = self._post(f"to-{to}", self._group.send, arguments, buffers)
        return FlightHandle(self, flight, None)

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        check_contiguous(tensor)
        check_peer(source, self.rank, self.size, "source")
        if tensor.numel() == 0:
            return self._nothing()
        buffer = on_host(tensor, load=False)
        arguments = (*piece_of(buffer), source)
        flight = self._post(f"from-{source}", self._group.receive, arguments, buffer)
        return FlightHandle(self, flight, lambda: return_to(tensor, buffer))

    # -- state -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread waits for an operation now."""
        return self._waiting or self._group.waiting

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks whose processes are known to have ended."""
        return tuple(self._group.dead)

    def cut(self) -> int:
        """Break the segment, as a peer that vanishes would; return from how many others."""
        if self._closed or self._group.failure is not None:
            return 0
        self._group.abort(f"rank {self.rank} was cut off")
        return self.size - 1

    def close(self) -> None:
        """Leave the segment: in good order if nothing is under way."""
        if self._closed or self._process != os.getpid():
            return  # a fork has neither the group's threads nor its place among the ranks
        self._closed = True
        lent = [ticket for ticket, _ in self._lent]
        idle = all(each.done() for each in lent) and all(a.idle for a in self._lanes.values())
        self._alarm.raise_("the communicator is closed", gentle=idle)
        for lane in self._lanes.values():
            lane.join()
        self._group.close()
        self._lent.clear()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(
        self,
        start: Callable[..., int],
        arguments: tuple[Any, ...],
        lent: object,
        land: Callable[[], None] | None,
    ) -> Handle:
        self._alarm.check()
        self._let_go()
        try:
            ticket = Ticket(self._group, start(*arguments))
        except core.Broken as error:
            self._fail(str(error))
        self._lent.append((ticket, lent))
        return FlightHandle(self, ticket, land)

    def _let_go(self) -> None:
        """Let go of memory that was lent to operations that have ended; they end in order."""
        while self._lent and self._lent[0][0].done():
            if self._group.failure is not None:
                return
            self._lent.popleft()

    def _settle(self, _flight: object) -> None:
        self._let_go()

    def _post(
        self, lane: str, move: Callable[..., None], arguments: tuple[object, ...], lent: object
    ) -> MessageFlight:
        """Send or receive in a lane."""
        self._alarm.check()
        if lane not in self._lanes:
            name = f"nbelastic-shm-{self.generation}-{self.rank}-{lane}"
            self._lanes[lane] = Lane(name, self._timeout_s)
        return self._lanes[lane].put(Message(move, arguments, lent))


_living: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Free whoever waits: a thread must not come back into an interpreter that is gone."""
    communicators = list(_living)
    for communicator in communicators:
        communicator.abort("the process is exiting")
    deadline = time.monotonic() + EXIT_LIMIT_S
    while any(each.waiting for each in communicators) and time.monotonic() < deadline:
        time.sleep(0.001)

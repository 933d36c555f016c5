"""The communicator over Gloo: TCP between any ranks.

It offers Gloo's operations with what Gloo lacks: whoever waits can be freed, and what is left
behind ends by itself. How, and which thread owns what, is told in the modules beneath this one:
``keeper`` (the group), ``flights`` and ``lanes`` (operations under way), ``alarm`` (the end).

Operations that only move data move bytes, so they take any type. Averages are sums, divided when
they are waited for. A reduce-scatter is an allreduce of which each rank takes its part, as it is
inside Gloo too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import BarrierOptions, BroadcastOptions

from nbelastic.collectives.alarm import Alarm
from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_peer,
    check_rank,
    check_scatter,
)
from nbelastic.collectives.buffers import as_bytes, join, on_host, return_to
from nbelastic.collectives.communicator import Handle, Op, Rendezvous
from nbelastic.collectives.flights import CollectiveFlight, first_sentence
from nbelastic.collectives.keeper import Keeper
from nbelastic.collectives.landing import FlightHandle, LandingCommunicator
from nbelastic.collectives.reducing import as_reducible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Work

    from nbelastic.collectives.flights import Flight

__all__ = ["GlooCommunicator"]


class GlooCommunicator(LandingCommunicator):
    """A communicator of two or more ranks.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks, and where they meet.
    alarm : Alarm, optional
        Of those it belongs to, if it is a part of something.
    """

    name = "gloo"

    def __init__(self, rendezvous: Rendezvous, alarm: Alarm | None = None) -> None:
        super().__init__(rendezvous, alarm or Alarm())
        self._keeper = Keeper(rendezvous, self._alarm)

    def connect(self) -> GlooCommunicator:
        """Meet the other ranks and connect to all of them."""
        self._alarm.check()
        self._keeper.form()
        return self

    # -- operations ------------------------------------------------------------------------------

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        buffer = on_host(tensor)

        def land() -> None:
            if op is Op.AVERAGE:
                buffer.div_(self.size)
            return_to(tensor, buffer)

        return self._reduce(buffer, op, land)

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        buffer = on_host(tensor, load=self.rank == root)
        options = BroadcastOptions()
        options.rootRank = root

        def land() -> None:
            if self.rank != root:
                return_to(tensor, buffer)

        if tensor.numel() == 0:
            return self._nothing()
        return self._begin(lambda: self._keeper.group.broadcast([as_bytes(buffer)], options), land)

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        source = on_host(tensor)
        buffers = [on_host(output, load=False) for output in outputs]

        def land() -> None:
            for output, buffer in zip(outputs, buffers, strict=True):
                return_to(output, buffer)

        if tensor.numel() == 0:
            return self._nothing()
        return self._begin(
            lambda: self._keeper.group.allgather(
                [[as_bytes(buffer) for buffer in buffers]], [as_bytes(source)]
            ),
            land,
        )

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        buffer = join(inputs)
        start = sum(tensor.numel() for tensor in inputs[: self.rank])

        def land() -> None:
            own = buffer[start : start + output.numel()].view(output.shape)
            if op is Op.AVERAGE:
                own.div_(self.size)
            output.detach().copy_(own)

        return self._reduce(buffer, op, land)

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        check_exchange(outputs, inputs, self.rank, self.size)
        sent = join([as_bytes(tensor) for tensor in inputs])
        leaving = [tensor.nbytes for tensor in inputs]
        coming = [tensor.nbytes for tensor in outputs]
        received = torch.empty(sum(coming), dtype=torch.uint8)

        def land() -> None:
            for output, piece in zip(outputs, torch.split(received, coming), strict=True):
                as_bytes(output).copy_(piece)

        return self._begin(
            lambda: self._keeper.group.alltoall_base(received, sent, coming, leaving), land
        )

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        options = BarrierOptions()
        return self._begin(lambda: self._keeper.group.barrier(options))

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`."""
        check_contiguous(tensor)
        check_peer(to, self.rank, self.size, "to")
        if tensor.numel() == 0:
            return self._nothing()
        buffer = on_host(tensor)
        return self._begin(
            lambda: self._keeper.group.send([as_bytes(buffer)], to, 0), lane=f"to-{to}"
        )

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        check_contiguous(tensor)
        check_peer(source, self.rank, self.size, "source")
        if tensor.numel() == 0:
            return self._nothing()
        buffer = on_host(tensor, load=False)
        return self._begin(
            lambda: self._keeper.group.recv([as_bytes(buffer)], source, 0),
            lambda: return_to(tensor, buffer),
            lane=f"from-{source}",
        )

    # -- state -----------------------------------------------------------------------------------

    def cut(self) -> int:
        """Cut the connections of the group, as a broken network would; return how many."""
        return self._keeper.cut()

    def close(self) -> None:
        """Let go of the group, which ends in its keeper."""
        self._alarm.raise_("the communicator is closed", gentle=self.idle)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return all(flight.done() for flight in self._keeper.flights())

    def __del__(self) -> None:
        if hasattr(self, "_keeper"):
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _reduce(self, buffer: torch.Tensor, op: Op, land: Callable[[], None]) -> Handle:
        if buffer.numel() == 0:
            return self._nothing()
        flat, options = as_reducible(buffer, op)
        return self._begin(lambda: self._keeper.group.allreduce([flat], options), land)

    def _begin(
        self,
        start: Callable[[], Work],
        land: Callable[[], None] | None = None,
        lane: str | None = None,
    ) -> Handle:
        """Begin an operation, unless one under way turns out to have failed."""
        self._keeper.check_formed()
        for earlier in self._keeper.flights():
            failure = earlier.failure()
            if failure is not None:
                self._fail(failure)
            if earlier.done():
                self._keeper.settle(earlier)
        failure = None
        with self._keeper.hands:
            self._alarm.check()
            try:
                flight = self._watch(start, lane)
            except RuntimeError as error:
                failure = first_sentence(error)
        if failure is not None:
            self._fail(failure)
        return FlightHandle(self, flight, land)

    def _watch(self, start: Callable[[], Work], lane: str | None) -> Flight:
        if lane is None:
            flight: Flight = CollectiveFlight(start(), self._keeper.hands)
        else:
            flight = self._keeper.lane(lane).put(start())
        self._keeper.watch(flight)
        return flight

    def _nothing(self) -> Handle:
        self.check()
        return super()._nothing()

    def check(self) -> None:
        """Raise unless operations can begin."""
        self._keeper.check_formed()
        self._alarm.check()

    def _settle(self, _flight: Flight) -> None:
        self._keeper.settle(_flight)

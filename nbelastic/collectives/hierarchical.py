"""The communicator of ranks on several hosts, some of which share memory.

An allreduce goes in three stages: within each host, every rank reduces a slice of the host's
buffers; each slice is reduced over the hosts, by Gloo, between the ranks that have it; and within
each host the slices are gathered. So all ranks of a host use the wire at once, and each byte
crosses it once for a host. As many slices as the smallest host has ranks: in larger ones the others
take part in the first and last stage only. Everything else goes over one flat Gloo group.

Who owns what::

    communicator   the flat group, used by the rank's thread; the lane
    stages         the segment's group, and the Gloo group of the slice: used by the lane's thread,
                   but for memory, which the rank's thread takes from the segment
    alarm          one for all: what ends a part ends the others

An allreduce is *lent* to the lane, which performs one after the other, in the order of the rank's
calls, the same on all ranks; it has *ended* when its last stage has; it has *landed* when it was
waited for. A stage that fails raises the alarm: that breaks the segment for the host, and severs
the connections to the others, whose stages then fail likewise. Closing with nothing under way
leaves all parts in good order; else it raises the alarm, and waits for the lane to come out.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.arguments import check_contiguous, check_op
from nbelastic.collectives.communicator import Communicator, Handle, Op, Rendezvous
from nbelastic.collectives.forwarding import ForwardingCommunicator
from nbelastic.collectives.gloo import GlooCommunicator
from nbelastic.collectives.landing import FlightHandle, LandingCommunicator
from nbelastic.collectives.lanes import Lane
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.alarm import Alarm
    from nbelastic.collectives.cards import Layout
    from nbelastic.native._core import Group

__all__ = ["HierarchicalCommunicator"]

_LINE = 16
"""Slices begin at multiples of so many elements: no two ranks write to one line of a cache."""


class HierarchicalCommunicator(LandingCommunicator, ForwardingCommunicator):
    """A communicator of ranks on two or more hosts.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks, and where they meet.
    layout : Layout
        Which of them are on which host.
    group : Group or None
        The segment that the ranks of this host share; None for one who is alone. It is the
        communicator's from here on.
    alarm : Alarm
        What ends it.
    """

    name = "hierarchical"
    anywhere = False

    def __init__(
        self, rendezvous: Rendezvous, layout: Layout, group: Group | None, alarm: Alarm
    ) -> None:
        super().__init__(rendezvous, alarm)
        self._process = os.getpid()
        self._group = group
        self._neighbours = layout.neighbours(rendezvous.rank)
        self._flat = GlooCommunicator(rendezvous, alarm)
        self._cross = _across(rendezvous, layout, alarm)
        self._stages = _Stages(rendezvous, layout, group, self._cross)
        name = f"nbelastic-hierarchical-{self.generation}-{self.rank}"
        self._lane = Lane(name, rendezvous.timeout_s)
        if group is not None:
            from nbelastic.collectives.segment import break_with

            break_with(group, alarm, self.rank)

    def connect(self) -> HierarchicalCommunicator:
        """Connect to all other ranks, and to those that have the same slice."""
        self._flat.connect()
        if self._cross is not None:
            self._cross.connect()
        return self

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector in the segment of this host."""
        self._alarm.check()
        return self._stages.empty(count, dtype)

    # -- operations ------------------------------------------------------------------------------

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        if tensor.numel() == 0:
            return self._nothing()
        self._flat.check()
        own = tensor.detach().view(-1)
        buffer = own
        if not self._stages.holds(own):
            buffer = self._stages.empty(own.numel(), own.dtype)
            buffer.copy_(own)

        def land() -> None:
            if buffer is not own:
                own.copy_(buffer)

        work = _Reduction(self._stages, self._alarm, buffer, op)
        return FlightHandle(self, self._lane.put(work), land)

    def _target(self) -> Communicator:
        return self._flat

    # -- state -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread waits for an operation now."""
        return self._waiting or self._flat.waiting

    @property
    def completed(self) -> int:
        """How many operations have been waited for with success."""
        return self._completed + self._flat.completed

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks of this host whose processes are known to have ended."""
        dead = () if self._group is None else self._group.dead
        return tuple(self._neighbours[place] for place in dead)

    def cut(self) -> int:
        """Cut the connections to other hosts, as a broken network would; return how many."""
        return self._flat.cut() + (0 if self._cross is None else self._cross.cut())

    def close(self) -> None:
        """Let go of all parts: in good order if nothing is under way."""
        if self._process != os.getpid():
            return  # a fork has none of the threads
        idle = self._flat.idle and self._lane.idle
        self._alarm.raise_("the communicator is closed", gentle=idle)
        self._lane.join()
        if self._group is not None:
            self._group.close()

    def __del__(self) -> None:
        if hasattr(self, "_lane"):
            self.close()


def _across(rendezvous: Rendezvous, layout: Layout, alarm: Alarm) -> GlooCommunicator | None:
    """Return the communicator of the ranks that have this rank's slice, if it has one."""
    peers = layout.peers(rendezvous.rank)
    if not peers:
        return None
    place = layout.neighbours(rendezvous.rank).index(rendezvous.rank)
    terms = dataclasses.replace(
        rendezvous,
        job=f"{rendezvous.job}/cross-{place}",
        rank=peers.index(rendezvous.rank),
        size=len(peers),
    )
    return GlooCommunicator(terms, alarm)


class _Stages:
    """The three stages of an allreduce, and what they need."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        layout: Layout,
        group: Group | None,
        cross: GlooCommunicator | None,
    ) -> None:
        neighbours = layout.neighbours(rendezvous.rank)
        self._size = rendezvous.size
        self._place = neighbours.index(rendezvous.rank)
        self._ranks = len(neighbours)
        self._slices = layout.slices
        self._group = group
        self._cross = cross

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if self._group is None:
            return torch.empty(count, dtype=dtype)
        from nbelastic.collectives.segment import room_in

        try:
            return room_in(self._group, count, dtype)
        except MemoryError as error:
            raise CollectiveError(f"no room in shared memory: {error}") from None

    def holds(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cpu:
            return False
        return self._group is None or self._group.holds(tensor.data_ptr(), tensor.nbytes)

    def perform(self, buffer: torch.Tensor, op: Op) -> None:
        """Reduce `buffer`, which is in the segment. Raises `Broken` or ``CollectiveError``."""
        counts = self._counts(buffer.numel())
        whole = Op.SUM if op is Op.AVERAGE else op
        group = self._group
        if group is not None:
            from nbelastic.collectives.segment import codes_of

            kind, code = codes_of(buffer.dtype, whole)
            group.wait(group.reduce_parts_async(buffer.data_ptr(), counts, kind, code))
        if self._cross is not None:
            first = sum(counts[: self._place])
            own = buffer[first : first + counts[self._place]]
            self._cross.allreduce(own, whole)
            if op is Op.AVERAGE:
                own.div_(self._size)
        if group is not None:
            group.wait(group.gather_parts_async(buffer.data_ptr(), counts, kind))

    def _counts(self, total: int) -> list[int]:
        """Return how many elements are in the slice of each rank of this host."""
        lines = -(-total // _LINE)
        bounds = [min(lines * i // self._slices * _LINE, total) for i in range(self._slices + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        return counts + [0] * (self._ranks - self._slices)


class _Reduction:
    """An allreduce that a lane is to perform."""

    def __init__(self, stages: _Stages, alarm: Alarm, buffer: torch.Tensor, op: Op) -> None:
        self._stages = stages
        self._alarm = alarm
        self._buffer = buffer
        self._op = op

    def wait(self, _timeout: object) -> None:
        """Perform it, unless all is over."""
        try:
            self._alarm.check()
            self._stages.perform(self._buffer, self._op)
        except CollectiveError:
            raise  # the alarm has been raised
        except Exception as error:  # whatever it is, the other parts must not wait for this one
            self._alarm.raise_(str(error))
            raise RuntimeError(str(error)) from None

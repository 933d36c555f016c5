"""Communicators and contexts that let a test decide what the other ranks do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nbelastic.collectives import Communicator, Handle, Op, SoloCommunicator
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.gradients.groups import Staging
from tests.support.world import StaticContext

if TYPE_CHECKING:
    import torch


class TwinCommunicator(SoloCommunicator):
    """Rank 0 of two that compute exactly the same; notes what it is asked to reduce.

    `fail_at` is the number of the reduction that cannot be begun, from 0.
    """

    fail_at: int | None = None

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.capabilities = dataclasses.replace(self.capabilities, carries_descriptions=True)
        self.size = 2
        self.lent: list[torch.Tensor] = []

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        if len(self.lent) == self.fail_at:
            self.abort("a peer is gone")
        handle = super().allreduce_async(tensor, op)
        self.lent.append(tensor)
        if op is Op.SUM:
            tensor.mul_(2)
        return handle


class LendingCommunicator(TwinCommunicator):
    """A twin with memory of its own, as shared memory is; notes what it has handed out."""

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.made: list[torch.Tensor] = []

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(super().empty(count, dtype).fill_(1000))  # never to be relied on
        return self.made[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in what was handed out."""
        memory = {made.untyped_storage().data_ptr() for made in self.made}
        return tensor.untyped_storage().data_ptr() in memory

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        if self.capabilities.devices or self.capabilities.coalesces:  # in memory of torch's
            self.made.append(tensor)
        assert any(tensor is made for made in self.made)
        return super().allreduce_async(tensor, op)


class NotedStaging(Staging):
    """Staging whose memory counts as some that the rank's lending communicator has made."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(buffer)
        communicator = current().communicator()
        if isinstance(communicator, LendingCommunicator):
            communicator.made += [buffer, self.host]


class UnreachableCommunicator(SoloCommunicator):
    """One of two ranks, which must not be asked for anything."""

    def begin_nothing(self) -> Handle:
        raise AssertionError("nothing was to be sent")


class ChangingContext(StaticContext):
    """A member of whatever generation the test puts it in."""

    def enter(self, communicator: Communicator) -> None:
        self._communicator = communicator  # type: ignore[assignment]
        self.rank, self.size = communicator.rank, communicator.size
        self.generation = communicator.generation

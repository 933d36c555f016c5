"""A world of one: no network, no threads, and no torch unless the caller has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_peer,
    check_rank,
    check_scatter,
)
from nbelastic.collectives.communicator import Communicator, Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["SoloCommunicator"]


class SoloCommunicator(Communicator):
    """The communicator of a generation with a single member.

    Every operation has happened by the time its call returns. It needs no connecting, but may be
    connected, aborted and closed like any other.

    Parameters
    ----------
    generation : int
        Number of the generation.
    """

    name = "solo"

    def __init__(self, generation: int) -> None:
        self.rank = 0
        self.size = 1
        self.generation = generation
        self._completed = 0
        self._broken: str | None = None

    def connect(self) -> SoloCommunicator:
        """Do nothing: there is nobody to meet."""
        self.check()
        return self

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Leave `tensor` as it is: the sum of one."""
        check_contiguous(tensor)
        check_op(tensor, op)
        return self._begun()

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Leave `tensor` as it is."""
        check_contiguous(tensor)
        check_rank(root, 1, "root")
        return self._begun()

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Copy `tensor` into the only output."""
        check_gather(outputs, tensor, 1)
        handle = self._begun()
        outputs[0].detach().copy_(tensor)
        return handle

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Copy the only input into `output`."""
        check_scatter(output, inputs, 0, 1, op)
        handle = self._begun()
        output.detach().copy_(inputs[0])
        return handle

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Copy the only input into the only output."""
        check_exchange(outputs, inputs, 0, 1)
        handle = self._begun()
        outputs[0].detach().copy_(inputs[0])
        return handle

    def barrier_async(self) -> Handle:
        """All one of them have arrived."""
        return self._begun()

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Refuse: there is nobody to send to."""
        check_contiguous(tensor)
        check_peer(to, 0, 1, "to")
        return self._begun()

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Refuse: there is nobody to receive from."""
        check_contiguous(tensor)
        check_peer(source, 0, 1, "source")
        return self._begun()

    @property
    def waiting(self) -> bool:
        """False: nothing is ever waited for."""
        return False

    @property
    def completed(self) -> int:
        """How many operations have succeeded."""
        return self._completed

    def abort(self, reason: str) -> None:
        """Break the communicator; the first reason stays."""
        self._broken = self._broken or reason

    def close(self) -> None:
        """Let go of nothing; later operations fail as on any closed communicator."""
        self.abort("the communicator is closed")

    def check(self) -> None:
        """Raise if it is broken."""
        if self._broken is not None:
            raise CollectiveError(self._broken)

    def _begun(self) -> Handle:
        self.check()
        return _SoloHandle(self)


class _SoloHandle:
    """An operation that has happened; waiting for it is what makes it count."""

    def __init__(self, communicator: SoloCommunicator) -> None:
        self._communicator: SoloCommunicator | None = communicator

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        communicator = self._communicator
        if communicator is None:
            return
        communicator.check()
        communicator._completed += 1
        self._communicator = None

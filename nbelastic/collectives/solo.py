"""Communicator of a single rank, without network, threads or torch."""

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
    check_tree,
)
from nbelastic.collectives.communicator import Communicator, Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.collectives.reduction_tree import Blocks


class SoloCommunicator(Communicator):
    """The communicator of a generation with one rank.

    Every operation has ended when its call returns. Connecting is optional.

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
        """Return itself: there is nothing to connect to."""
        self.check()
        return self

    def agree(self, text: str, number: int = 0) -> list[int]:  # noqa: ARG002 - one rank
        """Return the number of the only rank."""
        self._begun()
        return [number] * self.size

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        """Return the `record` of the only rank."""
        self._begun().wait()
        return [record]

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Leave `tensor` as it is."""
        check_contiguous(tensor)
        check_op(tensor, op)
        return self._begun()

    def allreduce_tree_async(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor] | None = None,
    ) -> Handle:
        """Copy the tensors of the root, the only node, to `outputs`."""
        found = check_tree(nodes, blocks, outputs, 0, 1)
        handle = self._begun()
        for output, tensor in zip(found, nodes[0], strict=True):
            if output is not tensor:
                output.detach().copy_(tensor)
        return handle

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
        """Return at once."""
        return self._begun()

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Raise: there is no other rank."""
        check_contiguous(tensor)
        check_peer(to, 0, 1, "to")
        return self._begun()

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Raise: there is no other rank."""
        check_contiguous(tensor)
        check_peer(source, 0, 1, "source")
        return self._begun()

    @property
    def waiting(self) -> bool:
        """False: no operation blocks."""
        return False

    @property
    def completed(self) -> int:
        """Number of operations completed."""
        return self._completed

    def abort(self, reason: str) -> None:
        """Break the communicator; the first reason stays."""
        self._broken = self._broken or reason

    def close(self) -> None:
        """Make later operations fail, as on any closed communicator."""
        self.abort("the communicator is closed")

    def check(self) -> None:
        """Raise if it is broken."""
        if self._broken is not None:
            raise CollectiveError(self._broken)

    def _begun(self) -> Handle:
        self.check()
        return _SoloHandle(self)


class _SoloHandle:
    """A handle on an operation that has ended, to be completed."""

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

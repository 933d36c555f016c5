"""Communicator of a single rank, without network, threads or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.communicator import Rendezvous
from nbelastic.collectives.operations import AsyncCommunicator
from nbelastic.collectives.transport import Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.collectives.reduction_tree import Blocks


class SoloCommunicator(AsyncCommunicator):
    """The communicator of a generation with one rank.

    Every operation has ended when its call returns. Connecting is optional.
    """

    name = "solo"

    def __init__(self, generation: int) -> None:
        its = Rendezvous(
            job="", generation=generation, rank=0, size=1, store=("", 0), bind="", backend="solo"
        )
        # It needs no thread and no connection, so a fork can use its copy.
        super().__init__(its, AbortSignal(outlives_forks=True))

    def connect(self) -> SoloCommunicator:
        self.check()
        return self

    def agree(self, text: str, number: int = 0) -> list[int]:  # noqa: ARG002 - one rank
        self.begin_nothing()
        return [number] * self.size

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        self.begin_nothing().wait()
        return [record]

    def matching_client(self) -> None:
        return None

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:  # noqa: ARG002
        return self.begin_nothing()

    def begin_allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,  # noqa: ARG002 - one rank has all leaves
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        return self._copied(outputs, nodes[0])

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:  # noqa: ARG002
        return self.begin_nothing()

    def begin_allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        return self._copied(outputs, [tensor])

    def begin_reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op,  # noqa: ARG002
    ) -> Handle:
        return self._copied([output], inputs)

    def begin_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        return self._copied(outputs, inputs)

    def begin_barrier(self) -> Handle:
        return self.begin_nothing()

    def begin_send(self, parts: Sequence[torch.Tensor], to: int) -> Handle:  # noqa: ARG002
        raise CollectiveError(f"there is no rank {to}")

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:  # noqa: ARG002
        raise CollectiveError(f"there is no rank {source}")

    def _near(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        load: bool = True,  # noqa: ARG002
    ) -> list[torch.Tensor]:
        return list(tensors)

    def _copied(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Handle:
        handle = self.begin_nothing()
        for output, tensor in zip(outputs, inputs, strict=True):
            if output is not tensor:
                output.detach().copy_(tensor)
        return handle

    def close(self) -> None:
        self.abort("the communicator is closed")

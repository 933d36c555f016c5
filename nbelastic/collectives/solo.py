"""Communicator of a single rank, without network, threads or torch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.operations import AsyncCommunicator
from nbelastic.collectives.rendezvous.client import Rendezvous
from nbelastic.collectives.transport import Handle

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Nodes, Tensors


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

    def agree(
        self,
        text: str,  # noqa: ARG002 - one rank
        number: int = 0,
        pattern: Hashable = None,  # noqa: ARG002
    ) -> list[int]:
        self.begin_nothing()
        return [number] * self.size

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        self.begin_nothing().wait()
        return [record]

    def matching_client(self) -> None:
        return None

    def begin_allreduce_tree(
        self,
        nodes: Nodes,
        blocks: Blocks,  # noqa: ARG002 - one rank has all leaves
        outputs: Tensors,
    ) -> Handle:
        return self._copied(outputs, nodes[0])

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        return self._copied(outputs, [tensor])

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        return self._copied(outputs, inputs)

    def _nothing(self, *_arguments: Any, **_options: Any) -> Any:
        return self.begin_nothing()

    begin_allreduce = begin_broadcast = begin_barrier = _nothing
    begin_send = begin_receive = _nothing  # never called: a rank alone has no peer

    def _near(self, tensors: Tensors, *_: Any, **_options: Any) -> list[torch.Tensor]:
        return list(tensors)

    def _copied(self, outputs: Tensors, inputs: Tensors) -> Handle:
        handle = self.begin_nothing()
        for output, tensor in zip(outputs, inputs, strict=True):
            if output is not tensor:
                output.detach().copy_(tensor)
        return handle

    def close(self) -> None:
        self._abort_signal.abort("the communicator is closed", orderly=True)

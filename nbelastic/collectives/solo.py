"""Communicator of a single rank, without network, threads or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.communicator import Communicator
from nbelastic.collectives.transport import Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.collectives.reduction_tree import Blocks


class SoloCommunicator(Communicator):
    """The communicator of a generation with one rank.

    Every operation has ended when its call returns. Connecting is optional.
    """

    name = "solo"

    def __init__(self, generation: int) -> None:
        self.rank = 0
        self.size = 1
        self.generation = generation
        self._completed = 0
        self._broken: str | None = None

    def connect(self) -> SoloCommunicator:
        self.check()
        return self

    def agree(self, text: str, number: int = 0) -> list[int]:  # noqa: ARG002 - one rank
        self._begun()
        return [number] * self.size

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        self._begun().wait()
        return [record]

    def begin_nothing(self) -> Handle:
        return self._begun()

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:  # noqa: ARG002
        return self._begun()

    def begin_allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,  # noqa: ARG002 - one rank has all leaves
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        return self._copied(outputs, nodes[0])

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:  # noqa: ARG002
        return self._begun()

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
        return self._begun()

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
        handle = self._begun()
        for output, tensor in zip(outputs, inputs, strict=True):
            if output is not tensor:
                output.detach().copy_(tensor)
        return handle

    @property
    def waiting(self) -> bool:
        return False

    @property
    def completed(self) -> int:
        return self._completed

    def abort(self, reason: str, kind: type[CollectiveError] = CollectiveError) -> None:  # noqa: ARG002
        self._broken = self._broken or reason

    def close(self) -> None:
        self.abort("the communicator is closed")

    def check(self) -> None:
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

"""Communicator over NCCL, for ranks with a GPU each, on any hosts.

Before each operation all ranks meet on the host, and compare it. So no kernel of NCCL waits for a
rank that is late, has left, or does something else. Then the operation is queued in the device's
own stream, and the executor's thread polls for its end: the event behind it, NCCL's error, the
death of a peer, and an abort. The streams of the caller follow only what has ended. So nothing of
the caller's waits for a peer, and a peer that dies in the middle leaves no stream waiting but the
own one, until the abort has freed it.

What is copied before and after, such as the parts of a gathering, is copied by the rank's thread on
its streams. Sums along a tree, messages and tensors on the CPU go through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.buffers import copy_back
from nbelastic.collectives.gpu.communicator import DeviceCommunicator
from nbelastic.collectives.gpu.device import Device, DeviceError, as_reducible
from nbelastic.collectives.transport import Handle, Op
from nbelastic.errors import RanksDisagree

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.nccl.group import NcclGroup
    from nbelastic.collectives.nccl.library import NcclLibrary
    from nbelastic.collectives.transport import Tensors

    Calls = Callable[[NcclLibrary, int, int], None]

CLOSE_LIMIT_S = 2.0  # limit for the executor to leave a call when the communicator is closed


class NcclCommunicator(DeviceCommunicator):
    """A communicator of ranks with a GPU each.

    It owns `host`, the communicator of the same ranks. `group`, which is formed, ends itself.
    """

    name = "nccl"
    staged = ("allreduce_tree",)

    def __init__(
        self, host: Host, device: Device, group: NcclGroup, abort_signal: AbortSignal
    ) -> None:
        super().__init__(host, device, abort_signal)
        self._group = group

    # -- operations on devices -------------------------------------------------------------------

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        if not self._device.holds(tensors[0]):
            return super().begin_allreduce(tensors, op)
        filled = [tensor for tensor in tensors if tensor.numel()]
        values, kind = as_reducible([self._device.near(tensor.detach()) for tensor in filled], op)

        def calls(library: NcclLibrary, comm: int, stream: int) -> None:
            for each in values:
                library.allreduce(comm, stream, each, kind)

        what = f"allreduce ({op.value}) of {_listed(values)}"
        return self._queue(what, calls, filled, values)

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if not self._device.holds(tensor):
            return super().begin_broadcast(tensor, root)
        values = [self._device.near(tensor.detach()).view(-1)]
        return self._queue(
            f"broadcast of {_listed(values)} from rank {root}",
            lambda library, comm, stream: library.broadcast(comm, stream, values[0], root),
            [tensor],
            values,
        )

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        if not self._device.holds(tensor):
            return super().begin_allgather(outputs, tensor)
        source = self._device.near(tensor.detach()).view(-1)
        everything = source.new_empty((self.size, source.numel()))
        return self._queue(
            f"allgather of {_listed([source])}",
            lambda library, comm, stream: library.allgather(comm, stream, everything, source),
            outputs,
            [*everything],
            [tensor, source],
        )

    def begin_reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: Op) -> Handle:
        if not self._device.holds(output) or len({each.numel() for each in inputs}) > 1:
            return super().begin_reduce_scatter(output, inputs, op)  # NCCL's parts are all alike
        flat = torch.cat([each.detach().view(-1) for each in inputs])
        (values,), kind = as_reducible([self._device.near(flat)], op)
        own = values.new_empty(len(values) // self.size)
        return self._queue(
            f"reduce-scatter ({op.value}) of {_listed([values])}",
            lambda library, comm, stream: library.reduce_scatter(comm, stream, own, values, kind),
            [output],
            [own],
            [*inputs, values],
        )

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        if not self._device.holds(inputs[0]):
            return super().begin_all_to_all(outputs, inputs)
        near = self._device.near
        sent = [near(each.detach()).view(-1) for each in inputs]
        received = [torch.empty_like(near(each.detach())).view(-1) for each in outputs]
        received[self.rank] = sent[self.rank]

        def calls(library: NcclLibrary, comm: int, stream: int) -> None:
            for rank in range(self.size):
                if rank != self.rank and sent[rank].numel():
                    library.send(comm, stream, sent[rank], rank)
                if rank != self.rank and received[rank].numel():
                    library.receive(comm, stream, received[rank], rank)

        return self._queue("all-to-all", calls, outputs, received, [*inputs, *sent])

    def _queue(
        self, what: str, calls: Calls, outputs: Tensors, results: Tensors, inputs: Tensors = ()
    ) -> Handle:
        """Queue `calls`, and copy results that do not lie in the outputs to them."""
        used = [*outputs, *results, *inputs]  # copies are lent, too

        def perform() -> None:
            try:
                self._host.agree(what)
            except RanksDisagree as error:
                raise DeviceError(str(error)) from None
            self._group.begin(calls, used)

        return self._on_device(used, perform, lambda: copy_back(results, outputs))

    def _reached(self, end: Any) -> None:
        def reached() -> bool:
            if self._device.reached(end):
                return True
            for rank in self._host.dead_ranks:  # NCCL may not notice a death by itself
                raise DeviceError(f"the process of rank {rank} is gone, in the middle of a sum")
            return False

        self._group.wait_for(reached)

    # -- state -----------------------------------------------------------------------------------

    def _leave_device(self) -> None:
        self._executor.join(CLOSE_LIMIT_S)  # the group's owner ends the rest


def _listed(values: Tensors) -> str:
    counts = ", ".join(str(each.numel()) for each in values)
    return f"{counts} values of {values[0].dtype}"

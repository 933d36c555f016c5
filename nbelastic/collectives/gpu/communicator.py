"""Communicator of ranks with devices, in front of that of their hosts.

A kind overrides the operations that it performs on devices. All else is done by the host's
communicator: tensors on the CPU, records, messages, and what a kind leaves to it.
One executor performs all operations but messages, in the order of the rank's calls.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from nbelastic.collectives.operations import (
    AsyncCommunicator,
    OperationHandle,
    OrderedExecutor,
    abortable,
)
from nbelastic.collectives.transport import Handle, Op

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.gloo.communicator import GlooCommunicator
    from nbelastic.collectives.gpu.device import Device
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.shm.communicator import SharedMemoryCommunicator
    from nbelastic.collectives.transport import Nodes, Tensors

    Host: TypeAlias = SharedMemoryCommunicator | GlooCommunicator


class DeviceCommunicator(AsyncCommunicator):
    """A communicator that reduces tensors of devices where they are.

    It owns `host`, the connected communicator of the same ranks, and has that one's abort signal.
    """

    def __init__(self, host: Host, device: Device, abort_signal: AbortSignal) -> None:
        super().__init__(host._rendezvous, abort_signal)  # subgroups are as the host's
        self.capabilities = dataclasses.replace(
            self.capabilities,
            devices=frozenset({device.kind}),
            coalesces=True,
            carries_descriptions=host.capabilities.carries_descriptions,
        )
        self._host = host
        self._device = device
        name = f"nbelastic-{self.name}-{self.generation}-{self.rank}"
        self._executor = OrderedExecutor(name, self._rendezvous.timeout_s)
        self._closed = False

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._host.empty(count, dtype)

    # -- parts of a kind -------------------------------------------------------------------------

    @abc.abstractmethod
    def _leave_device(self) -> None:
        """Let go of the device, as a part of closing, after the abort."""

    def _reached(self, _end: Any) -> None:
        """Wait on the host, in the executor, for an operation that the stream has begun."""

    # -- operations ------------------------------------------------------------------------------

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        found: list[list[bytes]] = []
        self._submit(lambda: found.append(self._host.allgather_bytes(record))).wait()
        return found[0]

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        return self._submit(lambda: self._host.allreduce_coalesced(tensors, op))

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        return self._submit(lambda: self._host.allreduce_tree(nodes, blocks, outputs))

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        return self._submit(lambda: self._host.broadcast(tensor, root))

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        return self._submit(lambda: self._host.allgather(outputs, tensor))

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        return self._submit(lambda: self._host.all_to_all(outputs, inputs))

    def begin_barrier(self) -> Handle:
        return self._submit(self._host.barrier)

    def begin_send(self, parts: Tensors, to: int) -> Handle:
        return self._message(self._host.begin_send(parts, to))

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        return self._message(self._host.begin_receive(tensor, source))

    def _message(self, handle: Handle) -> Handle:
        assert isinstance(handle, OperationHandle)
        assert handle._its is not None
        _, operation, _ = handle._its
        return OperationHandle(self, operation)  # counted here, and not queued behind sums

    # -- in the executor's thread ----------------------------------------------------------------

    def _submit(
        self, perform: Callable[[], object], deliver: Callable[[], None] | None = None
    ) -> Handle:
        self._abort_signal.check()
        task = abortable(self._abort_signal, perform)
        return OperationHandle(self, self._executor.submit(task), deliver)

    def _on_device(
        self,
        tensors: Tensors,
        perform: Callable[[], object],
        deliver: Callable[[], None] | None = None,
    ) -> Handle:
        """Perform the task on the device's stream, between the caller's present and next work."""
        self._abort_signal.check()
        mark = self._device.mark(tensors)  # here, because a current stream is a thread's
        ends: list[Any] = []

        def follow_caller() -> None:
            with self._device.after(mark):
                perform()
            ends.append(self._device.end(mark))
            self._reached(ends[0])

        def have_caller_follow() -> None:
            self._device.follow(ends[0])
            if deliver is not None:
                deliver()

        return self._submit(follow_caller, have_caller_follow)

    # -- state -----------------------------------------------------------------------------------

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        return self._host.dead_ranks

    def cut_connections(self) -> int:
        return self._host.cut_connections()

    def close(self) -> None:
        if self._closed or self._abort_signal.forked:
            return
        self._closed = True
        self.close_subgroups()
        idle = self._executor.idle and self._host.idle
        self._abort_signal.abort("the communicator is closed", orderly=idle)
        self._leave_device()
        self._host.close()  # last: meetings and staged operations are the host's

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

"""Communicator of ranks with devices, in front of that of their hosts.

What a kind does on devices, it says in methods that end in ``_there``. All else is done by the
host's communicator: tensors on the CPU, records, messages, subgroups, and what a kind leaves to it.
One executor performs all operations but messages, in the order of the rank's calls.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_rank,
    check_scatter,
    check_together,
    check_tree,
)
from nbelastic.collectives.buffers import copying_back, on_host
from nbelastic.collectives.communicator import Op
from nbelastic.collectives.operations import (
    AbortableTask,
    AsyncCommunicator,
    OperationHandle,
    OrderedExecutor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Communicator, Handle, Rendezvous
    from nbelastic.collectives.gloo.communicator import GlooCommunicator
    from nbelastic.collectives.gpu.device import Device
    from nbelastic.collectives.matching import MatchingClient
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.shm.communicator import SharedMemoryCommunicator

    Host = SharedMemoryCommunicator | GlooCommunicator


class DeviceCommunicator(AsyncCommunicator):
    """A communicator that reduces tensors of devices where they are.

    Parameters
    ----------
    rendezvous : Rendezvous
        The generation and its ranks.
    host : SharedMemoryCommunicator or GlooCommunicator
        That of the same ranks, connected. Owned from here on.
    device : Device
        That of this rank.
    abort_signal : AbortSignal
        That of `host`.
    """

    def __init__(
        self, rendezvous: Rendezvous, host: Host, device: Device, abort_signal: AbortSignal
    ) -> None:
        super().__init__(rendezvous, abort_signal)
        self.devices = frozenset({device.kind})
        self.carries_descriptions = host.carries_descriptions
        self._host = host
        self._device = device
        name = f"nbelastic-{self.name}-{self.generation}-{self.rank}"
        self._executor = OrderedExecutor(name, rendezvous.timeout_s)
        self._closed = False

    def connect(self) -> DeviceCommunicator:
        """Raise: it is connected when it is made."""
        self._abort_signal.check()
        raise RuntimeError("connect() is called once")

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector in the memory of the host's communicator."""
        return self._host.empty(count, dtype)

    # -- subgroups ---------------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """Return a connected communicator of some of the ranks, as the host's does."""
        return self._host.subgroup(ranks, name)

    def close_subgroup(self, name: str) -> None:
        """Close a communicator that :meth:`subgroup` has made, if there is one."""
        self._host.close_subgroup(name)

    def matching_client(self) -> MatchingClient | None:
        """Return the host's client of the matching of operations."""
        return self._host.matching_client()

    # -- on devices ------------------------------------------------------------------------------

    @abc.abstractmethod
    def _reduce_there(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        """Reduce tensors, of which some have elements."""

    @abc.abstractmethod
    def _broadcast_there(self, tensor: torch.Tensor, root: int) -> Handle:
        """Broadcast a tensor with elements."""

    @abc.abstractmethod
    def _leave_device(self) -> None:
        """Let go of the device, as a part of closing, after the abort."""

    def _leave_parts(self) -> None:
        """Close communicators that only the executor uses, which is idle. Called twice."""

    def _reached(self, _end: Any) -> None:
        """Wait on the host, in the executor, for an operation that the stream has begun."""

    def _sum_along_there(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        staged = [list(map(on_host, node)) for node in nodes]
        buffers = _empty_on_host(outputs)
        return self._submit(
            lambda: self._host.allreduce_tree(staged, blocks, buffers),
            copying_back(outputs, buffers),
        )

    def _gather_there(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        source, buffers = on_host(tensor), _empty_on_host(outputs)
        return self._submit(
            lambda: self._host.allgather(buffers, source), copying_back(outputs, buffers)
        )

    def _scatter_there(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op
    ) -> Handle:
        sources, buffers = list(map(on_host, inputs)), _empty_on_host([output])
        return self._submit(
            lambda: self._host.reduce_scatter(buffers[0], sources, op),
            copying_back([output], buffers),
        )

    def _exchange_there(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        sources, buffers = list(map(on_host, inputs)), _empty_on_host(outputs)
        return self._submit(
            lambda: self._host.all_to_all(buffers, sources), copying_back(outputs, buffers)
        )

    # -- operations ------------------------------------------------------------------------------

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        """Return the `record` of every rank, and wait for it."""
        found: list[list[bytes]] = []
        self._perform(lambda: found.append(self._host.allgather_bytes(record)))
        return found[0]

    def allreduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        """Reduce `tensor` over all ranks and wait for it."""
        if self._device.holds(tensor):
            self.allreduce_async(tensor, op).wait()
        else:
            self._perform(lambda: self._host.allreduce(tensor, op))

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        return self._reduce([tensor], op)

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors` over all ranks, in place, as one operation."""
        check_together(tensors, op)
        return self._reduce(tensors, op)

    def _reduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        if not any(tensor.numel() for tensor in tensors):
            return self._nothing_to_do()
        if self._device.holds(tensors[0]):
            return self._reduce_there(tensors, op)
        staged = list(map(on_host, tensors))
        return self._submit(
            lambda: self._host.allreduce_coalesced(staged, op), copying_back(tensors, staged)
        )

    def allreduce_tree_async(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor] | None = None,
    ) -> Handle:
        """Sum tensors along a tree."""
        found = check_tree(nodes, blocks, outputs, self.rank, self.size)
        if not any(tensor.numel() for tensor in found):
            return self._nothing_to_do()
        if self._device.holds(found[0]):
            return self._sum_along_there(nodes, blocks, found)
        return self._submit(lambda: self._host.allreduce_tree(nodes, blocks, outputs))

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        if tensor.numel() == 0:
            return self._nothing_to_do()
        if self._device.holds(tensor):
            return self._broadcast_there(tensor, root)
        staged = on_host(tensor)
        return self._submit(
            lambda: self._host.broadcast(staged, root), copying_back([tensor], [staged])
        )

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        if tensor.numel() and self._device.holds(tensor):
            return self._gather_there(outputs, tensor)
        return self._submit(lambda: self._host.allgather(outputs, tensor))

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        if any(each.numel() for each in inputs) and self._device.holds(output):
            return self._scatter_there(output, inputs, op)
        return self._submit(lambda: self._host.reduce_scatter(output, inputs, op))

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        check_exchange(outputs, inputs, self.rank, self.size)
        if self._device.holds(inputs[0]):
            return self._exchange_there(outputs, inputs)
        return self._submit(lambda: self._host.all_to_all(outputs, inputs))

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        return self._submit(self._host.barrier)

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`, through the host."""
        return self._message(self._host.send_async(tensor, to))

    def send_parts_async(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        """Send `parts` as one message, through the host."""
        return self._message(self._host.send_parts_async(parts, to))

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        return self._message(self._host.receive_async(tensor, source))

    def _message(self, handle: Handle) -> Handle:
        return OperationHandle(self, _OnHost(handle))

    # -- in the executor's thread ----------------------------------------------------------------

    def _submit(
        self, perform: Callable[[], object], deliver: Callable[[], None] | None = None
    ) -> Handle:
        self._abort_signal.check()
        task = AbortableTask(self._abort_signal, perform)
        return OperationHandle(self, self._executor.submit(task), deliver)

    def _on_device(
        self,
        tensors: Sequence[torch.Tensor],
        perform: Callable[[], object],
        deliver: Callable[[], None] | None = None,
    ) -> Handle:
        """Perform it on the device's stream, between what the caller's has now and its next."""
        self._abort_signal.check()
        mark = self._device.mark(tensors)
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

    def _perform(self, perform: Callable[[], None]) -> None:
        """Perform an operation of the host and wait for it, in this thread if the other is idle."""
        if not self._executor.idle:
            self._submit(perform).wait()
            return
        self._abort_signal.check()
        self._waiting = True
        try:
            perform()
        finally:
            self._waiting = False
        self._completed += 1

    # -- state -----------------------------------------------------------------------------------

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes are known to have ended."""
        return self._host.dead_ranks

    def cut_connections(self) -> int:
        """Break the host's communicator as a failure would; return the number of connections."""
        return self._host.cut_connections()

    def close(self) -> None:
        """Leave the other ranks, and let go of the device."""
        if self._closed or self._abort_signal.forked:
            return
        self._closed = True
        self._host.close_subgroups()
        idle = self._executor.idle and self._host.idle
        if idle:
            self._leave_parts()  # before the abort, which would fail their peers
        self._abort_signal.abort("the communicator is closed", orderly=idle)
        self._leave_device()
        self._leave_parts()
        self._host.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _empty_on_host(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [on_host(output, load=False) for output in outputs]


class _OnHost:
    """An operation of the host's communicator, as one of this one's."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, _abort_signal: AbortSignal) -> bool:
        self._handle.wait()
        return True

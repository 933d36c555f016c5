"""Communicator of ranks on one host that read the memory of each other's GPUs.

Every rank has one exchange buffer, which all others have opened. A sum has three steps, with a
meeting of all ranks on the host after each: every rank copies its values to its own buffer, adds
its slice of all buffers in the order of ranks, and copies the others' slices out. Before a meeting
a rank waits, on the host, for its *own* stream alone, so that the death of a peer leaves no stream
waiting.

Meetings, tensors on the CPU, and all other operations are those of the shared-memory communicator.
One executor performs all operations in the order of the rank's calls, because a meeting is an
operation, too.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch

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
from nbelastic.collectives.communicator import Op
from nbelastic.collectives.cuda_ipc.device import DeviceError
from nbelastic.collectives.operations import (
    AbortableTask,
    AsyncCommunicator,
    OperationHandle,
    OrderedExecutor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Communicator, Handle, Rendezvous
    from nbelastic.collectives.cuda_ipc.device import Device, Memory
    from nbelastic.collectives.reduction_tree import Blocks

__all__ = ["BUFFER_BYTES", "CudaIpcCommunicator", "Exchange", "open_exchange"]

T = TypeVar("T")

BUFFER_BYTES = 64 << 20
"""Bytes of a rank's exchange buffer. More values are reduced in several rounds."""

_LINE = 128
"""Slices begin at multiples of so many elements."""

_HALVES = (torch.float16, torch.bfloat16)
_PROBE = 64


class Exchange:
    """The exchange buffers of all ranks: this rank's own, and the others', opened.

    Parameters
    ----------
    device : Device
        The device of this rank.
    memories : sequence of Memory
        By rank.
    """

    def __init__(self, device: Device, memories: Sequence[Memory]) -> None:
        self.device = device
        self._memories = list(memories)
        self.buffers = [memory.tensor for memory in memories]

    def close(self) -> None:
        """Close and free all of them."""
        self.buffers = []
        for memory in self._memories:
            memory.close()
        self._memories = []


def open_exchange(
    host: Communicator, device: Device | None, nbytes: int = BUFFER_BYTES
) -> tuple[Exchange | None, str]:
    """Open exchange buffers between all ranks; all ranks call this together.

    Parameters
    ----------
    host : Communicator
        Carries handles and results.
    device : Device or None
        That of this rank; None if it uses none.
    nbytes : int
        Size of a buffer.

    Returns
    -------
    exchange : Exchange or None
        None on all ranks, or on none.
    reason : str
        Why there is none, for people; empty if no rank uses a device.
    """
    memories: list[Memory] = []
    own: Memory | None = None
    problem = "" if device is not None else "it uses no GPU"
    if device is not None:
        try:
            own = device.allocate(nbytes)
        except DeviceError as error:
            problem = str(error)
    offers = host.allgather_bytes(own.handle if own is not None else b"")
    try:
        if device is None and not any(offers):
            return None, ""
        if own is not None and device is not None and all(offers):
            problem = _open_all(host, device, own, offers, nbytes, memories)
        problems = [each.decode() for each in host.allgather_bytes(problem.encode()[:200])]
    except BaseException:
        _close(memories, own)
        raise
    for rank, each in enumerate(problems):
        if each:
            _close(memories, own)
            return None, f"rank {rank}: {each}"
    assert device is not None
    return Exchange(device, memories), ""


def _open_all(
    host: Communicator,
    device: Device,
    own: Memory,
    offers: Sequence[bytes],
    nbytes: int,
    memories: list[Memory],
) -> str:
    """Open the buffers of all others, and read a mark in each; return what has failed."""
    marks = [hashlib.blake2b(offer, digest_size=_PROBE).digest() for offer in offers]
    problem = ""
    try:
        with device.after(device.mark()):
            own.tensor[:_PROBE].copy_(torch.frombuffer(bytearray(marks[host.rank]), dtype=_BYTES))
        device.drain()
    except (DeviceError, RuntimeError) as error:
        problem = str(error)
    host.barrier()
    try:
        for rank, offer in enumerate(offers):
            memory = own if rank == host.rank else device.open(offer, nbytes)
            memories.append(memory)
            if bytes(memory.tensor[:_PROBE].cpu().tolist()) != marks[rank]:
                problem = problem or f"it cannot read the memory of the GPU of rank {rank}"
    except (DeviceError, RuntimeError) as error:
        problem = problem or str(error)
    return problem


_BYTES = torch.uint8


def _close(memories: Sequence[Memory], own: Memory | None) -> None:
    for memory in [*memories, *([] if own is None else [own])]:
        memory.close()


class CudaIpcCommunicator(AsyncCommunicator):
    """A communicator of ranks that share a host and can read each other's GPUs.

    Parameters
    ----------
    rendezvous : Rendezvous
        The generation and its ranks.
    host : Communicator
        The shared-memory communicator of the same ranks, owned from here on.
    exchange : Exchange
        The buffers, owned from here on.
    abort_signal : AbortSignal
        That of `host`.
    """

    name = "cuda_ipc"
    coalesces = True
    overlaps = True
    carries_descriptions = True
    stops_sending_on_failure = True

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: Communicator,
        exchange: Exchange,
        abort_signal: AbortSignal,
    ) -> None:
        super().__init__(rendezvous, abort_signal)
        self.devices = frozenset({"cpu", exchange.device.kind})
        self._host = host
        self._exchange = exchange
        self._device = exchange.device
        name = f"nbelastic-cuda-ipc-{self.generation}-{self.rank}"
        self._executor = OrderedExecutor(name, rendezvous.timeout_s)
        self._closed = False

    def connect(self) -> CudaIpcCommunicator:
        """Raise: it is connected when it is made."""
        self._abort_signal.check()
        raise RuntimeError("connect() is called once")

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector in the segment of the host."""
        return self._host.empty(count, dtype)

    # -- operations ------------------------------------------------------------------------------

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        """Return the `record` of every rank, and wait for it."""
        found: list[list[bytes]] = []
        self._submit(lambda: found.append(self._host.allgather_bytes(record))).wait()
        return found[0]

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        if tensor.numel() == 0:
            return self._nothing_to_do()
        return self._reduce([tensor], op)

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors` over all ranks, in place, as one operation."""
        check_together(tensors, op)
        return self._reduce(tensors, op)

    def _reduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        if not all(map(self._device.holds, tensors)):
            return self._on_host(lambda: self._host.allreduce_coalesced(tensors, op), *tensors)
        mark = self._device.mark()
        return self._submit(lambda: self._reduce_there(tensors, op, mark))

    def allreduce_tree_async(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor] | None = None,
    ) -> Handle:
        """Sum tensors along a tree, on the host."""
        found = check_tree(nodes, blocks, outputs, self.rank, self.size)
        every = [*found, *(each for node in nodes for each in node)]
        return self._on_host(lambda: self._host.allreduce_tree(nodes, blocks, outputs), *every)

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        if tensor.numel() == 0:
            return self._nothing_to_do()
        if not self._device.holds(tensor):
            return self._on_host(lambda: self._host.broadcast(tensor, root), tensor)
        mark = self._device.mark()
        return self._submit(lambda: self._broadcast_there(tensor, root, mark))

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        return self._on_host(lambda: self._host.allgather(outputs, tensor), tensor, *outputs)

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        return self._on_host(lambda: self._host.reduce_scatter(output, inputs, op), output, *inputs)

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        check_exchange(outputs, inputs, self.rank, self.size)
        return self._on_host(lambda: self._host.all_to_all(outputs, inputs), *outputs, *inputs)

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

    def _submit(self, perform: Callable[[], object]) -> Handle:
        self._abort_signal.check()
        task = AbortableTask(self._abort_signal, perform)
        return OperationHandle(self, self._executor.submit(task), None)

    def _on_host(self, perform: Callable[[], None], *tensors: torch.Tensor) -> Handle:
        """Have the host's communicator do it; it copies tensors of the device there and back."""
        if not any(map(self._device.holds, tensors)):
            return self._submit(perform)
        mark = self._device.mark()

        def follow() -> None:
            with self._device.after(mark):
                perform()
            self._device.drain()

        return self._submit(follow)

    def _meet(self) -> None:
        """Wait for the own stream, then for all ranks to have done so."""
        self._device.drain()
        self._host.barrier()

    def _reduce_there(self, tensors: Sequence[torch.Tensor], op: Op, mark: Any) -> None:
        dtype = tensors[0].dtype
        if dtype is torch.bool:  # whether any is true, or all are; bytes would overflow
            dtype = torch.uint8
            op = Op.MAX if op in (Op.SUM, Op.MAX) else Op.MIN
        buffers = [buffer.view(dtype) for buffer in self._exchange.buffers]
        mine = buffers[self.rank]
        flat = [tensor.detach().view(-1).view(dtype) for tensor in tensors]
        with self._device.after(mark):
            for parts, count in _rounds(flat, mine.numel()):
                for part, at in parts:
                    mine[at : at + part.numel()].copy_(part)
                self._meet()
                bounds = _bounds(count, self.size)
                low, high = bounds[self.rank], bounds[self.rank + 1]
                if low < high:
                    slices = [buffer[low:high] for buffer in buffers]
                    mine[low:high].copy_(_combined(slices, op))
                self._meet()
                for rank, buffer in enumerate(buffers):
                    _copy_out(buffer, bounds[rank], bounds[rank + 1], parts)
                self._meet()  # before a buffer is written to again

    def _broadcast_there(self, tensor: torch.Tensor, root: int, mark: Any) -> None:
        buffers = [buffer.view(torch.uint8) for buffer in self._exchange.buffers]
        flat = tensor.detach().view(-1).view(torch.uint8)
        with self._device.after(mark):
            for parts, count in _rounds([flat], buffers[root].numel()):
                ((part, _),) = parts
                if self.rank == root:
                    buffers[root][:count].copy_(part)
                self._meet()
                if self.rank != root:
                    part.copy_(buffers[root][:count])
                self._meet()

    # -- state -----------------------------------------------------------------------------------

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes are known to have ended."""
        return self._host.dead_ranks

    def cut_connections(self) -> int:
        """Break the segment as the death of a peer would; return the number of other ranks."""
        return self._host.cut_connections()

    def close(self) -> None:
        """Leave the segment, and close the buffers once nothing uses them any more."""
        if self._closed or self._abort_signal.forked:
            return
        self._closed = True
        idle = self._executor.idle
        self._abort_signal.abort("the communicator is closed", orderly=idle)
        # Its meetings end at once, and a stream has only work of this process.
        self._executor.join()
        self._host.close()
        self._exchange.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


class _OnHost:
    """An operation of the host's communicator, as one of this one's."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, _abort_signal: AbortSignal) -> bool:
        self._handle.wait()
        return True


Parts = list[tuple[torch.Tensor, int]]


def _rounds(tensors: Sequence[torch.Tensor], capacity: int) -> Iterator[tuple[Parts, int]]:
    """Yield what fits into a buffer at a time: pieces with their places, and their number."""
    parts: Parts = []
    used = 0
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            length = min(tensor.numel() - start, capacity - used)
            parts.append((tensor[start : start + length], used))
            start += length
            used += length
            if used == capacity:
                yield parts, used
                parts, used = [], 0
    if parts:
        yield parts, used


def _bounds(count: int, size: int) -> list[int]:
    """Return where the slice of each rank begins, and the end."""
    each = -(-count // size)
    each += -each % _LINE
    return [min(rank * each, count) for rank in range(size + 1)]


def _combined(slices: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    """Reduce slices in their order. Halves are reduced as float32, and rounded once."""
    first = slices[0].float() if slices[0].dtype in _HALVES else slices[0].clone()
    for each in slices[1:]:
        if op in (Op.SUM, Op.AVERAGE):
            first += each
        elif op is Op.PRODUCT:
            first *= each
        elif op is Op.MIN:
            torch.minimum(first, each.to(first.dtype), out=first)
        else:
            torch.maximum(first, each.to(first.dtype), out=first)
    if op is Op.AVERAGE:
        first /= len(slices)
    return first


def _copy_out(buffer: torch.Tensor, low: int, high: int, parts: Parts) -> None:
    """Copy a slice of a buffer to the pieces that lie there."""
    for part, at in parts:
        first, last = max(low, at), min(high, at + part.numel())
        if first < last:
            part[first - at : last - at].copy_(buffer[first:last])

"""The communicator over the package ``pygloo``, for environments that are bound to it.

pygloo holds the interpreter for the whole of a call. So an operation has happened when its
``*_async`` returns, and while it lasts no other thread of the process runs: none that would beat,
and none that could abort. What frees a rank that waits inside a call is

- that a connection breaks. A rank that fails or is aborted closes its own, which fails those who
  wait for it, who close theirs: the news runs through all ranks that are alive. So one abort
  anywhere outside a call is enough, and so is the end of a process;
- or else, where a peer is stopped or cut off, :data:`LIMIT_S`. It is Gloo's, whatever the
  rendezvous says: pygloo's ``setTimeout`` takes a type that pygloo does not bind.

Each rank must be a process of its own: of two threads, one would wait for the other with the
interpreter in its hands. A message waits until it is received.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.alarm import Alarm
from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_peer,
    check_rank,
    check_scatter,
)
from nbelastic.collectives.buffers import as_bytes, join, on_host, return_to
from nbelastic.collectives.communicator import Handle, Op, Rendezvous
from nbelastic.collectives.flights import first_sentence
from nbelastic.collectives.landing import LandingCommunicator
from nbelastic.collectives.proof import PROOF_BYTES, proof
from nbelastic.collectives.store import GREETING
from nbelastic.collectives.visit import Visit, read
from nbelastic.errors import CollectiveError

try:
    import pygloo
except ImportError as error:
    raise ImportError(
        'backend="pygloo" needs the package pygloo, which there is for Python 3.8 to 3.10: '
        "pip install 'nbelastic[pygloo]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LIMIT_S", "PyglooCommunicator"]

LIMIT_S = 30.0
"""How long Gloo waits for a peer from which nothing comes."""

_BYTES = pygloo.glooUint8
_TYPES = {
    torch.float32: pygloo.glooFloat32,
    torch.float64: pygloo.glooFloat64,
    torch.float16: pygloo.glooFloat16,
    torch.int8: pygloo.glooInt8,
    torch.uint8: pygloo.glooUint8,
    torch.int32: pygloo.glooInt32,
    torch.int64: pygloo.glooInt64,
    torch.bool: pygloo.glooUint8,
}
_OPS = {
    Op.SUM: pygloo.ReduceOp.SUM,
    Op.AVERAGE: pygloo.ReduceOp.SUM,
    Op.MIN: pygloo.ReduceOp.MIN,
    Op.MAX: pygloo.ReduceOp.MAX,
    Op.PRODUCT: pygloo.ReduceOp.PRODUCT,
}
# A sum of truths is whether any is true, and a product whether all are; bytes would overflow.
_OPS_ON_TRUTHS = {**_OPS, Op.SUM: pygloo.ReduceOp.MAX, Op.PRODUCT: pygloo.ReduceOp.MIN}


class PyglooCommunicator(LandingCommunicator):
    """A communicator of two or more ranks, each in a process of its own.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks, and where they meet. Its timeout is for the meeting.
    """

    name = "pygloo"

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous, Alarm())
        self._rendezvous = rendezvous
        self._mesh = _Mesh(rendezvous)
        self._alarm.then(self._mesh.part)

    def connect(self) -> PyglooCommunicator:
        """Meet the other ranks and connect to all of them."""
        self._alarm.check()
        if self._mesh.context is not None:
            raise RuntimeError("connect() is called once")
        cause = None
        try:
            self._mesh.connect()
        except CollectiveError as error:  # of the visit, which comes through Gloo as it is
            cause = str(error)
        except RuntimeError as error:
            cause = first_sentence(error)
        if cause is not None:
            self._alarm.raise_(f"generation {self.generation} did not form: {cause}")
        if self._alarm.reason is not None:
            self._mesh.part()  # it may have been raised before there was anything to part from
        self._alarm.check()
        self._check_peers()
        return self

    # -- operations ------------------------------------------------------------------------------

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place. A ``bfloat16`` is summed as ``float32``."""
        check_contiguous(tensor)
        check_op(tensor, op)
        buffer = on_host(tensor)
        self._reduce(buffer, op)
        return_to(tensor, buffer)
        return self._nothing()

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        buffer = on_host(tensor, load=self.rank == root)
        where = buffer.data_ptr()
        self._do(buffer.nbytes, pygloo.broadcast, where, where, buffer.nbytes, _BYTES, root)
        if self.rank != root:
            return_to(tensor, buffer)
        return self._nothing()

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        source = on_host(tensor)
        gathered = torch.empty((self.size, source.nbytes), dtype=torch.uint8)
        ends = source.data_ptr(), gathered.data_ptr()
        self._do(source.nbytes, pygloo.allgather, *ends, source.nbytes, _BYTES)
        for output, piece in zip(outputs, gathered, strict=True):
            as_bytes(output).copy_(piece)
        return self._nothing()

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        buffer = join(inputs)
        self._reduce(buffer, op)
        parts = torch.split(buffer, [tensor.numel() for tensor in inputs])
        output.detach().copy_(parts[self.rank].view(output.shape))
        return self._nothing()

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it, one after the other."""
        check_exchange(outputs, inputs, self.rank, self.size)
        outputs[self.rank].detach().copy_(inputs[self.rank])
        # In each round the ranks are in pairs, of which the lower one sends first.
        for turn in range(1, 1 << (self.size - 1).bit_length()):
            peer = self.rank ^ turn
            if self.rank < peer < self.size:
                self._send(inputs[peer], peer)
                self._receive(outputs[peer], peer)
            elif peer < self.rank:
                self._receive(outputs[peer], peer)
                self._send(inputs[peer], peer)
        return self._nothing()

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        self._do(1, pygloo.barrier)
        return self._nothing()

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to` and wait until it receives it."""
        check_contiguous(tensor)
        check_peer(to, self.rank, self.size, "to")
        self._send(tensor, to)
        return self._nothing()

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        check_contiguous(tensor)
        check_peer(source, self.rank, self.size, "source")
        self._receive(tensor, source)
        return self._nothing()

    # -- state -----------------------------------------------------------------------------------

    def cut(self) -> int:
        """Cut the connections to the others, as a broken network would; return how many."""
        count = 0 if self._mesh.context is None else self.size - 1
        self._mesh.part()
        return count

    def close(self) -> None:
        """Part from the others."""
        self._alarm.raise_("the communicator is closed", gentle=True)
        self._mesh.context = None

    def __del__(self) -> None:
        if hasattr(self, "_mesh"):
            self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _reduce(self, buffer: torch.Tensor, op: Op) -> None:
        """Reduce memory of the host, in place."""
        wide = buffer.float() if buffer.dtype is torch.bfloat16 else buffer
        where, count = wide.data_ptr(), wide.numel()
        how = (_OPS_ON_TRUTHS if wide.dtype is torch.bool else _OPS)[op]
        self._do(count, pygloo.allreduce, where, where, count, _TYPES[wide.dtype], how)
        if op is Op.AVERAGE:
            wide.div_(self.size)
        if wide is not buffer:
            buffer.copy_(wide)

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        buffer = on_host(tensor)
        self._do(buffer.nbytes, pygloo.send, buffer.data_ptr(), buffer.nbytes, _BYTES, to)

    def _receive(self, tensor: torch.Tensor, source: int) -> None:
        buffer = on_host(tensor, load=False)
        self._do(buffer.nbytes, pygloo.recv, buffer.data_ptr(), buffer.nbytes, _BYTES, source)
        return_to(tensor, buffer)

    def _do(self, count: int, act: Callable[..., None], *arguments: object) -> None:
        """Have pygloo move or reduce so many things, and wait for it."""
        self._alarm.check()
        context = self._mesh.context
        if context is None:
            raise RuntimeError("connect() comes before any operation")
        if count == 0:
            return
        failure = None
        try:
            act(context, *arguments)
        except RuntimeError as error:
            failure = first_sentence(error)
        if failure is not None:
            self._fail(failure)

    def _check_peers(self) -> None:
        """Make sure that who connected is who was meant: each rank proves what it is."""
        tokens = [torch.empty(PROOF_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        own = torch.frombuffer(bytearray(self._token(self.rank)), dtype=torch.uint8)
        self.allgather_async(tokens, own)
        for rank, token in enumerate(tokens):
            if bytes(token.tolist()) != self._token(rank):
                self._fail(f"rank {rank} is of another generation, or no rank of this job")

    def _token(self, rank: int) -> bytes:
        its = self._rendezvous
        return proof(its.secret, "peer", f"{its.job}/{its.generation}/{rank}".encode())


class _Mesh:
    """A rank's connections to all others.

    Attributes
    ----------
    context : pygloo.Context or None
        What has them, once they are made.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.context: Any = None
        self._rendezvous = rendezvous
        self._visit = Visit(rendezvous)

    def connect(self) -> None:
        its = self._rendezvous
        context = pygloo.rendezvous.Context(its.rank, its.size)
        device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(its.bind))
        meeting = _Meeting(its, self._visit)
        context.connectFullMesh(pygloo.rendezvous.CustomStore(meeting), device)
        self.context = context

    def part(self, _reason: str = "", _gentle: bool = False) -> None:
        """Leave: whoever waits in the meeting, here, or for this rank, elsewhere, is freed."""
        self._visit.leave()
        context = self.context
        if context is not None:
            context.closeConnections()


class _Meeting:
    """A visit to the store, in the shape in which pygloo asks for it."""

    def __init__(self, rendezvous: Rendezvous, visit: Visit) -> None:
        self._rendezvous = rendezvous
        self._visit = visit
        self._own = b""
        self._values: list[bytes] = []

    def set(self, _key: str, value: bytes) -> None:
        """Take in the name of this rank's host, and later, in its place, the rank's addresses."""
        self._own = value

    def wait(self, keys: list[str]) -> None:
        if not self._values and all(key.isdecimal() for key in keys):
            self._values = self._visit.exchange(self._own)
            if self._rendezvous.rank == 0:
                self._let_the_store_answer()

    def get(self, key: str) -> bytes:
        """Return a rank's addresses, or the name of its host: Gloo over TCP has no use for that."""
        return self._values[int(key)] if key.isdecimal() else b""

    def _let_the_store_answer(self) -> None:
        """Wait until the others have their answers too.

        In a job, the process of rank 0 keeps the store. Once this returns to Gloo the store's
        thread comes to a halt, and the others would wait for it as this rank does for them. It
        greets who comes only when it has sent what it was sending.
        """
        its = self._rendezvous
        try:
            with socket.create_connection(its.store, min(its.timeout_s, LIMIT_S)) as connection:
                read(connection, GREETING.size)
        except OSError as error:
            raise CollectiveError(f"the store has gone: {error}") from None

"""Communicator over the package ``pygloo``, where an environment depends on it.

pygloo holds the interpreter for the whole of a call. So an operation has ended when its ``*_async``
returns, and meanwhile no other thread runs, neither for heartbeats nor for an abort. A rank that
waits inside a call is freed by a broken connection: a rank that fails or is aborted closes its
connections, which fails its peers, and so on through all live ranks. Otherwise, as with a stopped
peer, it is freed after :data:`LIMIT_S`.

Each rank must be a process of its own, because of two threads one would wait for the other while
holding the interpreter.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.buffers import as_bytes, as_number
from nbelastic.collectives.operations import AsyncCommunicator, first_sentence
from nbelastic.collectives.rendezvous.client import Rendezvous, RendezvousClient
from nbelastic.collectives.rendezvous.handshake import GREETING, read
from nbelastic.collectives.transport import Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.transport import Tensors

try:
    import pygloo
except ImportError as error:
    raise ImportError(
        'backend="pygloo" needs the package pygloo, which there is for Python 3.8 to 3.10: '
        "pip install 'nbelastic[pygloo]'"
    ) from error


LIMIT_S = 30.0
"""Gloo's limit for a silent peer. pygloo cannot change it: ``setTimeout`` takes an unbound type."""

_BYTES = pygloo.glooUint8
_TYPES = {
    torch.float32: pygloo.glooFloat32,
    torch.float64: pygloo.glooFloat64,
    torch.float16: pygloo.glooFloat16,
    torch.int8: pygloo.glooInt8,
    torch.uint8: pygloo.glooUint8,
    torch.int32: pygloo.glooInt32,
    torch.int64: pygloo.glooInt64,
}


class PyglooCommunicator(AsyncCommunicator):
    """A communicator of two or more ranks, each in a process of its own.

    The rendezvous' timeout limits connecting only.
    """

    name = "pygloo"

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous, AbortSignal())
        self._mesh = _Mesh(rendezvous)
        self._abort_signal.on_abort(self._mesh.leave)  # the signal keeps the mesh, not self

    def connect(self) -> PyglooCommunicator:
        self._abort_signal.check()
        cause = None
        try:
            self._mesh.connect()
        except CollectiveError as error:  # the client's; Gloo passes it on unchanged
            cause = str(error)
        except RuntimeError as error:
            cause = first_sentence(error)
        if cause is not None:
            self._abort_signal.abort(f"generation {self.generation} did not form: {cause}")
        if self._abort_signal.reason is not None:
            self._mesh.leave()  # the abort may have come before there were connections
        self._abort_signal.check()
        self._check_peers()
        return self

    # -- operations ------------------------------------------------------------------------------

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        (tensor,) = tensors
        wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
        where, count = wide.data_ptr(), wide.numel()
        dtype, number_op = as_number(wide.dtype, op)
        how = getattr(pygloo.ReduceOp, "SUM" if op is Op.AVERAGE else number_op.name)
        handle = self._do(count, pygloo.allreduce, where, where, count, _TYPES[dtype], how)
        if op is Op.AVERAGE:
            wide.div_(self.size)
        if wide is not tensor:
            tensor.copy_(wide)
        return handle

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        where, count = tensor.data_ptr(), tensor.nbytes
        return self._do(count, pygloo.broadcast, where, where, count, _BYTES, root)

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        gathered = torch.empty((self.size, tensor.nbytes), dtype=torch.uint8)
        ends = tensor.data_ptr(), gathered.data_ptr()
        handle = self._do(tensor.nbytes, pygloo.allgather, *ends, tensor.nbytes, _BYTES)
        for output, piece in zip(outputs, gathered, strict=True):
            as_bytes(output).copy_(piece)
        return handle

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        outputs[self.rank].copy_(inputs[self.rank])
        # In each round the ranks are in pairs, of which the lower one sends first.
        for turn in range(1, 1 << (self.size - 1).bit_length()):
            peer = self.rank ^ turn
            if self.rank < peer < self.size:
                self.begin_send([inputs[peer]], peer)
                self.begin_receive(outputs[peer], peer)
            elif peer < self.rank:
                self.begin_receive(outputs[peer], peer)
                self.begin_send([inputs[peer]], peer)
        return self.begin_nothing()

    def begin_barrier(self) -> Handle:
        return self._do(1, pygloo.barrier)

    def begin_send(self, parts: Tensors, to: int) -> Handle:
        message = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        where, count = message.data_ptr(), message.nbytes
        return self._do(count, pygloo.send, where, count, _BYTES, to)

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        where, count = tensor.data_ptr(), tensor.nbytes
        return self._do(count, pygloo.recv, where, count, _BYTES, source)

    # -- state -----------------------------------------------------------------------------------

    def cut_connections(self) -> int:
        count = 0 if self._mesh.context is None else self.size - 1
        self._mesh.leave()
        return count

    def close(self) -> None:
        self.close_subgroups()
        self._abort_signal.abort("the communicator is closed", orderly=True)  # none is under way
        self._mesh.context = None

    def __del__(self) -> None:
        if hasattr(self, "_mesh"):
            self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _do(self, count: int, act: Callable[..., None], *arguments: object) -> Handle:
        """Call a function of pygloo, unless there are no elements."""
        self._abort_signal.check()
        failure = None
        try:
            if count:
                act(self._mesh.context, *arguments)
        except RuntimeError as error:
            failure = first_sentence(error)
        if failure is not None:
            self._fail(failure)
        return self.begin_nothing()


class _Mesh:
    """A rank's connections to all others; `context` is pygloo's handle, once they are made."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.context: Any = None
        self._rendezvous = rendezvous
        self._client = RendezvousClient(rendezvous)

    def connect(self) -> None:
        its = self._rendezvous
        context = pygloo.rendezvous.Context(its.rank, its.size)
        device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(its.bind))
        store = _PyglooStore(its, self._client)
        context.connectFullMesh(pygloo.rendezvous.CustomStore(store), device)
        self.context = context

    def leave(self, _reason: str = "", _orderly: bool = False) -> None:
        """Abort the rendezvous and close the connections, which frees the peers."""
        self._client.abort()  # the wait there is Python's, so it does not hold the GIL
        context = self.context
        if context is not None:
            context.closeConnections()


class _PyglooStore:
    """Adapter from pygloo's store interface to one exchange at the rendezvous server."""

    def __init__(self, rendezvous: Rendezvous, client: RendezvousClient) -> None:
        self._rendezvous = rendezvous
        self._client = client
        self._own = b""
        self._values: list[bytes] = []

    def set(self, _key: str, value: bytes) -> None:
        """Take the host's name, and in a second call this rank's addresses."""
        self._own = value

    def wait(self, keys: list[str]) -> None:
        if not self._values and all(key.isdecimal() for key in keys):  # not for hosts' names
            self._values = self._client.exchange(self._own)
            # In a job, the rendezvous server is a thread of rank 0's process. It stands still once
            # this returns to Gloo, and the other ranks would wait for its reply while this rank
            # waits for them. The server greets a new connection only after it has sent its replies.
            if self._rendezvous.rank == 0:
                self._wait_for_a_greeting()

    def get(self, key: str) -> bytes:
        """Return a rank's addresses, or nothing for its host's name, which TCP does not use."""
        return self._values[int(key)] if key.isdecimal() else b""

    def _wait_for_a_greeting(self) -> None:
        its = self._rendezvous
        try:
            with socket.create_connection(its.store, min(its.timeout_s, LIMIT_S)) as connection:
                read(connection, GREETING.size)
        except OSError as error:
            raise CollectiveError(
                f"rank 0 cannot reach its own rendezvous server: {error}"
            ) from None

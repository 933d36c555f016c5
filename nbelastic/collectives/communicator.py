"""What a communicator is: tensors between the ranks of one generation.

Ownership of buffers
--------------------
An operation that fails may leave traces behind: a transport can still be writing into its buffers
when the caller has long been told of the failure. So every tensor handed to a communicator is
*lent* until the operation has succeeded, and *given away* if it fails: after a
:class:`~nbelastic.errors.CollectiveError` the caller must not read or reuse it, and takes a new
one. Callers that work on tensors of their users copy into a buffer of their own first.

Threads
-------
One thread, the rank's, calls everything except :meth:`Communicator.abort`, which any thread may
call at any time, from an event loop too: it never blocks.
All ranks issue the same operations in the same order.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["BACKENDS", "Communicator", "Handle", "Op", "Rendezvous"]

BACKENDS = ("auto", "gloo", "shm", "pygloo")
"""How a job may want its tensors to travel: what :attr:`Rendezvous.backend` can be."""


class Op(enum.Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the ranks of one generation find each other.

    Attributes
    ----------
    job : str
        Name of the job, unique on the cluster.
    generation : int
        Number of the generation; together with ``job`` it names keys that are never reused.
    rank, size : int
        Position in, and number of, the members.
    store : tuple of (str, int)
        Address of the key-value store that one member keeps open.
    bind : str
        Address of the interface that this rank listens on.
    timeout_s : float
        How long connecting, and any one operation, may take before it counts as failed although
        nobody aborted it.
    backend : str
        How tensors are to travel: one of :data:`BACKENDS`.
    secret : bytes
        What the ranks of the job know, and nobody else: who does not is not met.
    """

    job: str
    generation: int
    rank: int
    size: int
    store: tuple[str, int]
    bind: str
    timeout_s: float = 1800.0
    backend: str = "auto"
    secret: bytes = field(default=b"", repr=False)


class Handle(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Return whether the operation has finished, failed or been aborted."""

    def wait(self) -> None:
        """Wait for the operation.

        Raises
        ------
        CollectiveError
            It failed or was aborted. Its tensors are given away (see the module's docstring).
        """


class Communicator(abc.ABC):
    """Operations between the ranks of one generation.

    All tensors are contiguous. Operations work in place or fill a given output, and either
    complete on this rank or raise :class:`~nbelastic.errors.CollectiveError`. After the first
    failure or :meth:`abort` the communicator is broken: each further operation fails at once, and
    so does each one begun that has not been waited for, even if its data has arrived.

    An argument that is wrong by itself is a ``ValueError``, and nothing has been sent. That ranks
    disagree on shapes or types, a communicator cannot see: Gloo may end the process then.
    """

    name: ClassVar[str]
    """Which kind it is: ``gloo``, ``shm``, ``hierarchical``, ``pygloo`` or ``solo``."""

    remark: str = ""
    """Why it is none of a faster kind, for people; empty where nothing was stepped aside from."""

    overlaps: bool = True
    """Whether operations that were begun go on beside the rank's own computing.

    If not, they take its processor's time whenever they happen: best all at once, when they are
    waited for.
    """

    anywhere: bool = True
    """Whether large tensors are reduced where they are, not copied to memory of its own first."""

    coalesces: bool = False
    """Whether many tensors are reduced at once, where they are, at the price of one."""

    lets_go: bool = False
    """Whether nobody receives any more what is sent of a tensor once an operation has failed.

    If not, a tensor that is changed then may arrive half changed with those who have not failed.
    """

    rank: int
    size: int
    generation: int

    @abc.abstractmethod
    def connect(self) -> Communicator:
        """Meet the other ranks: the first thing to call, once.

        Blocks until this rank can take part in operations; :meth:`abort` frees it.

        Returns
        -------
        Communicator
            The one to use from here on: this, or one that it has chosen with the others. Until
            then, :meth:`abort` of this one reaches that one too.

        Raises
        ------
        CollectiveError
            A peer cannot be reached, or the communicator was aborted.
        """

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector, of whatever is in it, that is reduced without being copied.

        It lies in memory of the communicator's where that has such a thing. It may be used for as
        long as anything refers to it, unless it is given away.
        """
        import torch

        return torch.empty(count, dtype=dtype)

    @abc.abstractmethod
    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place, the result being the same on all of them.

        ``Op.AVERAGE`` is for floating point only.
        """

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors`, at least one and all of one type, over all ranks, in place.

        How the values are cut into tensors may differ between ranks where :attr:`coalesces`.
        """
        return _Handles([self.allreduce_async(tensor, op) for tensor in tensors])

    @abc.abstractmethod
    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""

    @abc.abstractmethod
    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor`, of one shape, into `outputs`, a tensor per rank."""

    @abc.abstractmethod
    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""

    @abc.abstractmethod
    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it. Shapes may differ."""

    @abc.abstractmethod
    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""

    @abc.abstractmethod
    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`, which receives it."""

    def send_parts_async(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        """Send `parts`, vectors of one type, as one: to be received as one tensor."""
        import torch

        return self.send_async(torch.cat(list(parts)), to)

    @abc.abstractmethod
    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""

    def allreduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        """Reduce `tensor` over all ranks and wait for it."""
        self.allreduce_async(tensor, op).wait()

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> None:
        """Reduce `tensors` over all ranks and wait for it."""
        self.allreduce_coalesced_async(tensors, op).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Broadcast `tensor` from rank `root` and wait for it."""
        self.broadcast_async(tensor, root).wait()

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Gather every rank's `tensor` into `outputs` and wait for it."""
        self.allgather_async(outputs, tensor).wait()

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> None:
        """Reduce and scatter `inputs` into `output` and wait for it."""
        self.reduce_scatter_async(output, inputs, op).wait()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Exchange `inputs` for `outputs` and wait for it."""
        self.all_to_all_async(outputs, inputs).wait()

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.barrier_async().wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor` to rank `to` and wait for it."""
        self.send_async(tensor, to).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive `tensor` from rank `source` and wait for it."""
        self.receive_async(tensor, source).wait()

    @abc.abstractmethod
    def check(self) -> None:
        """Raise :class:`~nbelastic.errors.CollectiveError` if the communicator is broken."""

    @property
    @abc.abstractmethod
    def waiting(self) -> bool:
        """Whether the rank's thread is in ``wait()`` now. Read by other threads."""

    @property
    @abc.abstractmethod
    def completed(self) -> int:
        """How many operations have been waited for with success.

        Read by other threads, to see progress.
        """

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks whose processes are known to have ended. Others may have ended, too."""
        return ()

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Break the communicator: whoever waits is freed within milliseconds.

        Any thread may call it, any number of times; it returns at once. Afterwards every
        operation, begun or new, raises ``CollectiveError(reason)``.
        """

    def cut(self) -> int:
        """Cut the connections to the others, as a broken network would; return how many."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of all resources. Idempotent; legal in any state.

        Returns at once; what cannot be freed yet (operations stuck in a transport) is freed in
        the background.
        """


class _Handles:
    """Operations that are waited for together."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
